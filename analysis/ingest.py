"""The only reader of runs: a store, run folders or a table file into one tidy table, with what was left out and why.

Between the stores (filled by ``scaling.tracking`` or by other tools) and every analysis. Databases are read by SQL
(``ingest_sql``), servers over HTTP (``ingest_server``), folders directly (``ingest_folder``); ``tidy`` makes the same
table of all three.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

from scaling.analysis.raw import Progress, Query, Raw
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
    query = Query(
        fields=frozenset(name for names in fields.values() for name in names) | EXTRA,
        sweep=sweep,
        conditions=_pushdown(where, fields),
        histories=None if histories is False else frozenset() if histories is True else frozenset(histories),
    )
    raw, damaged = _read(source, query, job_state, progress)
    return assemble(raw, damaged, fields, where=where, keep=keep)


def assemble(
    raw: Raw,
    damaged: Mapping[str, str],
    fields: Mapping[str, tuple[str, ...]],
    *,
    where: str | Sequence[str] | None,
    keep: Collection[str],
) -> Ingested:
    """What was read as ``Ingested``: tidy, filtered, unusable runs dropped."""
    from scaling.analysis.columns import filter_rows, map_columns

    table = tidy(raw, fields)
    if where and table.empty:
        raise TableError(f"--where {where!r} leaves no row")
    if where:
        table = table.loc[filter_rows(map_columns(table), where).index]
    table, dropped = drop(table, keep)
    lost = tuple(Dropped(run=key, reason=reason) for key, reason in damaged.items())
    history = raw.histories
    if history is not None:
        history = _by_key(history, table)
    ids = dict(zip(table["run_key"], map(str, table.index), strict=True))
    return Ingested(table=table.reset_index(drop=True), histories=history, dropped=lost + dropped, source_ids=ids)


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


def _by_key(histories: pd.DataFrame, table: pd.DataFrame) -> pd.DataFrame:
    """Histories of the table's runs under their run keys."""
    import numpy as np
    import pandas as pd

    keys = table["run_key"]
    old = list(histories["run"].cat.categories)
    order = sorted(set(keys))
    position = {key: i for i, key in enumerate(order)}
    mapping = np.array([position[keys[run]] if run in keys.index else -1 for run in old] or [-1], dtype=np.int32)
    codes = mapping[histories["run"].cat.codes.to_numpy()]
    run_key = pd.Categorical.from_codes(codes, categories=pd.Index(order, dtype=object))
    renamed = histories.drop(columns="run")
    renamed.insert(0, "run_key", run_key)
    if (mapping < 0).any():
        renamed = renamed[codes >= 0]
        codes = codes[codes >= 0]
    if len(codes) and not bool((np.diff(codes) >= 0).all()):
        renamed = renamed.iloc[np.argsort(codes, kind="stable")]
    return renamed.reset_index(drop=True)


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
            if decidable and type(value.value) in (int, float, str):
                sign = _SIGNS[type(part.ops[0])]
                if not isinstance(value.value, str) or sign == "=":
                    found.append((places, sign, value.value))
    return found
