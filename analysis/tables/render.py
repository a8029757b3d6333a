"""Writes a ``Table`` as Markdown, LaTeX (booktabs), HTML or CSV text; ``report`` puts the text into files.

Every string that came from a run is escaped for the language it is written in.
"""

from __future__ import annotations

import html as _html
import json
import re
from collections.abc import Callable
from typing import Final

from scaling.analysis.digits import MINUS, MISSING
from scaling.analysis.tables.table import Cell, Table
from scaling.errors import UsageError, nearest

_LATEX_SPECIAL: Final = {
    "\\": r"\textbackslash{}",
    "&": r"\&",
    "%": r"\%",
    "$": r"\$",
    "#": r"\#",
    "_": r"\_",
    "{": r"\{",
    "}": r"\}",
    "~": r"\textasciitilde{}",
    "^": r"\textasciicircum{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    MINUS: "$-$",
    MISSING: "--",
    "×": r"$\times$",
    "∞": r"$\infty$",
    "±": r"$\pm$",
    "·": r"$\cdot$",
    "≥": r"$\ge$",
    "≤": r"$\le$",
    "→": r"$\to$",
    "●": r"$\bullet$",
    "○": r"$\circ$",
}
_PROSE_FROM: Final = 24  # letters; longer texts get a column wide enough to read
_MARKDOWN_SPECIAL: Final = re.compile(r"([\\`*_\[\]<>|])")


def markdown(table: Table) -> str:
    """A pipe table under its title and caption; best values bold, ties marked with ``=``."""
    head = "| " + " | ".join(markdown_text(column.label) for column in table.columns) + " |"
    rule = "|" + "|".join(" ---: " if column.is_numeric else " --- " for column in table.columns) + "|"
    lines = [
        "| " + " | ".join(_marked(markdown_text(cell.text), cell, "**{}**", "{} (=)") for cell in row) + " |"
        for row in table.rows()
    ]
    notes = [f"- {markdown_text(note)}" for note in table.notes]
    parts = [f"**{markdown_text(table.title)}.** {markdown_text(table.caption)}", "\n".join([head, rule, *lines])]
    return "\n\n".join(parts + (["\n".join(notes)] if notes else [])) + "\n"


def latex(table: Table) -> str:
    """A ``table`` environment with booktabs rules; the document needs the packages booktabs and graphicx."""
    layout = "".join("r" if column.is_numeric else "l" for column in table.columns)
    head = " & ".join(latex_text(column.label) for column in table.columns) + r" \\"
    lines = [
        " & ".join(_marked(latex_text(cell.text), cell, r"\textbf{{{}}}", r"{}$^{{=}}$") for cell in row) + r" \\"
        for row in table.rows()
    ]
    notes = [r"\par\smallskip\footnotesize " + latex_text(" ".join(table.notes))] if table.notes else []
    body = [
        r"\begin{table}[htbp]",
        r"\centering\small",
        rf"\caption{{\textbf{{{latex_text(table.title)}.}} {latex_text(table.caption)}}}",
        rf"\label{{tab:{re.sub(r'[^a-z0-9-]', '-', table.name)}}}",
        r"\resizebox{\ifdim\width>\textwidth\textwidth\else\width\fi}{!}{%",
        rf"\begin{{tabular}}{{{layout}}}",
        r"\toprule",
        head,
        r"\midrule",
        *lines,
        r"\bottomrule",
        r"\end{tabular}}",
        *notes,
        r"\end{table}",
    ]
    return "\n".join(body) + "\n"


def html(table: Table, *, classes: str = "data", box: str = "scroll", first: int | None = None) -> str:
    """A ``table`` element whose cells carry the unrounded number in ``data-v`` for sorting.

    Parameters
    ----------
    classes, box
        Classes of the table and of the box it scrolls in.
    first
        Rows to lay out; the others stand in a ``template`` that a script takes them from.
    """
    escape = _html.escape
    head = "".join(
        f'<th scope="col"{" class=num" if column.is_numeric else ""}>{escape(column.label)}</th>'
        for column in table.columns
    )
    rows = ["<tr>" + "".join(_html_cell(cell) for cell in row) + "</tr>" for row in table.rows()]
    cut = len(rows) if first is None else first
    name = escape(table.name)
    rest = f'<template id="table-{name}-rest">' + "\n".join(rows[cut:]) + "</template>" if rows[cut:] else ""
    told = f"<li>{cut:,} of {len(rows):,} rows; all are in {name}.csv.</li>" if rest else ""
    notes = "".join(f"<li>{escape(note)}</li>" for note in table.notes)
    return (
        f'<div class="{box}" tabindex="0" role="region" aria-label="{escape(table.title)}">'
        f'<table class="{classes}" id="table-{name}">'
        f"<caption><span><strong>{escape(table.title)}.</strong> {escape(table.caption)}</span></caption>"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n"
        + "\n".join(rows[:cut])
        + f"\n</tbody></table>{rest}</div>"
        + (f'<noscript><ul class="notes">{told}</ul></noscript>' if told else "")
        + (f'<ul class="notes">{notes}</ul>' if notes else "")
    )


def csv(table: Table) -> str:
    """The unrounded frame, marks and bounds included."""
    kept = [name for name in table.frame.columns if not str(name).endswith("_sort")]
    return str(table.frame[kept].to_csv(index=False, lineterminator="\n"))


def to_json(table: Table) -> dict[str, object]:
    """The table as one JSON object: unrounded values, their bounds and marks by key; what is missing is null."""
    kept = [str(name) for name in table.frame.columns if not str(name).endswith("_sort")]
    rows = json.loads(table.frame[kept].to_json(orient="records", double_precision=15))
    columns = [{"key": column.key, "label": column.label} for column in table.columns]
    told = {"name": table.name, "title": table.title, "caption": table.caption, "columns": columns, "rows": rows}
    return {**told, "notes": list(table.notes)}


FORMATS: Final[dict[str, Callable[[Table], str]]] = {"md": markdown, "tex": latex, "html": html, "csv": csv}


def write(table: Table, fmt: str) -> str:
    """The table in the named format.

    Raises
    ------
    UsageError
        If there is no such format.
    """
    if fmt not in FORMATS:
        raise UsageError(f"table format {fmt!r} is unknown; {nearest(fmt, FORMATS)}")
    return FORMATS[fmt](table)


def latex_text(text: str) -> str:
    """Text with LaTeX's special characters made harmless; other non-ASCII characters stay as they are (UTF-8)."""
    return "".join(_LATEX_SPECIAL.get(character, character) for character in re.sub(r"\s+", " ", text))


def markdown_text(text: str) -> str:
    """Text whose characters mean nothing to Markdown."""
    return _MARKDOWN_SPECIAL.sub(r"\\\1", re.sub(r"\s+", " ", text))


def _marked(text: str, cell: Cell, best: str, tie: str) -> str:
    if cell.mark == "best":
        return best.format(text)
    return tie.format(text) if cell.mark == "tie" else text


def _html_cell(cell: Cell) -> str:
    kind = "num" if cell.is_numeric else "prose" if len(cell.text) > _PROSE_FROM else ""
    classes = " ".join(name for name in (kind, cell.mark) if name)
    value = f' data-v="{cell.sort!r}"' if isinstance(cell.sort, float) else ""
    attribute = f' class="{classes}"' if classes else ""
    title = ' title="not distinguishable from the best"' if cell.mark == "tie" else ""
    return f"<td{attribute}{value}{title}>{_html.escape(cell.text)}</td>"
