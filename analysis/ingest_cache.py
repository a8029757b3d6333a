"""A Parquet file of the run table that is brought up to date by reading only what is new.

After the readers in the flow. ``runs.parquet`` is the tidy table, with its schema's version, options and dropped runs
in the metadata; beside it ``runs.parquet.cache/`` keeps every run read so far (dropped ones too) with a fingerprint of
how the store had it, and histories in parts: a new ingest adds a part with the runs that are new or changed.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from scaling.analysis import schema
from scaling.analysis.raw import Points
from scaling.analysis.result import Dropped
from scaling.errors import TableError

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

MAX_PARTS: Final = 24
_KEY: Final = b"isoloss"


class Cache:
    """The cache beside ``path`` for one source and set of options; other options start a new one."""

    def __init__(self, path: Path, options: Mapping[str, Any]) -> None:
        self.path, self.folder = path, path.with_name(path.name + ".cache")
        self._options = json.dumps({"version": schema.VERSION, **options}, sort_keys=True)
        self.index = self._load()

    def changed(self, fingerprints: Mapping[str, str]) -> list[str]:
        """Source ids that are new or look different from what was read."""
        if self.index is None:
            return list(fingerprints)
        known = dict(zip(self.index.index.tolist(), self.index["fingerprint"].tolist(), strict=True))
        return [key for key, mark in fingerprints.items() if known.get(key) != mark]

    def merge(self, rows: pd.DataFrame, points: Points | None, fingerprints: Mapping[str, str]) -> pd.DataFrame:
        """Take newly read rows in, forget runs that are gone; returns the table of all runs."""
        import pandas as pd

        part = self._next_part() if points is not None and len(points.step) else 0
        new = rows.assign(fingerprint=[fingerprints[key] for key in rows.index], part=part)
        if self.index is None:
            shutil.rmtree(self.folder, ignore_errors=True)
            merged = new
        else:
            new_ids = set(rows.index.tolist())
            kept = [run in fingerprints and run not in new_ids for run in self.index.index.tolist()]
            old = self.index if all(kept) else self.index[kept]
            merged = pd.concat([old, new]) if len(old) else new
            merged = merged.sort_values(["started_ms", "run_key"], kind="stable")
        self.folder.mkdir(parents=True, exist_ok=True)
        if part:
            assert points is not None
            _write_points(_sorted(points, rows), self.folder / f"part-{part:04d}.parquet")
        if self.index is None or len(rows) or len(merged) != len(self.index):
            _write(merged.reset_index(names="source_id"), self.folder / "index.parquet", {"options": self._options})
        self.index = merged
        return merged.drop(columns=["fingerprint", "part"])

    def points(self) -> Points | None:
        """Metric values of all runs, under source ids; ``None`` where none were read."""
        import pyarrow as pa
        import pyarrow.compute as pc

        if self.index is None:
            return None
        part_of = dict(zip(self.index.index.tolist(), self.index["part"].tolist(), strict=True))
        tables = []
        for number in sorted(set(part_of.values()) - {0}):
            table = _read(self.folder / f"part-{number:04d}.parquet")
            stale = [run for run in table.column("run").unique().to_pylist() if part_of.get(run) != number]
            if stale:
                table = table.filter(pc.invert(pc.is_in(table.column("run"), pa.array(stale))))
            tables.append(table)
        if not tables:
            return None
        joined = pa.concat_tables(tables).unify_dictionaries()
        run, metric = (joined.column(name).combine_chunks() for name in ("run", "metric"))
        return Points(
            runs=run.dictionary.to_pylist(),
            metrics=metric.dictionary.to_pylist(),
            run=run.indices.to_numpy(),
            metric=metric.indices.to_numpy(),
            step=joined.column("step").to_numpy(),
            time_ms=joined.column("time_ms").to_numpy(),
            value=joined.column("value").to_numpy(),
        )

    def compact(self) -> None:
        """Join the parts into one when there are many."""
        if self.index is not None and len(list(self.folder.glob("part-*.parquet"))) > MAX_PARTS:
            joined, part = self.points(), self._next_part()
            if joined is not None:
                _write_points(joined, self.folder / f"part-{part:04d}.parquet")
                self.index = self.index.assign(part=part)
                _write(
                    self.index.reset_index(names="source_id"), self.folder / "index.parquet", {"options": self._options}
                )
                for old in self.folder.glob("part-*.parquet"):
                    if old.name != f"part-{part:04d}.parquet":
                        old.unlink()

    def _next_part(self) -> int:
        numbers = [int(path.stem.partition("-")[2]) for path in self.folder.glob("part-*.parquet")]
        return max(numbers, default=0) + 1

    def _load(self) -> pd.DataFrame | None:
        import pandas as pd

        path = self.folder / "index.parquet"
        if not path.exists():
            return None
        table = _read(path)
        if _metadata(table).get("options") != self._options:
            return None
        frame = table.to_pandas()
        ids = pd.Index(frame.pop("source_id").tolist(), dtype=object, name="source_id")
        return _typed(_completed(frame.set_axis(ids, axis=0)))


def write_table(table: pd.DataFrame, dropped: Sequence[Dropped], path: Path) -> None:
    """Write the tidy table; ``TableError`` where the file's kind is unknown."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        table.to_csv(beside, index=False)
        os.replace(beside, path)
    elif path.suffix == ".parquet":
        notes = {"schema": str(schema.VERSION), "dropped": json.dumps([asdict(one) for one in dropped])}
        _write(table, path, notes)
    else:
        raise TableError(f"{path}: unknown kind of table; write to a file ending in .parquet or .csv")


