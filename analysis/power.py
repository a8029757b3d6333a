"""What an experiment could show: detectable differences, and the seeds or scales a wanted precision takes.

By formula (noncentral t) and by simulation of the very test that ``seeds`` makes. Reads no runs: the noise comes from
``noise.noise_floor`` or from the user.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from scipy import optimize, special, stats

from scaling.errors import FitError, UsageError

# Gauss-Legendre nodes: four panels of them give the power to 1e-9 (checked against scipy's noncentral t where that
# works).
_NODES, _WEIGHTS = np.polynomial.legendre.leggauss(48)


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
    difference_in_sds: float, design: Design, alpha: float = 0.05, power: float = 0.8, most: int = 10_000
) -> int:
    """Fewest seeds with which ``design`` finds that difference.

    Raises
    ------
    FitError
        When even ``most`` seeds do not.
    """
    if not difference_in_sds > 0:
        raise UsageError(f"the difference to find must be positive, got {difference_in_sds!r}")
    low, high = (1 if design.known_sd else 2), most
    if detectable(replace(design, seeds=high), alpha, power) > difference_in_sds:
        raise FitError(f"out-of-reach: {most} seeds do not find a difference of {difference_in_sds:g} SDs")
    while low < high:
        middle = (low + high) // 2
        if detectable(replace(design, seeds=middle), alpha, power) <= difference_in_sds:
            high = middle
        else:
            low = middle + 1
    return low


def simulated_power(
    design: Design, difference_in_sds: float, rng: np.random.Generator, alpha: float = 0.05, runs: int = 4000
) -> float:
    """Share of simulated experiments in which the test rejects."""
    shape = (runs, design.scales, design.seeds)
    common = rng.normal(size=shape) * np.sqrt(max(design.rho, 0.0))
    own = np.sqrt(1 - max(design.rho, 0.0))
    a = common + own * rng.normal(size=shape) + difference_in_sds
    b = common + own * rng.normal(size=shape)
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
