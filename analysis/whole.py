"""A table made whole before anything is asked of it: all columns of the schema, numbers where they belong, a baseline.

After ``schema`` and ``source``, before ``inquiry``.
"""

from __future__ import annotations

from typing import Final

import pandas as pd

from scaling.analysis.schema import CANONICAL, COLUMNS
from scaling.errors import TableError, nearest

DEFAULT_BASELINE: Final = "baseline"


def complete(table: pd.DataFrame) -> pd.DataFrame:
    """The table with every column of the schema, missing ones empty, other ones kept at the end.

    Runs without a column ``method`` are of one, ``all runs``.

    Raises
    ------
    TableError
        If it has no rows, lacks ``val_loss``, or holds text in a column of numbers.
    """
    if len(table) == 0:
        raise TableError("the table holds no run; nothing to report (check --where)")
    if "val_loss" not in table.columns:
        have = ", ".join(map(str, table.columns))
        raise TableError(f"column 'val_loss' is missing; the table has: {have}; name it with --columns loss=COLUMN")
    runs = table.copy()
    if "method" not in runs.columns:
        runs["method"] = "all runs"
    for name, kind in COLUMNS.items():
        if name not in runs.columns:
            runs[name] = pd.Series(pd.NA, index=runs.index, dtype=kind) if kind != "float64" else float("nan")
        elif kind in ("Int64", "float64"):
            runs[name] = _numbers(runs[name], name)
    if runs["run_key"].isna().any():
        runs["run_key"] = (
            runs["run_key"]
            .astype("string")
            .fillna(pd.Series([f"row {i}" for i in range(len(runs))], index=runs.index, dtype="string"))
        )
    known = list(COLUMNS)
    return runs[[*known, *(c for c in runs.columns if c not in COLUMNS)]].reset_index(drop=True)


def pick_baseline(runs: pd.DataFrame, wanted: str | None) -> str | None:
    """The baseline's name: the wanted one, else ``baseline`` where it is a method, else ``None``."""
    methods = sorted(runs["method"].dropna().unique())
    if wanted is None:
        return DEFAULT_BASELINE if DEFAULT_BASELINE in methods else None
    if wanted not in methods:
        raise TableError(f"baseline {wanted!r} is not a method of the table; {nearest(wanted, methods)}")
    return wanted


def _numbers(column: pd.Series, name: str) -> pd.Series:
    """A column of numbers as it is, or with numbers read where they stand as text."""
    if pd.api.types.is_numeric_dtype(column):
        return column
    read = pd.to_numeric(column, errors="coerce")
    wrong = (read.isna() & column.notna()).to_numpy(dtype=bool)
    if wrong.any():
        at = int(wrong.argmax())
        short = next((short for short, long in CANONICAL.items() if long == name), name)
        raise TableError(
            f"column {name!r} holds text ({column.iloc[at]!r} in row {at + 1}) where numbers are needed; map another "
            f"column with --columns {short}=COLUMN"
        )
    return read
