"""Minima over what was swept: the best learning rate at each scale, and the lower envelope of training curves.

Before the comparisons, which should see each method at its own best setting, and beside ``isoflop`` (Approach 1). The
lowest of several noisy losses is too low by construction; so the minimum is read off a parabola in the logarithms, and
the optimism that is left is estimated by drawing the noise again and taken off.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.isoflop import weighted_line
from scaling.analysis.options import check_draws, check_level, check_noise, generator
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.screen import numbers, screen
from scaling.analysis.verdict import few_draws
from scaling.errors import FitError, TableError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

REPLICATES = 400


@dataclass(frozen=True, kw_only=True, slots=True)
class Optimum:
    """A cell's best setting: location, its loss (optimism taken off), SD of both, and the raw minimum."""

    at: dict[str, float]
    log_sd: dict[str, float]
    loss: float
    loss_sd: float
    optimism: float
    smallest_observed: float
    inside: bool
    curved: bool
    points: int


def quadratic_optimum(
    settings: dict[str, Floats], losses_n: Floats, sd: float, *, window: float | None = None, rng: np.random.Generator
) -> Optimum:
    """Minimum of a parabola in the logarithms of the settings.

    Parameters
    ----------
    settings
        One array of positive numbers a swept variable.
    losses_n
        Their losses.
    sd
        Noise of one loss; 0 where unknown (then the residual SD of the parabola is used).
    window
        Only points within this much of the smallest loss are used (a parabola describes the neighbourhood of
        an optimum).

    Raises
    ------
    FitError
        When fewer points are left than the parabola has coefficients.
    """
    names = list(settings)
    logs = np.column_stack([np.log(settings[n]) for n in names])
    keep = losses_n <= losses_n.min() + window if window is not None else np.ones(len(losses_n), dtype=bool)
    coefficients = (len(names) + 1) * (len(names) + 2) // 2
    if keep.sum() < coefficients:
        raise FitError(
            f"too-few-settings: {int(keep.sum())} settings of {', '.join(names)} for a parabola with "
            f"{coefficients} coefficients; "
            "sweep more values or widen the window"
        )
    logs, losses_n = logs[keep], losses_n[keep]
    centre, scale = logs.mean(axis=0), np.maximum(logs.std(axis=0), 1e-12)
    u = (logs - centre) / scale
    basis, pairs = _basis(u)
    inverse = np.linalg.pinv(basis)
    fitted = basis @ (inverse @ losses_n)
    if sd <= 0:
        df = len(losses_n) - coefficients
        sd = float(np.sqrt(np.sum((losses_n - fitted) ** 2) / df)) if df > 0 else 0.0
    noisy = fitted + rng.normal(size=(REPLICATES, len(fitted))) * sd
    where, value, curved = _vertices(inverse @ losses_n[:, None], pairs, len(names))
    where_R, value_R, curved_R = _vertices(inverse @ noisy.T, pairs, len(names))
    good = curved_R & np.all(np.abs(where_R) < 10, axis=1)
    inside = bool(np.all((where[0] > u.min(axis=0)) & (where[0] < u.max(axis=0)))) and bool(curved[0])
    optimism = float(value[0] - np.mean(value_R[good])) if good.sum() > REPLICATES // 2 and inside else 0.0
    natural = np.exp(centre + scale * where[0])
    spread = np.std(where_R[good], axis=0, ddof=1) * scale if good.sum() > 1 else np.full(len(names), np.nan)
    return Optimum(
        at=dict(zip(names, map(float, natural), strict=True)),
        log_sd=dict(zip(names, map(float, spread), strict=True)),
        loss=float(value[0]) + optimism,
        loss_sd=float(np.std(value_R[good], ddof=1)) if good.sum() > 1 else float("nan"),
        optimism=optimism,
        smallest_observed=float(losses_n.min()),
        inside=inside,
        curved=bool(curved[0]),
        points=len(losses_n),
    )


