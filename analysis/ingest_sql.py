"""Reader of MLflow databases: read-only SQL on sqlite files and PostgreSQL, by ADBC where it is installed.

One of the three readers; see ``raw``. It reads the five tables whose columns MLflow has kept for years (runs, params,
tags, latest_metrics, metrics) and refuses a layout it does not know. Readers never lock a writer out: sqlite is opened
read-only, PostgreSQL in a read-only transaction.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from scaling.analysis.raw import Progress, Query, Raw, decode, order_histories
from scaling.errors import StoreError, StoreUnavailable
from scaling.tracking.store import normalise, redact, sqlite_path

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_NEEDED: Final = {
    "runs": ("run_uuid", "name", "status", "start_time", "end_time", "lifecycle_stage", "experiment_id"),
    "experiments": ("experiment_id", "name"),
    "params": ("run_uuid", "key", "value"),
    "tags": ("run_uuid", "key", "value"),
    "latest_metrics": ("run_uuid", "key", "value", "step", "timestamp", "is_nan"),
    "metrics": ("run_uuid", "key", "value", "step", "timestamp", "is_nan"),
}
_NUMBER: Final = "^[-+]?[0-9]+([.][0-9]*)?([eE][-+]?[0-9]+)?$"
_BATCH_ROWS: Final = 131_072
_DRIVERS: Final = ("psycopg", "adbc_driver_manager")


def read_database(uri: str, query: Query, *, progress: Progress | None = None) -> Raw:
    """Read runs of a database.

    Raises
    ------
    StoreError
        If there is no such database or its layout is unknown.
    StoreUnavailable
        If it does not answer.
    """
    import pandas as pd

    with Database(uri) as database:
        _check_layout(database)
        chosen = _chosen(database, query)
        runs = database.table(
            "SELECT r.run_uuid AS id, COALESCE(r.name, '') AS name, e.name AS experiment, r.status AS status, "
            "COALESCE(r.start_time, 0) AS started_ms, COALESCE(r.end_time, -1) AS ended_ms FROM runs r "
            f"JOIN experiments e ON e.experiment_id = r.experiment_id WHERE r.run_uuid IN ({chosen})"
        ).to_pandas()
        frame = runs.set_index("id").astype({"name": "string", "experiment": "string", "status": "string"})
        for name in ("started_ms", "ended_ms"):
            frame[name] = frame[name].astype("Int64")
        frame["ended_ms"] = frame["ended_ms"].mask((frame["ended_ms"] < 0) | (frame["status"] == "RUNNING"))
        frame.index = pd.Index(frame.index, dtype=object, name=None)
        everything = int(database.scalar("SELECT count(*) FROM runs")) == len(frame)
        fields = _fields(database, query, "" if everything else f" AND run_uuid IN ({chosen})")
        histories = None
        if query.histories is not None:
            histories = _histories(database, query, "" if everything else f"run_uuid IN ({chosen})", progress)
            if everything:
                # Runs of deleted or foreign experiments cannot be among them: all runs are chosen.
                assert len(histories["run"].cat.categories) <= len(frame)
        return Raw(runs=frame, fields=fields, histories=histories)


class Database:
    """A read-only connection that gives Arrow tables."""

    def __init__(self, uri: str) -> None:
        self.uri = normalise(uri)
        self.path = sqlite_path(self.uri)
        if self.path is not None and not self.path.is_file():
            raise StoreError(f"{self.path}: no such database; give the store that `scaling runs sync` wrote")
        self.postgres = self.path is None
        with self._translated():
            self._connection, self.adbc = self._connect()

    def __enter__(self) -> Database:
        return self

    def __exit__(self, *_: object) -> None:
        self._connection.close()

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        """Result of a query, in batches; ``StoreUnavailable`` where the database does not answer."""
        import pyarrow as pa

        with self._translated(), closing(self._connection.cursor()) as cursor:
            if self.adbc:
                if not self.postgres:
                    cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(_BATCH_ROWS)})
                cursor.execute(query)
                yield from cursor.fetch_record_batch()
                return
            cursor.execute(query)
            names = [column[0] for column in cursor.description]
            while rows := cursor.fetchmany(_BATCH_ROWS):
                yield pa.record_batch([pa.array(column) for column in zip(*rows, strict=True)], names=names)

    def table(self, query: str) -> pa.Table:
        """Result of a query, whole."""
        import pyarrow as pa

        with self._translated(), closing(self._connection.cursor()) as cursor:
            cursor.execute(query)
            if self.adbc:
                return cursor.fetch_arrow_table()
            names = [column[0] for column in cursor.description]
            rows = cursor.fetchall()
            columns = list(zip(*rows, strict=True)) if rows else [()] * len(names)
            return pa.table(dict(zip(names, map(pa.array, columns), strict=True)))

    def scalar(self, query: str) -> Any:
        """The one value of a query."""
        return self.table(query).column(0)[0].as_py()

    def _connect(self) -> tuple[Any, bool]:
        if self.path is not None:
            address = f"file:{quote(str(self.path))}?mode=ro"
            if find_spec("adbc_driver_sqlite") is not None:
                import adbc_driver_sqlite.dbapi as adbc_sqlite

                return adbc_sqlite.connect(address), True
            return sqlite3.connect(address, uri=True), False
        address = self.uri.replace("postgresql+psycopg://", "postgresql://", 1)
        if find_spec("adbc_driver_postgresql") is not None:
            import adbc_driver_postgresql.dbapi as adbc_postgresql

            connection = adbc_postgresql.connect(address)
            with closing(connection.cursor()) as cursor:
                cursor.execute("SET default_transaction_read_only = on")
            connection.commit()
            return connection, True
        if find_spec("psycopg") is None:
            raise StoreError("reading PostgreSQL needs a driver; install isoloss[fast] or isoloss[postgres]")
        import psycopg

        return psycopg.connect(address, options="-c default_transaction_read_only=on"), False

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            ours = isinstance(error, sqlite3.Error) or type(error).__module__.split(".")[0] in _DRIVERS
            if not ours:
                raise
            raise StoreUnavailable(f"{redact(self.uri)}: {(str(error).splitlines() or ['no answer'])[0]}") from None


def _check_layout(database: Database) -> None:
    """Refuse a database whose tables are not those of MLflow that this module knows."""
    if database.postgres:
        found = database.table("SELECT table_name AS t, column_name AS c FROM information_schema.columns").to_pydict()
        pairs = set(zip(map(str, found["t"]), map(str, found["c"]), strict=True))
    else:
        pairs = set()
        for table in _NEEDED:
            names = database.table(f"SELECT name FROM pragma_table_info('{table}')").column(0).to_pylist()
            pairs |= {(table, str(name)) for name in names}
    missing = [f"{table}.{name}" for table, names in _NEEDED.items() for name in names if (table, name) not in pairs]
    if missing:
        raise StoreError(
            f"{redact(database.uri)}: not an MLflow database that can be read ({missing[0]} is missing); "
            "read it through `mlflow server` instead: give its http address"
        )


def _chosen(database: Database, query: Query) -> str:
    """SELECT of the run ids that the query means."""
    parts = ["lifecycle_stage = 'active'"]
    if query.sweep is not None:
        sweep = literal(query.sweep)
        parts.append(
            f"(experiment_id IN (SELECT experiment_id FROM experiments WHERE name = {sweep}) "
            f"OR run_uuid IN (SELECT run_uuid FROM tags WHERE key = 'sweep' AND value = {sweep}))"
        )
    if query.only is not None:
        parts.append(f"run_uuid IN ({', '.join(map(literal, sorted(query.only))) or 'NULL'})")
    for fields, sign, value in query.conditions:
        parts.append("(" + " OR ".join(_condition(database, field, sign, value) for field in fields) + ")")
    return "SELECT run_uuid FROM runs WHERE " + " AND ".join(parts)


def _condition(database: Database, field: str, sign: str, value: float | str) -> str:
    kind, _, name = field.partition(":")
    table = {"tag": "tags", "param": "params", "metric": "latest_metrics"}[kind]
    if isinstance(value, str):
        test = f"value {sign} {literal(value)}"
    else:
        number = "value"
        if kind == "metric":
            number = "value"
        elif database.postgres:
            number = f"(CASE WHEN value ~ '{_NUMBER}' THEN CAST(value AS DOUBLE PRECISION) END)"
        else:
            number = "CAST(value AS REAL)"
        # Texts become numbers a last digit off at most: a little more is let through, the table is filtered again.
        slack = abs(value) * 1e-9
        low, high = repr(float(value - slack)), repr(float(value + slack))
        test = {
            "=": f"{number} BETWEEN {low} AND {high}",
            "<": f"{number} < {high}",
            "<=": f"{number} <= {high}",
            ">": f"{number} > {low}",
            ">=": f"{number} >= {low}",
        }[sign]
        if kind == "metric":
            test += " AND NOT is_nan" if database.postgres else " AND is_nan = 0"
    return f"run_uuid IN (SELECT run_uuid FROM {table} WHERE key = {literal(name)} AND {test})"


def _fields(database: Database, query: Query, restrict: str) -> dict[str, pd.Series]:
    import pandas as pd

    fields: dict[str, pd.Series] = {}
    for kind, table in (("tag", "tags"), ("param", "params")):
        keys = ", ".join(map(literal, query.names(kind))) or "NULL"
        found = database.table(f"SELECT run_uuid, key, value FROM {table} WHERE key IN ({keys}){restrict}")
        for key, rows in _by_key(found):
            ids = pd.Index(rows.column("run_uuid").to_numpy(zero_copy_only=False), dtype=object)
            values = rows.column("value").to_numpy(zero_copy_only=False)
            fields[f"{kind}:{key}"] = pd.Series(values, index=ids, dtype=object)
    keys = ", ".join(map(literal, query.names("metric"))) or "NULL"
    found = database.table(f"SELECT run_uuid, key, value, is_nan FROM latest_metrics WHERE key IN ({keys}){restrict}")
    for key, rows in _by_key(found):
        ids = pd.Index(rows.column("run_uuid").to_numpy(zero_copy_only=False), dtype=object)
        values = decode(rows.column("value").to_numpy(), rows.column("is_nan").to_numpy(zero_copy_only=False))
        fields[f"metric:{key}"] = pd.Series(values, index=ids)
    if "step:" in query.fields:
        where = restrict.replace(" AND", " WHERE", 1)
        steps = database.table(f"SELECT run_uuid, max(step) AS step FROM latest_metrics{where} GROUP BY run_uuid")
        ids = pd.Index(steps.column("run_uuid").to_numpy(zero_copy_only=False), dtype=object)
        fields["step:"] = pd.Series(steps.column("step").to_numpy(zero_copy_only=False), index=ids)
    return fields


def _by_key(table: pa.Table) -> Iterator[tuple[str, pa.Table]]:
    import pyarrow.compute as pc

    if table.num_rows:
        keys = table.column("key")
        for key in pc.unique(keys).to_pylist():
            yield str(key), table.filter(pc.equal(keys, key))


def _histories(database: Database, query: Query, restrict: str, progress: Progress | None) -> pd.DataFrame:
    """All wanted metrics of the chosen runs; sqlite files are read by two threads, each its half of the rows."""
    tests = [restrict] if restrict else []
    if query.histories:
        tests.append(f"key IN ({', '.join(map(literal, sorted(query.histories)))})")
    select = "SELECT run_uuid, key, step, timestamp, value, is_nan FROM metrics"
    halves = [tests]
    if database.path is not None and database.adbc and not tests:
        last = database.scalar("SELECT COALESCE(max(rowid), 0) AS n FROM metrics")
        if last > _BATCH_ROWS:
            halves = [[f"rowid <= {last // 2}"], [f"rowid > {last // 2}"]]
    collector = _Collector(progress)
    queries = [select + (f" WHERE {' AND '.join(half)}" if half else "") for half in halves]
    if len(queries) == 1:
        collector.read(database, queries[0])
    else:
        with ThreadPoolExecutor(len(queries)) as pool:
            for done in [pool.submit(collector.read_apart, database.uri, text) for text in queries]:
                done.result()
    return collector.frame()


class _Collector:
    """Batches of metric rows as columns of numbers: texts become codes batch by batch, so that they take no room."""

    def __init__(self, progress: Progress | None) -> None:
        self._runs: dict[str, int] = {}
        self._metrics: dict[str, int] = {}
        self._parts: list[tuple[Any, ...]] = []
        self._lock = threading.Lock()
        self._progress = progress
        self._rows = 0

    def read_apart(self, uri: str, query: str) -> None:
        with Database(uri) as database:
            self.read(database, query)

    def read(self, database: Database, query: str) -> None:
        import numpy as np

        for batch in database.batches(query):
            if not batch.num_rows:
                continue
            runs, metrics = (batch.column(i).dictionary_encode() for i in (0, 1))
            step, time_ms = (batch.column(i).to_numpy(zero_copy_only=False) for i in (2, 3))
            value = decode(batch.column(4).to_numpy(), batch.column(5).to_numpy(zero_copy_only=False))
            with self._lock:
                run_map = np.array(
                    [self._runs.setdefault(x, len(self._runs)) for x in runs.dictionary.to_pylist()], np.int32
                )
                metric_map = np.array(
                    [self._metrics.setdefault(x, len(self._metrics)) for x in metrics.dictionary.to_pylist()], np.int32
                )
                self._rows += batch.num_rows
                if self._progress is not None:
                    self._progress("metric rows", self._rows, 0)
            run, metric = run_map[runs.indices.to_numpy()], metric_map[metrics.indices.to_numpy()]
            with self._lock:
                self._parts.append((run, metric, step, time_ms, value))

    def frame(self) -> pd.DataFrame:
        import numpy as np

        empty = (np.int32, np.int32, np.int64, np.int64, np.float64)
        columns = []
        for i, dtype in enumerate(empty):
            columns.append(np.concatenate([part[i] for part in self._parts]) if self._parts else np.empty(0, dtype))
        self._parts = []
        return order_histories(columns[0], list(self._runs), columns[1], list(self._metrics), *columns[2:])


def literal(text: str) -> str:
    """A text as an SQL literal.

    >>> literal("it's")
    "'it''s'"
    """
    if "\0" in text:
        raise StoreError(f"{text[:40]!r}: a zero byte cannot be asked for; leave it out")
    return "'" + text.replace("'", "''") + "'"
