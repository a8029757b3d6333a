"""From what a reader found to the tidy run table, and which runs are left out, with reasons.

After the readers in the flow, before every analysis. Which field fills which column is one table, ``SOURCES``; runs
that other tools logged come in through its alternatives or through the caller's own map.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import TYPE_CHECKING, Any, Final, Literal

from scaling.analysis.raw import KINDS, Raw
from scaling.analysis.result import Dropped
from scaling.analysis.schema import COLUMNS
from scaling.errors import TableError, nearest

if TYPE_CHECKING:
    import pandas as pd

# Column -> fields, the first that a run has counts. Own names first, then those of Lightning's MLFlowLogger,
# transformers'
# MLflowCallback and plain habits.
SOURCES: Final[dict[str, tuple[str, ...]]] = {
    "run_key": ("tag:run_key",),
    "sweep": ("tag:sweep", "run:experiment"),
    "name": ("run:name",),
    "method": ("tag:method", "param:method", "param:model.method"),
    "size": ("tag:size", "param:size"),
    "n_params": ("tag:n_params", "param:n_params", "metric:n_params"),
    "n_params_non_embedding": ("tag:n_params_non_embedding", "param:n_params_non_embedding"),
    "heads": ("tag:heads",),
    "kv": ("tag:kv", "param:num_key_value_heads"),
    "variant": ("tag:variant",),
    "lr": ("tag:lr", "param:lr", "param:learning_rate", "param:optimizer.lr"),
    "seed": ("tag:seed", "param:seed", "param:data_seed"),
    "steps": ("tag:final_step", "step:"),
    "steps_planned": ("param:schedule.steps", "param:max_steps", "param:trainer/max_steps"),
    "tokens": ("metric:train/tokens", "metric:num_input_tokens_seen", "metric:tokens"),
    "flops": ("metric:train/flops", "metric:total_flos", "metric:flops"),
    "wall_time_s": ("metric:perf/wall_time_s", "metric:train_runtime"),
    "gpu_seconds": ("metric:perf/gpu_seconds",),
    "train_loss": ("metric:train/loss", "metric:train_loss", "metric:train-loss", "metric:loss"),
    "val_loss": ("metric:val/loss", "metric:eval_loss", "metric:val_loss", "metric:val-loss", "metric:eval/loss"),
    "val_loss_se": ("metric:val/loss_se",),
    "val_bpb": ("metric:val/bpb",),
    "val_loss_tail": ("metric:val/loss_tail",),
    "status": ("tag:status",),
    "schedule_finished": ("tag:schedule_finished",),
    "precision": ("param:precision.mode",),
    "data_fingerprint": ("param:data.fingerprint",),
    "eval_fingerprint": ("tag:eval_fingerprint",),
    "curve_hash": ("tag:curve_hash",),
    "started_ms": ("run:started_ms",),
    "ended_ms": ("run:ended_ms",),
    "attempts": ("tag:attempts",),
    "layers": ("param:model.num_layers", "param:num_hidden_layers"),
    "width": ("param:model.d_model", "param:hidden_size"),
    "ffn_width": ("param:model.d_ffn", "param:intermediate_size"),
    "vocab_size": ("param:model.vocab_size", "param:vocab_size"),
    "tail_evaluations": ("param:evaluation.tail",),
    "experts": ("param:model.moe.num_experts",),
    "reason": ("tag:reason",),
}
EXTRA: Final = frozenset({"tag:kind", "param:data.seq_len", "param:data.batch_size"})  # for derived columns
STATUS: Final[dict[str, str]] = {  # MLflow's word -> ours, for runs that carry no tag of their own
    "FINISHED": "done",
    "FAILED": "failed",
    "KILLED": "cancelled",
    "RUNNING": "running",
    "SCHEDULED": "scheduled",
}
# Reasons to leave a run out of an analysis, in the order in which they are looked for.
REASONS: Final = ("failed", "cancelled", "running", "diverged", "unfinished", "attempt", "duplicate")


def sources(columns: Mapping[str, str] | None) -> dict[str, tuple[str, ...]]:
    """``SOURCES`` with the caller's map in front: column -> ``metric:NAME``, ``param:NAME``, ``tag:NAME`` or ``NAME``.

    Raises
    ------
    TableError
        If a column is not one of the tidy table.
    """
    merged = dict(SOURCES)
    for column, text in (columns or {}).items():
        if column not in COLUMNS:
            raise TableError(f"column {column!r} is not of the run table; {nearest(column, COLUMNS)}")
        kind = text.partition(":")[0]
        given = (text,) if kind in KINDS else tuple(f"{kind}:{text}" for kind in ("metric", "param", "tag"))
        merged[column] = (*given, *merged.get(column, ()))
    return merged


def tidy(raw: Raw, columns: Mapping[str, tuple[str, ...]]) -> pd.DataFrame:
    """The run table (``schema.COLUMNS``), index the source's run id, rows in order of start.

    Raises
    ------
    TableError
        If a field holds something that its column cannot (the message names run, column and value).
    """
    import numpy as np
    import pandas as pd

    runs = raw.runs
    parents = raw.fields.get("tag:kind")
    if parents is not None:
        runs = runs.drop(index=parents.index[parents == "sweep"])
    ids = runs.index
    found = {column: _pick(raw, runs, names) for column, names in columns.items()}
    table = pd.DataFrame({column: _typed(column, found.get(column), ids) for column in COLUMNS}, index=ids)
    table["run_key"] = table["run_key"].fillna(pd.Series(ids, index=ids, dtype="string"))
    numbers = {
        name: _typed("steps", raw.fields.get(name), ids) for name in ("param:data.seq_len", "param:data.batch_size")
    }
    table["batch_tokens"] = table["batch_tokens"].fillna(
        numbers["param:data.seq_len"] * numbers["param:data.batch_size"]
    )
    table["reason"] = table["reason"].mask(table["reason"] == "")  # what a store keeps of one that holds no more
    own = table["status"].notna()
    table["status"] = table["status"].fillna(runs["status"].map(STATUS).astype("string")).fillna("unknown")
    # A run of another tool that ended on NaN or infinity diverged, whatever its status says.
    not_finite = [
        (table[name].isna() & _present(found[name], ids)) | np.isinf(table[name]) for name in ("val_loss", "train_loss")
    ]
    table.loc[~own & (not_finite[0] | not_finite[1]) & (table["status"] == "done"), "status"] = "diverged"
    took_s = (runs["ended_ms"] - runs["started_ms"]) / 1000
    table["wall_time_s"] = table["wall_time_s"].fillna(took_s.astype("float64").where(table["status"] != "running"))
    reached = (table["steps"] >= table["steps_planned"]).astype("boolean")
    table["schedule_finished"] = table["schedule_finished"].fillna(reached & (table["status"] == "done"))
    sixth = 6.0 * table["n_params_non_embedding"].astype("Float64") * table["tokens"].astype("Float64")
    table["flops_6nd"] = table["flops_6nd"].fillna(sixth.astype("float64"))
    return table.sort_values(["started_ms", "run_key"], kind="stable")


def drop(table: pd.DataFrame, keep: Collection[str] = ()) -> tuple[pd.DataFrame, tuple[Dropped, ...]]:
    """Leave out runs that no comparison may count, and say why.

    Parameters
    ----------
    keep
        Words of ``REASONS`` that are no reason here; ``("all",)`` keeps everything.

    Raises
    ------
    TableError
        If ``keep`` has another word.
    """
    if "all" in keep:
        return table, ()
    for word in keep:
        if word not in REASONS:
            raise TableError(f"--keep {word!r} is no reason to drop a run; {nearest(word, (*REASONS, 'all'))}")
    reasons: dict[str, str] = {}
    status = table["status"]
    for word in (word for word in REASONS if word not in keep):
        if word in ("failed", "cancelled", "running", "diverged"):
            words = {word, "unknown", "scheduled"} if word == "running" else {word}
            new = {run: f"{status[run]}" for run in table.index[status.isin(words)]}
        elif word == "unfinished":
            short = (status == "done") & ~table["schedule_finished"].fillna(True).astype(bool)
            new = {run: "unfinished schedule" for run in table.index[short]}
        elif word == "attempt":
            new = {
                row: f"older attempt ({row}); a newer one has the same run key"
                for row in _again(table["run_key"], "last")
            }
        else:
            left = table["curve_hash"][(status == "done") & _others(table.index, reasons)]
            twins = _again(left, "first")
            keys = table["run_key"]
            new = {row: f"duplicate of {keys.loc[stays]} (same loss curve)" for row, stays in twins.items()}
        reasons |= {run: reason for run, reason in new.items() if run not in reasons}
    if not reasons:
        return table, ()
    dropped = tuple(
        Dropped(run=str(table.at[run, "run_key"]), reason=reasons[run]) for run in table.index if run in reasons
    )
    return table[_others(table.index, reasons)], dropped


def _others(index: pd.Index, runs: Collection[str]) -> Any:
    """Which rows are none of these."""
    import numpy as np

    return np.array([run not in runs for run in index.tolist()], dtype=bool)


def _again(values: pd.Series, stays: Literal["first", "last"]) -> dict[Any, Any]:
    """Rows whose value another row has too -> the row that stays."""
    known = values[values.notna() & (values != "")]
    extra = known[known.duplicated(keep=stays)]
    if extra.empty:
        return {}
    first = known[~known.duplicated(keep=stays)]
    staying = dict(zip(first.tolist(), first.index.tolist(), strict=True))
    return {row: staying[value] for row, value in zip(extra.index.tolist(), extra.tolist(), strict=True)}


def _pick(raw: Raw, runs: pd.DataFrame, names: tuple[str, ...]) -> pd.Series | None:
    picked: pd.Series | None = None
    for name in names:
        kind, _, rest = name.partition(":")
        series = runs[rest].dropna() if kind == "run" else raw.fields.get(name)
        if series is None or series.empty:
            continue
        picked = series if picked is None else _join(picked, series)
    return picked


def _join(first: pd.Series, second: pd.Series) -> pd.Series:
    import pandas as pd

    more = second[~second.index.isin(first.index)]
    return pd.concat([first.astype(object), more.astype(object)]) if len(more) else first


def _present(series: pd.Series | None, ids: pd.Index) -> Any:
    return ids.isin(series.index) if series is not None else False


def _typed(column: str, series: pd.Series | None, ids: pd.Index) -> pd.Series:
    """A column in its schema's dtype over all runs; ``TableError`` where a value does not fit."""
    import pandas as pd

    dtype = COLUMNS[column]
    if series is None:
        return pd.Series(pd.NA if dtype != "float64" else float("nan"), index=ids, dtype=dtype)
    series = series.reindex(ids)
    if dtype == "string":
        return series.astype("string")
    if dtype == "boolean":
        words = series.astype("string").str.lower()
        good = words.isna() | words.isin(["true", "false", "1", "0"])
        _refuse(column, series[~good], "true or false")
        return words.isin(["true", "1"]).astype("boolean").mask(words.isna())
    if pd.api.types.is_numeric_dtype(series.dtype):
        numbers = series
    else:
        text = series.mask(series.isin(["null", "None", ""]))
        numbers = pd.to_numeric(text, errors="coerce")
        unread = text[numbers.isna() & text.notna()]
        said = unread.astype("string").str.lower().isin(["nan", "inf", "-inf", "infinity", "-infinity"])
        _refuse(column, unread[~said], "a number")
    if dtype == "float64":
        return numbers.astype("float64")
    values = numbers.astype("Float64")
    _refuse(column, series[(values != values.round()).fillna(False)], "a whole number")
    return values.round().astype("Int64")


def _refuse(column: str, bad: pd.Series, wanted: str) -> None:
    if not bad.empty:
        raise TableError(
            f"run {bad.index[0]}: column {column!r} holds {str(bad.iloc[0])[:80]!r}, which is not {wanted}; "
            "map the column to another field, or leave the run out"
        )
