"""What ingestion costs, side by side: our paths, the fastest bare reader, and MLflow's own calls.

``python -m tests.benchmarks.ingest`` makes stores of 500 and 5,000 runs (8 metrics x 200 steps, 30 parameters, 16
tags), reads them every way, checks that all ways see the same rows, and prints one table with the targets. ``--quick``
reads 50 and 500 runs.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling.analysis.ingest import ingest, read_runs
from scaling.tracking.sql import SqlStore, import_mlflow
from tests.tracking.servers import MlflowServer

METRICS = (
    "train/loss",
    "train/grad_norm",
    "train/lr",
    "train/tokens",
    "val/loss",
    "perf/tokens_per_s",
    "perf/mfu",
    "mem/x",
)
STEPS = 200
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One line of the table; ``good`` is ``None`` where there is no target."""

    what: str
    value: str
    target: str = ""
    good: bool | None = None


def fill(path: Path, runs: int, *, first: int = 0, seed: int = 0) -> None:
    """Add runs as the syncer writes them, by plain SQL (MLflow's own client would take minutes)."""
    draw = random.Random(seed + first)
    connection = sqlite3.connect(path)
    experiment = connection.execute("SELECT max(experiment_id) FROM experiments").fetchone()[0]
    for i in range(first, first + runs):
        run = f"{draw.getrandbits(128):032x}"
        start_ms = 1_790_000_000_000 + i * 1_000_000
        connection.execute(
            "INSERT INTO runs (run_uuid, name, source_type, user_id, status, start_time, end_time, lifecycle_stage, "
            "artifact_uri, experiment_id) VALUES (?, ?, 'LOCAL', 'me', 'FINISHED', ?, ?, 'active', '', ?)",
            (run, f"run-{i}", start_ms, start_ms + 200_000, experiment),
        )
        params = {f"model.p{k}": str(k) for k in range(25)}
        params |= {"data.seq_len": "64", "data.batch_size": "8", "schedule.steps": "1990", "precision.mode": "mixed"}
        params |= {"data.fingerprint": "f" * 40}
        tags = {"kind": "run", "run_key": f"{i:016x}", "sweep": "ladder", "method": ("baseline", "mhar")[i % 2]}
        tags |= {"size": "50k", "kv": "1", "lr": "0.001", "seed": str(i // 2), "status": "done", "attempts": "1"}
        tags |= {"n_params": "80000", "n_params_non_embedding": "50000", "schedule_finished": "true"}
        tags |= {"eval_fingerprint": "e" * 16, "curve_hash": f"{i:016x}", "final_step": str(10 * (STEPS - 1))}
        for table, pairs in (("params", params), ("tags", tags)):
            rows = [(key, value, run) for key, value in pairs.items()]
            connection.executemany(f"INSERT INTO {table} (key, value, run_uuid) VALUES (?, ?, ?)", rows)
        points = [
            (name, 5120.0 * s if k == 3 else 6 / (1 + 0.01 * s) + k + draw.random(), start_ms + 1000 * s, run, 10 * s)
            for s in range(STEPS)
            for k, name in enumerate(METRICS)
        ]
        for table, some in (("metrics", points), ("latest_metrics", points[-len(METRICS) :])):
            connection.executemany(
                f"INSERT INTO {table} (key, value, timestamp, run_uuid, step, is_nan) VALUES (?, ?, ?, ?, ?, 0)", some
            )
    connection.commit()
    connection.close()


def make(folder: Path, small: int, big: int) -> None:
    """The two stores, where they are not there yet."""
    for runs in (small, big):
        path = folder / f"{runs}.db"
        if not path.exists():
            beside = folder / f"new-{runs}.db"
            store = SqlStore(f"sqlite:///{beside}", artifacts=folder / "artifacts")
            store.experiment("ladder")
            store.close()
            fill(beside, runs)
            beside.rename(path)


BIG_S = 6.0  # for 5,000 runs, 8 million points
REFERENCE_BARE_S = 0.41  # ADBC, 800,000 points, where the targets in seconds were set


def best(work: Callable[[], Any], repeats: int = 5) -> tuple[float, Any]:
    """Shortest of some times, in seconds, and the last result."""
    times = []
    for _ in range(repeats):
        started_s = time.perf_counter()
        result = work()
        times.append(time.perf_counter() - started_s)
    return min(times), result


def bare_read(path: Path) -> Any:
    """The rows by the fastest reader known: ADBC to Arrow, texts as dictionaries, to pandas."""
    import adbc_driver_sqlite.dbapi as adbc

    with adbc.connect(f"file:{path}?mode=ro") as connection, connection.cursor() as cursor:
        cursor.execute("SELECT run_uuid, key, step, timestamp, value, is_nan FROM metrics")
        table = cursor.fetch_arrow_table()
    for i in (0, 1):
        table = table.set_column(i, table.column_names[i], table.column(i).combine_chunks().dictionary_encode())
    return table.to_pandas()


def one_by_one(uri: str, experiment: str, limit: int | None) -> tuple[float, int, int]:
    """search_runs and get_metric_history for each run and metric: seconds for all, points, calls made.

    With ``limit`` that many calls are made and the time is scaled to all of them.
    """
    client = import_mlflow().MlflowClient(uri, registry_uri=uri)
    started_s = time.perf_counter()
    runs, token = [], None
    while True:
        page = client.search_runs([experiment], max_results=1000, page_token=token)
        runs += list(page)
        token = page.token
        if not token:
            break
    searched_s = time.perf_counter() - started_s
    calls = [(run.info.run_id, name) for run in runs for name in METRICS]
    made = calls if limit is None else random.Random(0).sample(calls, min(limit, len(calls)))
    started_s = time.perf_counter()
    points = sum(len(client.get_metric_history(run, name)) for run, name in made)
    asked_s = time.perf_counter() - started_s
    return searched_s + asked_s * len(calls) / len(made), points * len(calls) // len(made), len(made)


def measure_large(path: str) -> None:
    """In a process of its own, so that its peak memory is the reading's."""
    started_s = time.perf_counter()
    got = read_runs(f"sqlite:///{path}", histories=True)
    took_s = time.perf_counter() - started_s
    assert got.histories is not None
    # ru_maxrss would be the parent's, which a child inherits and which has read the same points by then
    status = Path("/proc/self/status").read_text(encoding="utf-8")
    peak_gib = int(next(line for line in status.splitlines() if line.startswith("VmHWM")).split()[1]) / 2**20
    print(json.dumps({"s": took_s, "gib": peak_gib, "points": len(got.histories), "runs": len(got.table)}))


def large(path: Path) -> dict[str, float]:
    command = [sys.executable, "-m", "tests.benchmarks.ingest", "--large", str(path)]
    done = [
        json.loads(subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout)
        for _ in range(3)
    ]
    return min(done, key=lambda one: float(one["s"]))


def measure(folder: Path, small: int, big: int, calls: int | None, server_calls: int) -> list[Row]:
    """All figures; stores are made in ``folder``."""
    make(folder, small, big)
    path = folder / f"use-{small}.db"
    shutil.copy(folder / f"{small}.db", path)
    experiment = "1"
    rows: list[Row] = []
    points = small * len(METRICS) * STEPS
    uri = f"sqlite:///{path}"

    bare_s, bare = best(lambda: bare_read(path))
    ours_s, ours = best(lambda: read_runs(uri, histories=True))
    assert len(ours.table) == small and len(ours.histories) == len(bare) == points
    assert math.fsum(ours.histories["value"]) == math.fsum(bare["value"])
    rows.append(Row(what=f"bare read, ADBC, {points:,} points", value=f"{bare_s:.2f} s"))
    ratio = ours_s / bare_s
    rows.append(
        Row(
            what="SQL path, table and histories",
            value=f"{ours_s:.2f} s = {ratio:.2f} x bare",
            target="<= 1.5 x",
            good=ratio <= 1.5,
        )
    )
    table_s, _ = best(lambda: read_runs(uri))
    rows.append(Row(what="SQL path, table only", value=f"{table_s:.2f} s"))
    slow_s, slow_points, made = one_by_one(uri, experiment, calls)
    assert slow_points == points
    gain = slow_s / ours_s
    rows.append(
        Row(
            what=f"search_runs + get_metric_history ({made:,} of {small * len(METRICS):,} calls timed)",
            value=f"{slow_s:.1f} s = {gain:.0f} x ours",
            target=">= 100 x",
            good=gain >= 100,
        )
    )
    connection = sqlite3.connect(path)
    connection.execute("ANALYZE")
    connection.close()
    after_s, _, _ = one_by_one(uri, experiment, calls)
    rows.append(Row(what="the same after ANALYZE, which the syncer runs", value=f"{after_s:.1f} s"))

    server = MlflowServer(uri, folder, workers=2).start()
    try:
        bulk_s, bulk = best(lambda: read_runs(server.url, histories=True), 2)
        assert bulk.histories is not None and bulk.histories.equals(ours.histories) and bulk.table.equals(ours.table)
        each_s, _, made = one_by_one(server.url, experiment, server_calls)
    finally:
        server.kill()
    gain = each_s / bulk_s
    rows.append(Row(what="server path, bulk in parallel", value=f"{bulk_s:.1f} s", target="", good=None))
    rows.append(
        Row(
            what=f"the server's calls one by one ({made:,} calls timed)",
            value=f"{each_s:.1f} s = {gain:.1f} x ours",
            target=">= 2.5 x",
            good=gain >= 2.5,
        )
    )

    parquet = folder / "runs.parquet"
    ingest(uri, parquet, histories=True)
    again_s, again = best(lambda: read_runs(parquet, histories=True))
    assert again.table.equals(ours.table) and again.histories is not None and len(again.histories) == points
    rows.append(
        Row(what=f"Parquet re-read, {points:,} points", value=f"{again_s:.3f} s", target="< 0.1 s", good=again_s < 0.1)
    )

    rows += measure_big(folder, big, small_s=ours_s, small=small, bare_s=bare_s)
    return rows


def measure_big(folder: Path, big: int, *, small_s: float, small: int, bare_s: float) -> list[Row]:
    """The figures of the large store.

    The times asked for were set on a machine whose bare read of the small store takes ``REFERENCE_BARE_S``; on others
    the same demand is a multiple of the bare read beside it.
    """
    many = folder / f"use-{big}.db"
    shutil.copy(folder / f"{big}.db", many)
    rows: list[Row] = []
    bare_big_s, _ = best(lambda: len(bare_read(many)), 2)
    rows.append(Row(what=f"bare read, ADBC, {big:,} runs", value=f"{bare_big_s:.2f} s"))
    got = large(many)
    assert got["runs"] == big and got["points"] == big * len(METRICS) * STEPS
    fast = got["s"] <= BIG_S and got["gib"] < 1.3
    value = f"{got['s']:.2f} s, {got['gib']:.2f} GiB"
    rows.append(Row(what=f"SQL path, {big:,} runs", value=value, target=f"<= {BIG_S:g} s, < 1.3 GiB", good=fast))
    most = BIG_S / (REFERENCE_BARE_S * big / small)
    ratio = got["s"] / bare_big_s
    what = f"SQL path, {big:,} runs, beside the bare read"
    rows.append(Row(what=what, value=f"{ratio:.2f} x bare", target=f"<= {most:.2f} x", good=ratio <= most))
    growth = (got["s"] / small_s) / (big / small)
    rows.append(Row(what=f"growth from {small:,} to {big:,} runs, 1 = linear", value=f"{growth:.2f}"))
    cached = folder / "many.parquet"
    first_s, _ = best(lambda: ingest(f"sqlite:///{many}", cached, histories=True), 1)
    rows.append(Row(what=f"first ingest of {big:,} runs into Parquet", value=f"{first_s:.2f} s"))
    fill(many, 50, first=big)
    new_s, newer = best(lambda: ingest(f"sqlite:///{many}", cached, histories=True, load=False), 1)
    assert len(newer.table) == big + 50
    rows.append(
        Row(
            what=f"ingest again with 50 new runs of {big:,}", value=f"{new_s:.2f} s", target="< 0.5 s", good=new_s < 0.5
        )
    )
    most, ratio = 0.5 / REFERENCE_BARE_S, new_s / bare_s
    what = f"the same beside the bare read of {small:,} runs"
    rows.append(Row(what=what, value=f"{ratio:.2f} x bare", target=f"< {most:.2f} x", good=ratio < most))
    none_s, _ = best(lambda: ingest(f"sqlite:///{many}", cached, histories=True, load=False), 3)
    rows.append(Row(what="ingest again with nothing new", value=f"{none_s:.2f} s"))
    return rows


def main() -> None:
    """Parse options, measure, print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--quick", action="store_true", help="50 and 500 runs")
    parser.add_argument(
        "--calls", type=int, default=None, help="get_metric_history calls to time on the file; default all"
    )
    parser.add_argument("--server-calls", type=int, default=800, help="calls to time through the server")
    parser.add_argument("--folder", type=Path, help="keep the stores here, and use those that are here")
    parser.add_argument("--make", action="store_true", help="only make the stores in --folder")
    parser.add_argument("--json", action="store_true", help="rows as JSON")
    parser.add_argument("--large", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.large:
        measure_large(options.large)
        return
    sizes = (50, 500) if options.quick else (500, 5_000)
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.folder or Path(scratch)
        folder.mkdir(parents=True, exist_ok=True)
        if options.make:
            make(folder, *sizes)
            return
        for old in folder.glob("*.parquet*"):
            shutil.rmtree(old) if old.is_dir() else old.unlink()
        rows = measure(folder, *sizes, options.calls, options.server_calls)
    if options.json:
        print(json.dumps([{"what": r.what, "value": r.value, "target": r.target, "good": r.good} for r in rows]))
    else:
        print("| what | measured | target | |\n| --- | --- | --- | --- |")
        for row in rows:
            mark = {True: "reached", False: "MISSED", None: ""}[row.good]
            print(f"| {row.what} | {row.value} | {row.target} | {mark} |")
    raise SystemExit(0 if all(row.good is not False for row in rows) else 1)


if __name__ == "__main__":
    main()
