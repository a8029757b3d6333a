"""The noise floor: each kind of noise with its interval, and each measured effect against it, on one axis of loss."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure

from scaling.analysis.figures import style
from scaling.analysis.readings import Delta, Noise


def noise_floor(
    noises: Sequence[Noise],
    deltas: Sequence[Delta] = (),
    *,
    baseline: str = "baseline",
    width_in: float = style.WIDE_IN,
) -> Figure:
    """Standard deviations above, effects (absolute mean deltas) below; seed noise, which alone judges methods, shaded.

    An effect is filled when its interval leaves out zero, hollow when it does not.
    """
    noises = [noise for noise in noises if noise.sd > 0]
    effects = [delta for delta in deltas if delta.mean != 0]
    if not noises and not effects:
        return style.empty("No noise could be measured: no cell has two seeds.", width_in=width_in)
    narrow = width_in <= style.NARROW_IN
    one_place = len({delta.size for delta in effects}) == 1
    look = style.looks([*{delta.method for delta in effects}, baseline], baseline=baseline)
    figure = Figure(figsize=(width_in, max(1.9, 0.9 + 0.29 * (len(noises) + len(effects)))), layout="constrained")
    axis = figure.subplots()
    axis.set_xscale("log")
    names: list[str] = []
    short = style.short_names((delta.method for delta in effects), 12 if narrow else 22)
    for noise in noises:
        place = len(names)
        names.append(style.shorten(noise.label, 22 if narrow else 34))
        color = style.INK if noise.counts_for_methods else style.SOFT
        if noise.low and noise.high:
            axis.plot([noise.low, noise.high], [place, place], color=color, linewidth=2.0, solid_capstyle="butt")
        axis.plot([noise.sd], [place], "s", color=color, markersize=5)
        if noise.counts_for_methods:
            axis.axvspan(noise.low or noise.sd, noise.high or noise.sd, color=style.SOFT, alpha=0.12, linewidth=0)
            axis.axvline(noise.sd, color=style.SOFT, linewidth=0.9, linestyle="--")
    for delta in effects:
        place = len(names)
        size = "" if one_place else f" · {style.shorten(delta.size, 12 if narrow else 16)}"
        names.append(short[delta.method] + size)
        mine = look[delta.method]
        decided = delta.verdict != "undecided"
        if decided and delta.low is not None and delta.high is not None:
            ends = sorted((abs(delta.low), abs(delta.high)))
            axis.plot(ends, [place, place], color=mine.color, linewidth=1.6, solid_capstyle="butt")
        axis.plot(
            [abs(delta.mean)],
            [place],
            mine.marker,
            color=mine.color,
            markersize=5.5,
            markerfacecolor=mine.color if decided else style.PAPER,
        )
    axis.set_yticks(range(len(names)), names)
    axis.set_ylim(len(names) - 0.4, -0.6)
    if noises and effects:
        axis.axhline(len(noises) - 0.5, color=style.GRID, linewidth=1.0)
    axis.grid(visible=False, axis="y")
    low, high = axis.get_xlim()
    axis.set_xlim(max(low, high * 1e-8), high)
    style.log_axis(axis, "x")
    both = (
        "nats: SD above, effect below" if narrow else "nats per token: standard deviation above, size of effect below"
    )
    axis.set_xlabel(both if noises and effects else "nats per token")
    return figure
