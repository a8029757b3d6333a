"""Speedup by scale: each method's iso-loss speedup over compute with intervals, and the line of its trend."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from scaling.analysis.figures import style
from scaling.analysis.readings import Speedup

COSTS: Final = {
    "flops": "training compute (FLOPs)",
    "tokens": "training tokens",
    "seconds": "wall time (s)",
    "gpu_hours": "GPU time (h)",
}
_MOST_END_LABELS: Final = 6


def speedup_by_scale(
    speedups: Sequence[Speedup], *, baseline: str = "baseline", width_in: float = style.WIDE_IN
) -> Figure:
    """One point a method and scale, hollow where the baseline's law is extrapolated; dashed: the trend."""
    shown = [item for item in speedups if item.scales]
    if not shown:
        return style.empty("No speedup could be determined.", width_in=width_in)
    methods = [item.method for item in shown]
    look = style.looks([*methods, baseline], baseline=baseline)
    figure = Figure(figsize=(width_in, 3.3), layout="constrained")
    axis = figure.subplots()
    axis.axhline(1.0, color=style.INK, linewidth=0.9)
    short = style.short_names(methods, style.END_LABEL)
    tips = {}
    for place, item in enumerate(shown):
        mine = look[item.method]
        shift = 1.0 + 0.02 * (place - (len(shown) - 1) / 2)
        x = np.array([scale.compute for scale in item.scales]) * shift
        y = np.array([scale.speedup for scale in item.scales])
        for at, scale in zip(x, item.scales, strict=True):
            if scale.low is not None and scale.high is not None and scale.low > 0:
                axis.plot([at, at], [scale.low, scale.high], color=mine.color, linewidth=1.3, alpha=0.8)
            face = style.PAPER if scale.extrapolated else mine.color
            axis.plot([at], [scale.speedup], mine.marker, color=mine.color, markerfacecolor=face)
        if item.trend is not None and len(x) > 2:
            middle = np.log(x).mean()
            slope = item.trend / np.log(10)
            level = np.log(y).mean()
            axis.plot(x, np.exp(level + slope * (np.log(x) - middle)), linestyle="--", color=mine.color, linewidth=1.0)
        tips[short[item.method]] = (float(x[-1]), float(y[-1]))
    low = min(min(s.speedup for item in shown for s in item.scales), 1.0)
    high = max(max(s.speedup for item in shown for s in item.scales), 1.0)
    axis.set_yscale("log")
    reach = max((high / low) ** 1.5, 1.06)  # an interval may be far wider than the points differ; it is cut there
    ends = [end for item in shown for s in item.scales for end in (s.low, s.high) if end is not None and end > 0]
    below, above = min([low / 1.06, *ends]), max([high * 1.06, *ends])
    axis.set_ylim(max(below, low / reach) / 1.02, min(above, high * reach) * 1.02)
    style.log_axis(axis, "x")
    style.log_axis(axis, "y")
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _place: f"{value:g}×"))
    axis.set_xlabel(f"the method's {COSTS.get(shown[0].currency, shown[0].currency)}")
    axis.set_ylabel("speedup at equal loss")
    if len(shown) <= _MOST_END_LABELS and width_in > style.NARROW_IN:
        style.end_labels(axis, tips, {short[m]: look[m].color for m in methods})
    else:
        style.legend(figure, methods, look, width_in=width_in)
    return figure
