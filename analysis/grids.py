"""Runs gathered over axes of a grid (heads, key-value heads, learning rate): cell means, and what ties with the best.

After ``schema``, before ``tables`` and ``figures`` of ablations. One spread for all cells (pooled over seeds), because
single cells rarely have more than three runs; with one run a cell a spread known from elsewhere can be given.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import pandas as pd
from scipy import stats

from scaling.analysis.cells import constant
from scaling.analysis.paired import dunnett
from scaling.errors import TableError

IDENTICAL_CELLS: Final = (
    "runs of a cell have equal losses (copies of one run, or seeds that change nothing), which measures no noise"
)
COPIED_CELLS: Final = "their runs have equal losses, copies of one run or seeds that change nothing"


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Cells of a grid.

    Parameters
    ----------
    frame
        One row a cell: the axes, ``n``, ``mean`` and its interval ``mean_low``, ``mean_high`` (missing without a
        spread), ``gap`` to the best cell of the same group, and ``mark``: ``best`` (better than all others of its group
        by more than the noise), ``tie`` (the best, or not distinguishable from it), or empty.
    sd, df
        Standard deviation of one run within a cell and its degrees of freedom (infinite where given, 0 if unknown).
    source
        Where the spread comes from; where there is none, why.
    """

    frame: pd.DataFrame
    axes: tuple[str, ...]
    sd: float
    df: float
    level: float
    source: str


def gather(
    runs: pd.DataFrame,
    axes: Sequence[str],
    *,
    within: Sequence[str] = (),
    loss: str = "val_loss",
    sd: float | None = None,
    level: float = 0.95,
) -> Grid:
    """Cell means over ``axes``, compared with the best cell among those that agree in ``within``.

    Parameters
    ----------
    runs
        Tidy runs; rows with a missing axis or loss are left out.
    axes, within
        Columns that make a cell; columns (among the axes) whose values are compared apart, e.g. ``["size"]``.
    sd
        Standard deviation over seeds from elsewhere, used where cells have one run or runs with equal losses.

    Raises
    ------
    TableError
        If no run has all axes and a finite loss.

    Notes
    -----
    Ties are found by a multiple comparison with the best (Hsu 1981), through Dunnett's two-sided probability, which is
    conservative: the tie set is rather too large than too small.
    """
    kept = runs.dropna(subset=[*axes, loss])
    kept = kept[np.isfinite(kept[loss].astype(float))]
    if kept.empty:
        raise TableError(f"no run has a finite {loss} and all of {', '.join(axes)}; nothing to compare")
    grouped = kept.assign(**{loss: kept[loss].astype(float)}).groupby(list(axes), sort=True)[loss]
    squares = grouped.agg(lambda losses: float(((losses - losses.mean()) ** 2).sum()))
    equal = grouped.agg(lambda losses: constant(losses.to_numpy()))
    frame = grouped.agg(n="size", mean="mean").assign(squares=squares, equal=equal).reset_index()
    copied = (frame["n"] > 1) & frame["equal"]
    # as in comparisons: copies count as one run where other cells measure the noise
    measured = bool(((frame["n"] > 1) & ~copied).any())
    frame = frame.drop(columns="equal").assign(counted=frame["n"].mask(copied, 1) if measured else frame["n"])
    df = float((frame["counted"] - 1).sum()) if measured else 0.0
    spread = math.sqrt(float(frame.loc[~copied, "squares"].sum()) / df) if measured else math.nan
    source = "pooled over cells"
    if copied.any() and measured:
        source += f" ({int(copied.sum())} of {len(frame)} count as one run each: {COPIED_CELLS})"
    elif not measured:  # not a spread of 0, which would make every difference a certainty
        source = IDENTICAL_CELLS if copied.any() else "one run a cell and no known noise"
    if df == 0 and sd is not None:
        spread, df, source = sd, math.inf, "given"
    quantile = float(stats.t.ppf((1 + level) / 2, df)) if df > 0 else math.nan
    half = quantile * spread / np.sqrt(frame["counted"].astype(float))
    frame = frame.drop(columns="squares").assign(mean_low=frame["mean"] - half, mean_high=frame["mean"] + half)
    groups = frame.groupby(list(within), sort=False) if within else [("all", frame)]
    parts = [_compare(part, spread, df, level) for _, part in groups]
    return Grid(
        frame=pd.concat(parts).drop(columns="counted"), axes=tuple(axes), sd=spread, df=df, level=level, source=source
    )


def _compare(part: pd.DataFrame, sd: float, df: float, level: float) -> pd.DataFrame:
    place = int(np.argmin(part["mean"].to_numpy()))
    gap = part["mean"] - float(part["mean"].iloc[place])
    near = pd.Series(True, index=part.index)
    others = np.arange(len(part)) != place
    if math.isfinite(sd) and others.any():
        error = sd * np.sqrt(1 / part["counted"].astype(float) + 1 / float(part["counted"].iloc[place]))
        near[others] = np.array(dunnett([float(t) for t in (gap / error)[others]], df)) > 1 - level
    word = "" if len(part) < 2 or not math.isfinite(sd) else "best" if int(near.sum()) == 1 else "tie"
    return part.assign(gap=gap, mark=[word if is_near else "" for is_near in near])


def with_single_head(runs: pd.DataFrame) -> pd.DataFrame:
    """Runs that route over depth, ``attnres`` counted as ``mhar`` with one head, which it is."""
    one = runs["method"].eq("attnres") & runs["heads"].isna()
    return runs.assign(heads=runs["heads"].mask(one, 1), method=runs["method"].mask(one, "mhar")).dropna(
        subset=["heads"]
    )