def _basis(u: Floats) -> tuple[Floats, list[tuple[int, int]]]:
    d = u.shape[1]
    pairs = [(i, j) for i in range(d) for j in range(i, d)]
    return np.column_stack([np.ones(len(u)), u, *(u[:, i] * u[:, j] for i, j in pairs)]), pairs


def _vertices(
    coefficients_cR: Floats, pairs: list[tuple[int, int]], d: int
) -> tuple[Floats, Floats, NDArray[np.bool_]]:
    """Location, value and whether it is a minimum, of each column of coefficients."""
    count = coefficients_cR.shape[1]
    hessian = np.zeros((count, d, d))
    for k, (i, j) in enumerate(pairs):
        hessian[:, i, j] += coefficients_cR[1 + d + k]
        hessian[:, j, i] += coefficients_cR[1 + d + k]
    gradient = coefficients_cR[1 : 1 + d].T
    lowest = np.linalg.eigvalsh(hessian)[:, 0]
    curved = lowest > 1e-9 * np.maximum(np.abs(hessian).max(axis=(1, 2)), 1e-300)
    safe = np.where(curved[:, None, None], hessian, np.eye(d))
    where = -np.linalg.solve(safe, gradient[:, :, None])[..., 0]
    value = coefficients_cR[0] + 0.5 * np.einsum("rd,rd->r", gradient, where)
    return np.asarray(where, dtype=np.float64), np.asarray(value, dtype=np.float64), np.asarray(curved, dtype=np.bool_)


def best_settings(
    table: pd.DataFrame,
    *,
    over: Sequence[str] = ("lr",),
    by: Sequence[str] = ("method", "size"),
    noise_sd: float = 0.0,
    window: float | None = None,
    rng: int | np.random.Generator = 0,
) -> tuple[pd.DataFrame, tuple[Caution, ...]]:
    """A table with one row a cell: each at its own best setting, ready for the other analyses.

    Parameters
    ----------
    table
        Runs with ``loss``, the swept columns and those of ``by``.
    over, by
        Swept columns (positive) and what defines a cell.
    noise_sd
        Noise of one loss.

    Returns
    -------
    table, cautions
        Columns of ``by``, the swept ones at the optimum, ``loss`` (optimism taken off), ``loss_sd``, ``optimism``,
        ``smallest_observed``, ``settings``, ``inside``; other numeric columns that are constant in a cell are
        kept. Cells
        whose optimum is not inside the sweep keep their smallest loss, and a caution says so.
    """
    import pandas as pd

    if noise_sd:
        check_noise(noise_sd)
    random = generator(rng)
    screened = screen(table, needs=["loss", *over], analysis="best settings")
    absent = [c for c in by if c not in screened.frame.columns]
    if absent:
        raise TableError(
            f"best settings: column {absent[0]!r} missing; the table has: {', '.join(map(str, table.columns))}"
        )
    rows, edge = [], []
    for key, part in screened.frame.groupby(list(by), sort=False):
        constant = {c: part[c].iloc[0] for c in part.columns if part[c].nunique(dropna=False) == 1}
        name = "/".join(map(str, key if isinstance(key, tuple) else (key,)))
        settings = {v: numbers(part, v) for v in over}
        losses = numbers(part, "loss")
        try:
            found = quadratic_optimum(settings, losses, noise_sd, window=window, rng=random)
            usable = found.inside
        except FitError:
            found, usable = None, False
        if found is None or not usable:
            edge.append(name)
            best = part.iloc[int(np.argmin(losses))]
            rows.append({**constant, **{v: best[v] for v in over}, "loss": float(losses.min()), "loss_sd": np.nan,
                         "optimism": 0.0, "smallest_observed": float(losses.min()), "settings": len(part),
                         "inside": False})  # fmt: skip
            continue
        rows.append({**constant, **found.at, **{f"log_sd_{v}": s for v, s in found.log_sd.items()}, "loss": found.loss,
                     "loss_sd": found.loss_sd, "optimism": found.optimism, "smallest_observed": found.smallest_observed,
                     "settings": found.points, "inside": True})  # fmt: skip
    cautions = list(screened.cautions)
    if edge:
        text = (
            f"no inner optimum in {', '.join(edge)}: the smallest loss there is used and is too low by its "
            "optimism; sweep wider"
        )
        cautions.append(Caution(code="optimum-at-edge", message=text))
    return pd.DataFrame(rows), tuple(cautions)


