"""Runs gathered into cells: one cell is one method at one scale with its seeds.

Between ``screen`` and the comparisons (``speedup``, ``seeds``, ``noise``): what counts as the same scale, the pooled
standard deviation within cells, and the correlation of runs that share a seed.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.screen import numbers
from scaling.errors import TableError, UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

# Sizes within this factor are one scale: methods add a little to the parameters of a size.
SAME_SCALE = 1.06
# Standard deviation over loss below which runs of a cell are equal.
ROUNDING = 1e-12
# One-sided level at which a negative correlation of pairs counts. It widens an interval, so little is asked for: with
# 0.25 the nominal 95% interval covers 94 to 96% at any negative correlation, and 95 to 96% at none.
OPPOSED = 0.25
# Letters after a number in the name of a size.
MULTIPLES = {"": 1.0, "k": 1e3, "m": 1e6, "b": 1e9, "g": 1e9, "t": 1e12}


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """Runs of one method at one scale, ordered by seed; ``x`` is their mean cost in the currency asked for.

    ``tokens`` is what each was trained on, empty where a run of the table does not tell it.
    """

    method: str
    scale: str
    x: float
    losses: Floats
    seeds: tuple[str, ...]
    tokens: tuple[float, ...] = ()

    @property
    def mean(self) -> float:
        """Mean loss over seeds."""
        return float(np.mean(self.losses))

    @property
    def squares(self) -> float:
        """Sum of squares about the mean."""
        return float(np.sum((self.losses - self.mean) ** 2))

    @property
    def copied(self) -> bool:
        """Whether it has several runs, whose losses differ by rounding at most: they say nothing of noise."""
        return len(self.losses) > 1 and constant(self.losses)


def constant(sample: Floats) -> bool:
    """Whether values differ by rounding at most: nothing can be said of their spread."""
    return bool(np.ptp(sample) <= ROUNDING * abs(float(np.mean(sample))))


def group_near(values: Floats, factor: float = SAME_SCALE) -> NDArray[np.intp]:
    """Number the values so that neighbours within ``factor`` share a number, smallest first.

    >>> group_near(np.array([100.0, 1.0, 101.0]))
    array([1, 0, 1])
    """
    order = np.argsort(values, kind="stable")
    logs = np.log(np.maximum(values[order], np.finfo(np.float64).tiny))  # what is not positive is one group of its own
    jumps = np.concatenate([[0], (np.diff(logs) > np.log(factor)).astype(np.intp)])
    out = np.empty(len(values), dtype=np.intp)
    out[order] = np.cumsum(jumps)
    return out


def scale_labels(frame: pd.DataFrame, currency: str | None = None) -> list[str]:
    """The scale of each row: ``size`` where there is one, else N, else tokens, else the currency; plus tokens where
    a size was trained on several budgets.
    """
    if "size" in frame.columns and frame["size"].notna().all():
        base = [str(s) for s in frame["size"]]
    else:
        name = next((n for n in ("N", "D", currency, "C") if n and n in frame.columns and frame[n].notna().all()), None)
        if name is None:
            return ["all"] * len(frame)
        values = numbers(frame, name)
        index = group_near(values)
        named = {g: f"{name}={_span(values[index == g])}" for g in set(index)}
        base = [named[g] for g in index]
        if name == "D":
            return base
    if "D" not in frame.columns or frame["D"].isna().any():
        return base
    budgets = numbers(frame, "D")
    out = list(base)
    for scale in set(base):
        rows = np.flatnonzero(np.array(base) == scale)
        several = any(
            len(set(group_near(budgets[rows[frame["method"].to_numpy()[rows] == m]]))) > 1
            for m in (set(frame["method"].iloc[rows]) if "method" in frame.columns else ())
        )
        if several:
            index = group_near(budgets[rows])
            for row, g in zip(rows, index, strict=True):
                out[row] = f"{scale} D={np.exp(np.mean(np.log(budgets[rows][index == g]))):.3g}"
    return out


def _span(values: Floats) -> str:
    """One number for values of one scale, or both ends where a chain of near neighbours has drawn it out.

    >>> _span(np.array([1e9, 1.02e9])), _span(np.array([1e9, 1.05e9, 1.1e9]))
    ('1.01e+09', '1e+09 to 1.1e+09')
    """
    low, high = float(values.min()), float(values.max())
    if low <= 0 or high <= SAME_SCALE * low:
        return f"{np.exp(np.mean(np.log(values))):.4g}" if low > 0 else f"{high:.4g}"
    return f"{low:.4g} to {high:.4g}"


def size_key(label: str) -> tuple[str, float, str]:
    """Sorts names of sizes by the number in them, a thousand, million or billion by its letter.

    >>> sorted(["12k", "50k", "6k", "1.3B", "25M"], key=size_key)
    ['6k', '12k', '50k', '25M', '1.3B']
    """
    found = re.search(r"(\d+(?:\.\d+)?(?:e[+-]?\d+)?)([kKmMbBgGtT]?)(?![A-Za-z0-9])", label)
    if found is None:
        return label, 0.0, label
    return label[: found.start()], float(found[1]) * MULTIPLES[found[2].lower()], label


def order_scales(frame: pd.DataFrame, labels: Sequence[str]) -> dict[str, int]:
    """Label of each scale -> its place, smallest first: by parameters, else compute, else tokens, else its name."""
    names = np.array(labels, dtype=object)
    columns = ("N", "n_params_non_embedding", "n_params", "C", "flops", "D", "tokens")
    column = next((c for c in columns if c in frame.columns and frame[c].notna().all()), None)
    values = numbers(frame, column) if column else np.ones(len(frame))
    typical = {str(name): float(np.median(values[names == name])) for name in dict.fromkeys(labels)}
    ordered = sorted(typical, key=lambda name: (typical[name], size_key(name)))
    return {name: place for place, name in enumerate(ordered)}


def make_cells(frame: pd.DataFrame, *, cost: str | None) -> dict[str, dict[str, Cell]]:
    """Method -> scale -> cell, scales in order of cost, or of size without one; ``cost`` is the currency's column."""
    labels = scale_labels(frame, cost)
    scales, places = np.array(labels), order_scales(frame, labels)
    methods = frame["method"].to_numpy(dtype=str)
    losses = numbers(frame, "loss")
    costs = numbers(frame, cost) if cost else np.ones(len(frame))
    tokens = numbers(frame, "D") if "D" in frame.columns and frame["D"].notna().all() else np.zeros(0)
    told = len(tokens) > 0 and bool(np.all(tokens > 0))
    seeds = (
        frame["seed"].astype(str).to_numpy()
        if "seed" in frame.columns
        else np.array([str(k) for k in range(len(frame))])
    )
    out: dict[str, dict[str, Cell]] = {}
    for method in dict.fromkeys(methods):
        found = []
        for scale in dict.fromkeys(scales[methods == method]):
            rows = np.flatnonzero((methods == method) & (scales == scale))
            rows = rows[np.argsort(seeds[rows], kind="stable")]
            found.append(
                Cell(
                    method=str(method),
                    scale=str(scale),
                    x=float(np.exp(np.mean(np.log(costs[rows])))),
                    losses=losses[rows],
                    seeds=tuple(str(s) for s in seeds[rows]),
                    tokens=tuple(map(float, tokens[rows])) if told else (),
                )
            )
        found.sort(key=lambda c: (c.x if cost else 0.0, places[c.scale]))
        out[str(method)] = {c.scale: c for c in found}
    return out


