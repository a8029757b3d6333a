"""What an experiment could show: detectable differences, and the seeds or scales a wanted precision takes.

By formula (noncentral t) and by simulation of the very test that ``seeds`` makes. Reads no runs: the noise comes from
``noise.noise_floor`` or from the user.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special, stats

from scaling.errors import FitError, UsageError

# Gauss-Legendre nodes: four panels of them give the power to 1e-9 (checked against scipy's noncentral t where that
# works).
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)


# Seeds or scales beyond which an experiment is out of reach.
MOST = 10_000


@dataclass(frozen=True, kw_only=True, slots=True)
class Design:
    """An experiment: runs an arm at each of ``scales`` scales, seeds correlated by ``rho``."""

    seeds: int
    scales: int = 1
    rho: float = 0.0
    paired: bool = False
    known_sd: bool = False

    @property
    def standard_error_factor(self) -> float:
        """Standard error of the mean difference over the SD of one run."""
        return float(np.sqrt(2 * (1 - (self.rho if self.paired else 0.0)) / (self.seeds * self.scales)))

    @property
    def df(self) -> float:
        """Degrees of freedom of the test."""
        if self.known_sd:
            return float("inf")
        arms = 1 if self.paired else 2
        return float(arms * self.scales * (self.seeds - 1))


def detectable(design: Design, alpha: float = 0.05, power: float = 0.8) -> float:
    """Smallest difference, in SDs of one run, found with that power by a two-sided test; infinite without df.

    References
    ----------
    Power of the t test by the noncentral t distribution; Cohen (1988), Statistical Power Analysis.
    """
    if design.df < 1:
        return float("inf")
    return _shift(design.df, alpha, power) * design.standard_error_factor


def power_of(design: Design, difference_in_sds: float, alpha: float = 0.05) -> float:
    """Probability that the two-sided test finds that difference; 0 without degrees of freedom."""
    if design.df < 1:
        return 0.0
    shift = difference_in_sds / design.standard_error_factor
    if np.isinf(design.df):
        limit = stats.norm.ppf(1 - alpha / 2)
        return float(special.ndtr(shift - limit) + special.ndtr(-shift - limit))
    return _rejection(float(stats.t.ppf(1 - alpha / 2, design.df)), design.df, shift)


def detectable_paired(pairs: int, alpha: float = 0.05, power: float = 0.8) -> float:
    """The same for one scale in SDs of the pair differences.

    >>> round(detectable_paired(3), 2)
    3.26
    """
    return _shift(pairs - 1, alpha, power) / float(np.sqrt(pairs)) if pairs > 1 else float("inf")


def _shift(df: float, alpha: float, power: float) -> float:
    """Noncentrality at which the two-sided test has that power."""
    if np.isinf(df):
        return float(stats.norm.ppf(1 - alpha / 2) + stats.norm.ppf(power))
    limit = stats.t.ppf(1 - alpha / 2, df)

    def gap(shift: float) -> float:
        return _rejection(limit, df, shift) - power

    return float(optimize.brentq(gap, 1e-6, 10.0 + 4 * limit, xtol=1e-9))


def _rejection(limit: float, df: float, shift: float) -> float:
    """Probability that |t| exceeds ``limit``: scipy's noncentral t gives NaN for few df and far shifts."""

    edge = float(np.sqrt(stats.chi2.isf(1e-14, df) / df))
    kink = float(np.clip(shift / limit, 1e-9, 0.999 * edge))
    total = 0.0
    for low, high in (
        (0.0, 0.8 * kink),
        (0.8 * kink, kink),
        (kink, min(1.2 * kink, edge)),
        (min(1.2 * kink, edge), edge),
    ):
        ratio = 0.5 * (high - low) * _NODES + 0.5 * (high + low)
        density = 2 * df * ratio * stats.chi2.pdf(df * ratio**2, df)
        inside = special.ndtr(shift - limit * ratio) + special.ndtr(-shift - limit * ratio)
        total += 0.5 * (high - low) * float(np.sum(_WEIGHTS * density * inside))
    return total


