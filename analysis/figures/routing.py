"""Figures of what depth routing learned: weights per head over depth, and disagreement between heads against chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, MaxNLocator
from numpy.typing import NDArray

from scaling.analysis.disagreement import Measured
from scaling.analysis.figures import style

Floats = NDArray[np.float64]
_MOST_HEADS: Final = 16
_MOST_PANELS: Final = 6
_MOST_SITE_TICKS: Final = 5


def routing_weights(
    weights_SNH: Floats, *, sites: Sequence[int] | None = None, title: str = "", width_in: float = style.WIDE_IN
) -> Figure:
    """Mean routing weight of each site (down) on each source (across), one panel a head.

    Parameters
    ----------
    weights_SNH
        Shape (sites, sources, heads); NaN where a site cannot see a source. Legend: S sites, N sources, H heads.
    sites
        Numbers of the sites; default from 0.
    """
    assert weights_SNH.ndim == 3, f"weights have shape {weights_SNH.shape}, expected (sites, sources, heads)"
    rows, _, heads = weights_SNH.shape
    numbers = list(range(rows)) if sites is None else [int(site) for site in sites]
    ticks = list(range(0, rows, -(-rows // _MOST_SITE_TICKS)))
    shown = min(heads, _MOST_HEADS)
    columns = min(shown, 2 if width_in <= style.NARROW_IN else 4)
    figure, axes = style.canvas(shown, width_in=width_in, panel_height_in=1.5, columns=columns)
    top = float(np.nanmax(weights_SNH))
    shades = sns.light_palette(style.PALETTE[0], as_cmap=True)
    image = None
    for head, axis in enumerate(axes):
        values = np.ma.masked_invalid(weights_SNH[..., head])
        image = axis.imshow(
            values, cmap=shades, vmin=0, vmax=top, aspect="auto", interpolation="nearest", origin="upper"
        )
        axis.set_title(f"head {head}", fontsize=8)
        axis.grid(visible=False)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=4, integer=True))
        axis.yaxis.set_major_locator(FixedLocator(ticks))
        axis.set_yticklabels([str(numbers[tick]) for tick in ticks])
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.6, label="mean weight")
    figure.supxlabel("source (0: embedding)", fontsize=9)
    figure.supylabel("site (sublayer that reads)", fontsize=9)
    left_out = f"; heads {shown} to {heads - 1} left out" if heads > shown else ""
    if title or left_out:
        figure.suptitle(style.shorten(title, 60) + left_out, fontsize=9)
    return figure


def disagreement(panels: Sequence[tuple[str, Measured]], *, width_in: float = style.WIDE_IN) -> Figure:
    """Disagreement of the heads at each site, one panel a probe, against random queries of the same norms.

    Lines are means over sequences; the shade is two standard deviations over random draws either way.
    """
    shown = panels[:_MOST_PANELS]
    if not shown:
        return style.empty("No routing site to look at.", width_in=width_in)
    figure, axes = style.canvas(len(shown), width_in=width_in, panel_height_in=2.4, columns=None)
    for axis, (title, probe) in zip(axes, shown, strict=True):
        learned, drawn = probe.learned.mean(axis=0), probe.random.mean(axis=0)
        random, spread = drawn.mean(axis=-1), drawn.std(axis=-1)
        axis.plot(probe.sites, learned, color=style.PALETTE[0], marker="o", markersize=3.5)
        axis.plot(probe.sites, random, color=style.SOFT, linestyle="--")
        axis.fill_between(
            probe.sites, random - 2 * spread, random + 2 * spread, color=style.SOFT, alpha=0.15, linewidth=0
        )
        axis.set_ylim(bottom=0)
        axis.xaxis.set_major_locator(MaxNLocator(nbins=8 if len(shown) == 1 else 4, integer=True))
        axis.yaxis.set_major_locator(style.few_ticks(4))
        axis.set_title(style.shorten(title, 36 if len(shown) == 1 else 20), fontsize=8)
        axis.set_xlabel("site (sublayer that reads)" if len(shown) == 1 else "site")
    axes[0].set_ylabel("disagreement")
    handles = [
        Line2D([], [], color=style.PALETTE[0], marker="o", markersize=3.5, label="trained queries"),
        Line2D([], [], color=style.SOFT, linestyle="--", label="random queries of the same norm"),
    ]
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.25)
    figure.legend(handles=handles, loc="outside lower center", ncols=1 if width_in <= style.NARROW_IN else 2)
    return figure