def pick_methods(cells: Mapping[str, object], baseline: str, method: str | None) -> list[str]:
    """The methods to compare with ``baseline``.

    Raises
    ------
    UsageError
        When the method is the baseline.
    TableError
        When the baseline or the method is not in the table.
    """
    if method == baseline:
        raise UsageError(f"method {baseline!r} is the baseline itself; name another, or none for all others")
    for name in (baseline, *([method] if method else [])):
        if name not in cells:
            raise TableError(f"method {name!r} is not in the table; {nearest(name, cells)}")
    others = [m for m in cells if m != baseline]
    if not others:
        raise TableError(f"the table holds only the baseline {baseline!r}: nothing to compare it with")
    return [method] if method else others


def identical(cells: Sequence[Cell], sd: float) -> bool:
    """Whether runs of a cell differ by rounding at most: copies, or seeds that change nothing; never noise measured."""
    return bool(sd <= ROUNDING * min(c.mean for c in cells))


def without_copies(baseline: Sequence[Cell], method: Sequence[Cell]) -> tuple[list[Cell], list[Cell]]:
    """Both arms, where runs with equal losses count as one run, that of the first seed.

    Counted as several they would lend the pooled SD degrees of freedom without any spread, and a mean the standard
    error of several runs. Where no cell has runs that differ, nothing was measured (`identical`) and all stay.
    """
    if not any(len(c.losses) > 1 and not c.copied for c in (*baseline, *method)):
        return list(baseline), list(method)
    first, second = ([_one_run(c) if c.copied else c for c in arm] for arm in (baseline, method))
    return first, second


