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
HISTORY_COLUMNS: Final = ("run", "metric", "step", "time_ms", "value")
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
class Raw:
    """What a reader found.

    Parameters
    ----------
    runs
        One row a run, index the source's run id, columns ``RUN_COLUMNS``.
    fields
        Field name -> series over the same ids (only those that have it): text for tags and parameters, numbers else.
    histories
        Columns ``HISTORY_COLUMNS``, sorted by run, metric, step; ``run`` and ``metric`` are categories; one row for
        each step.
    """

    runs: pd.DataFrame
    fields: Mapping[str, pd.Series] = field(default_factory=dict)
    histories: pd.DataFrame | None = None


def order_histories(
    run_codes: Any,
    runs: Sequence[str],
    metric_codes: Any,
    metrics: Sequence[str],
    step: Any,
    time_ms: Any,
    value: Any,
) -> pd.DataFrame:
    """Histories from columns in any order: sorted by run, metric and step, one row for each step.

    A step that was measured twice (a resume whose store could not drop the first) keeps the later time.
    """
    import numpy as np
    import pandas as pd

    run, metric = np.asarray(run_codes), np.asarray(metric_codes)
    steps, times, values = np.asarray(step, np.int64), np.asarray(time_ms, np.int64), np.asarray(value, np.float64)
    # Categories in sorted order, so that two sources of the same runs give equal frames.
    run_order, metric_order = np.argsort(np.asarray(runs, dtype=object)), np.argsort(np.asarray(metrics, dtype=object))
    run = _inverse(run_order)[run] if len(runs) else run
    metric = _inverse(metric_order)[metric] if len(metrics) else metric
    series = run.astype(np.int64) * max(1, len(metrics)) + metric
    if len(steps):
        low, span = int(steps.min()), int(steps.max()) - int(steps.min()) + 1
        if (int(series.max()) + 1) * span < 2**62:
            key = series * span + (steps - low)
            order = None if bool((np.diff(key) > 0).all()) else np.argsort(key, kind="stable")
            if order is not None and not bool((np.diff(key[order]) > 0).all()):
                order = np.lexsort((times, key))
                ordered = key[order]
                order = order[np.append(ordered[1:] != ordered[:-1], True)]
        else:
            order = np.lexsort((times, steps, series))
            same = (np.diff(series[order]) == 0) & (np.diff(steps[order]) == 0)
            order = order[np.append(~same, True)]
        if order is not None:
            run, metric, steps, times, values = run[order], metric[order], steps[order], times[order], values[order]
    columns = {
        "run": pd.Categorical.from_codes(run, categories=pd.Index([runs[i] for i in run_order], dtype=object)),
        "metric": pd.Categorical.from_codes(
            metric, categories=pd.Index([metrics[i] for i in metric_order], dtype=object)
        ),
        "step": steps,
        "time_ms": times,
        "value": values,
    }
    return pd.DataFrame(columns, copy=False)


def decode(value: Any, is_nan: Any) -> Any:
    """MLflow's stored values to numbers: a row with ``is_nan`` holds 0.0, infinities are the largest double."""
    import numpy as np

    values = np.array(value, dtype=np.float64, copy=True)
    values[np.asarray(is_nan, dtype=bool)] = np.nan
    infinite = np.abs(values) >= MLFLOW_INFINITY
    values[infinite] = np.sign(values[infinite]) * np.inf
    return values


def _inverse(order: Any) -> Any:
    import numpy as np

    positions = np.asarray(order)
    inverse = np.empty(len(positions), dtype=np.int32)
    inverse[positions] = np.arange(len(positions), dtype=np.int32)
    return inverse
