"""The one look of all figures: sizes, fonts, colours by method, direct labels. Each is drawn inside ``context``.

Figures are plain ``matplotlib.figure.Figure`` objects (no global state); ``analysis.report`` saves them. Colours are
Okabe and Ito's, which colour-blind readers tell apart; beyond seven methods line style and marker change too, so that
no two methods share all three. ``INK``, ``SOFT``, ``GRID`` and ``PAPER`` are set nowhere else, so that a page may
replace them by the colours of its own theme.

References
----------
Okabe and Ito (2008), Color Universal Design.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Literal

import matplotlib as mpl
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from scaling.analysis.arms import natural

INK: Final = "#1b1b1f"
SOFT: Final = "#5f6068"
GRID: Final = "#dcdde3"
PAPER: Final = "#fefefe"
PALETTE: Final = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#8c6d00")
_MARKERS: Final = ("o", "s", "^", "D", "v", "P", "X")
_DASHES: Final[tuple[Literal["-", "--", ":", "-."], ...]] = ("-", "--", ":", "-.")
HATCHES: Final = {"-": "", "--": "////", ":": "....", "-.": "xxxx"}  # of bars, which have neither marker nor dash
_PLAIN: Final = 1e-4  # the least tick that is written without a power of ten
WIDE_IN: Final = 7.0
END_LABEL: Final = 24  # letters of a name at the end of its line
NARROW_IN: Final = 3.75  # a phone 390 px wide, less its margins

_RC: Final[dict[str, Any]] = {
    "font.family": "DejaVu Sans",  # comes with matplotlib, so it is there on every machine
    "font.size": 9,
    "axes.titlesize": 9.5,
    "axes.titleweight": "bold",
    "axes.titlelocation": "left",
    "axes.labelsize": 9,
    "xtick.labelsize": 8,
    "ytick.labelsize": 8,
    "legend.fontsize": 8,
    "legend.frameon": False,
    "text.color": INK,
    "axes.labelcolor": INK,
    "axes.edgecolor": SOFT,
    "axes.linewidth": 0.8,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "xtick.labelcolor": INK,
    "ytick.labelcolor": INK,
    "grid.color": GRID,
    "grid.linewidth": 0.7,
    "axes.facecolor": PAPER,
    "figure.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "lines.linewidth": 1.7,
    "lines.markersize": 4.5,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.unicode_minus": True,
    "axes.formatter.useoffset": False,  # whole numbers at ticks, no constant to be added in the reader's head
    "pdf.fonttype": 42,  # TrueType, embedded
    "ps.fonttype": 42,
    "svg.fonttype": "path",  # letters as outlines: the same everywhere
    "svg.hashsalt": "isoloss",  # the same figure gives the same file
    "figure.dpi": 100,
    "savefig.dpi": 200,
}


@contextmanager
def context() -> Iterator[None]:
    """Seaborn's white-grid style with this project's settings, for drawing and for saving."""
    with mpl.rc_context():
        sns.set_theme(context="paper", style="whitegrid", rc=_RC)
        yield


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
    """How one method is drawn, everywhere."""

    color: str
    marker: str
    dash: Literal["-", "--", ":", "-."]


def looks(methods: Sequence[str], *, baseline: str | None) -> dict[str, Look]:
    """A look for each method: the baseline in ink, the others in order of name."""
    others = sorted(set(methods) - {baseline}, key=natural)
    found = {} if baseline is None else {baseline: Look(color=INK, marker="o", dash="-")}
    for place, method in enumerate(others):
        turn, colour = divmod(place, len(PALETTE))
        marker = _MARKERS[(colour + turn) % len(_MARKERS)]
        found[method] = Look(color=PALETTE[colour], marker=marker, dash=_DASHES[turn % len(_DASHES)])
    return found


def canvas(
    panels: int,
    *,
    width_in: float = WIDE_IN,
    panel_height_in: float = 2.6,
    columns: int | None = None,
    share_x: bool = False,
) -> tuple[Figure, list[Axes]]:
    """A figure of ``panels`` axes in as many columns as its width has room for."""
    room = max(1, int(width_in // 2.2))
    wanted = columns or (room if panels > 4 else min(panels, 2 if panels == 4 else 3))
    ncols = max(1, min(columns or min(wanted, room), panels))
    nrows = math.ceil(panels / ncols)
    figure = Figure(figsize=(width_in, 0.4 + panel_height_in * nrows), layout="constrained")
    grid = figure.subplots(nrows, ncols, squeeze=False, sharex=share_x)
    axes = [axis for row in grid for axis in row]
    for spare in axes[panels:]:
        spare.remove()
    return figure, axes[:panels]


def empty(message: str, *, width_in: float = WIDE_IN) -> Figure:
    """A figure that says why there is nothing to draw."""
    figure = Figure(figsize=(width_in, 1.2), layout="constrained")
    axis = figure.subplots()
    axis.set_axis_off()
    axis.text(0.5, 0.5, message, ha="center", va="center", color=SOFT, wrap=True)
    return figure


def log_axis(axis: Axes, which: str, *, powers_only: bool = False) -> None:
    """A logarithmic axis with readable ticks: powers of ten over decades, plain numbers within one."""
    set_scale = axis.set_xscale if which == "x" else axis.set_yscale
    set_scale("log")
    low, high = axis.get_xlim() if which == "x" else axis.get_ylim()
    spine = axis.xaxis if which == "x" else axis.yaxis
    decades = math.log10(high / low) if low > 0 else 1.0
    if 1.2 <= decades < 2.2:
        spine.set_major_locator(LogLocator(base=10, subs=(1, 3), numticks=12))
        spine.set_minor_locator(NullLocator())
    elif decades >= 1.2:
        narrow = which == "x" and isinstance(axis.figure, Figure) and axis.figure.get_figwidth() <= NARROW_IN
        spine.set_major_locator(LogLocator(base=10, numticks=5 if narrow else 8))
        spine.set_minor_locator(LogLocator(base=10, subs=range(2, 10), numticks=60))
        spine.set_minor_formatter(FuncFormatter(lambda _value, _place: ""))
    else:
        spine.set_major_locator(mpl.ticker.MaxNLocator(nbins=5, steps=[1, 2, 2.5, 5, 10]))
        spine.set_minor_locator(NullLocator())
    powers = decades >= 1.2 and 0 < low < _PLAIN  # all ticks alike, where one of them has to be a power
    spine.set_major_formatter(FuncFormatter(lambda value, _place: tick(value, powers=powers)))


def tick(value: float, _place: int = 0, *, powers: bool = False) -> str:
    """A tick's text: plain from 0.0001, in thousands, millions or billions from 10,000, then a power of ten.

    , tick(2500.0), tick(20000.0), tick(1e18), tick(3e15)
    ('0.25', '2,500', '20k', '$10^{18}$', '$3{\\\\times}10^{15}$')
    >>> tick(0.01, powers=True)
    '$10^{-2}$'
    """
    if value == 0:
        return "0"
    if powers:
        return _power(value)
    for unit, size in (("B", 1e9), ("M", 1e6), ("k", 1e3)):
        if 10 * 1e3 <= abs(value) < 1e12 and abs(value) >= size:
            return f"{value / size:,.6g}{unit}".replace("-", "\u2212")
    if _PLAIN <= abs(value) < 1e4:
        return f"{value:,.6g}".replace("-", "\u2212")
    return _power(value)


def _power(value: float) -> str:
    exponent = math.floor(math.log10(abs(value)) + 1e-9)
    mantissa = value / 10.0**exponent
    front = "" if abs(mantissa - 1) < 1e-6 else f"{mantissa:.3g}{{\\times}}"
    return f"${front}10^{{{exponent}}}$"


def spread(positions: Mapping[str, float], *, gap: float, low: float, high: float) -> dict[str, float]:
    """Positions moved apart to at least ``gap``, in order, as little as a single sweep each way allows.

    Used for direct labels, in units of the axis's height.
    """
    order = sorted(positions, key=lambda name: positions[name])
    placed: dict[str, float] = {}
    floor = low
    for name in order:
        placed[name] = max(positions[name], floor)
        floor = placed[name] + gap
    ceiling = high
    for name in reversed(order):
        placed[name] = min(placed[name], ceiling)
        ceiling = placed[name] - gap
    return placed


def end_labels(
    axis: Axes, ends: Mapping[str, tuple[float, float]], colors: Mapping[str, str], *, size: float = 8
) -> None:
    """Write each line's name at its right end, moved apart, in the line's colour, outside the axes."""
    transform = axis.transData
    heights = {}
    for name, (x, y) in ends.items():
        _, height = axis.transAxes.inverted().transform(transform.transform((x, y)))
        heights[name] = float(height)
    height_in = axis.get_window_extent().height / axis.figure.dpi
    gap = 1.25 * size / 72 / max(height_in, 0.5)
    for name, height in spread(heights, gap=gap, low=0.02, high=0.98).items():
        axis.annotate(
            name,
            (1.015, height),
            xycoords="axes fraction",
            color=colors[name],
            fontsize=size,
            va="center",
            ha="left",
            annotation_clip=False,
        )


def legend(
    figure: Figure, methods: Sequence[str], look: Mapping[str, Look], *, width_in: float, bars: bool = False
) -> None:
    """One legend under the figure, for many methods or many panels; ``bars``: of bars, not of lines."""
    handles: list[Any] = []
    short = short_names(methods)
    for m in methods:
        if bars:
            hatch = HATCHES[look[m].dash]
            handles.append(mpl.patches.Patch(facecolor=look[m].color, hatch=hatch, edgecolor=PAPER, label=short[m]))
        else:
            mine = look[m]
            handles.append(
                mpl.lines.Line2D([], [], color=mine.color, marker=mine.marker, linestyle=mine.dash, label=short[m])
            )
    longest = max((len(handle.get_label()) for handle in handles), default=0)
    columns = max(1, min(len(handles), int(width_in / (0.55 + 0.075 * longest))))
    width, height = figure.get_size_inches()
    figure.set_size_inches(width, height + 0.19 * -(-len(handles) // columns))  # room for its lines, however many
    figure.legend(handles=handles, loc="outside lower center", ncols=columns)


def shorten(name: str, limit: int = 26) -> str:
    """A long name, cut in the middle, with mathematics switched off."""
    plain, most = name.replace("\n", " "), max(limit, 12)
    if len(plain) > most:
        plain = f"{plain[: most - most // 3 - 1]}…{plain[-(most // 3) :]}"
    return plain.replace("$", r"\$")


def short_names(names: Iterable[str], limit: int = 26) -> dict[str, str]:
    """Each name shortened, so that no two names look alike: of alike ones what they end with in common goes first.

    >>> short_names(["tail_average_272_submission", "tail_average_273_submission"], 18)
    {'tail_average_272_submission': 'tail_average_272…', 'tail_average_273_submission': 'tail_average_273…'}
    """
    every = list(dict.fromkeys(names))
    alike: dict[str, list[str]] = {}
    for name in every:
        alike.setdefault(shorten(name, limit), []).append(name)
    found = {}
    for short, group in alike.items():
        if len(group) == 1:
            found[group[0]] = short
            continue
        common = len(os.path.commonprefix([name[::-1] for name in group]))
        cut = {name: shorten(name[: len(name) - common], limit - 1) + "…" for name in group}
        whole = len(set(cut.values())) < len(group) or not set(cut.values()).isdisjoint(alike)
        found |= {name: shorten(name, len(name)) for name in group} if whole else cut
    return {name: found[name] for name in every}


def few_ticks(count: int = 5) -> mpl.ticker.Locator:
    """At most ``count`` intervals between round numbers."""
    return mpl.ticker.MaxNLocator(nbins=count, steps=[1, 2, 2.5, 5, 10])


def plain_ticks() -> FuncFormatter:
    """Ticks written by ``tick``."""
    return FuncFormatter(tick)
