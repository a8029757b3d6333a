"""Figures of what depth routing learned: weights per head over depth, and disagreement between heads against chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np
import seaborn as sns
from matplotlib.figure import Figure
from numpy.typing import NDArray

from scaling.analysis.figures import style

Floats = NDArray[np.float64]
_MOST_HEADS: Final = 16


def routing_weights(weights_SNH: Floats, *, title: str = "", width_in: float = style.WIDE_IN) -> Figure:
    """Mean routing weight of each site (down) on each source (across), one panel a head.

    Parameters
    ----------
    weights_SNH
        Shape (sites, sources, heads); entries of sources a site cannot see are NaN or 0. Legend: S sites, N sources, H
        heads.
    """
    assert weights_SNH.ndim == 3, f"weights have shape {weights_SNH.shape}, expected (sites, sources, heads)"
    sites, sources, heads = weights_SNH.shape
    shown = min(heads, _MOST_HEADS)
    columns = min(shown, 2 if width_in <= style.NARROW_IN else 4)
    figure, axes = style.canvas(shown, width_in=width_in, panel_height_in=1.5, columns=columns)
    site, source = np.indices((sites, sources))
    hidden = source > site
    top = float(np.nanmax(np.where(hidden[..., None], np.nan, weights_SNH)))
    shades = sns.light_palette(style.PALETTE[0], as_cmap=True)
    image = None
    for head, axis in enumerate(axes):
        values = np.ma.masked_where(hidden | np.isnan(weights_SNH[..., head]), weights_SNH[..., head])
        image = axis.imshow(
            values, cmap=shades, vmin=0, vmax=top, aspect="auto", interpolation="nearest", origin="upper"
        )
        axis.set_title(f"head {head}", fontsize=8)
        axis.grid(visible=False)
        axis.xaxis.set_major_locator(style.few_ticks(4))
        axis.yaxis.set_major_locator(style.few_ticks(4))
    assert image is not None
    figure.colorbar(image, ax=axes, shrink=0.6, label="mean weight")
    figure.supxlabel("source (0: embedding)", fontsize=9)
    figure.supylabel("site (sublayer that reads)", fontsize=9)
    left_out = f"; heads {shown} to {heads - 1} left out" if heads > shown else ""
    if title or left_out:
        figure.suptitle(style.shorten(title, 60) + left_out, fontsize=9)
    return figure


def disagreement(
    learned: Sequence[float], random: Sequence[float], *, random_sd: Sequence[float] | None = None,
    width_in: float = style.WIDE_IN,
) -> Figure:  # fmt: skip
    """Disagreement of the heads' routing at each site, against random queries of the same norm.

    Parameters
    ----------
    learned, random
        One value a site; ``random`` is the mean over draws.
    random_sd
        Standard deviation over draws; twice it either way is shaded.
    """
    assert len(learned) == len(random), f"{len(learned)} learned and {len(random)} random values"
    if not learned:
        return style.empty("No routing site to look at.", width_in=width_in)
    figure = Figure(figsize=(width_in, 2.9), layout="constrained")
    axis = figure.subplots()
    sites = np.arange(len(learned))
    axis.plot(sites, learned, color=style.PALETTE[0], marker="o", markersize=3.5, label="trained queries")
    axis.plot(sites, random, color=style.SOFT, linestyle="--", label="random queries of the same norm")
    if random_sd is not None:
        low = np.asarray(random) - 2 * np.asarray(random_sd)
        high = np.asarray(random) + 2 * np.asarray(random_sd)
        axis.fill_between(sites, low, high, color=style.SOFT, alpha=0.15, linewidth=0)
    axis.set_ylim(bottom=0)
    axis.set_xlabel("site (sublayer that reads)")
    axis.set_ylabel("disagreement between heads")
    axis.xaxis.set_major_locator(style.few_ticks(8))
    axis.legend(loc="best")
    return figure
