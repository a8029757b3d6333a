"""The report as a LaTeX document that includes the tables and figures written beside it.

After ``page``'s sections, before ``report``. It compiles with pdflatex (and lualatex) in the folder ``latex`` and needs
booktabs, geometry, graphicx, hyperref and iftex. pdflatex writes letters that it has no font for as their code points.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from scaling.analysis.page import Section
from scaling.analysis.summary import Summary
from scaling.analysis.tables.render import latex, latex_text
from scaling.analysis.tables.table import Table

_MOST_ROWS: Final = 60  # a longer table is left to its CSV: it does not fit a page
_KNOWN: Final = frozenset("–—‘’“”„…€")  # beyond the Latin letters, what pdflatex sets without being told
_FIT: Final = r"width=\textwidth,height=.8\textheight,keepaspectratio"
_PREAMBLE: Final = r"""\documentclass[10pt]{article}
\usepackage[T1]{fontenc}
\usepackage[utf8]{inputenc}
\usepackage{booktabs}
\usepackage{graphicx}
\usepackage[a4paper,margin=2cm]{geometry}
\usepackage{hyperref}
\usepackage{iftex}
\setlength{\parindent}{0pt}
\setlength{\parskip}{4pt}
"""


def document(title: str, summary: Summary, sections: Sequence[Section]) -> str:
    """The whole document; figures are taken from ``../figures``, tables from ``../tables``."""
    parts = [_PREAMBLE + rf"\title{{{latex_text(title)}}}", r"\date{}", r"\begin{document}", r"\maketitle"]
    parts.append(latex_text(summary.headline))
    for heading, lines in (
        ("What these runs show", summary.shown),
        ("What they do not show", summary.not_shown),
        ("What it would take to know more", summary.needed),
    ):
        if lines:
            parts.append(rf"\section*{{{heading}}}")
            parts.append("\n".join([r"\begin{itemize}", *(rf"\item {latex_text(x)}" for x in lines), r"\end{itemize}"]))
    for section in sections:
        parts.append(rf"\section*{{{latex_text(section.title)}}}")
        parts += [latex_text(line) for line in section.intro]
        for picture in section.pictures:
            parts.append(
                "\n".join(
                    [
                        r"\begin{figure}[htbp]",
                        r"\centering",
                        rf"\includegraphics[{_FIT}]{{../figures/{picture.name}.pdf}}",
                        rf"\caption{{\textbf{{{latex_text(picture.title)}.}} {latex_text(picture.caption)}}}",
                        r"\end{figure}",
                    ]
                )
            )
        parts += [_include(table) for table in section.tables]
        if section.entries:
            rows = [rf"\item[{{{latex_text(term)}}}] {latex_text(text)}" for term, text in section.entries]
            parts.append("\n".join([r"\begin{description}", *rows, r"\end{description}"]))
        parts.append(r"\clearpage" if section.pictures or section.tables else "")
    text = "\n\n".join(part for part in parts if part) + "\n\n\\end{document}\n"
    included = [latex(t) for section in sections for t in section.tables if len(t.frame) <= _MOST_ROWS]
    return text.replace(r"\begin{document}", _letters("".join([text, *included])) + r"\begin{document}", 1)


def _letters(text: str) -> str:
    """Declarations for pdflatex of letters that its fonts lack, from the Greek ones on; lualatex has its own fonts."""
    codes = sorted({ord(letter) for letter in text if ord(letter) >= 0x370 and letter not in _KNOWN})
    if not codes:
        return ""
    lines = [rf"\DeclareUnicodeCharacter{{{code:04X}}}{{[U+{code:04X}]}}" for code in codes]
    return "\n".join([r"\ifPDFTeX", *lines, r"\fi", ""])


def _include(table: Table) -> str:
    if len(table.frame) > _MOST_ROWS:
        name = latex_text(table.name)
        return rf"Table \texttt{{{name}}}: {len(table.frame)} rows, in \texttt{{tables/{name}.csv}}."
    return rf"\input{{../tables/{table.name}.tex}}"
