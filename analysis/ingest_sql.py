"""Reader of MLflow databases: read-only SQL on sqlite files and PostgreSQL, by ADBC where it is installed.

One of the three readers; see ``raw``. It reads the five tables whose columns MLflow has kept for years (runs, params,
tags, latest_metrics, metrics) and refuses a layout it does not know. Readers never lock a writer out: sqlite is opened
read-only, PostgreSQL in a read-only transaction.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

from scaling.analysis.collector import read_points
from scaling.analysis.database import Database, check_layout, literal
from scaling.analysis.raw import Points, Progress, Query, Raw, decode

if TYPE_CHECKING:
    import pandas as pd
    import pyarrow as pa

_NUMBER: Final = "^[-+]?[0-9]+([.][0-9]*)?([eE][-+]?[0-9]+)?$"


def read_database(uri: str, query: Query, *, progress: Progress | None = None) -> Raw:
    """Read runs of a database.

    Raises
    ------
    StoreError
        If there is no such database or its layout is unknown.
    StoreUnavailable
        If it does not answer.
    """
    with Database(uri) as database, ThreadPoolExecutor(1) as beside:
        check_layout(database)
        chosen = _chosen(database, query)
        runs = database.table(
            "SELECT r.run_uuid AS id, COALESCE(r.name, '') AS name, e.name AS experiment, r.status AS status, "
            "COALESCE(r.start_time, 0) AS started_ms, COALESCE(r.end_time, -1) AS ended_ms FROM runs r "
            f"JOIN experiments e ON e.experiment_id = r.experiment_id WHERE r.run_uuid IN ({chosen})"
        )
        everything = int(database.scalar("SELECT count(*) FROM runs")) == runs.num_rows
        restrict = "" if everything else f"run_uuid IN ({chosen})"
        reading = None
        if query.histories is not None:  # a database answers several connections at once
            wanted = sorted(runs.column("id").to_pylist())
            reading = beside.submit(_points, uri, query.histories, restrict, wanted, progress)
        frame = _frame(runs)
        fields = _fields(database, query, f" AND {restrict}" if restrict else "")
        points = None if reading is None else reading.result()
        return Raw(runs=frame, fields=fields, points=points)


def _frame(runs: pa.Table) -> pd.DataFrame:
    import pandas as pd

    frame: pd.DataFrame = runs.to_pandas().set_index("id")
    frame = frame.astype({"name": "string", "experiment": "string", "status": "string"})
    for name in ("started_ms", "ended_ms"):
        frame[name] = frame[name].astype("Int64")
    frame["ended_ms"] = frame["ended_ms"].mask((frame["ended_ms"] < 0) | (frame["status"] == "RUNNING"))
    frame.index = pd.Index(frame.index, dtype=object, name=None)
    return frame


def _points(
    uri: str, histories: Collection[str], restrict: str, wanted: Sequence[str], progress: Progress | None
) -> Points:
    with Database(uri) as database:
        return read_points(database, histories, restrict=restrict, wanted=wanted, progress=progress)


def database_fingerprints(uri: str, query: Query) -> dict[str, str]:
    """Run id -> a text that changes when the run gets points or another status."""
    with Database(uri) as database:
        check_layout(database)
        found = database.table(
            "SELECT r.run_uuid AS id, r.status AS status, COALESCE(r.end_time, -1) AS ended, COALESCE(m.n, 0) AS n, "
            "COALESCE(m.step, 0) AS step, COALESCE(m.time, 0) AS time FROM runs r LEFT JOIN "
            "(SELECT run_uuid, count(*) AS n, max(step) AS step, max(timestamp) AS time FROM latest_metrics "
            f"GROUP BY run_uuid) m ON m.run_uuid = r.run_uuid WHERE r.run_uuid IN ({_chosen(database, query)}) "
            "AND r.run_uuid NOT IN (SELECT run_uuid FROM tags WHERE key = 'kind' AND value = 'sweep')"
        )
        columns = [column.to_pylist() for column in found.columns]
        return {row[0]: " ".join(map(str, row[1:])) for row in zip(*columns, strict=True)}


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
