"""Throughput and memory of each method as bars, with the machine's or the baseline's ceiling as a line."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from scaling.analysis.figures import style


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
        One row a size and method: ``tokens_per_s`` and ``peak_gib`` (either may be missing).
    ceilings
        Quantity -> limit, drawn dashed, e.g. ``{"peak_gib": 139.0}``.
    """
    known = {"tokens_per_s": "tokens per second", "peak_gib": "peak memory (GiB)"}
    measured = [(key, label) for key, label in known.items() if key in frame and frame[key].notna().any()]
    if not measured:
        return style.empty("No run recorded its throughput or memory.", width_in=width_in)
    order = [size for size in (sizes or dict.fromkeys(frame["size"])) if size in set(frame["size"])]
    methods = sorted(frame["method"].unique(), key=lambda name: (name != baseline, name))
    look = style.looks(methods, baseline=baseline)
    figure, axes = style.canvas(len(measured), width_in=width_in, panel_height_in=2.6)
    width = 0.8 / len(methods)
    for axis, (key, label) in zip(axes, measured, strict=True):
        values = frame.pivot_table(index="size", columns="method", values=key, aggfunc="median").reindex(order)
        for place, method in enumerate(methods):
            if method not in values:
                continue
            at = np.arange(len(order)) + (place - (len(methods) - 1) / 2) * width
            axis.bar(at, values[method].astype(float), width * 0.92, color=look[method].color, linewidth=0)
        if ceilings and key in ceilings:
            axis.axhline(ceilings[key], color=style.SOFT, linestyle="--", linewidth=1.0)
        axis.set_xticks(
            range(len(order)), [style.shorten(size, 12) for size in order], rotation=35 if len(order) > 5 else 0
        )
        axis.grid(visible=False, axis="x")
        spread = values.max().max() / max(float(values.min().min()), 1e-12)
        if spread > 30:
            axis.set_yscale("log")
        axis.yaxis.set_major_formatter(style.plain_ticks())
        axis.set_ylabel(label)
    style.legend(figure, methods, look, width_in=width_in)
    return figure
