"""Reads what a report is made of: run folders, a store, or anyone's table through a column mapping.

After ``ingest`` and ``columns``, before ``report``: whatever the source, a tidy table with the schema's names comes
out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import pandas as pd

from scaling.analysis.schema import CANONICAL
from scaling.errors import TableError

HISTORIES: Final = ("val/loss", "perf/tokens_per_s", "perf/mfu", "mem/peak_gib")  # what figures and tables draw
FEWEST_POINTS: Final = 5  # of a curve by which copies of a run are known


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """Tidy runs, their histories where the source has any, and runs left out as (run, reason)."""

    table: pd.DataFrame
    histories: pd.DataFrame | None
    dropped: tuple[tuple[str, str], ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Sweep:
    """The runs that a sweep's file plans: the folder of their run folders, and run key -> name."""

    folder: Path
    runs: Mapping[str, str]


def sweep_of(source: str, *, settings: Sequence[str] = (), folder: Path | None = None) -> Sweep | None:
    """The sweep that ``source`` names, by its file or as a preset; ``None`` where it is a folder, table or store.

    Parameters
    ----------
    settings
        ``key=value`` as for ``scaling sweep``; default: those of its last submit.
    folder
        Folder of the run folders; default: what the sweep's file says.

    Raises
    ------
    GridError, ConfigError
        If the file is not a valid sweep.
    """
    if Path(source).suffix not in (".yaml", ".yml"):
        from scaling.sweeps.document import preset_names

        if Path(source).exists() or source not in preset_names():
            return None
    from scaling.sweeps.launch import remembered
    from scaling.sweeps.plan import plan
    from scaling.sweeps.spec import load_spec

    chosen = list(settings) or remembered(plan(load_spec(source), folder))
    planned = plan(load_spec(source, chosen), folder)
    return Sweep(folder=planned.out, runs={run.key: run.label for run in planned.runs})


def read_sweep(sweep: Sweep, *, where: Sequence[str] = ()) -> Source:
    """The sweep's runs, whichever sweep trained them first; planned ones that are not there count as left out.

    Raises
    ------
    TableError, RecordError
        If the folder is none, or holds no finished run of the sweep.
    """
    from scaling.analysis.ingest import read_runs
    from scaling.analysis.tidy import drop

    # A copy of another sweep's run is no copy within this one: duplicates are looked for after the choice.
    found = read_runs(sweep.folder, where=list(where), keep=("duplicate",), histories=HISTORIES)
    table, copies = drop(found.table[found.table["run_key"].isin(list(sweep.runs))].reset_index(drop=True))
    lost = tuple((item.run or "", item.reason) for item in (*found.dropped, *copies) if item.run in sweep.runs)
    if table.empty:
        raise TableError(
            f"{sweep.folder}: holds no finished run of the {len(sweep.runs)} planned; train the sweep first"
        )
    if where:  # runs that a comparison leaves out are not missing
        return Source(table=table.reset_index(drop=True), histories=found.histories, dropped=lost)
    there = {*table["run_key"], *(run for run, _ in lost)}
    missing = tuple(
        (f"{name} ({key})", "planned, not trained yet") for key, name in sweep.runs.items() if key not in there
    )
    return Source(table=table.reset_index(drop=True), histories=found.histories, dropped=(*lost, *missing))


def read(source: str, *, columns: str | None = None, where: Sequence[str] = (), curves: str | None = None) -> Source:
    """Runs from a folder of run folders, a store's address, or a file.

    Parameters
    ----------
    columns
        Mapping for tables of other tools, ``"loss=final_val_loss,method=group"``; needs a file.
    where
        Comparisons that rows must satisfy.
    curves
        File of loss curves for a table without histories: columns ``run`` (or ``run_key``), ``step``, and one of
        ``value``, ``loss``, ``val_loss``. The table tells its runs apart by a column of the same name. Runs of one
        curve are copies of one run: all but the first are left out of every analysis.

    Raises
    ------
    TableError, StoreError, UsageError
        If the source cannot be read, or a mapping or comparison cannot be parsed.
    """
    if columns is None and Path(source).suffix not in (".csv", ".tsv"):
        from scaling.analysis.ingest import is_table, read_runs
        from scaling.analysis.ingest_cache import read_cached_points

        bare = is_table(source) and read_cached_points(Path(source)) is None
        found = read_runs(source, where=list(where), histories=False if bare else HISTORIES)
        lost = tuple((item.run or f"row {item.row}", item.reason) for item in found.dropped)
        return Source(table=found.table, histories=found.histories, dropped=lost)
    from scaling.analysis.columns import load_table

    table = tidy(load_table(source, columns=columns, where=list(where)))
    if "run_key" not in table.columns and "run" in table.columns:
        table = table.rename(columns={"run": "run_key"})
    histories = None if curves is None else read_curves(curves)
    if histories is not None and "curve_hash" not in table.columns and "run_key" in table.columns:
        table = table.assign(curve_hash=table["run_key"].astype("string").map(curve_hashes(histories)).astype("string"))
    return Source(table=table, histories=histories, dropped=())


def curve_hashes(histories: pd.DataFrame) -> dict[str, str]:
    """Run -> hash of its curve, for curves long enough that two runs do not agree in all of it by chance."""
    from scaling.tracking.conventions import curve_hash

    found = {}
    for run, points in histories.groupby("run_key", observed=True):
        if len(points) >= FEWEST_POINTS:
            pairs = zip(points["step"].astype(int), points["value"].astype(float), strict=True)
            found[str(run)] = curve_hash({"val/loss": list(pairs)})
    return found


def tidy(table: pd.DataFrame) -> pd.DataFrame:
    """Short names (``N``, ``C``, ``loss``...) under the schema's names; columns that already have them stay."""
    names = {short: name for short, name in CANONICAL.items() if short in table.columns and short != name}
    return table.drop(columns=[name for name in names.values() if name in table.columns]).rename(columns=names)


def read_curves(path: str) -> pd.DataFrame:
    """A long table of loss curves as histories of ``val/loss``.

    Raises
    ------
    TableError
        If the file is missing, of another kind, or lacks a column; the message lists those it has.
    """
    from scaling.analysis.columns import load_file

    frame = load_file(path, "curves come from a .csv or .parquet file with columns run, step and value (or val_loss)")
    key = next((name for name in ("run_key", "run") if name in frame.columns), None)
    loss = next((name for name in ("value", "loss", "val_loss") if name in frame.columns), None)
    if key is None or loss is None or "step" not in frame.columns:
        have = ", ".join(map(str, frame.columns))
        raise TableError(f"{path}: needs columns run, step and value (or val_loss); it has: {have}; rename them")
    long = pd.DataFrame(
        {"run_key": frame[key].astype("string"), "step": frame["step"], "value": frame[loss].astype(float)}
    )
    return long.assign(metric="val/loss", time_ms=0)[["run_key", "metric", "step", "time_ms", "value"]]
