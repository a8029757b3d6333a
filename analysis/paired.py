"""Small-sample tests on differences: t, exact sign flips, Hodges-Lehmann, and corrections for many methods.

The arithmetic under ``seeds``: arrays in, numbers out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import combinations_with_replacement

import numpy as np
from numpy.typing import NDArray
from scipy import stats

Floats = NDArray[np.float64]

# Up to this many pairs all sign patterns are counted; beyond, random ones.
EXACT_PAIRS = 20
RANDOM_PATTERNS = 100_000


@dataclass(frozen=True, kw_only=True, slots=True)
class TTest:
    """Difference of means with a t interval; ``p`` is two-sided."""

    difference: float
    standard_error: float
    df: float
    p: float
    low: float
    high: float


def t_summary(difference: float, standard_error: float, df: float, level: float) -> TTest:
    """The t test and interval of a difference with a known standard error."""
    half = float(stats.t.ppf((1 + level) / 2, df)) * standard_error
    if standard_error > 0:
        p = float(2 * stats.t.sf(abs(difference) / standard_error, df))
    else:
        p = 1.0 if difference == 0 else 0.0
    return TTest(
        difference=difference, standard_error=standard_error, df=df, p=p, low=difference - half, high=difference + half
    )


def paired_t(d: Floats, level: float = 0.95) -> TTest | None:
    """Paired t of differences; ``None`` below two pairs."""
    if len(d) < 2:
        return None
    return t_summary(float(np.mean(d)), float(np.std(d, ddof=1) / np.sqrt(len(d))), len(d) - 1, level)


def unpaired_t(a: Floats, b: Floats, level: float = 0.95) -> TTest | None:
    """Welch's t of two independent samples; ``None`` where a sample has fewer than two."""
    if min(len(a), len(b)) < 2:
        return None
    va, vb = np.var(a, ddof=1) / len(a), np.var(b, ddof=1) / len(b)
    total = float(va + vb)
    df = total**2 / (va**2 / (len(a) - 1) + vb**2 / (len(b) - 1)) if total > 0 else float(len(a) + len(b) - 2)
    return t_summary(float(np.mean(a) - np.mean(b)), float(np.sqrt(total)), float(df), level)


def sign_flip(d: Floats, rng: np.random.Generator | None = None) -> tuple[float, float]:
    """Two-sided p of the sign-flip test of a zero mean, and the smallest p that many pairs can give.

    Exact up to `EXACT_PAIRS` pairs, else from `RANDOM_PATTERNS` random patterns (then the floor is theirs).

    >>> sign_flip(np.array([1.0, 2.0, 3.0]))
    (0.25, 0.25)
    """
    n = len(d)
    observed = abs(float(np.sum(d)))
    tolerance = 1e-12 * max(float(np.sum(np.abs(d))), 1e-300)
    if n <= EXACT_PAIRS:
        sums = np.zeros(1)
        for value in d:
            sums = np.concatenate([sums + value, sums - value])
        return float(np.mean(np.abs(sums) >= observed - tolerance)), min(1.0, 2.0 ** (1 - n))
    generator = rng or np.random.default_rng(0)
    hits = 0
    for _ in range(10):
        signs = generator.choice([-1.0, 1.0], size=(RANDOM_PATTERNS // 10, n))
        hits += int(np.sum(np.abs(signs @ d) >= observed - tolerance))
    return (hits + 1) / (RANDOM_PATTERNS + 1), 1.0 / (RANDOM_PATTERNS + 1)


def hodges_lehmann(d: Floats) -> float:
    """Median of the means of all pairs of differences (each with itself too)."""
    walsh = [0.5 * (a + b) for a, b in combinations_with_replacement(d.tolist(), 2)]
    return float(np.median(walsh)) if walsh else float("nan")


def holm(p: Sequence[float]) -> list[float]:
    """Holm's step-down adjusted p-values (family-wise error)."""
    return _adjust(p, lambda ordered, m: np.maximum.accumulate(ordered * (m - np.arange(m))))


def benjamini_hochberg(p: Sequence[float]) -> list[float]:
    """Benjamini and Hochberg's adjusted p-values (false discovery rate)."""
    return _adjust(p, lambda ordered, m: np.minimum.accumulate((ordered * m / np.arange(1, m + 1))[::-1])[::-1])


def _adjust(p: Sequence[float], rule: object) -> list[float]:
    values = np.asarray(p, dtype=np.float64)
    known = np.flatnonzero(np.isfinite(values))
    out = np.full(len(values), np.nan)
    order = known[np.argsort(values[known], kind="stable")]
    if len(order):
        assert callable(rule)
        out[order] = np.minimum(rule(values[order], len(order)), 1.0)
    return [float(v) for v in out]


def dunnett(t: Sequence[float], df: float, *, correlation: float = 0.5) -> list[float]:
    """Adjusted two-sided p of many methods against one baseline, from their t statistics.

    Parameters
    ----------
    t
        One statistic a method, all with the same pooled standard deviation.
    df
        Degrees of freedom of that standard deviation.
    correlation
        Between two methods' differences: 1/2 where all arms have the same number of runs.

    References
    ----------
    Dunnett (1955), A multiple comparison procedure for comparing several treatments with a control.
    """
    m = len(t)
    z, weight = np.polynomial.hermite_e.hermegauss(64)
    weight = weight / np.sum(weight)
    # Quantiles of the pooled SD over sigma, equal shares; infinite df means no spread.
    share = (np.arange(400) + 0.5) / 400
    spread = np.sqrt(stats.chi2.ppf(share, df) / df) if np.isfinite(df) else np.ones(1)
    out = []
    for value in t:
        limit = abs(value) * spread[:, None]
        root = np.sqrt(correlation) * z[None, :]
        inside = stats.norm.cdf((limit + root) / np.sqrt(1 - correlation)) - stats.norm.cdf(
            (-limit + root) / np.sqrt(1 - correlation)
        )
        out.append(float(np.clip(1 - np.mean((inside**m) @ weight), 0.0, 1.0)))
    return out


def expected_best(k: int) -> float:
    """Expected largest of ``k`` standard normals: the luck of the best of ``k`` equal methods, in standard errors.

    >>> round(expected_best(5), 4)
    1.163
    """
    if k < 2:
        return 0.0
    grid = np.linspace(-9.0, 9.0, 20_001)
    density = k * stats.norm.pdf(grid) * stats.norm.cdf(grid) ** (k - 1)
    return float(np.trapezoid(grid * density, grid))


def known_sd_test(gain: float, n_new: int, n_old: int, *, sd: float) -> float:
    """One-sided p that a gain of mean loss between independent arms is luck, the noise of one run being known."""
    return float(stats.norm.sf(gain / (sd * np.sqrt(1 / n_new + 1 / n_old))))
