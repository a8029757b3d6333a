"""Throughput and memory of each method as bars, with the machine's or the baseline's ceiling as a line."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from matplotlib.patheffects import withStroke

from scaling.analysis.arms import natural
from scaling.analysis.figures import style

_MOST_PANELS: Final = 4


def costs(
    frame: pd.DataFrame,
    *,
    baseline: str | None = "baseline",
    sizes: Sequence[str] = (),
    ceilings: dict[str, float] | None = None,
    width_in: float = style.WIDE_IN,
) -> Figure:
    """Bars of throughput and of peak memory by size and method.

    Parameters
    ----------
    frame
        One row a size and method: ``tokens_per_s`` (or ``ratio``, the throughput over the baseline's) and
        ``peak_gib``; any may be missing.
    ceilings
        Quantity -> limit, drawn dashed, e.g. ``{"peak_gib": 139.0}``.
    """
    known = {
        "tokens_per_s": "tokens per second",
        "ratio": "throughput over the baseline's",
        "peak_gib": "peak memory (GiB)",
    }
    measured = [(key, label) for key, label in known.items() if key in frame and frame[key].notna().any()]
    if not measured:
        return style.empty("No run recorded its throughput or memory.", width_in=width_in)
    order = [size for size in (sizes or dict.fromkeys(frame["size"])) if size in set(frame["size"])]
    methods = sorted(frame["method"].unique(), key=lambda name: (name != baseline, natural(name)))
    look = style.looks(methods, baseline=baseline)
    figure, axes = style.canvas(len(measured), width_in=width_in, panel_height_in=2.6)
    width = 0.8 / len(methods)
    for axis, (key, label) in zip(axes, measured, strict=True):
        values = frame.pivot_table(index="size", columns="method", values=key, aggfunc="median").reindex(order)
        for place, method in enumerate(methods):
            if method not in values:
                continue
            at = np.arange(len(order)) + (place - (len(methods) - 1) / 2) * width
            axis.bar(
                at, values[method].astype(float), width * 0.92, color=look[method].color, linewidth=0,
                hatch=style.HATCHES[look[method].dash], edgecolor=style.PAPER,
            )  # fmt: skip
        if ceilings and key in ceilings:
            axis.axhline(ceilings[key], color=style.INK, linestyle="--", linewidth=1.0)
        labels = [style.shorten(size, 14) for size in order]
        turned = len(order) > 5 or sum(map(len, labels)) > 30
        axis.set_xticks(range(len(order)), labels, rotation=35 if turned else 0, ha="right" if turned else "center")
        axis.grid(visible=False, axis="x")
        spread = values.max().max() / max(float(values.min().min()), 1e-12)
        if spread > 30:
            axis.set_yscale("log")
        axis.yaxis.set_major_formatter(style.plain_ticks())
        axis.set_ylabel(label)
    style.legend(figure, methods, look, width_in=width_in, bars=True)
    return figure


def kernels(frame: pd.DataFrame, *, width_in: float = style.WIDE_IN) -> Figure:
    """Share of the copy rate that each kernel reaches, one panel a shape; the dashed line is the ceiling.

    Parameters
    ----------
    frame
        ``operation``, ``shape``, ``ms`` and ``share`` (percent of the copy rate).
    """
    shapes = list(dict.fromkeys(frame["shape"]))[:_MOST_PANELS]
    most = max(int((frame["shape"] == shape).sum()) for shape in shapes)
    columns = 1 if width_in <= style.NARROW_IN else min(2, len(shapes))
    figure, axes = style.canvas(
        len(shapes), width_in=width_in, panel_height_in=0.7 + 0.22 * most, columns=columns, share_x=True
    )
    narrow = columns > 1 or width_in <= style.NARROW_IN
    for axis, shape in zip(axes, shapes, strict=True):
        part = frame[frame["shape"] == shape]
        places = np.arange(len(part))
        axis.barh(places, part["share"].astype(float), 0.72, color=style.PALETTE[0], linewidth=0)
        axis.axvline(100, color=style.INK, linestyle="--", linewidth=1.0)
        for place, (share, ms) in enumerate(zip(part["share"].astype(float), part["ms"].astype(float), strict=True)):
            axis.annotate(
                f"{ms:.3g} ms", (share, place), xytext=(3, 0), textcoords="offset points", fontsize=6.5, va="center",
                path_effects=[withStroke(linewidth=2.0, foreground=style.PAPER)],
            )  # fmt: skip
        twice = part["operation"].duplicated(keep=False)
        names = part["operation"].where(~twice, part["operation"] + ", " + part.get("pass", part["operation"]))
        axis.set_yticks(places, [style.shorten(name, 22 if narrow else 40) for name in names])
        axis.tick_params(axis="y", labelsize=7)
        axis.set_ylim(len(part) - 0.4, -0.6)
        axis.grid(visible=False, axis="y")
        axis.set_title(style.shorten(str(shape)))
        axis.set_xlim(0, max(125.0, 1.2 * float(part["share"].max())))
        axis.xaxis.set_major_locator(style.few_ticks(5))
    figure.supxlabel("bytes moved a second, % of the copy rate (dashed: the ceiling)", fontsize=8 if narrow else 9)
    return figure
