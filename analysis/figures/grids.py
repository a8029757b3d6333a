"""Figures over the axes of a grid: loss by head count, a heat map of H by KV, loss by learning rate."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator
from numpy.typing import NDArray

from scaling.analysis.arms import natural
from scaling.analysis.figures import style
from scaling.analysis.grids import Grid

_MOST_PANELS: Final = 9


def head_counts(grid: Grid, *, sizes: Sequence[str], width_in: float = style.WIDE_IN) -> Figure:
    """Loss over log2 H, one panel a size; the counts not distinguishable from the best are shaded.

    Parameters
    ----------
    grid
        Cells over ``size``, ``method``, ``heads``, compared within size and method.
    sizes
        Sizes, smallest first.
    """
    shown = [size for size in sizes if size in set(grid.frame["size"])][-_MOST_PANELS:]
    if not shown:
        return style.empty("No run routes with heads.", width_in=width_in)
    methods = sorted(grid.frame["method"].unique(), key=natural)
    look, aside = style.looks(methods, baseline=None), _aside(methods)
    figure, axes = style.canvas(len(shown), width_in=width_in, panel_height_in=2.2)
    for axis, size in zip(axes, shown, strict=True):
        for method in methods:
            cells = grid.frame[(grid.frame["size"] == size) & (grid.frame["method"] == method)].sort_values("heads")
            _line(axis, cells, "heads", look[method], aside[method])
            tied = cells[cells["mark"] != ""]["heads"].astype(float)
            if len(methods) == 1 and len(tied) and len(cells) > 1:
                axis.axvspan(
                    float(tied.min()) / 2**0.4, float(tied.max()) * 2**0.4, color=style.SOFT, alpha=0.13, linewidth=0
                )
        counts = sorted(grid.frame[grid.frame["size"] == size]["heads"].astype(float).unique())
        axis.set_xscale("log", base=2)
        axis.xaxis.set_major_locator(FixedLocator(counts))
        axis.xaxis.set_minor_locator(NullLocator())
        axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}"))
        axis.set_xlim(counts[0] / 1.5, counts[-1] * 1.5)
        axis.set_title(style.shorten(size))
        axis.set_xlabel("routing heads H")
    axes[0].set_ylabel("held-out loss (nats)")
    if len(methods) > 1:
        style.legend(figure, methods, look, width_in=width_in)
    return figure


def heads_by_kv(grid: Grid, *, sizes: Sequence[str], width_in: float = style.WIDE_IN) -> Figure:
    """Heat map of loss over H (across) and KV (down), one panel a size; ● best of its row, ○ ties with it."""
    shown = [size for size in sizes if size in set(grid.frame["size"])][-_MOST_PANELS:]
    if not shown:
        return style.empty("No run has routing heads and key-value heads.", width_in=width_in)
    most = max(grid.frame[grid.frame["size"] == size]["kv"].nunique() for size in shown)
    figure, axes = style.canvas(len(shown), width_in=width_in, panel_height_in=0.9 + 0.4 * most)
    for axis, size in zip(axes, shown, strict=True):
        cells = grid.frame[grid.frame["size"] == size]
        means = cells.pivot(index="kv", columns="heads", values="mean").astype(float)
        marks = cells.pivot(index="kv", columns="heads", values="mark")
        small = means.shape[1] > 4 and len(shown) > 1 or width_in <= style.NARROW_IN
        values, signs = means.to_numpy(dtype=float), marks.to_numpy(dtype=object)
        decimals = _decimals(cells, values)
        text = np.array(
            [
                [_written(value, mark, row, decimals) for value, mark in zip(row, sign, strict=True)]
                for row, sign in zip(values, signs, strict=True)
            ]
        )
        sns.heatmap(
            means, ax=axis, annot=text, fmt="", cmap=sns.light_palette(style.PALETTE[0], reverse=True, as_cmap=True),
            cbar=False, linewidths=1.5, linecolor=style.PAPER, annot_kws={"fontsize": 6 if small else 8},
        )  # fmt: skip
        axis.set_title(style.shorten(size))
        axis.set_xticklabels([f"{float(h):g}" for h in means.columns], rotation=0)
        axis.set_yticklabels([f"{float(kv):g}" for kv in means.index], rotation=0)
        axis.set_xlabel("routing heads H")
        axis.set_ylabel("key-value heads")
    return figure


def learning_rates(
    grid: Grid, *, sizes: Sequence[str], baseline: str | None = "baseline", width_in: float = style.WIDE_IN
) -> Figure:
    """Loss over peak learning rate, one panel a size, one line a method, each one's optimum ringed."""
    shown = [size for size in sizes if size in set(grid.frame["size"])][-_MOST_PANELS:]
    if not shown:
        return style.empty("No run records its learning rate.", width_in=width_in)
    methods = sorted(grid.frame["method"].unique(), key=lambda name: (name != baseline, natural(name)))
    look, aside = style.looks(methods, baseline=baseline), _aside(methods)
    figure, axes = style.canvas(len(shown), width_in=width_in, panel_height_in=2.2)
    for axis, size in zip(axes, shown, strict=True):
        axis.margins(y=0.12)  # room for the rings
        for method in methods:
            cells = grid.frame[(grid.frame["size"] == size) & (grid.frame["method"] == method)].sort_values("lr")
            if cells.empty:
                continue
            _line(axis, cells, "lr", look[method], aside[method])
            best = cells.loc[cells["mean"].idxmin()]
            axis.plot(
                [best["lr"] * aside[method]], [best["mean"]], "o", markersize=10, markerfacecolor="none",
                color=look[method].color,
            )  # fmt: skip
        _rate_ticks(axis, sorted(grid.frame[grid.frame["size"] == size]["lr"].astype(float).unique()))
        axis.set_title(style.shorten(size))
        axis.set_xlabel("peak learning rate")
    axes[0].set_ylabel("held-out loss (nats)")
    style.legend(figure, methods, look, width_in=width_in)
    return figure


