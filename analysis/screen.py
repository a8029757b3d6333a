"""Which rows of a table an analysis may use, and why the others are left out.

After ``columns`` and before every analysis: all of them start here, so that a run dropped from a fit is dropped from a
comparison for the same reason, and each result carries the list.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.columns import map_columns
from scaling.analysis.result import Caution, Dropped
from scaling.errors import TableError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

# Short names that must be positive to be used (they are taken logarithms of).
POSITIVE = ("N", "D", "C", "loss", "lr", "H", "wall_time_s", "gpu_seconds", "U", "tokens")
TEXT = ("method",)


@dataclass(frozen=True, kw_only=True, slots=True)
class Screened:
    """The rows left, with a fresh index; ``row`` keeps the number in the table given."""

    frame: pd.DataFrame
    dropped: tuple[Dropped, ...]
    cautions: tuple[Caution, ...]


def screen(
    table: pd.DataFrame,
    *,
    needs: Sequence[str],
    analysis: str,
    keep_unfinished: bool = False,
    labels: Sequence[str] = (),
) -> Screened:
    """Drop what cannot be used, saying why; refuse where nothing is left.

    Parameters
    ----------
    table
        Tidy or mapped table.
    needs
        Short names the analysis reads; all must exist.
    analysis
        What asks, for messages.
    keep_unfinished
        Keep runs whose learning-rate schedule did not finish (their loss is not comparable).
    labels
        Those of ``needs`` that only tell rows apart: any values will do, text or numbers.

    Raises
    ------
    TableError
        When a column is missing (the message lists those there), holds no numbers, or no row is usable.
    """
    import pandas as pd

    frame = map_columns(table)
    frame = frame.assign(row=np.arange(len(frame)))
    _require(frame, needs, analysis)
    dropped: list[Dropped] = []

    def drop(bad: NDArray[np.bool_], reason: str) -> None:
        nonlocal frame
        for _, line in frame[bad].iterrows():
            dropped.append(Dropped(row=int(line["row"]), run=_run_name(line), reason=reason))
        frame = frame[~bad]

    for name in needs:
        if name in TEXT or name in labels:
            drop(frame[name].isna().to_numpy(), f"{name} is missing")
            frame = frame.assign(**{name: frame[name].astype(str)})
            continue
        try:
            values = pd.to_numeric(frame[name]).to_numpy(dtype=np.float64, na_value=np.nan)
        except (ValueError, TypeError) as error:
            raise TableError(f"{analysis}: column {name!r} holds text where numbers are needed ({error})") from error
        frame = frame.assign(**{name: values})
        if name in POSITIVE:
            drop(np.isnan(values), f"{name} is missing")
            drop(np.isinf(frame[name].to_numpy()), f"{name} is infinite")
            drop(frame[name].to_numpy() <= 0, f"{name} is not positive")
    unusable = len(dropped)
    if "status" in frame.columns:
        status = frame["status"].astype("string").fillna("done")
        for word in sorted(set(status) - {"done"}):
            drop((frame["status"].astype("string").fillna("done") == word).to_numpy(dtype=bool), f"status is {word}")
    unfinished = 0
    if "schedule_finished" in frame.columns and not keep_unfinished:
        bad = (~frame["schedule_finished"].astype("boolean").fillna(True)).to_numpy(dtype=bool)
        unfinished = int(bad.sum())
        drop(bad, "learning-rate schedule unfinished")
    before = len(dropped)
    if "curve_hash" in frame.columns:
        known = frame["curve_hash"].notna()
        drop((known & frame.duplicated("curve_hash")).to_numpy(dtype=bool), "duplicate: same curve hash")
    hashable = [c for c in frame.columns if c != "row"]
    if len(hashable) > len(needs) or "seed" in frame.columns:
        drop(frame.duplicated(hashable).to_numpy(dtype=bool), "duplicate: every column equal")
    duplicates = len(dropped) - before
    if frame.empty:
        reasons = "; ".join(sorted({d.reason for d in dropped})) or "the table is empty"
        raise TableError(f"{analysis}: no usable row of {len(table)} ({reasons})")
    cautions = _cautions(frame, unusable, unfinished, duplicates)
    return Screened(frame=frame.reset_index(drop=True), dropped=tuple(dropped), cautions=cautions)


def _require(frame: pd.DataFrame, needs: Sequence[str], analysis: str) -> None:
    absent = [name for name in needs if name not in frame.columns]
    if absent:
        there = ", ".join(str(c) for c in frame.columns if c != "row")
        raise TableError(
            f"{analysis}: column {', '.join(map(repr, absent))} missing; the table has: {there}; "
            f"map it with --columns {absent[0]}=COLUMN"
        )


def _run_name(line: pd.Series) -> str | None:
    for column in ("run_key", "run", "name"):
        value = line.get(column)
        if isinstance(value, str):
            return value
    return None


def _cautions(frame: pd.DataFrame, unusable: int, unfinished: int, duplicates: int) -> tuple[Caution, ...]:
    out = []
    if unusable:
        out.append(
            Caution(
                code="unusable-rows", message=f"{unusable} rows with missing, infinite or non-positive values left out"
            )
        )
    if unfinished:
        out.append(
            Caution(
                code="unfinished-schedules", message=f"{unfinished} runs left out: learning-rate schedule unfinished"
            )
        )
    if duplicates:
        out.append(Caution(code="duplicated-runs", message=f"{duplicates} copies of runs left out"))
    for column, code, what in (
        ("eval_fingerprint", "mixed-evaluation-sets", "evaluation sets"),
        ("data_fingerprint", "mixed-training-data", "training corpora"),
    ):
        if column in frame.columns and frame[column].nunique(dropna=True) > 1:
            out.append(
                Caution(
                    code=code, message=f"runs use {frame[column].nunique()} different {what}: losses are not comparable"
                )
            )
    return tuple(out)


def numbers(frame: pd.DataFrame, name: str) -> Floats:
    """One column as float64."""
    return frame[name].to_numpy(dtype=np.float64)


def check_spread(values: Floats, name: str, analysis: str, at_least: int = 2) -> None:
    """Refuse a variable that takes too few values to learn from.

    Raises
    ------
    TableError
        When ``values`` has fewer than ``at_least`` distinct numbers.
    """
    distinct = len(np.unique(values))
    if distinct < at_least:
        only = f" ({name} = {values[0]:.6g} in every row)" if distinct == 1 else ""
        raise TableError(
            f"{analysis}: {name} takes {distinct} distinct value{'s' * (distinct != 1)}{only}, needs {at_least} or more"
        )
