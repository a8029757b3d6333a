"""Metric rows of a database or of run folders into columns of numbers of which there is one copy.

Used by ``ingest_folder``, and by ``ingest_sql`` between ``database`` (batches of a query) and ``raw.Points``. A batch
is copied out and let go before the next is asked for, however fast the database is: memory is that of the columns and
of one batch a reader.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

from scaling.analysis.database import Database, literal
from scaling.analysis.raw import Points, Progress, decode
from scaling.errors import StoreError
from scaling.tracking.store import redact

if TYPE_CHECKING:
    import pyarrow as pa

READERS: Final = 4  # connections over which many rows of a sqlite file are read at once, on as many cores
# A writer of a sqlite file waits while a query runs (unless the file is in WAL mode): no query reads more than about
# this many rows, a fraction of a second.
SLICE_ROWS: Final = 262_144
# A driver spends most of its time on handing over cells. So run, metric and whether the value is NaN come as one text:
# run id, mark, name of the metric.
NUMBER, NAN = "\x1f", "\x1e"  # the marks: control characters, which neither ids nor names hold
SELECT: Final = (
    f"SELECT run_uuid || CASE WHEN is_nan THEN '{NAN}' ELSE '{NUMBER}' END || key AS name, step, timestamp, value "
    "FROM metrics"
)
GROWTH_ROWS: Final = 262_144  # least number of rows by which columns grow


def read_points(
    database: Database,
    histories: Collection[str],
    *,
    restrict: str,
    wanted: Sequence[str],
    progress: Progress | None = None,
) -> Points:
    """Metric values of runs, in the order of the database within each run.

    Parameters
    ----------
    histories
        Metrics to read; empty: all.
    restrict
        SQL condition that chooses the runs; empty: all runs of the database.
    wanted
        The ids of these runs, sorted.
    progress
        Called with (what, rows read, 0).

    Raises
    ------
    StoreError
        If a run's id holds a character that nothing but damage puts there.
    """
    for run in wanted:
        if NUMBER in run or NAN in run:
            raise StoreError(f"{redact(database.uri)}: run id {run!r} holds a control character; remove that run")
    slices, only = _slices(database, histories, restrict, wanted)
    queries = [f"{SELECT} WHERE {one}" if one else SELECT for one in slices]
    readers = min(READERS, _cores()) if database.path is not None and database.adbc else 1
    readers = min(readers, len(queries))
    edges = [len(queries) * i // readers for i in range(readers + 1)]
    collector = Collector(readers, only=only, progress=progress)
    if readers == 1:
        collector.read(database, queries)
    else:
        with ThreadPoolExecutor(readers) as pool:
            started = [
                pool.submit(_read_apart, collector, database.uri, part, queries[low:high])
                for part, (low, high) in enumerate(pairwise(edges))
            ]
            for reader in started:
                reader.result()
    return collector.points()


def _slices(
    database: Database, histories: Collection[str], restrict: str, wanted: Sequence[str]
) -> tuple[list[str], frozenset[str] | None]:
    """Conditions that divide the rows of ``wanted``, and the runs to keep of what they let through (``None``: all)."""
    if histories:
        keys = list(map(literal, sorted(histories)))
        tests = [f"key IN ({', '.join(keys)})"] if database.postgres else [f"key = {key}" for key in keys]
        return [f"{restrict} AND {test}" if restrict else test for test in tests], None
    if database.postgres:
        return [restrict], None
    rows = int(database.scalar("SELECT COALESCE(max(rowid), 0) AS n FROM metrics"))
    runs = int(database.scalar("SELECT count(*) AS n FROM runs"))
    if 2 * len(wanted) >= runs:
        # One sweep over the file is faster than going there run by run, so the few others are read and left out.
        count = max(-(-rows // SLICE_ROWS), 1)
        edges = [str(rows * i // count) for i in range(1, count)]
        return _ranges("rowid", edges), frozenset(wanted) if restrict else None
    count = max(min(-(-rows * len(wanted) // (SLICE_ROWS * runs)), len(wanted)), 1)
    edges = [literal(wanted[len(wanted) * i // count]) for i in range(1, count)]
    return [f"{restrict} AND {one}" if one else restrict for one in _ranges("run_uuid", edges)], None


def _ranges(column: str, edges: Sequence[str]) -> list[str]:
    """Conditions for the ranges between edges, open at both ends.

    >>> _ranges("rowid", ["3", "6"])
    ['rowid < 3', 'rowid >= 3 AND rowid < 6', 'rowid >= 6']
    """
    lower = ["", *(f"{column} >= {edge}" for edge in edges)]
    upper = [*(f"{column} < {edge}" for edge in edges), ""]
    return [" AND ".join(filter(None, both)) for both in zip(lower, upper, strict=True)]


def _read_apart(collector: Collector, uri: str, part: int, queries: Sequence[str]) -> None:
    with Database(uri) as database:
        collector.read(database, queries, part)


class Columns:
    """Numpy arrays of equal length that grow in place (where the allocator can move pages, without a second copy)."""

    def __init__(self, *dtypes: Any) -> None:
        import numpy as np

        self.arrays = [np.empty(0, dtype) for dtype in dtypes]
        self.rows = 0

    def append(self, *new: Any) -> None:
        """Copy rows to the end."""
        end = self.rows + len(new[0])
        room = len(self.arrays[0])
        if end > room:
            self._resize(max(end, room + max(GROWTH_ROWS, room // 8)))
        for array, values in zip(self.arrays, new, strict=True):
            array[self.rows : end] = values
        self.rows = end

    def take(self, other: Columns) -> None:
        """Move all rows of another to the end, a column at a time, so that one column is there twice at most."""
        start, self.rows = self.rows, self.rows + other.rows
        for i, array in enumerate(self.arrays):
            array.resize(self.rows, refcheck=False)
            array[start:] = other.arrays[i][: other.rows]
            other.arrays[i] = array[:0]
        other.rows = 0

    def trim(self) -> None:
        """Give back the room that is not used."""
        self._resize(self.rows)

    def _resize(self, rows: int) -> None:
        for array in self.arrays:
            array.resize(rows, refcheck=False)  # no view of an array is kept here


class Collector:
    """Columns that several readers fill at the same time, each a part of the rows; the parts stay in order."""

    def __init__(
        self, parts: int = 1, *, only: Collection[str] | None = None, progress: Progress | None = None
    ) -> None:
        import numpy as np

        self._parts = [Columns(np.int32, np.int32, np.int64, np.int64, np.float64) for _ in range(parts)]
        self._runs: dict[str, int] = {}
        self._metrics: dict[str, int] = {}
        self._only = only
        self._lock = threading.Lock()
        self._progress = progress
        self._rows = 0

    def read(self, database: Database, queries: Sequence[str], part: int = 0) -> None:
        """Read rows as ``SELECT`` gives them to the end of a part."""
        for query in queries:
            for batch in database.batches(query):
                if batch.num_rows:
                    self._take(batch, self._parts[part])

    def extend(self, run: str, metrics: Sequence[str], *columns: Sequence[float]) -> None:
        """Add rows of one run to the end of the first part; ``columns`` are step, time in ms and value."""
        import numpy as np

        with self._lock:
            place = self._runs.setdefault(run, len(self._runs))
            codes = [self._metrics.setdefault(name, len(self._metrics)) for name in metrics]
        self._parts[0].append(np.full(len(codes), place), codes, *columns)

    def points(self) -> Points:
        """All rows, in the order of the parts; empties this."""
        first, *others = self._parts
        for part in others:
            first.take(part)
        first.trim()
        run, metric, step, time_ms, value = first.arrays
        return Points(
            runs=list(self._runs),
            metrics=list(self._metrics),
            run=run,
            metric=metric,
            step=step,
            time_ms=time_ms,
            value=value,
        )

    def _take(self, batch: pa.RecordBatch, columns: Columns) -> None:
        run, metric, is_nan = self._codes(batch.column(0))
        step, time_ms = (batch.column(i).to_numpy(zero_copy_only=False) for i in (1, 2))
        new = [run, metric, step, time_ms, decode(batch.column(3).to_numpy(), is_nan)]
        if self._only is not None and int(run.min()) < 0:
            new = [column[run >= 0] for column in new]
        columns.append(*new)
        with self._lock:
            self._rows += batch.num_rows
            if self._progress is not None:
                self._progress("metric rows", self._rows, 0)

    def _codes(self, names: pa.Array) -> tuple[Any, Any, Any]:
        """Each row's run and metric as positions among those known, to which new ones are added, and if it is NaN.

        A run that is not of ``only`` has position -1.
        """
        import numpy as np

        coded = names.dictionary_encode()
        parts = [_parts(name) for name in coded.dictionary.to_pylist()]
        runs, metrics, only = self._runs, self._metrics, self._only
        with self._lock:
            run = [runs.setdefault(one, len(runs)) if only is None or one in only else -1 for one, _, _ in parts]
            metric = [metrics.setdefault(name, len(metrics)) for _, name, _ in parts]
        rows = coded.indices.to_numpy()
        is_nan = np.array([nan for _, _, nan in parts], bool)
        return np.array(run, np.int32)[rows], np.array(metric, np.int32)[rows], is_nan[rows]


def _parts(name: str) -> tuple[str, str, bool]:
    """Run id, name of the metric, and whether the value is NaN.

    >>> _parts(f"0a{NUMBER}val/loss"), _parts(f"0a{NAN}val/loss")
    (('0a', 'val/loss', False), ('0a', 'val/loss', True))
    """
    run, mark, metric = name.partition(NUMBER)
    if mark and NAN not in run:
        return run, metric, False
    run, _, metric = name.partition(NAN)
    return run, metric, True


def _cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