def envelope_frontier(
    curves: pd.DataFrame, *, points: int = 40, level: float = 0.95, draws: int = 500, rng: int | np.random.Generator = 0
) -> Result:
    """Approach 1: which size has the lowest loss at each compute, read off training curves.

    Parameters
    ----------
    curves
        One row an evaluation: ``run``, N, C (spent so far), ``loss``. Runs are drawn anew for the interval.

    Raises
    ------
    FitError
        When fewer than 3 sizes reach the envelope.
    """
    check_level(level)
    check_draws(draws, at_least=2)
    random = generator(rng)
    absent = [c for c in ("run", "N", "C", "loss") if c not in curves.columns]
    if absent:
        raise TableError(
            f"envelope: column {absent[0]!r} missing; the table has: {', '.join(map(str, curves.columns))}"
        )
    usable = screen(curves, needs=["N", "C", "loss"], analysis="envelope", keep_unfinished=True).frame
    groups = [
        (float(numbers(g, "N")[0]), np.log(numbers(g, "C")), numbers(g, "loss"))
        for _, g in usable.sort_values("C").groupby("run", sort=False)
    ]
    return _envelope(groups, points, level, draws, random)


def _envelope(
    groups: list[tuple[float, Floats, Floats]], points: int, level: float, draws: int, rng: np.random.Generator
) -> Result:
    grid = np.linspace(min(c.min() for _, c, _ in groups), max(c.max() for _, c, _ in groups), points)
    values = np.array([np.interp(grid, c, loss, left=np.inf, right=np.inf) for _, c, loss in groups])
    log_n = np.log([n for n, _, _ in groups])

    def slope(rows: NDArray[np.intp]) -> tuple[float, float, int]:
        best = np.argmin(values[rows], axis=0)
        reached = np.isfinite(values[rows].min(axis=0))
        # The first and last size have no competitor on one side: their stretch says nothing about the optimum.
        inner = reached & (log_n[rows][best] > log_n.min()) & (log_n[rows][best] < log_n.max())
        chosen = log_n[rows][best][inner]
        if len(set(chosen)) < 2:
            return float("nan"), float("nan"), len(set(chosen))
        a, b = weighted_line(grid[inner], chosen[None], np.ones(int(inner.sum())))
        return float(a[0]), float(b[0]), len(set(chosen))

    a, b, sizes = slope(np.arange(len(groups)))
    if sizes < 3:
        raise FitError(f"too-few-sizes: {sizes} inner sizes reach the lower envelope, 3 are needed")
    drawn = np.array([slope(rng.integers(0, len(groups), len(groups)))[0] for _ in range(draws)])
    drawn = drawn[np.isfinite(drawn)]
    made = len(drawn) >= max(2, 0.5 * draws)
    text = "a curve before the end of its schedule is not the loss of a run of that length: exponents are biased"
    cautions = [Caution(code="unfinished-curves", message=text)]
    interval = None
    if made:
        low, high = np.quantile(drawn, [(1 - level) / 2, (1 + level) / 2])
        limits = {"low": {"N_exponent": float(low)}, "high": {"N_exponent": float(high)}}
        interval = Interval(level=level, method="bootstrap of runs, percentile", **limits)
    else:
        few = "fewer than half of the draws of runs leave two inner sizes on the envelope: no interval; add sizes"
        cautions.append(Caution(code="refits-failed", message=few))
    return Result(
        kind="fit envelope",
        estimate={"N_exponent": a, "log_N_coefficient": b},
        standard_error={"N_exponent": float(np.std(drawn, ddof=1))} if made else {},
        interval=interval,
        n=len(groups),
        df=float(sizes - 2),
        warnings=(*cautions, *few_draws(interval, draws)),
        details={"grid_log_C": grid.tolist(), "envelope": np.min(values, axis=0).tolist()},
    )
