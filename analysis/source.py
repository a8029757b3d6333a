"""Reads what a report is made of: run folders, a store, or anyone's table through a column mapping.

After ``ingest`` and ``columns``, before ``report``: whatever the source, a tidy table with the schema's names comes
out.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pandas as pd

from scaling.analysis.schema import CANONICAL


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Tidy runs, their histories where the source has any, and runs left out as (run, reason)."""

    table: pd.DataFrame
    histories: pd.DataFrame | None
    dropped: tuple[tuple[str, str], ...]


def read(source: str, *, columns: str | None = None, where: Sequence[str] = ()) -> Source:
    """Runs from a folder of run folders, a store's address, or a file.

    Parameters
    ----------
    columns
        Mapping for tables of other tools, ``"loss=final_val_loss,method=group"``; needs a file.
    where
        Comparisons that rows must satisfy.

    Raises
    ------
    TableError, StoreError, UsageError
        If the source cannot be read, or a mapping or comparison cannot be parsed.
    """
    if columns is None and Path(source).suffix not in (".csv", ".tsv"):
        from scaling.analysis.columns import filter_rows
        from scaling.analysis.ingest import read_runs

        found = read_runs(source)
        lost = tuple((item.run or f"row {item.row}", item.reason) for item in found.dropped)
        return Source(table=filter_rows(found.table, list(where)), histories=found.histories, dropped=lost)
    from scaling.analysis.columns import load_table

    return Source(table=tidy(load_table(source, columns=columns, where=list(where))), histories=None, dropped=())


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Short names (``N``, ``C``, ``loss``...) under the schema's names; columns that already have them stay."""
    names = {short: name for short, name in CANONICAL.items() if short in table.columns and short != name}
    return table.drop(columns=[name for name in names.values() if name in table.columns]).rename(columns=names)