def _rate_ticks(axis: Axes, rates: Sequence[float]) -> None:
    """The rates tried as ticks, as many as there is room for."""
    axis.set_xscale("log")
    axis.xaxis.set_major_locator(FixedLocator(list(rates[:: -(-len(rates) // 4)])))
    axis.xaxis.set_minor_locator(NullLocator())
    axis.xaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:.3g}"))


def _aside(methods: Sequence[str]) -> dict[str, float]:
    """A factor on the horizontal axis for each method, so that equal losses do not hide one another."""
    step = min(0.05, 0.3 / len(methods))
    return {method: 2.0 ** (step * (place - (len(methods) - 1) / 2)) for place, method in enumerate(methods)}


def _line(axis: Axes, cells: pd.DataFrame, x: str, look: style.Look, aside: float) -> None:
    xs, ys = cells[x].astype(float) * aside, cells["mean"].astype(float)
    axis.plot(xs, ys, color=look.color, marker=look.marker, linestyle=look.dash, linewidth=1.3)
    low, high = cells["mean_low"].astype(float), cells["mean_high"].astype(float)
    if np.isfinite(low).all() and len(cells):
        axis.vlines(xs, low, high, color=look.color, linewidth=1.1)
    axis.yaxis.set_major_locator(style.few_ticks())


def _decimals(cells: pd.DataFrame, values_KH: NDArray[np.float64]) -> int:
    """Decimals that the intervals allow; without them, those that tell the cells of each row apart."""
    half = (cells["mean_high"].astype(float) - cells["mean_low"].astype(float)) / 2
    spans = np.array([np.ptp(row[np.isfinite(row)]) for row in values_KH if np.isfinite(row).any()])
    steps = half[np.isfinite(half) & (half > 0)].to_numpy() if half.notna().any() else spans[spans > 0]
    return int(np.clip(np.ceil(-np.log10(steps.min())) + 1, 3, 5)) if len(steps) else 3


def _written(value: float, mark: object, row: NDArray[np.float64], decimals: int) -> str:
    if np.isnan(value):
        return ""
    sign = " ●" if value == np.nanmin(row) else " ○" if mark else ""
    return f"{value:.{decimals}f}{sign}"
