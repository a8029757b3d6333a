"""A table as aligned plain text, for the terminal and for logs; beside ``render``, which writes it for documents."""

from __future__ import annotations

from collections.abc import Collection

from scaling.analysis.tables.table import Table


def plain(table: Table, *, only: Collection[str] | None = None) -> str:
    """Title, then columns aligned by two spaces; numbers to the right.

    Parameters
    ----------
    only
        Keys of the columns to show; default: all. A terminal is narrower than a page.
    """
    shown = [i for i, column in enumerate(table.columns) if only is None or column.key in only]
    head = [table.columns[i].label for i in shown]
    rows = [[row[i].text for i in shown] for row in table.rows()]
    widths = [max(len(line[i]) for line in [head, *rows]) for i in range(len(shown))]
    right = [table.columns[i].is_numeric for i in shown]
    lines = [
        "  ".join(
            cell.rjust(width) if numeric else cell.ljust(width)
            for cell, width, numeric in zip(line, widths, right, strict=True)
        )
        for line in [head, *rows]
    ]
    return "\n".join([table.title, *(f"  {line.rstrip()}" for line in lines)])
