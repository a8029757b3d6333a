"""Paired seed deltas: each method's loss minus the baseline's, one dot a pair, with the mean and its interval."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from scaling.analysis.arms import natural
from scaling.analysis.figures import style
from scaling.analysis.readings import Delta

_MOST_ROWS: Final = 20  # in one panel; beyond, one panel a method


def seed_deltas(
    deltas: Sequence[Delta],
    *,
    baseline: str,
    noise_sd: float | None = None,
    sizes: Sequence[str] | None = None,
    width_in: float = style.WIDE_IN,
) -> Figure:
    """One row a method and size; left of zero is better than the baseline.

    Parameters
    ----------
    noise_sd
        Standard deviation of the loss over seeds; twice it either way is shaded.
    sizes
        Order of the sizes, smallest first; default as they come.
    """
    if not deltas:
        return style.empty("No method shares a size and a seed with the baseline.", width_in=width_in)
    order = [*(sizes or ()), *(delta.size for delta in deltas)]
    methods = sorted({delta.method for delta in deltas}, key=natural)
    look = style.looks([*methods, baseline], baseline=baseline)
    rows = sorted(deltas, key=lambda delta: (methods.index(delta.method), order.index(delta.size)))
    narrow = width_in <= style.NARROW_IN
    one_place = len({delta.size for delta in rows}) == 1
    if one_place:
        rows = sorted(rows, key=lambda delta: delta.mean)
    if len(rows) > _MOST_ROWS and len(methods) > 1 and len(rows) > 2 * len(methods):
        most = max(sum(delta.method == method for delta in rows) for method in methods)
        figure, axes = style.canvas(len(methods), width_in=width_in, panel_height_in=0.75 + 0.24 * most, share_x=True)
        groups = [[delta for delta in rows if delta.method == method] for method in methods]
        for axis, group in zip(axes, groups, strict=True):
            _panel(axis, group, look, noise_sd, [style.shorten(delta.size, 12) for delta in group])
            axis.set_title(style.shorten(group[0].method, 22), color=look[group[0].method].color)
        figure.supxlabel(_label(baseline, narrow), fontsize=9)
    else:
        height = max(1.9, 0.9 + 0.27 * len(rows) + (0 if one_place else 0.12 * len(methods)))
        figure = Figure(figsize=(width_in, height), layout="constrained")
        axes = [figure.subplots()]
        short = style.short_names(methods, 14 if narrow else 26)
        names = [
            short[delta.method] + ("" if one_place else f" · {style.shorten(delta.size, 10 if narrow else 16)}")
            for delta in rows
        ]
        _panel(axes[0], rows, look, noise_sd, names, gaps=not one_place)
        figure.supxlabel(_label(baseline, narrow), fontsize=9)  # names at the left may leave the axes little room
    for axis in axes:
        _limits(axis, rows, noise_sd)
        axis.xaxis.set_major_locator(style.few_ticks(4 if narrow or len(axes) > 1 else 7))
        axis.xaxis.set_major_formatter(style.plain_ticks())
    return figure


def _label(baseline: str, narrow: bool) -> str:
    unit = "(nats)" if narrow else "(nats per token)"
    return f"held-out loss minus {style.shorten(baseline, 12 if narrow else 20)} {unit}"


def _panel(
    axis: Axes,
    rows: Sequence[Delta],
    look: Mapping[str, style.Look],
    noise_sd: float | None,
    names: Sequence[str],
    *,
    gaps: bool = True,
) -> None:
    if noise_sd is not None and np.isfinite(noise_sd):
        axis.axvspan(-2 * noise_sd, 2 * noise_sd, color=style.SOFT, alpha=0.13, linewidth=0)
    axis.axvline(0, color=style.INK, linewidth=0.9)
    places: list[float] = []
    for delta in rows:
        turn = gaps and places and delta.method != rows[len(places) - 1].method
        place = places[-1] + (1.5 if turn else 1.0) if places else 0.0
        mine = look[delta.method]
        axis.plot(
            delta.deltas,
            np.full(len(delta.deltas), place + 0.17),
            mine.marker,
            color=mine.color,
            alpha=0.5,
            markersize=4,
            markeredgewidth=0,
            linestyle="none",
        )
        if delta.low is not None and delta.high is not None:
            axis.plot(
                [delta.low, delta.high], [place - 0.12] * 2, color=mine.color, linewidth=2.2, solid_capstyle="butt"
            )
        axis.plot(
            [delta.mean],
            [place - 0.12],
            mine.marker,
            color=mine.color,
            markersize=5.5,
            markeredgecolor=style.PAPER,
            markeredgewidth=0.8,
        )
        places.append(place)
    axis.set_yticks(places, names)
    axis.set_ylim(max(places) + 0.7, min(places) - 0.7)
    axis.grid(visible=False, axis="y")


def _limits(axis: Axes, rows: Sequence[Delta], noise_sd: float | None) -> None:
    """Show every pair whole; an interval of two pairs may be fifty times wider and is then cut at the edge."""
    dots = [value for delta in rows for value in (*delta.deltas, delta.mean)] + [0.0]
    if noise_sd is not None and np.isfinite(noise_sd):
        dots += [2 * noise_sd, -2 * noise_sd]
    low, high = min(dots), max(dots)
    span = (high - low) or 1.0
    bounds = [b for delta in rows for b in (delta.low, delta.high) if b is not None and np.isfinite(b)]
    low = max(min([low, *bounds]), low - 1.5 * span)
    high = min(max([high, *bounds]), high + 1.5 * span)
    pad = 0.04 * (high - low) or 0.01
    axis.set_xlim(low - pad, high + pad)
