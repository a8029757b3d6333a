"""Measured costs and downstream results: throughput and memory of runs, paired items of evaluations."""

from __future__ import annotations

from collections.abc import Mapping

import pandas as pd

from scaling.analysis.result import Result
from scaling.analysis.tables.table import Column, Table
from scaling.errors import TableError

METRICS = {"perf/tokens_per_s": "tokens_per_s", "mem/peak_gib": "peak_gib", "perf/mfu": "mfu"}
_WARM_UP_SHARE = 0.2  # of a run's points: compilation and warm caches distort the first


def measured(runs: pd.DataFrame, histories: pd.DataFrame | None) -> pd.DataFrame:
    """One row a size and method: median throughput, peak memory and model FLOPs utilisation over its runs.

    A run's figure is the median of its points after the first fifth (of memory, the greatest).

    Raises
    ------
    TableError
        If the histories hold none of these metrics.
    """
    points = None if histories is None else histories[histories["metric"].isin(METRICS)]
    if points is None or points.empty:
        raise TableError(f"no history of {', '.join(METRICS)}; ingest the runs with their histories")
    last = points.groupby("run_key")["step"].transform("max")
    late = points[(points["step"] >= _WARM_UP_SHARE * last) | points["metric"].eq("mem/peak_gib")]
    by_run = late.groupby(["run_key", "metric"])["value"].agg(["median", "max"]).reset_index()
    value = by_run["median"].mask(by_run["metric"].eq("mem/peak_gib"), by_run["max"])
    wide = by_run.assign(value=value).pivot(index="run_key", columns="metric", values="value").rename(columns=METRICS)
    joined = runs[["run_key", "size", "method", "n_params"]].merge(wide, left_on="run_key", right_index=True)
    kept = [name for name in METRICS.values() if name in joined]
    frame = joined.groupby(["size", "method"], sort=False)[[*kept, "n_params"]].median()
    frame["n"] = joined.groupby(["size", "method"], sort=False).size()
    return frame.reset_index().sort_values(["n_params", "method"]).reset_index(drop=True)


def throughput(runs: pd.DataFrame, histories: pd.DataFrame | None, *, baseline: str | None) -> Table:
    """Throughput and peak memory of each method at each size, as a share of the baseline's."""
    frame = measured(runs, histories)
    columns = [Column(key="size", label="size"), Column(key="method", label="method")]
    for key, label in (("tokens_per_s", "tokens/s"), ("mfu", "MFU"), ("peak_gib", "peak memory (GiB)")):
        if key not in frame or frame[key].isna().all():
            continue
        columns.append(Column(key=key, label=label, kind="number", digits=3))
        if baseline is not None and key != "mfu":
            base = frame[frame["method"] == baseline].set_index("size")[key]
            frame[f"{key}_ratio"] = frame[key] / frame["size"].map(base)
            columns.append(Column(key=f"{key}_ratio", label=f"of {baseline}", kind="number", digits=2))
    columns.append(Column(key="n", label="runs", kind="integer"))
    caption = (
        "Medians over runs; each run's throughput is the median after the first fifth of its points, its memory "
        "the peak. "
        "Meaningful only where the runs had one kind of machine to themselves."
    )
    return Table(name="throughput", title="Throughput and memory", caption=caption, columns=tuple(columns), frame=frame)


def items(found: Mapping[str, Result]) -> Table:
    """McNemar's test of paired answers: ``compare items`` results by method and task."""
    rows = []
    for name, result in found.items():
        method, _, task = name.partition("/")
        interval = result.interval
        rows.append(
            {
                "method": method,
                "task": task or "all items",
                "gains": result.details["gains"],
                "losses": result.details["losses"],
                "odds": result.estimate.get("odds_ratio"),
                "odds_low": interval.low.get("odds_ratio") if interval else None,
                "odds_high": interval.high.get("odds_ratio") if interval else None,
                "p": result.details["p"],
                "holm": result.details.get("holm"),
            }
        )
    columns = (
        Column(key="method", label="method"),
        Column(key="task", label="task"),
        Column(key="gains", label="right where the baseline is wrong", kind="integer"),
        Column(key="losses", label="wrong where the baseline is right", kind="integer"),
        Column(key="odds", label="odds ratio [interval]", kind="estimate"),
        Column(key="p", label="McNemar p", kind="number", digits=2),
        Column(key="holm", label="p, Holm", kind="number", digits=2),
    )
    caption = (
        "Items both models answered; only those answered differently count. Holm: corrected for the number of tests."
    )
    return Table(name="items", title="Paired answers", caption=caption, columns=columns, frame=pd.DataFrame(rows))
