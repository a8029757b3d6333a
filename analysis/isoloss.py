"""The arithmetic of an iso-loss speedup: per-scale log speedups with their covariance.

Between ``inversion`` and ``speedup``: two arms of cells and a noise level in, log speedups, covariance, trend
contrast and bootstrap draws out. Nothing here reads tables or writes results.

Shapes: R draws, k scales of the method, c cells of both arms (baseline first).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.cells import OPPOSED, Cell, constant_pairs, identical, paired, pooled_sd, seed_correlation
from scaling.analysis.inversion import Inverse, refit

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Level of the test that pairs of seeds are positively correlated; unpaired variances are used unless they are.
PAIRING_LEVEL = 0.01
IDENTICAL = "identical losses"


@dataclass(frozen=True, kw_only=True, slots=True)
class Arms:
    """Cells of the baseline and of one method, each in order of cost."""

    baseline: list[Cell]
    method: list[Cell]

    @property
    def cells(self) -> list[Cell]:
        """All cells, baseline first."""
        return [*self.baseline, *self.method]

    @property
    def pairs(self) -> list[tuple[int, int]]:
        """Places in `cells` of both arms at the same scale."""
        where = {c.scale: k for k, c in enumerate(self.baseline)}
        return [(where[c.scale], len(self.baseline) + j) for j, c in enumerate(self.method) if c.scale in where]


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """Standard deviation of one run within a cell, where it comes from, and the correlation of pairs of seeds.

    ``sd_df`` are the degrees of freedom of ``sd``, ``df`` those of an interval: where the correlation counts, what is
    left is the pairs' differences, and there are half as many of them.
    """

    sd: float
    sd_df: float
    df: float
    source: str
    rho: float
    rho_p: float
    used_rho: float


def measure_noise(arms: Arms, known: float | None) -> Noise:
    """Pooled within cells of both arms, or given.

    A correlation that narrows the interval counts only where it is significant, one that widens it where it is likely.
    Scales whose pairs all differ by one amount measure none: losses moved by a constant are no second run.
    """
    cells = arms.cells
    pairs = [paired(cells[i], cells[j]) for i, j in arms.pairs]
    rho, pairs_df, p = seed_correlation([pair for pair in pairs if not constant_pairs(pair)])
    used = rho if p < PAIRING_LEVEL or p > 1 - OPPOSED else 0.0
    if known is not None:
        return Noise(sd=known, sd_df=np.inf, df=np.inf, source="given", rho=rho, rho_p=p, used_rho=used)
    sd, df = pooled_sd(cells)
    if identical(cells, sd):
        return Noise(sd=np.nan, sd_df=0.0, df=0.0, source=IDENTICAL, rho=np.nan, rho_p=np.nan, used_rho=0.0)
    return Noise(
        sd=sd,
        sd_df=float(df),
        df=float(pairs_df if used else df),
        source="pooled cells",
        rho=rho,
        rho_p=p,
        used_rho=used,
    )


def loss_gradient(inverse: Inverse, arms: Arms, losses: Floats, usable: Bools) -> Floats:
    """d log s_i / d mean loss of each cell, shape (k, c)."""
    by_loss, by_phi = inverse.gradient(np.where(usable, losses, np.max(losses)))
    out = np.zeros((len(losses), len(arms.cells)))
    out[:, : inverse.response.shape[1]] = by_phi @ inverse.response
    first = len(arms.baseline)
    out[np.arange(len(losses)), first + np.arange(len(losses))] += by_loss
    out[~usable] = 0.0
    return out


def log_covariance(gradient: Floats, arms: Arms, noise: Noise) -> Floats:
    """Covariance of the log speedups, shape (k, k); cells of one scale are correlated by the pairs of seeds."""
    counts = np.array([len(c.losses) for c in arms.cells])
    sigma = np.diag(1.0 / counts)
    for i, j in arms.pairs:
        shared = len(paired(arms.cells[i], arms.cells[j])[0])
        sigma[i, j] = sigma[j, i] = noise.used_rho * shared / (counts[i] * counts[j])
    out: Floats = gradient @ sigma @ gradient.T * noise.sd**2
    return out


def trend_contrast(costs: Floats, usable: Bools) -> Floats | None:
    """Weights that give the least-squares slope of log s on log cost; ``None`` with fewer than 3 scales."""
    if np.sum(usable) < 3:
        return None
    centred = np.where(usable, costs - np.mean(costs[usable]), 0.0)
    out: Floats = centred / np.sum(centred**2)
    return out


def bootstrap(
    inverse: Inverse, arms: Arms, noise: Noise, usable: Bools, costs: Floats, draws: int, rng: np.random.Generator
) -> Floats:
    """Draws of the mean log speedup: scales stay, seeds within a cell are drawn, alike for both arms where paired."""
    cells = arms.cells
    means = np.empty((draws, len(cells)))
    partner = {j: i for i, j in arms.pairs}
    picks: dict[int, NDArray[np.int64]] = {}
    for k, cell in enumerate(cells):
        count = len(cell.losses)
        if count == 1 or noise.source == "given":
            means[:, k] = cell.mean + rng.normal(0.0, noise.sd / np.sqrt(count), size=draws)
            continue
        base = partner.get(k)
        if base in picks and cells[base].seeds == cell.seeds:
            pick = picks[base]
        else:
            pick = rng.integers(0, count, size=(draws, count))
        picks[k] = pick
        centred = cell.losses - cell.mean
        means[:, k] = cell.mean + np.sqrt(count / (count - 1)) * centred[pick].mean(axis=1)
    phi = refit(inverse, np.maximum(means[:, : len(inverse.cells)], 1e-9))
    log_s = inverse.log_cost(means[:, len(arms.baseline) :], phi) - costs
    return np.asarray(np.mean(log_s[:, usable], axis=1), dtype=np.float64)


def chord(arms: Arms, costs: Floats) -> Floats:
    """Straight lines of loss on log cost between neighbouring baseline cells, the end ones extended."""
    x = np.log([c.x for c in arms.baseline])
    y = np.array([c.mean for c in arms.baseline])
    out = np.empty(len(costs))
    for i, cell in enumerate(arms.method):
        # Loss falls with cost: find the segment that holds the loss.
        k = int(np.clip(np.searchsorted(-y, -cell.mean) - 1, 0, len(x) - 2))
        out[i] = x[k] + (cell.mean - y[k]) * (x[k + 1] - x[k]) / (y[k + 1] - y[k]) - costs[i]
    return out