def _one_run(cell: Cell) -> Cell:
    return replace(cell, losses=cell.losses[:1], seeds=cell.seeds[:1], tokens=cell.tokens[:1])


def pooled_sd(cells: Sequence[Cell]) -> tuple[float, int]:
    """Standard deviation within cells and its degrees of freedom; NaN and 0 without replicates."""
    df = sum(len(c.losses) - 1 for c in cells)
    if df == 0:
        return float("nan"), 0
    return float(np.sqrt(sum(c.squares for c in cells) / df)), df


def paired(a: Cell, b: Cell) -> tuple[Floats, Floats]:
    """Losses of runs whose seed both cells have once, in the order of seeds."""
    once = [s for s in a.seeds if a.seeds.count(s) == 1 and b.seeds.count(s) == 1]
    first = np.array([a.losses[a.seeds.index(s)] for s in once])
    second = np.array([b.losses[b.seeds.index(s)] for s in once])
    return first, second


def constant_pairs(pair: tuple[Floats, Floats]) -> bool:
    """Whether several pairs differ by one amount up to rounding, which says nothing of how much pairs differ."""
    method, baseline = pair
    return len(method) > 1 and bool(np.ptp(method - baseline) <= ROUNDING * float(np.max(np.abs(baseline))))


def seed_correlation(pairs: Sequence[tuple[Floats, Floats]]) -> tuple[float, int, float]:
    """Intraclass correlation of paired runs within cells, its degrees of freedom and one-sided p of rho > 0.

    ``2 sum xy / (sum x^2 + sum y^2)``, not Pearson's: with it ``2 sd^2 (1 - rho)`` is the variance of the pairs'
    differences also where one arm varies more than the other. The p is Pearson's, whose null does not need equal
    variances. NaN, 0 and NaN where fewer than two degrees of freedom remain.
    """
    left = [a - a.mean() for a, _ in pairs if len(a) > 1]
    right = [b - b.mean() for _, b in pairs if len(b) > 1]
    df = sum(len(a) - 1 for a in left)
    if df < 2:
        return float("nan"), 0, float("nan")
    x, y = np.concatenate(left), np.concatenate(right)
    size = float(np.sqrt(np.sum(x**2) * np.sum(y**2)))
    if size == 0:
        return float("nan"), 0, float("nan")
    pearson = float(np.clip(np.sum(x * y) / size, -1.0, 1.0))
    t = pearson * np.sqrt((df - 1) / max(1 - pearson**2, 1e-12))
    rho = float(2 * np.sum(x * y) / (np.sum(x**2) + np.sum(y**2)))
    return rho, df, float(stats.t.sf(t, df - 1))
