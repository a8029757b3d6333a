"""The report as one HTML page and as Markdown: sections put in order and rendered, every string from a run escaped.

After ``gallery``, ``summary`` and ``tables``; ``report`` writes what comes out.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.resources import files
from typing import Final
from urllib.parse import quote

import jinja2
import pandas as pd
from markupsafe import Markup

import scaling
from scaling.analysis.gallery import Picture
from scaling.analysis.summary import Summary
from scaling.analysis.tables import render
from scaling.analysis.tables.table import Table

_MOST_DATA_URI_BYTES: Final = 400_000
_FIRST_ROWS: Final = 250  # of the run table are laid out when the page opens, as many as report.js shows at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Section:
    """One part of the report: paragraphs, then figures, tables, and a list of terms."""

    anchor: str
    title: str
    intro: tuple[str, ...] = ()
    pictures: tuple[Picture, ...] = ()
    tables: tuple[Table, ...] = ()
    entries: tuple[tuple[str, str], ...] = ()
    is_code: bool = False

    @property
    def is_empty(self) -> bool:
        return not (self.intro or self.pictures or self.tables or self.entries)


def html(title: str, summary: Summary, sections: Sequence[Section], drawn: Mapping[str, tuple[str, str]]) -> str:
    """The whole page, self-contained: inline SVG, CSS and script, nothing fetched.

    Parameters
    ----------
    drawn
        Picture's name -> its wide and its narrow drawing as ``svg`` elements.
    """
    environment = jinja2.Environment(autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True)
    script = _template("report.js")
    digest = base64.b64encode(hashlib.sha256(script.encode("utf-8")).digest()).decode("ascii")
    shown = [_html_section(section, drawn) for section in sections]
    return environment.from_string(_template("report.html.j2")).render(
        title=title,
        summary=summary,
        sections=[{"anchor": "summary", "title": "Summary"}, *shown],
        style=Markup(_template("report.css")),
        script=Markup(script),
        script_hash=f"sha256-{digest}",
        version=scaling.__version__,
    )


def markdown(title: str, summary: Summary, sections: Sequence[Section]) -> str:
    """The same in Markdown, figures linked from ``figures/``."""
    parts = [f"# {render.markdown_text(title)}", render.markdown_text(summary.headline)]
    for heading, lines in (
        ("What these runs show", summary.shown or ("Nothing beyond the noise.",)),
        ("What they do not show", summary.not_shown),
        ("What it would take to know more", summary.needed),
    ):
        parts += [f"## {heading}", "\n".join(f"- {render.markdown_text(line)}" for line in lines)]
    for section in sections:
        parts.append(f"## {render.markdown_text(section.title)}")
        parts += [render.markdown_text(line) for line in section.intro]
        for picture in section.pictures:
            alt = render.markdown_text(picture.title)
            parts.append(f"![{alt}](figures/{picture.name}.png)\n\n*{render.markdown_text(picture.caption)}*")
        parts += [render.markdown(table).rstrip("\n") for table in section.tables]
        if section.entries:
            parts.append(
                "\n".join(f"- **{render.markdown_text(k)}**: {render.markdown_text(v)}" for k, v in section.entries)
            )
    return "\n\n".join(parts) + "\n"


def _html_section(section: Section, drawn: Mapping[str, tuple[str, str]]) -> Mapping[str, object]:
    return {
        "anchor": section.anchor,
        "title": section.title,
        "intro": section.intro,
        "plots": [_html_picture(picture, *drawn[picture.name]) for picture in section.pictures],
        "tables": [Markup(_html_table(table)) for table in section.tables],
        "entries": section.entries,
        "code": section.is_code,
        "filter": any(table.name == "runs" for table in section.tables),
    }


def _html_table(table: Table) -> str:
    if table.name == "runs":
        return render.html(table, box="scroll runs", first=_FIRST_ROWS)
    return render.html(table)


def _html_picture(picture: Picture, wide: str, narrow: str) -> Mapping[str, object]:
    return {
        "name": picture.name,
        "title": picture.title,
        "caption": picture.caption,
        "alt": picture.alt,
        "wide": Markup(wide),
        "narrow": Markup(narrow),
        "data_uri": _data_uri(picture.data),
    }


def _data_uri(frame: pd.DataFrame) -> str | None:
    text = str(frame.to_csv(index=False, lineterminator="\n"))
    return f"data:text/csv;charset=utf-8,{quote(text)}" if len(text) <= _MOST_DATA_URI_BYTES else None


def _template(name: str) -> str:
    return (files("scaling.analysis.templates") / name).read_text(encoding="utf-8")
