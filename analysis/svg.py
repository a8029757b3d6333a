"""Figures as bytes of files, and as SVG inside a page: the page's colours, identifiers of its own, no metadata."""

from __future__ import annotations

import io
import logging
import re
import warnings
from collections.abc import Iterable
from typing import Any, Final

from matplotlib.figure import Figure

from scaling.analysis.figures import style

_LOG = logging.getLogger(__name__)
_GLYPH: Final = re.compile(r"Glyph \d+ .*missing from font")
# Dates and program versions are left out: the same runs give the same bytes.
_METADATA: Final[dict[str, dict[str, Any]]] = {
    "png": {"Software": None},
    "pdf": {"CreationDate": None, "Creator": None, "Producer": None},
    "svg": {"Date": None, "Creator": None, "Format": None, "Type": None},
}
_VARIABLES: Final = {
    style.INK: "var(--ink)",
    style.SOFT: "var(--soft)",
    style.GRID: "var(--grid)",
    style.PAPER: "var(--paper)",
    **{color: f"var(--c{place})" for place, color in enumerate(style.PALETTE, start=1)},
}
_REFERENCE: Final = re.compile(r'(\bid="|href="#|url\(#)')
_COLOR: Final = re.compile("|".join(_VARIABLES))


def encode(figure: Figure, formats: Iterable[str]) -> dict[str, bytes]:
    """The figure in each format, laid out once (the layout costs more than the drawing)."""
    encoded = {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        figure.draw_without_rendering()
        figure.set_layout_engine("none")
        # That leaves a placeholder, for whose sake savefig would draw all once more, unseen, to the same bytes.
        figure._layout_engine = None  # type: ignore[attr-defined]
        for fmt in formats:
            buffer = io.BytesIO()
            figure.savefig(buffer, format=fmt, metadata=_METADATA.get(fmt))
            encoded[fmt] = buffer.getvalue()
    lacking = [warning for warning in caught if _GLYPH.match(str(warning.message))]
    for warning in caught:
        if warning not in lacking:
            warnings.warn_explicit(warning.message, warning.category, warning.filename, warning.lineno)
    if lacking:
        letters = len({str(warning.message) for warning in lacking})
        _LOG.warning("the font of figures lacks %d letters of these names; boxes stand in their place", letters)
    return encoded


def inline(svg: bytes, prefix: str) -> str:
    """The ``svg`` element alone, every identifier under ``prefix``, the theme's colours as CSS variables."""
    text = svg.decode("utf-8")
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = _REFERENCE.sub(rf"\g<1>{prefix}-", text)
    text = _COLOR.sub(lambda match: _VARIABLES[match.group()], text)
    text = text.replace('xmlns:xlink="http://www.w3.org/1999/xlink"', "").replace("xlink:href", "href")
    return re.sub(r"\s*\n\s*", "\n", text).replace("<svg", '<svg aria-hidden="true" focusable="false"', 1)
