"""The only reader of runs: a store, run folders or a table file into one tidy table, with what was left out and why.

Between the stores (filled by ``scaling.tracking`` or by other tools) and every analysis. Databases are read by SQL
(``ingest_sql``), servers over HTTP (``ingest_server``), folders directly (``ingest_folder``); ``tidy`` makes the same
table of all three.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scaling.analysis.raw import Points, Progress, Query, Raw
from scaling.analysis.result import Dropped
from scaling.analysis.schema import CANONICAL
from scaling.analysis.tidy import EXTRA, drop, sources, tidy
from scaling.errors import TableError
from scaling.tracking.store import is_store, normalise

if TYPE_CHECKING:
    import pandas as pd

    from scaling.tracking.standing import JobState

_SIGNS: Final[dict[type[ast.cmpop], str]] = {ast.Eq: "=", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
# Columns that ``tidy`` derives where no field says them: a store cannot decide about these.
_DERIVED: Final = frozenset(
    {"run_key", "sweep", "status", "batch_tokens", "wall_time_s", "schedule_finished", "flops_6nd", "steps"}
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ingested:
    """Runs as a table, and what was left out.

    Parameters
    ----------
    table
        ``schema.COLUMNS``, index 0, 1, 2...
    histories
        Columns run_key, metric (categories), step, time_ms, value; sorted by them; ``None`` where not asked for.
    dropped
        Runs left out, with reasons.
    source_ids
        Run key -> the source's own id of the run.
    """

    table: pd.DataFrame
    histories: pd.DataFrame | None
    dropped: tuple[Dropped, ...]
    source_ids: Mapping[str, str]


def read_runs(
    source: str | Path,
    *,
    sweep: str | None = None,
    where: str | Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Collection[str] = (),
    histories: bool | Collection[str] = False,
    job_state: JobState | None = None,
    progress: Progress | None = None,
) -> Ingested:
    """Read runs into the tidy table.

    Parameters
    ----------
    source
        A store's address (``sqlite:///...``, ``postgresql://...``, ``http://...``), a folder of run folders, or a
        ``.parquet`` or ``.csv`` file of the tidy table.
    sweep
        Only this sweep or experiment.
    where
        Comparisons of columns (``"lr >= 1e-3"``), several joined by ``and`` or in a list; pushed down to the store
        where it can decide.
    columns
        Column -> ``metric:NAME``, ``param:NAME``, ``tag:NAME`` or ``NAME``, for runs that other tools logged.
    keep
        Reasons (``tidy.REASONS``) that do not drop a run; ``("all",)`` keeps every run.
    histories
        Whether to read metrics by step, or of which metrics.
    job_state
        See ``scaling.tracking.sync``; only run folders need it.
    progress
        Called with (what, done, total).

    Raises
    ------
    StoreError, RecordError, TableError, UsageError
        If the source cannot be read, has unknown columns, or an option is wrong.
    """
    fields = sources(columns)
    query = _query(fields, sweep, where, histories)
    if is_table(source):
        return _from_file(Path(source), sweep, where, keep, histories)
    raw, damaged = _read(source, query, job_state, progress)
    return assemble(tidy(raw, fields), raw.points, damaged, where=where, keep=keep)


def ingest(
    source: str | Path,
    out: Path,
    *,
    sweep: str | None = None,
    where: str | Sequence[str] | None = None,
    columns: Mapping[str, str] | None = None,
    keep: Collection[str] = (),
    histories: bool | Collection[str] = False,
    load: bool = True,
    job_state: JobState | None = None,
    progress: Progress | None = None,
) -> Ingested:
    """Bring the table file ``out`` (``.parquet`` or ``.csv``) up to date, reading only what is new.

    Options as in ``read_runs``; what was read is kept in ``<out>.cache/``, and the next call reads the rest. Without
    ``load`` histories are kept on disk (``read_runs(out, histories=True)`` gives them) and not returned.
    """
    from scaling.analysis.ingest_cache import Cache, write_table

    fields = sources(columns)
    query = _query(fields, sweep, where, histories)
    wanted = None if query.histories is None else sorted(query.histories)
    options = {
        "source": str(source),
        "sweep": sweep,
        "where": where,
        "columns": dict(columns or {}),
        "histories": wanted,
    }
    cache = Cache(out, options)
    read, marks = _incremental(source, query, job_state, progress)
    changed = frozenset(cache.changed(marks))
    damaged: dict[str, str] = {}
    if changed or cache.index is None:
        # Nothing known: no list of ids, so that a whole database is read in one sweep.
        raw, damaged = read(replace(query, only=None if cache.index is None else changed))
        rows = tidy(raw, fields)
        table = cache.merge(rows, raw.points, {key: marks.get(key, "") for key in {*marks, *rows.index}})
    else:
        table = cache.merge(cache.index.iloc[:0].drop(columns=["fingerprint", "part"]), None, marks)
    cache.compact()
    points = cache.points() if query.histories is not None and load else None
    result = assemble(table, points, damaged, where=where, keep=keep)
    write_table(result.table, result.dropped, out)
    return result


def assemble(
    table: pd.DataFrame,
    points: Points | None,
    damaged: Mapping[str, str],
    *,
    where: str | Sequence[str] | None,
    keep: Collection[str],
) -> Ingested:
    """A tidy table (index: source ids) and its histories as ``Ingested``: filtered, unusable runs dropped."""
    from scaling.analysis.columns import filter_rows, map_columns

    if where and table.empty:
        raise TableError(f"--where {where!r} leaves no row")
    if where:
        table = table.loc[filter_rows(map_columns(table), where).index]
    table, dropped = drop(table, keep)
    lost = tuple(Dropped(run=key, reason=reason) for key, reason in damaged.items())
    history = (
        None
        if points is None
        else points.frame(dict(zip(map(str, table.index.tolist()), table["run_key"].tolist(), strict=True)))
    )
    ids = dict(zip(table["run_key"].tolist(), map(str, table.index.tolist()), strict=True))
    return Ingested(table=table.reset_index(drop=True), histories=history, dropped=lost + dropped, source_ids=ids)


def is_table(source: str | Path) -> bool:
    """Whether a source is a table file by its name."""
    return Path(str(source)).suffix in (".parquet", ".csv") and not is_store(str(source))


def _query(
    fields: Mapping[str, tuple[str, ...]],
    sweep: str | None,
    where: str | Sequence[str] | None,
    histories: bool | Collection[str],
) -> Query:
    return Query(
        fields=frozenset(name for names in fields.values() for name in names) | EXTRA,
        sweep=sweep,
        conditions=_pushdown(where, fields),
        histories=None if histories is False else frozenset() if histories is True else frozenset(histories),
    )


def _from_file(
    path: Path,
    sweep: str | None,
    where: str | Sequence[str] | None,
    keep: Collection[str],
    histories: bool | Collection[str],
) -> Ingested:
    from scaling.analysis.ingest_cache import read_cached_points, read_table

    table, dropped = read_table(path)
    if sweep is not None:
        table = table[table["sweep"] == sweep]
    points = None
    if histories is not False:
        kept = read_cached_points(path)
        if kept is None:
            raise TableError(f"{path}: has no histories beside it; make it with `scaling runs ingest --histories`")
        points, index = kept
        ids = dict(zip(index["run_key"].tolist(), index.index.tolist(), strict=True))
        table = table.set_axis([ids[key] for key in table["run_key"].tolist()], axis=0)
    result = assemble(table, points, {}, where=where, keep=keep)
    history = result.histories
    if history is not None and not isinstance(histories, bool):
        history = history[history["metric"].isin(list(histories))].reset_index(drop=True)
        history["metric"] = history["metric"].cat.remove_unused_categories()
    return replace(result, histories=history, dropped=dropped + result.dropped)


def _incremental(
    source: str | Path, query: Query, job_state: JobState | None, progress: Progress | None
) -> tuple[Callable[[Query], tuple[Raw, dict[str, str]]], dict[str, str]]:
    """How to read some runs of a source, and the fingerprints of all."""
    text = str(source)
    if is_store(text) and normalise(text).startswith("http"):
        from scaling.analysis.ingest_server import list_server, read_server, server_fingerprints

        listing = list_server(text, query, progress=progress)
        return lambda some: (read_server(text, some, listing=listing, progress=progress), {}), server_fingerprints(
            listing
        )
    if is_store(text):
        from scaling.analysis.ingest_sql import database_fingerprints

        marks = database_fingerprints(text, query)
    else:
        from scaling.analysis.ingest_folder import folder_fingerprints

        marks = folder_fingerprints(Path(text), query)
    return lambda some: _read(source, some, job_state, progress), marks


def _read(
    source: str | Path, query: Query, job_state: JobState | None, progress: Progress | None
) -> tuple[Raw, dict[str, str]]:
    text = str(source)
    if is_store(text):
        if normalise(text).startswith("http"):
            from scaling.analysis.ingest_server import read_server

            return read_server(text, query, progress=progress), {}
        from scaling.analysis.ingest_sql import read_database

        return read_database(text, query, progress=progress), {}
    from scaling.analysis.ingest_folder import read_folders

    return read_folders(Path(text), query, job_state=job_state, progress=progress)


def _pushdown(
    where: str | Sequence[str] | None, fields: Mapping[str, tuple[str, ...]]
) -> list[tuple[tuple[str, ...], str, float | str]]:
    """The comparisons a store can decide, as a superset of what ``where`` lets through."""
    found: list[tuple[tuple[str, ...], str, float | str]] = []
    for text in [where] if isinstance(where, str) else list(where or []):
        try:
            tree = ast.parse(text, mode="eval").body
        except SyntaxError:
            continue  # the table's own filter says what is wrong with it, or knows the column's spelling
        parts = tree.values if isinstance(tree, ast.BoolOp) and isinstance(tree.op, ast.And) else [tree]
        for part in parts:
            if not (isinstance(part, ast.Compare) and len(part.ops) == 1 and type(part.ops[0]) in _SIGNS):
                continue
            name, value = part.left, part.comparators[0]
            if not (isinstance(name, ast.Name) and isinstance(value, ast.Constant)):
                continue
            column = CANONICAL.get(name.id, name.id)
            places = fields.get(column, ())
            decidable = (
                column not in _DERIVED and places and all(p.split(":")[0] in ("tag", "param", "metric") for p in places)
            )
            sign, constant = _SIGNS[type(part.ops[0])], value.value
            if isinstance(constant, bool) or not isinstance(constant, (int, float, str)) or not decidable:
                continue
            if not isinstance(constant, str) or sign == "=":
                found.append((places, sign, constant))
    return found