def seeds_needed(
    difference_in_sds: float, design: Design, alpha: float = 0.05, power: float = 0.8, most: int = MOST
) -> int:
    """Fewest seeds with which ``design`` finds that difference.

    Raises
    ------
    FitError
        When even ``most`` seeds do not.
    """
    if not difference_in_sds > 0:
        raise UsageError(f"the difference to find must be positive, got {difference_in_sds!r}")
    found = fewest(
        lambda seeds: power_of(replace(design, seeds=seeds), difference_in_sds, alpha) >= power,
        1 if design.known_sd else 2,
        most,
    )
    if found is None:
        raise FitError(f"out-of-reach: {most} seeds do not find a difference of {difference_in_sds:g} SDs")
    return found


def seeds_for_precision(half_width_in_sds: float, design: Design, level: float = 0.95, most: int = MOST) -> int:
    """Fewest seeds with which the interval of the difference is that narrow.

    Raises
    ------
    FitError
        When even ``most`` seeds do not make it so.
    """
    found = fewest(
        lambda seeds: precision(replace(design, seeds=seeds), level) <= half_width_in_sds,
        1 if design.known_sd else 2,
        most,
    )
    if found is None:
        raise FitError(f"out-of-reach: {most} seeds do not give a half-width of {half_width_in_sds:g} SDs")
    return found


def fewest(reaches: Callable[[int], bool], first: int, most: int = MOST) -> int | None:
    """Smallest count from ``first`` to ``most`` that reaches what all larger ones reach too; ``None`` where none does.

    >>> fewest(lambda n: n * n >= 50, 1)
    8
    """
    if not reaches(most):
        return None
    low, high = first, most
    while low < high:
        middle = (low + high) // 2
        if reaches(middle):
            high = middle
        else:
            low = middle + 1
    return low


def simulated_power(
    design: Design, difference_in_sds: float, rng: np.random.Generator, alpha: float = 0.05, runs: int = 4000
) -> float:
    """Share of simulated experiments in which the test rejects."""
    shape = (runs, design.scales, design.seeds)
    b = rng.normal(size=shape)
    a = design.rho * b + np.sqrt(1 - design.rho**2) * rng.normal(size=shape) + difference_in_sds
    mean = (a - b).mean(axis=(1, 2))
    if design.known_sd:
        sd = np.ones(runs)
    elif design.paired:
        d = a - b
        sd = np.sqrt(((d - d.mean(axis=2, keepdims=True)) ** 2).sum(axis=(1, 2)) / design.df / 2 / (1 - design.rho))
    else:
        squares = ((a - a.mean(axis=2, keepdims=True)) ** 2).sum(axis=(1, 2)) + (
            (b - b.mean(axis=2, keepdims=True)) ** 2
        ).sum(axis=(1, 2))
        sd = np.sqrt(squares / design.df)
    limit = stats.norm.ppf(1 - alpha / 2) if design.known_sd else stats.t.ppf(1 - alpha / 2, design.df)
    return float(np.mean(np.abs(mean) > limit * sd * design.standard_error_factor))


def precision(design: Design, level: float = 0.95) -> float:
    """Half-width of the interval of the mean difference, in SDs of one run."""
    if design.df < 1:
        return float("inf")
    quantile = stats.norm.ppf((1 + level) / 2) if design.known_sd else stats.t.ppf((1 + level) / 2, design.df)
    return float(quantile) * design.standard_error_factor


def power_table(
    seeds: Sequence[int], scales: Sequence[int], *, rho: float, known_sd: bool, alpha: float, power: float
) -> list[dict[str, float]]:
    """Detectable difference and half-width, in SDs of one run, of every design."""
    out = []
    for k in scales:
        for s in seeds:
            unpaired = Design(seeds=s, scales=k, known_sd=known_sd)
            pairs = Design(seeds=s, scales=k, rho=rho, paired=True)
            out.append(
                {
                    "seeds": float(s),
                    "scales": float(k),
                    "detectable_unpaired": detectable(unpaired, alpha, power),
                    "detectable_paired": detectable(pairs, alpha, power),
                    "half_width_unpaired": precision(unpaired, 1 - alpha),
                    "half_width_paired": precision(pairs, 1 - alpha),
                }
            )
    return out
