"""Scaling curves: loss against compute with each method's law and band, and the arrows that define an iso-loss speedup.

The lower panel subtracts the baseline's law, because differences that decide between methods are thin lines in the
upper.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from scaling.analysis.arms import natural
from scaling.analysis.digits import speedup as speedup_text
from scaling.analysis.figures import style
from scaling.analysis.readings import Curve, IsoLoss, Speedup

AXES: Final = {
    "flops": "training compute (FLOPs)",
    "flops_6nd": "training compute, 6ND (FLOPs)",
    "tokens": "training tokens",
    "wall_time_s": "wall time (s)",
    "gpu_seconds": "GPU time (s)",
    "n_params": "parameters",
    "n_params_non_embedding": "parameters, embeddings left out",
}
_MOST_ARROW_METHODS: Final = 4
_MOST_END_LABELS: Final = 8
_ARROW_TEXT: Final = 8.0  # points
_MOST_STRETCH: Final = 1.35  # of the horizontal axis, to make room for the factors beside the arrows
_BESIDE_AXES_IN: Final = 1.6  # of a figure's width: ticks to the left of its axes, names to their right
_MOST_VECTOR_POINTS: Final = 600  # beyond, points are drawn as pixels: thousands of shapes make a page slow


def scaling_curves(
    table: pd.DataFrame,
    curves: Mapping[str, Curve],
    speedups: Sequence[Speedup] = (),
    *,
    x: str = "flops",
    loss: str = "val_loss",
    baseline: str | None = "baseline",
    width_in: float = style.WIDE_IN,
) -> Figure:
    """Runs as points, laws as lines with bands, and for each method the arrow from its loss to the baseline's law.

    Parameters
    ----------
    table
        Tidy runs; columns ``method``, ``x`` and ``loss`` are read.
    curves
        Method -> fitted law over its range; methods without one get points only.
    speedups
        Arrows are drawn from these: at the largest scale that does not extrapolate the baseline, else at the largest.
    """
    runs = table[["method", x, loss]].dropna()
    runs = runs[(runs[x] > 0) & np.isfinite(runs[loss].astype(float))]
    if runs.empty:
        return style.empty(f"No run has both {AXES.get(x, x)} and a loss.", width_in=width_in)
    methods = _order(list(runs["method"].unique()), baseline)
    look = style.looks(methods, baseline=baseline)
    has_lower = baseline in curves
    height = 3.2 if not has_lower else 5.2
    figure = Figure(figsize=(width_in, height), layout="constrained")
    rows = figure.subplots(2, 1, sharex=True, height_ratios=[3, 2]) if has_lower else [figure.subplots()]
    upper: Axes = rows[0]
    ends = {}
    for method in methods:
        points = runs[runs["method"] == method]
        xs, ys = points[x].astype(float).to_numpy(), points[loss].astype(float).to_numpy()
        upper.plot(
            xs, ys, look[method].marker, color=look[method].color, alpha=0.75, markeredgewidth=0, linestyle="none"
        )
        ends[method] = (float(xs.max()), float(ys[xs == xs.max()].mean()))
        if method in curves:
            _line(upper, curves[method], look[method])
            ends[method] = (curves[method].x[-1], curves[method].loss[-1])
    style.log_axis(upper, "x")
    upper.yaxis.set_major_formatter(style.plain_ticks())
    upper.set_ylabel("held-out loss (nats per token)")
    upper.margins(x=0.04)
    _arrows(upper, [s for s in speedups if s.scales][:_MOST_ARROW_METHODS], look, width_in)
    if has_lower:
        _differences(rows[1], runs, curves, look, methods, str(baseline), x, loss)
    rows[-1].set_xlabel(AXES.get(x, x))
    if len(methods) <= _MOST_END_LABELS and width_in > style.NARROW_IN:
        short = style.short_names(methods, style.END_LABEL)
        style.end_labels(upper, {short[m]: ends[m] for m in methods}, {short[m]: look[m].color for m in methods})
    else:
        style.legend(figure, methods, look, width_in=width_in)
    return figure


def _order(methods: Sequence[str], baseline: str | None) -> list[str]:
    return sorted(methods, key=lambda method: (method != baseline, natural(method)))


def _line(axis: Axes, curve: Curve, look: style.Look) -> None:
    axis.plot(curve.x, curve.loss, color=look.color, linestyle=look.dash, zorder=3)
    if curve.low and curve.high:
        axis.fill_between(curve.x, curve.low, curve.high, color=look.color, alpha=0.14, linewidth=0)


def _arrows(axis: Axes, speedups: Sequence[Speedup], look: Mapping[str, style.Look], width_in: float) -> None:
    """An arrow for each speedup, and its factor beside the arrow: within the axes, moved apart from one another."""
    texts: dict[str, tuple[str, IsoLoss]] = {}
    for found in speedups:
        inside = [scale for scale in found.scales if not scale.extrapolated] or list(found.scales)
        scale = max(inside, key=lambda item: item.compute)
        if not np.isfinite(scale.baseline_compute) or scale.baseline_compute <= 0:
            continue
        axis.annotate(
            "",
            xy=(scale.baseline_compute, scale.loss),
            xytext=(scale.compute, scale.loss),
            arrowprops={"arrowstyle": "-|>", "color": look[found.method].color, "linewidth": 1.3, "shrinkA": 0,
                        "shrinkB": 0},
            zorder=5,
        )  # fmt: skip
        where = f" at {style.shorten(scale.scale, 10)}" if len(found.scales) > 1 else ""  # the mean is another
        texts[found.method] = (speedup_text(scale.speedup) + where, scale)
    axis.autoscale_view()  # an arrow may lie outside what the runs alone would show
    to_axes = axis.transData + axis.transAxes.inverted()
    starts = {m: (max(scale.baseline_compute, scale.compute), scale.loss) for m, (_, scale) in texts.items()}
    widths = {m: 0.66 * _ARROW_TEXT / 72 * len(text) / (width_in - _BESIDE_AXES_IN) for m, (text, _) in texts.items()}
    stretch = max((float(to_axes.transform(starts[m])[0]) / (1 - widths[m]) for m in texts), default=1.0)
    if 1 < stretch <= _MOST_STRETCH:  # right of the laws there is nothing
        low, high = np.log(axis.get_xlim())
        axis.set_xlim(np.exp(low), np.exp(low + stretch * (high - low)))
    places = {method: to_axes.transform(start) for method, start in starts.items()}
    height_in = axis.get_window_extent().height / axis.figure.dpi
    line = 1.35 * _ARROW_TEXT / 72 / max(height_in, 0.5)
    heights = style.spread(
        {m: float(place[1]) + 0.6 * line for m, place in places.items()}, gap=line, low=0.0, high=1.0
    )
    for method, (text, _) in texts.items():
        x = float(places[method][0])
        fits = x + widths[method] <= 1.001  # beyond stand the names of the lines
        axis.annotate(
            text,
            xy=(x if fits else min(x, 0.99), heights[method]),
            xycoords="axes fraction",
            xytext=(4 if fits else 0, 0),
            textcoords="offset points",
            ha="left" if fits else "right",
            va="center",
            color=look[method].color,
            fontsize=_ARROW_TEXT,
            fontweight="bold",
            path_effects=[withStroke(linewidth=2.5, foreground=style.PAPER)],
            zorder=6,
        )


def _differences(
    axis: Axes,
    runs: pd.DataFrame,
    curves: Mapping[str, Curve],
    look: Mapping[str, style.Look],
    methods: Sequence[str],
    baseline: str,
    x: str,
    loss: str,
) -> None:
    reference = curves[baseline]
    grid, level = np.log(reference.x), np.asarray(reference.loss)
    for method in methods:
        points = runs[runs["method"] == method]
        xs, ys = points[x].astype(float).to_numpy(), points[loss].astype(float).to_numpy()
        inside = (xs >= reference.x[0] * 0.999) & (xs <= reference.x[-1] * 1.001)
        rest = ys[inside] - np.interp(np.log(xs[inside]), grid, level)
        axis.plot(
            xs[inside],
            rest,
            look[method].marker,
            color=look[method].color,
            alpha=0.75,
            markeredgewidth=0,
            linestyle="none",
            rasterized=len(runs) > _MOST_VECTOR_POINTS,
        )
        if method in curves:
            law = curves[method]
            keep = (np.asarray(law.x) >= reference.x[0] * 0.999) & (np.asarray(law.x) <= reference.x[-1] * 1.001)
            base = np.interp(np.log(law.x), grid, level)[keep]
            axis.plot(
                np.asarray(law.x)[keep],
                np.asarray(law.loss)[keep] - base,
                color=look[method].color,
                linestyle=look[method].dash,
                zorder=3,
            )
            if law.low and law.high:
                axis.fill_between(
                    np.asarray(law.x)[keep],
                    np.asarray(law.low)[keep] - base,
                    np.asarray(law.high)[keep] - base,
                    color=look[method].color,
                    alpha=0.14,
                    linewidth=0,
                )
    axis.axhline(0, color=style.SOFT, linewidth=0.8)
    axis.yaxis.set_major_formatter(style.plain_ticks())
    axis.set_ylabel(f"loss minus {style.shorten(baseline, 12)}'s law", fontsize=8)
