"""Measured costs: throughput and memory of runs and of benchmarked steps, timings of kernels."""

from __future__ import annotations

import pandas as pd

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


def steps(frame: pd.DataFrame) -> Table:
    """Whole training steps of a benchmark: time, throughput and peak memory beside the baseline's of the same shape."""
    rows = frame.assign(
        peak_gib=pd.to_numeric(frame["peak_bytes"]) / 2**30 if "peak_bytes" in frame else float("nan"),
        ms=frame["ms_50"], ms_low=frame["ms_20"], ms_high=frame["ms_80"],
    )  # fmt: skip
    columns = [
        Column(key="shape", label="shape"),
        Column(key="vocabulary", label="vocabulary", kind="integer"),
        Column(key="method", label="method"),
        *([Column(key="implementation", label="implementation")] if "implementation" in rows else []),
        Column(key="pass", label="what is timed"),
        Column(key="launch", label="launch"),
        Column(key="ms", label="ms [20%, 80% of repeats]", kind="estimate"),
    ]
    for key, label, digits in (
        ("ratio", "throughput of the baseline's", 3), ("peak_gib", "peak memory (GiB)", 3),
        ("peak_ratio", "memory of the baseline's", 3),
    ):  # fmt: skip
        if key in rows and rows[key].notna().any():
            columns.append(Column(key=key, label=label, kind="number", digits=digits))
    if "failed" in rows and rows["failed"].notna().any():
        columns.append(Column(key="failed", label="failed"))
    caption = (
        "Steps of each method beside the compiled pre-norm baseline of the same shape, timed in the same call of the "
        f"benchmark{_machine(frame)}. Median of the call's repeats, with their 20% and 80% quantiles in brackets. "
        "Launch: eager, one kernel at a time; graph, replayed as one CUDA graph."
    )
    return Table(name="steps", title="Training steps", caption=caption, columns=tuple(columns), frame=rows)


def kernels(frame: pd.DataFrame) -> Table:
    """Kernels of a benchmark: time, bytes moved, and the share of the copy rate measured beside them."""
    rows = frame.assign(
        mib=pd.to_numeric(frame["bytes"]) / 2**20 if "bytes" in frame else float("nan"),
        share=100 * pd.to_numeric(frame["ceiling_share"]) if "ceiling_share" in frame else float("nan"),
        ms=frame["ms_50"], ms_low=frame["ms_20"], ms_high=frame["ms_80"],
    )  # fmt: skip
    columns = [
        Column(key="operation", label="kernel"),
        Column(key="shape", label="shape"),
        Column(key="pass", label="pass"),
        Column(key="ms", label="ms [20%, 80% of repeats]", kind="estimate"),
        Column(key="mib", label="must move (MiB)", kind="number", digits=3),
        Column(key="share", label="of the copy rate (%)", kind="number", digits=3),
    ]
    caption = (
        f"Routing kernels alone{_machine(frame)}. Median of the call's repeats, with their 20% and 80% quantiles in "
        "brackets; the last column sets the bytes that a kernel must move against the copy rate of the same call of "
        "the benchmark, its ceiling."
    )
    return Table(name="kernels", title="Routing kernels", caption=caption, columns=tuple(columns), frame=rows)


def _machine(frame: pd.DataFrame) -> str:
    """Which GPU and versions a benchmark names."""
    told = []
    for key, word in (("gpu", ""), ("torch", "torch "), ("triton", "Triton ")):
        if key in frame and frame[key].notna().any():
            told.append(word + "/".join(dict.fromkeys(map(str, frame[key].dropna()))))
    return f" ({', '.join(told)})" if told else ""
