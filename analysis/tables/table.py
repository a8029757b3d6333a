"""A table for a reader: an unrounded frame, columns that say how each is written, a caption, and what stands below it.

Built by the modules beside this one from result objects; written by ``render``. The frame keeps unrounded numbers
(they go into the CSV); an ``estimate`` column ``x`` finds its interval in ``x_low`` and ``x_high``, and so does a
``rounded`` one, which shows the digits that the interval allows and not the interval. Any column may be
marked through ``x_mark``: ``best`` (bold: better than every other by more than the noise) or ``tie`` (not
distinguishable from the best). A text column is sorted by the numbers of ``x_sort`` where there are any.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import pandas as pd

from scaling.analysis import digits

Kind = Literal["text", "integer", "number", "general", "estimate", "rounded", "speedup"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Column:
    """One column: its key in the frame, its heading (with the unit), and how its values are written."""

    key: str
    label: str
    kind: Kind = "text"
    digits: int = 4  # of a number that has no interval

    @property
    def is_numeric(self) -> bool:
        return self.kind != "text"


@dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """One written value; ``sort`` is the number (or text) behind it."""

    text: str
    mark: str
    sort: float | str | None
    is_numeric: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Table:
    """What is written, in order.

    Parameters
    ----------
    name
        File name and identifier, e.g. ``"speedups"``.
    title, caption
        One line; and what a reader must know: seeds, interval, conventions, rows dropped.
    columns, frame
        Columns in order, and the unrounded data, one row a line.
    notes
        Short lines set below the table.
    """

    name: str
    title: str
    caption: str
    columns: tuple[Column, ...]
    frame: pd.DataFrame
    notes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        absent = [column.key for column in self.columns if column.key not in self.frame]
        assert not absent, f"table {self.name}: no frame column for {absent}"

    @property
    def is_empty(self) -> bool:
        return len(self.frame) == 0

    def rows(self) -> Iterator[list[Cell]]:
        """Cells row by row, in the order of ``columns``."""
        for record in self.frame.to_dict(orient="records"):
            yield [_cell(column, record) for column in self.columns]


def _cell(column: Column, record: dict[Any, Any]) -> Cell:
    value = record[column.key]
    mark = record.get(f"{column.key}_mark", "")
    mark = mark if isinstance(mark, str) else ""
    if column.kind == "text":
        text = digits.MISSING if _is_missing(value) else str(value)
        place = _bound(record, f"{column.key}_sort")
        return Cell(text=text, mark=mark, sort=text if place is None else place, is_numeric=False)
    figure = None if _is_missing(value) else float(value)
    low, high = _bound(record, f"{column.key}_low"), _bound(record, f"{column.key}_high")
    match column.kind:
        case "integer":
            text = digits.integer(figure)
        case "number":
            text = digits.number(figure, digits=column.digits)
        case "general":
            text = digits.general(figure, digits=column.digits)
        case "speedup":
            text = digits.speedup(figure)
            if low is not None and high is not None and figure is not None:
                text += (
                    f" [{digits.speedup(low)[:-1]}, {digits.speedup(high)[:-1]}]" if math.isfinite(low + high) else ""
                )
        case "rounded":
            text = digits.estimate(figure, low, high).partition(" [")[0]
        case _:
            text = digits.estimate(figure, low, high)
    return Cell(text=text, mark=mark, sort=figure, is_numeric=True)


def _bound(record: dict[Any, Any], key: str) -> float | None:
    value: Any = record.get(key)
    return None if _is_missing(value) else float(value)


def _is_missing(value: Any) -> bool:
    return value is None or bool(pd.isna(value))
