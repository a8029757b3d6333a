"""What every reader of runs returns, before it is made tidy: runs, the asked-for fields, histories.

First module of ingestion. ``ingest_sql``, ``ingest_server`` and ``ingest_folder`` fill a ``Raw``; ``tidy`` turns it
into the run table. A field is named by where it is: ``tag:method``, ``param:data.seq_len``, ``metric:val/loss`` (its
latest value), ``step:`` (the highest step of any metric), ``run:`` (a column of MLflow's runs).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import pandas as pd

KINDS: Final = ("tag", "param", "metric", "run", "step")
RUN_COLUMNS: Final = ("name", "experiment", "status", "started_ms", "ended_ms")
SAMPLE: Final = 4096  # rows that tell most unsorted points from sorted ones
MLFLOW_INFINITY: Final = 1.7976931348623157e308  # MLflow stores infinities as the largest double

Progress = Callable[[str, int, int], None]  # what is being read, how many of, how many


@dataclass(frozen=True, kw_only=True, slots=True)
class Query:
    """What a reader is asked for.

    Parameters
    ----------
    fields
        Names ``kind:name`` that the table needs.
    sweep
        Only runs of this sweep (tag ``sweep``) or experiment.
    conditions
        Comparisons to push down where the store can: (fields of which one must satisfy it, operator, value).
    histories
        ``None``: no histories; empty: all metrics; else these metrics.
    only
        Source ids to read, ``None`` for all.
    """

    fields: frozenset[str]
    sweep: str | None = None
    conditions: Sequence[tuple[tuple[str, ...], str, float | str]] = ()
    histories: frozenset[str] | None = None
    only: frozenset[str] | None = None

    def names(self, kind: str) -> list[str]:
        """Names of the fields of one kind, sorted."""
        return sorted(text.partition(":")[2] for text in self.fields if text.startswith(f"{kind}:"))


@dataclass(frozen=True, kw_only=True, slots=True)
class Points:
    """Metric values in any order, in columns of equal length: texts are positions in ``runs`` and ``metrics``.

    ``frame`` takes the columns over: it may reorder them in place, so that no second copy is needed.
    """

    runs: Sequence[str]
    metrics: Sequence[str]
    run: Any
    metric: Any
    step: Any
    time_ms: Any
    value: Any

    def frame(self, names: Mapping[str, str]) -> pd.DataFrame:
        """Sorted by run, metric and step; one row for each step, the later where it was measured twice.

        Parameters
        ----------
        names
            Run -> the name it has in column ``run_key``; runs that are not in it are left out.

        Returns
        -------
        pandas.DataFrame
            Columns run_key and metric (categories in order), step, time_ms, value.
        """
        import numpy as np
        import pandas as pd

        keys = sorted(set(names.values()))
        run_at = {key: i for i, key in enumerate(keys)}
        run_map = np.array([run_at[names[run]] if run in names else -1 for run in self.runs] or [0], np.int64)
        run, metric = np.asarray(self.run, np.int32), np.asarray(self.metric, np.int32)
        columns: list[Any] = [np.asarray(self.step, np.int64), np.asarray(self.time_ms, np.int64)]
        columns.append(np.asarray(self.value, np.float64))
        if run_map.min() < 0:
            known = run_map[run] >= 0
            run, metric, *columns = (column[known] for column in (run, metric, *columns))
        # categories are the metrics of these rows, whatever else the store holds
        metrics = sorted({self.metrics[i] for i in np.flatnonzero(np.bincount(metric)).tolist()})
        metric_at = {name: i for i, name in enumerate(metrics)}
        metric_map = np.array([metric_at.get(name, 0) for name in self.metrics] or [0], np.int64)
        # Run and metric as one number, in as few bytes as hold it: memory that is not touched takes no time.
        count = len(keys) * len(metrics)
        dtype = np.uint16 if count < 2**16 else np.uint32 if count < 2**32 else np.int64
        place: Any = (run_map * len(metrics)).astype(dtype)[run]
        place += metric_map.astype(dtype)[metric]
        del run, metric
        place, columns = _arranged(place, columns)
        first, second = np.divmod(place, dtype(max(len(metrics), 1)))
        return pd.DataFrame(
            {
                "run_key": pd.Categorical.from_codes(first, categories=pd.Index(keys, dtype=object)),
                "metric": pd.Categorical.from_codes(second, categories=pd.Index(metrics, dtype=object)),
                **dict(zip(("step", "time_ms", "value"), columns, strict=True)),
            },
            copy=False,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Raw:
    """What a reader found.

    Parameters
    ----------
    runs
        One row a run, index the source's run id, columns ``RUN_COLUMNS``.
    fields
        Field name -> series over the same ids (only those that have it): text for tags and parameters, numbers else.
    points
        Metric values, where histories were asked for.
    """

    runs: pd.DataFrame
    fields: Mapping[str, pd.Series] = field(default_factory=dict)
    points: Points | None = None


def decode(value: Any, is_nan: Any) -> Any:
    """MLflow's stored values to numbers: a row with ``is_nan`` holds 0.0, infinities are the largest double."""
    import numpy as np

    values = np.array(value, dtype=np.float64, copy=True)
    values[np.asarray(is_nan, dtype=bool)] = np.nan
    infinite = np.abs(values) >= MLFLOW_INFINITY
    if infinite.any():
        values[infinite] = np.sign(values[infinite]) * np.inf
    return values


def _arranged(place: Any, columns: list[Any]) -> tuple[Any, list[Any]]:
    """Rows in order of place and step, without repeated steps; the same arrays where they are so already.

    ``columns`` are step, time in ms and value, which may be reordered in place.
    """
    import numpy as np

    if _rising(place[:SAMPLE], columns[0][:SAMPLE]) and _rising(place, columns[0]):
        return place, columns
    # Rows mostly come by rising step, so that one stable pass puts all in order (16-bit numbers: digit by digit).
    order = np.argsort(place, kind="stable")
    place, columns = place[order], _taken(columns, order)
    if _rising(place, columns[0]):
        return place, columns
    step, time_ms, _ = columns
    order = np.lexsort((time_ms, step, place))
    place, step = place[order], step[order]
    last = np.append((place[1:] != place[:-1]) | (step[1:] != step[:-1]), True)
    return place[last], [column[order[last]] for column in columns]


def _taken(columns: list[Any], order: Any) -> list[Any]:
    """Columns of 8 bytes in another order; each that may be written gives its memory to the next."""
    import numpy as np

    taken, room = [], None
    for column in columns:
        out = np.empty_like(column) if room is None else room.view(column.dtype)
        np.take(column, order, out=out, mode="clip")  # `clip` writes to `out` directly; no position is outside
        taken.append(out)
        room = column if column.flags.writeable and column.flags.owndata else None
    return taken


def _rising(place: Any, step: Any) -> bool:
    """Whether places never fall, and steps rise where the place stays."""
    return bool(((place[1:] > place[:-1]) | ((place[1:] == place[:-1]) & (step[1:] > step[:-1]))).all())
