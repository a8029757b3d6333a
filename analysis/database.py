"""An MLflow database, opened for reading only: queries in, Arrow tables out, by ADBC where it is installed.

Used by ``ingest_sql``. Readers never lock a writer out: sqlite is opened read-only, PostgreSQL in read-only
transactions.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final
from urllib.parse import quote

from scaling.errors import StoreError, StoreUnavailable
from scaling.tracking.store import normalise, redact, sqlite_path

if TYPE_CHECKING:
    import pyarrow as pa

BATCH_ROWS: Final = 65_536  # smaller ones cost more for each row, larger ones memory
LOCK_WAIT_S: Final = 20  # how long to wait for a writer of a sqlite file, as long as MLflow itself does
_DRIVERS: Final = ("psycopg", "adbc_driver_manager")
_NEEDED: Final = {
    "runs": ("run_uuid", "name", "status", "start_time", "end_time", "lifecycle_stage", "experiment_id"),
    "experiments": ("experiment_id", "name", "lifecycle_stage"),
    "params": ("run_uuid", "key", "value"),
    "tags": ("run_uuid", "key", "value"),
    "latest_metrics": ("run_uuid", "key", "value", "step", "timestamp", "is_nan"),
    "metrics": ("run_uuid", "key", "value", "step", "timestamp", "is_nan"),
}


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

        with self._translated(), closing(self._cursor()) as cursor:
            if self.adbc:
                if not self.postgres:
                    cursor.adbc_statement.set_options(**{"adbc.sqlite.query.batch_rows": str(BATCH_ROWS)})
                cursor.execute(query)
                yield from cursor.fetch_record_batch()
                return
            cursor.execute(query)
            names = [column[0] for column in cursor.description]
            while rows := cursor.fetchmany(BATCH_ROWS):
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

    def _cursor(self) -> Any:
        """A cursor that does not hold a whole result: psycopg's own fetches all rows, unless it has a name."""
        return self._connection.cursor(name="batches") if self.postgres and not self.adbc else self._connection.cursor()

    def _connect(self) -> tuple[Any, bool]:
        if self.path is not None:
            address = f"file:{quote(str(self.path))}?mode=ro"
            if find_spec("adbc_driver_sqlite") is not None:
                import adbc_driver_sqlite.dbapi as adbc_sqlite

                # Without autocommit the first query would begin a transaction, which locks writers out to its end.
                connection = adbc_sqlite.connect(address, autocommit=True)
                with closing(connection.cursor()) as cursor:
                    cursor.execute(f"PRAGMA busy_timeout = {LOCK_WAIT_S * 1000}")
                return connection, True
            return sqlite3.connect(address, timeout=LOCK_WAIT_S, uri=True), False
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


def check_layout(database: Database) -> None:
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


def experiments(uri: str, limit: int) -> list[tuple[str, str]]:
    """Id and name of the newest experiments that have runs.

    Raises
    ------
    StoreError
        If there is no such database or its layout is unknown.
    StoreUnavailable
        If it does not answer.
    """
    with Database(uri) as database:
        check_layout(database)
        found = database.table(
            "SELECT experiment_id AS id, name FROM experiments WHERE lifecycle_stage = 'active' AND experiment_id IN "
            "(SELECT experiment_id FROM runs WHERE lifecycle_stage = 'active') "
            f"ORDER BY experiment_id DESC LIMIT {limit}"
        )
        ids, names = (column.to_pylist() for column in found.columns)
        return [(str(one), str(name)) for one, name in zip(ids, names, strict=True)]


def literal(text: str) -> str:
    """A text as an SQL literal.

    >>> literal("it's")
    "'it''s'"
    """
    if "\0" in text:
        raise StoreError(f"{text[:40]!r}: a zero byte cannot be asked for; leave it out")
    return "'" + text.replace("'", "''") + "'"
