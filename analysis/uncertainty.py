"""How far a fit can be trusted: six intervals for the parameters of a law, from the same refitting loop.

After ``certify``: each maker takes a `Fitted` and returns `Draws` or an `Interval`. Refits stream in blocks whose size
depends on the number of rows only, so memory is bounded for any number of draws.

=============== ====================================================== ==========================================
maker           what is drawn                                          right when
=============== ====================================================== ==========================================
pairs           rows with replacement                                  many independent rows
cluster         runs (all rows of one) with replacement                several checkpoints a run
two-level       seeds within a cell, scales fixed, SD unbiased         few scales, several seeds a cell
parametric      normal noise with the pooled SD of cells               few scales, few seeds
delta           nothing: sandwich covariance, t                        a check on the others
profile         nothing: objective along one parameter, F              skewed or bounded parameters
=============== ====================================================== ==========================================

Shapes: R draws, n rows, P parameters.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.certify import Fitted
from scaling.analysis.result import Interval
from scaling.analysis.robust import curvature, slope
from scaling.analysis.solver import minimise

Floats = NDArray[np.float64]

# Numbers held at once while refitting; about a dozen arrays of this size exist (0.2 GB).
BLOCK_NUMBERS = 2_000_000
BLOCK_REFITS = 256
# Share of the refits that must converge for an interval to be made of them.
ENOUGH = 0.5
# Degrees of freedom from which each row's own squared score is used (noise may differ from row to row).
ROBUST_DF = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Draws:
    """Refitted parameters in natural units (R, P) and whether each refit converged (R,)."""

    natural_RP: Floats
    converged_R: NDArray[np.bool_]
    objective_R: Floats

    @property
    def kept_RP(self) -> Floats:
        """Parameters of the refits that converged on numbers."""
        out: Floats = self.natural_RP[self.converged_R & np.all(np.isfinite(self.natural_RP), axis=1)]
        return out

    @property
    def enough(self) -> bool:
        """Whether so many refits converged that their spread means something."""
        return len(self.kept_RP) >= max(2, ENOUGH * len(self.natural_RP))


def refit(fitted: Fitted, blocks: Iterator[tuple[Floats | None, Floats | None]]) -> Draws:
    """Refit from the full fit for each draw; a block gives losses (R, n), weights (R, n), or ``None``."""
    natural, converged, objective = [], [], []
    for y_Rn, w_Rn in blocks:
        count = len(y_Rn if y_Rn is not None else w_Rn)  # type: ignore[arg-type]
        start = np.repeat(fitted.phi_P[None], count, axis=0)
        y = fitted.y_n[None] if y_Rn is None else y_Rn
        w = fitted.w_n[None] if w_Rn is None else w_Rn
        found = minimise(fitted.model, y, w, start, fitted.goal, warm=True)
        natural.append(fitted.model.natural(found.phi_RP))
        converged.append(found.converged_R)
        objective.append(found.objective_R)
    return Draws(
        natural_RP=np.concatenate(natural),
        converged_R=np.concatenate(converged),
        objective_R=np.concatenate(objective),
    )


def block_sizes(rows: int, draws: int) -> Iterator[int]:
    """Sizes of blocks of refits."""
    size = int(np.clip(BLOCK_NUMBERS // max(rows, 1), 1, BLOCK_REFITS))
    for first in range(0, draws, size):
        yield min(size, draws - first)


def cluster_bootstrap(fitted: Fitted, clusters: Sequence[object] | None, draws: int, rng: np.random.Generator) -> Draws:
    """Draw clusters (rows where ``clusters`` is ``None``) with replacement; a draw is a vector of counts."""
    n = len(fitted.y_n)
    index = (
        np.arange(n)
        if clusters is None
        else np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)[1]
    )
    total = int(index.max()) + 1

    def blocks() -> Iterator[tuple[None, Floats]]:
        for size in block_sizes(n, draws):
            counts = rng.multinomial(total, np.full(total, 1.0 / total), size=size).astype(np.float64)
            yield None, counts[:, index] * fitted.w_n

    return refit(fitted, blocks())


def cell_noise(residual_n: Floats, cells: Sequence[object]) -> tuple[float, int]:
    """Pooled standard deviation within cells and its degrees of freedom; NaN and 0 without replicates."""
    index = np.unique(np.asarray(cells, dtype=object).astype(str), return_inverse=True)[1]
    counts = np.bincount(index)
    means = np.bincount(index, weights=residual_n) / counts
    df = int(np.sum(counts - 1))
    if df == 0:
        return float("nan"), 0
    return float(np.sqrt(np.sum((residual_n - means[index]) ** 2) / df)), df


def parametric_bootstrap(fitted: Fitted, sd: float, draws: int, rng: np.random.Generator) -> Draws:
    """Add normal noise of that SD to the fitted losses (in the space of the residuals)."""
    f_n = fitted.model.prepare(fitted.phi_P[None])[0][0]

    def blocks() -> Iterator[tuple[Floats, None]]:
        for size in block_sizes(len(f_n), draws):
            noise = rng.normal(0.0, sd, size=(size, len(f_n)))
            yield (np.exp(f_n + noise) if fitted.goal.log else np.maximum(np.exp(f_n) + noise, 1e-9)), None

    return refit(fitted, blocks())


def two_level_bootstrap(
    fitted: Fitted, cells: Sequence[object], draws: int, rng: np.random.Generator, *, sd: float
) -> Draws:
    """Keep every cell; within it draw seeds with replacement, inflated by sqrt(S/(S-1)); normal noise where S = 1."""
    index = np.unique(np.asarray(cells, dtype=object).astype(str), return_inverse=True)[1]
    members = [np.flatnonzero(index == c) for c in range(int(index.max()) + 1)]
    data = np.log(fitted.y_n) if fitted.goal.log else fitted.y_n

    def blocks() -> Iterator[tuple[Floats, None]]:
        for size in block_sizes(len(data), draws):
            drawn = np.repeat(data[None], size, axis=0)
            for rows in members:
                seeds = len(rows)
                mean = data[rows].mean()
                if seeds == 1:
                    drawn[:, rows] = mean + rng.normal(0.0, sd, size=(size, 1))
                else:
                    picked = data[rows][rng.integers(0, seeds, size=(size, seeds))]
                    drawn[:, rows] = mean + np.sqrt(seeds / (seeds - 1)) * (picked - mean)
            yield (np.exp(drawn) if fitted.goal.log else np.maximum(drawn, 1e-9)), None

    return refit(fitted, blocks())


def percentile_interval(fitted: Fitted, draws: Draws, level: float, method: str) -> Interval:
    """Quantiles of the draws that converged."""
    kept = draws.kept_RP
    low, high = np.quantile(kept, [(1 - level) / 2, (1 + level) / 2], axis=0)
    return make_interval(fitted, low, high, level, method)


def t_interval(fitted: Fitted, draws: Draws, df: float, level: float, method: str) -> Interval:
    """Estimate plus or minus t times the SD of the draws, amplitudes and E on a log scale."""
    kept = draws.kept_RP
    logs = log_parameters(fitted)
    draws_RP = np.where(logs, np.log(np.maximum(kept, 1e-300)), kept)
    return _symmetric(fitted, np.std(draws_RP, axis=0, ddof=1), df, level, method)


def covariance(fitted: Fitted, clusters: Sequence[object] | None = None) -> Floats:
    """Sandwich covariance in the solver's units; zero rows and columns for parameters at a bound.

    References
    ----------
    Huber (1973) for M-estimators; Liang and Zeger (1986) for clusters.
    """
    free = np.flatnonzero(fitted.free_P)
    r, w = fitted.residual_n, fitted.w_n
    jacobian = fitted.model.jacobian(fitted.phi_P[None])[0]
    if not fitted.goal.log:
        jacobian = jacobian * (fitted.y_n - r)[:, None]
    jacobian = jacobian[:, free]
    local = _row_curvature(fitted)
    if fitted.df < ROBUST_DF:
        local = np.full_like(local, _mean_curvature(fitted))
    bread = (jacobian * (w * local)[:, None]).T @ jacobian
    scores = (w * _push(fitted))[:, None] * jacobian
    count = len(r)
    if clusters is None and fitted.df >= ROBUST_DF:
        meat = scores.T @ scores
    elif clusters is None:
        # One scale for all rows: steadier than the squared scores of single rows when there are few.
        meat = float(np.sum(w * _push(fitted) ** 2) / np.sum(w)) * (jacobian * (w**2)[:, None]).T @ jacobian
    else:
        index = np.unique(np.asarray(clusters, dtype=object).astype(str), return_inverse=True)[1]
        count = int(index.max()) + 1
        sums = np.zeros((count, len(free)))
        np.add.at(sums, index, scores)
        meat = sums.T @ sums
    out = np.zeros((len(fitted.phi_P), len(fitted.phi_P)))
    inverse = np.linalg.pinv(bread, hermitian=True)
    out[np.ix_(free, free)] = inverse @ meat @ inverse * (count / max(count - len(free), 1))
    return out


def delta_interval(fitted: Fitted, level: float, clusters: Sequence[object] | None = None) -> tuple[Interval, Floats]:
    """Sandwich covariance and t; also the standard errors in natural units."""
    cov_PP = restored(fitted, covariance(fitted, clusters))
    df = fitted.df if clusters is None else len(set(map(str, clusters))) - len(fitted.phi_P)
    sd = np.sqrt(np.maximum(np.diag(cov_PP), 0.0))
    natural = np.where(log_parameters(fitted), sd * fitted.natural_P, sd)
    name = "delta, t" if clusters is None else "delta, clusters, t"
    return _symmetric(fitted, sd, max(df, 1), level, name), natural


def dispersion(fitted: Fitted) -> float:
    """Scale in which twice a rise of the objective is a chi-square of 1 degree of freedom (s**2 for squares)."""
    push = _push(fitted)
    return float(np.sum(fitted.w_n * push**2) / max(fitted.df, 1) / _mean_curvature(fitted))


def _push(fitted: Fitted) -> Floats:
    if fitted.goal.loss == "l1":
        signs: Floats = np.sign(fitted.residual_n)
        return signs
    return slope(fitted.residual_n, fitted.delta)


def _row_curvature(fitted: Fitted) -> Floats:
    """Second derivative of the loss at each row, smoothed over a bandwidth wider than delta (Powell's sandwich)."""
    r = fitted.residual_n
    if fitted.goal.loss == "l2":
        return np.ones_like(r)
    size = np.abs(r)
    bandwidth = max(1.06 * 1.4826 * float(np.median(size)) * len(size) ** -0.2, 1e-300)
    if fitted.goal.loss == "l1":
        wide = max(bandwidth, float(np.sort(size)[min(len(fitted.phi_P) + 1, len(size) - 1)]))
        return np.asarray((size <= wide) / wide, dtype=np.float64)
    wide = max(fitted.delta, bandwidth)
    return np.asarray(curvature(size, wide) * (fitted.delta / wide), dtype=np.float64)


def _mean_curvature(fitted: Fitted) -> float:
    """Weighted mean of `_row_curvature`, at least a small number."""
    return max(float(np.sum(fitted.w_n * _row_curvature(fitted)) / np.sum(fitted.w_n)), 1e-6)


def log_parameters(fitted: Fitted) -> NDArray[np.bool_]:
    """Which parameters are solved for as logarithms."""
    kinds = {p.name: p.is_log for p in fitted.model.law.parameters}
    return np.array([kinds[s.name] for s in fitted.model.slots])


def restored(fitted: Fitted, cov_PP: Floats) -> Floats:
    """Covariance in the law's own units (amplitudes at x = 1, in logarithms)."""
    size = len(fitted.phi_P)
    move = fitted.model.from_solver(np.eye(size)).T
    out: Floats = move @ cov_PP @ move.T
    return out


def _symmetric(fitted: Fitted, sd_P: Floats, df: float, level: float, method: str) -> Interval:
    theta = fitted.model.from_solver(fitted.phi_P[None])[0]
    half = float(stats.t.ppf((1 + level) / 2, df)) * sd_P
    logs = log_parameters(fitted)
    with np.errstate(over="ignore"):
        low = np.where(logs, np.exp(theta - half), theta - half)
        high = np.where(logs, np.exp(theta + half), theta + half)
    return make_interval(fitted, low, high, level, method)


def make_interval(fitted: Fitted, low: Floats, high: Floats, level: float, method: str) -> Interval:
    names = fitted.model.parameters
    return Interval(
        level=level,
        method=method,
        low=dict(zip(names, map(float, low), strict=True)),
        high=dict(zip(names, map(float, high), strict=True)),
    )