def read_table(path: Path) -> tuple[pd.DataFrame, tuple[Dropped, ...]]:
    """Read a tidy table back, validated.

    Raises
    ------
    TableError
        If there is no such file, or its columns or schema version are others.
    """
    import pandas as pd

    if not path.is_file():
        raise TableError(f"{path}: no such file; make it with `scaling runs ingest SOURCE --out {path.name}`")
    dropped: tuple[Dropped, ...] = ()
    if path.suffix == ".parquet":
        arrow = _read(path)
        notes = _metadata(arrow)
        if notes.get("schema", str(schema.VERSION)) != str(schema.VERSION):
            raise TableError(
                f"{path}: is of schema {notes['schema']}, this program reads {schema.VERSION}; ingest again"
            )
        dropped = tuple(Dropped(**one) for one in json.loads(notes.get("dropped", "[]")))
        table = arrow.to_pandas()
    else:
        table = pd.read_csv(path, dtype={name: "string" for name, kind in schema.COLUMNS.items() if kind == "string"})
    table = _completed(table)
    missing = [name for name in schema.COLUMNS if name not in table.columns]
    if missing:
        raise TableError(f"{path}: column {missing[0]!r} is missing; make it with `scaling runs ingest`")
    return _typed(table[list(schema.COLUMNS)]), dropped


def read_cached_points(path: Path) -> tuple[Points, pd.DataFrame] | None:
    """Metric values kept beside a tidy table, and its runs by source id; ``None`` where there are none."""
    cache = Cache.__new__(Cache)
    cache.path, cache.folder = path, path.with_name(path.name + ".cache")
    index = cache.folder / "index.parquet"
    if not index.exists():
        return None
    cache.index = _read(index, ["source_id", "run_key", "part"]).to_pandas().set_index("source_id")
    points = cache.points()
    return None if points is None else (points, cache.index)


def fingerprint(*parts: object) -> str:
    """A short text that differs where any part does."""
    return hashlib.sha256(json.dumps(parts, default=str).encode()).hexdigest()[:16]


def _completed(table: pd.DataFrame) -> pd.DataFrame:
    """The table with empty columns where it was written before they were added."""
    import pandas as pd

    new = [name for name in schema.COLUMNS if name in schema.ADDED and name not in table.columns]
    return table.assign(**{name: pd.Series(pd.NA, index=table.index, dtype=schema.COLUMNS[name]) for name in new})


def _typed(table: pd.DataFrame) -> pd.DataFrame:
    try:
        return table.astype({name: kind for name, kind in schema.COLUMNS.items() if str(table[name].dtype) != kind})
    except (ValueError, TypeError) as error:
        raise TableError(f"a column has values of another type ({error}); ingest the runs again") from None


def _sorted(points: Points, rows: pd.DataFrame) -> Points:
    """The same points in the order in which they are wanted, so that reading them back sorts nothing."""
    order = {f"{key} {run}": str(run) for run, key in rows["run_key"].items()}
    frame = points.frame({run: text for text, run in order.items()})
    return Points(
        runs=[order[text] for text in frame["run_key"].cat.categories],
        metrics=list(frame["metric"].cat.categories),
        run=frame["run_key"].cat.codes.to_numpy(),
        metric=frame["metric"].cat.codes.to_numpy(),
        step=frame["step"].to_numpy(),
        time_ms=frame["time_ms"].to_numpy(),
        value=frame["value"].to_numpy(),
    )


def _write_points(points: Points, path: Path) -> None:
    import numpy as np
    import pyarrow as pa
    import pyarrow.parquet as pq

    codes = {"run": (points.run, points.runs), "metric": (points.metric, points.metrics)}
    columns: dict[str, Any] = {
        name: pa.DictionaryArray.from_arrays(pa.array(np.asarray(some, np.int32)), pa.array(list(texts), pa.string()))
        for name, (some, texts) in codes.items()
    }
    columns["step"], columns["time_ms"] = (pa.array(np.asarray(c, np.int64)) for c in (points.step, points.time_ms))
    columns["value"] = pa.array(np.asarray(points.value, np.float64))
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(pa.table(columns), beside, compression="zstd")
    os.replace(beside, path)


def _write(frame: pd.DataFrame, path: Path, notes: Mapping[str, str]) -> None:
    import pyarrow as pa
    import pyarrow.parquet as pq

    table = pa.Table.from_pandas(frame, preserve_index=False)
    table = table.replace_schema_metadata({**(table.schema.metadata or {}), _KEY: json.dumps(dict(notes)).encode()})
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    pq.write_table(table, beside, compression="zstd")
    os.replace(beside, path)


def _read(path: Path, columns: list[str] | None = None) -> pa.Table:
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return pq.read_table(path, columns=columns, memory_map=True)
    except (OSError, pa.ArrowInvalid) as error:
        raise TableError(f"{path}: cannot be read ({error}); ingest the runs again") from None


def _metadata(table: pa.Table) -> dict[str, str]:
    found: dict[str, str] = json.loads((table.schema.metadata or {}).get(_KEY, b"{}"))
    return found
