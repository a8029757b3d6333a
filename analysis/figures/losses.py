"""Loss curves: one panel a size, one line a run, the tail window that the tail mean is taken over shaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scaling.analysis.arms import natural
from scaling.analysis.cells import size_key
from scaling.analysis.figures import style

TAIL_EVALUATIONS: Final = 11  # as in the MHAR paper: mean of the last 11 evaluations
_MOST_POINTS: Final = 250  # a line; more cannot be seen and make the page heavy
_MOST_LINES: Final = 24  # a panel; beyond, the mean of each method with its range
_MOST_PANELS: Final = 9
_MOST_METHODS: Final = 14  # with a colour, marker and dash of their own
_MOST_NAMED: Final = 7  # of more than that
_MOST_RANGES: Final = 5  # methods whose ranges can be told apart where they lie on one another
_SAME_END: Final = 1.1  # last steps within this factor have one tail
_OTHER: Final = style.Look(color="#b5b6bd", marker="", dash="-")
_SETTLED: Final = 0.2  # share of the training after which the whole range is shown


def loss_curves(
    table: pd.DataFrame,
    histories: pd.DataFrame,
    *,
    metric: str = "val/loss",
    baseline: str | None = "baseline",
    tail: int = TAIL_EVALUATIONS,
    width_in: float = style.WIDE_IN,
) -> Figure:
    """Loss against step for every run of ``table`` that has a history of ``metric``.

    Parameters
    ----------
    table
        Tidy runs (``run_key``, ``method``, ``size``).
    histories
        Long table: ``run_key``, ``metric``, ``step``, ``value``.
    tail
        Number of last evaluations that are shaded.
    """
    points = histories[histories["metric"] == metric]
    points = points.merge(table[["run_key", "method", "size"]], on="run_key", how="inner")
    points = points[np.isfinite(points["value"].astype(float))]
    if points.empty:
        return style.empty(f"No run has a history of {metric}.", width_in=width_in)
    points = points.assign(size=points["size"].fillna("all runs"))
    sizes = _sizes(table, points)
    left_out = max(0, len(sizes) - _MOST_PANELS)
    sizes = sizes[-_MOST_PANELS:]
    methods = sorted(points["method"].unique(), key=lambda name: (name != baseline, natural(name)))
    named = _named(points, methods, baseline)
    look = style.looks(named, baseline=baseline if baseline in named else None)
    if len(named) < len(methods):
        look |= {name: _OTHER for name in methods if name not in look}
        methods = [*(name for name in methods if name not in named), *named]  # the named ones are drawn over the others
    figure, axes = style.canvas(len(sizes), width_in=width_in, panel_height_in=2.2)
    for axis, size in zip(axes, sizes, strict=True):
        _panel(axis, points[points["size"] == size], methods, look, tail)
        axis.set_title(style.shorten(str(size)))
    for axis in axes:
        spec = axis.get_subplotspec()
        if spec is not None and spec.is_first_col():
            axis.set_ylabel("held-out loss (nats)" if metric == "val/loss" else style.shorten(metric))
        axis.set_xlabel("step")
    others = {f"{len(methods) - len(named)} other methods": _OTHER} if len(named) < len(methods) else {}
    style.legend(figure, [*named, *others], {**look, **others}, width_in=width_in)
    if left_out:
        figure.suptitle(f"the {_MOST_PANELS} largest sizes; {left_out} smaller left out", fontsize=8, color=style.SOFT)
    return figure


def _named(points: pd.DataFrame, methods: Sequence[str], baseline: str | None) -> list[str]:
    """Methods that get a colour: all, or of many the baseline and those that end lowest."""
    if len(methods) <= _MOST_METHODS:
        return list(methods)
    last = points.loc[points.groupby("run_key", observed=True)["step"].idxmax()]
    lowest = last.groupby("method")["value"].mean().sort_values().index
    kept = [baseline] if baseline in methods else []
    kept += [name for name in lowest if name != baseline][: _MOST_NAMED - len(kept)]
    return [str(name) for name in kept]


def _sizes(table: pd.DataFrame, points: pd.DataFrame) -> list[str]:
    present = set(points["size"])
    parameters = table.groupby("size", dropna=True)["n_params"].median().to_dict() if "n_params" in table else {}

    def order(name: str) -> tuple[float, tuple[str, float, str]]:
        value = parameters.get(name)
        return (float("inf") if value is None or pd.isna(value) else float(value), size_key(name))

    return sorted(present, key=order)


def _panel(axis: Axes, points: pd.DataFrame, methods: Sequence[str], look: Mapping[str, style.Look], tail: int) -> None:
    runs = points["run_key"].nunique()
    steps: list[float] = []
    for method in methods:
        mine = points[points["method"] == method]
        if mine.empty:
            continue
        kept = look[method]
        if runs > _MOST_LINES:
            by_step = mine.groupby("step")["value"].agg(["mean", "min", "max", "size"])
            by_step = by_step[by_step["size"] >= by_step["size"].max() / 2]  # beyond, the few longest runs alone
            axis.plot(by_step.index, by_step["mean"], color=kept.color, linestyle=kept.dash, linewidth=1.4)
            if points["method"].nunique() <= _MOST_RANGES:
                axis.fill_between(
                    by_step.index, by_step["min"], by_step["max"], color=kept.color, alpha=0.14, linewidth=0
                )
            steps.extend(by_step.index)
            continue
        for _, line in mine.groupby("run_key"):
            line = line.sort_values("step")
            stride = max(1, len(line) // _MOST_POINTS)
            line = line.iloc[::-stride][::-1]  # the last point is always kept
            marker = (kept.marker or None) if len(line) <= 2 else None
            axis.plot(
                line["step"],
                line["value"],
                color=kept.color,
                linestyle=kept.dash,
                linewidth=1.1,
                marker=marker,
                alpha=0.85,
            )
            steps.extend(line["step"])
    _limits(axis, points)
    evaluations = np.unique(steps)
    ends = points.groupby("run_key")["step"].max()
    if len(evaluations) > tail > 1 and ends.max() <= _SAME_END * ends.min():
        axis.axvspan(float(evaluations[-tail]), float(evaluations[-1]), color=style.SOFT, alpha=0.12, linewidth=0)
    axis.xaxis.set_major_locator(style.few_ticks(4))
    axis.xaxis.set_major_formatter(style.plain_ticks())


def _limits(axis: Axes, points: pd.DataFrame) -> None:
    """Leave the fall of the first steps out of the picture: it squeezes the part where methods differ."""
    last_step = points.groupby("run_key")["step"].transform("max")
    settled = points.loc[points["step"] >= _SETTLED * last_step, "value"].astype(float)
    low, high = float(points["value"].min()), float(settled.max())
    low = min(low, float(settled.min()))
    pad = 0.05 * (high - low) or 0.01 * max(abs(high), 1e-6)
    axis.set_ylim(low - pad, high + pad)
