"""From run folders into a sqlite store: what MLflow shows; nothing lost, nothing doubled, sent again without effect."""

from __future__ import annotations

import os
import shutil
import socket
import sqlite3
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import RecordError, StoreError
from scaling.record import RunFolder, append_line
from scaling.tracking import sync
from tests.tracking.folders import START_MS, begin, finish, make_config, make_run, write_points


def uri(database: Path) -> str:
    return f"sqlite:///{database}"


def rows(sql: sqlite3.Connection, query: str) -> list[Any]:
    return sql.execute(query).fetchall()


def points(sql: sqlite3.Connection, name: str = "train/loss") -> list[tuple[int, float]]:
    return rows(sql, f"SELECT step, value FROM metrics WHERE key = '{name}' ORDER BY step, timestamp")


def test_a_run_is_shown_with_parent_tags_params_times_and_status(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    folder = make_run(tmp_path / "runs", method="mhar", seed=3)
    report = sync(tmp_path / "runs", store_uri=uri(database))
    assert report.ok and report.created == 1 and report.runs == 1
    run_id = report.run_ids[folder.key]
    assert rows(sql, f"SELECT name, status, start_time, end_time FROM runs WHERE run_uuid = '{run_id}'") == [
        ("50k-mhar-h4-kv1-lr0.001-s3", "FINISHED", START_MS, START_MS + 100_500)
    ]
    tags = dict(rows(sql, f"SELECT key, value FROM tags WHERE run_uuid = '{run_id}'"))
    expected = {
        "run_key": folder.key,
        "sweep": "tiny",
        "method": "mhar",
        "size": "50k",
        "heads": "4",
        "kv": "1",
        "lr": "0.001",
        "seed": "3",
        "status": "done",
        "attempts": "1",
        "host_kind": "cpu",
        "mlflow.source.git.commit": "0123abc",
    }
    assert {name: tags.get(name) for name in expected} == expected
    assert "scaling train config.yaml" in tags["mlflow.note.content"]
    params = dict(rows(sql, f"SELECT key, value FROM params WHERE run_uuid = '{run_id}'"))
    assert params["model.d_model"] == "48" and params["optimizer.lr"] == "0.001" and params["model.moe"] == "null"
    (parent,) = rows(sql, "SELECT r.run_uuid, r.name, r.status FROM runs r WHERE r.run_uuid != '" + run_id + "'")
    assert tags["mlflow.parentRunId"] == parent[0] and parent[1:] == ("tiny", "FINISHED")
    assert rows(sql, "SELECT name FROM experiments WHERE experiment_id > 0") == [("tiny",)]
    assert rows(sql, "SELECT name, digest FROM datasets") == [("tiny", "f" * 36)]
    artifacts = sorted(path.name for path in database.parent.glob(f"mlartifacts/*/{run_id}/artifacts/*"))
    assert artifacts == ["attempts.jsonl", "config.json", "config.yaml", "end.json"]


def test_metric_times_steps_and_final_values_are_the_journals(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    make_run(tmp_path / "runs")
    sync(tmp_path / "runs", store_uri=uri(database))
    times = rows(sql, "SELECT step, timestamp FROM metrics WHERE key = 'train/loss' ORDER BY step")
    assert times == [(step, START_MS + 1000 * step + 1) for step in range(0, 101, 10)]
    # The end record's val/loss is the journal's last: not written twice. Its other values are.
    assert len(points(sql, "val/loss")) == 11
    assert rows(sql, "SELECT step, timestamp, value FROM metrics WHERE key = 'perf/wall_time_s'") == [
        (100, START_MS + 100_500, 12.5)
    ]


def test_sending_again_changes_nothing_and_reads_only_what_is_new(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    write_points(folder, 1, range(0, 50, 10))
    assert sync(out, store_uri=uri(database)).points == 20
    assert sync(out, store_uri=uri(database)).points == 0
    write_points(folder, 1, range(50, 101, 10))
    assert sync(out, store_uri=uri(database)).points == 24
    assert rows(sql, "SELECT status FROM runs WHERE name LIKE '50k%'") == [("RUNNING",)]
    finish(folder)
    assert sync(out, store_uri=uri(database)).points == 7
    before = rows(sql, "SELECT * FROM metrics ORDER BY 1, 3")
    shutil.rmtree(out / ".tracking")  # all memory lost: everything is sent again, to the same run
    report = sync(out, store_uri=uri(database))
    assert report.created == 0 and report.points == 51
    assert rows(sql, "SELECT * FROM metrics ORDER BY 1, 3") == before
    assert rows(sql, "SELECT count(*) FROM runs") == [(2,)]


def test_a_resume_continues_the_run_and_drops_what_it_made_void(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    write_points(folder, 1, range(0, 60, 10))
    (run_id,) = sync(out, store_uri=uri(database)).run_ids.values()
    assert [step for step, _ in points(sql)] == [0, 10, 20, 30, 40, 50]
    begin(folder, attempt=2, resumed=30)
    sync(out, store_uri=uri(database))
    assert [step for step, _ in points(sql)] == [0, 10, 20, 30]
    assert rows(sql, "SELECT step FROM latest_metrics WHERE key = 'train/loss'") == [(30,)]
    append_line(folder.journal(2), {"step": 40, "time_ms": START_MS, "metrics": {"train/loss": 9.0}})
    write_points(folder, 2, range(50, 101, 10))
    finish(folder, attempt=2)
    report = sync(out, store_uri=uri(database))
    assert report.run_ids[folder.key] == run_id
    assert [step for step, _ in points(sql)] == list(range(0, 101, 10))
    assert dict(points(sql))[40] == 9.0
    assert points(sql) == [(p.step, p.metrics["train/loss"]) for p in folder.points()]
    # The same from nothing: the void points are never sent.
    shutil.rmtree(out / ".tracking")
    sync(out, store_uri=uri(database))
    assert points(sql) == [(p.step, p.metrics["train/loss"]) for p in folder.points()]


def test_a_void_tail_of_a_lost_state_is_dropped(tmp_path: Path, database: Path, sql: sqlite3.Connection) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    write_points(folder, 1, range(0, 60, 10))
    sync(out, store_uri=uri(database))
    shutil.rmtree(out / ".tracking")
    begin(folder, attempt=2, resumed=30)
    write_points(folder, 2, [40])
    sync(out, store_uri=uri(database))
    assert [step for step, _ in points(sql)] == [0, 10, 20, 30, 40]


def test_nan_and_infinity_are_kept(tmp_path: Path, database: Path, sql: sqlite3.Connection) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    for step, value in enumerate(("nan", "inf", "-inf", 1.0)):
        append_line(folder.journal(1), {"step": step, "time_ms": START_MS, "metrics": {"train/loss": value}})
    finish(folder, status="diverged", step=3)
    assert sync(out, store_uri=uri(database)).ok
    stored = rows(sql, "SELECT is_nan, value FROM metrics WHERE key = 'train/loss' ORDER BY step")
    assert stored == [(1, 0.0), (0, 1.7976931348623157e308), (0, -1.7976931348623157e308), (0, 1.0)]
    assert rows(sql, "SELECT status FROM runs WHERE name LIKE '50k%'") == [("FAILED",)]
    assert rows(sql, "SELECT is_nan FROM latest_metrics WHERE key = 'val/loss'") == [(1,)]


@pytest.mark.parametrize(
    ("answer", "status", "reason"),
    [
        (("CANCELLED by 1000", "", 1_790_000_777_000), "KILLED", "Slurm job 77: CANCELLED by 1000"),
        (("TIMEOUT", "TimeLimit", 1_790_000_777_000), "KILLED", "Slurm job 77: TIMEOUT (TimeLimit)"),
        (("NODE_FAIL", "None", 1_790_000_777_000), "FAILED", "Slurm job 77: NODE_FAIL"),
        (("COMPLETED", "", 1_790_000_777_000), "FAILED", "but the run left no end record"),
        (("RUNNING", "", None), "RUNNING", ""),
        (("PENDING", "Priority", None), "RUNNING", ""),
    ],
)
def test_a_dead_job_is_ended_with_its_reason_and_time(
    tmp_path: Path,
    database: Path,
    sql: sqlite3.Connection,
    answer: tuple[str, str, int | None],
    status: str,
    reason: str,
) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder, job_id="77", host="node-5")
    write_points(folder, 1, [0, 10])
    asked: list[str] = []

    def job_state(job: str) -> tuple[str, str, int | None]:
        asked.append(job)
        return answer

    sync(out, store_uri=uri(database), job_state=job_state)
    assert asked == ["77"]
    (found,) = rows(sql, "SELECT status, end_time FROM runs WHERE name LIKE '50k%'")
    assert found == (status, answer[2])
    tags = [tag[0] for tag in rows(sql, "SELECT value FROM tags WHERE key = 'reason'")]
    assert [reason in tag for tag in tags] == ([True] if reason else [])  # no empty tag on a run without one


def test_a_sweep_starts_with_its_first_run_whichever_is_sent_first(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    folders = [RunFolder.create(tmp_path / "runs", make_config(seed=seed)) for seed in range(3)]
    for i, folder in enumerate(sorted(folders, key=lambda one: one.key, reverse=True)):
        begin(folder, started_ms=START_MS + 60_000 * i)
        finish(folder, step=1_000)
    assert sync(tmp_path / "runs", store_uri=uri(database)).ok
    found = rows(sql, "SELECT start_time, end_time FROM runs WHERE name = 'tiny'")
    assert found == [(START_MS, START_MS + 1_000_500)]


def test_a_dead_local_process_is_ended_and_a_living_one_is_not(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    out = tmp_path / "runs"
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    now_ms = int(time.time() * 1000)
    for seed, pid in ((1, os.getpid()), (2, gone.pid)):
        folder = RunFolder.create(out, make_config(seed=seed))
        begin(folder, host=socket.gethostname(), pid=pid, started_ms=now_ms)
        write_points(folder, 1, [0])
    report = sync(out, store_uri=uri(database))
    assert report.running == 1
    found = dict(rows(sql, "SELECT name, status FROM runs WHERE name LIKE '50k%'"))
    assert {name[-2:]: status for name, status in found.items()} == {"s1": "RUNNING", "s2": "FAILED"}
    assert f"process {gone.pid} on" in rows(sql, "SELECT value FROM tags WHERE key = 'reason' AND value != ''")[0][0]
    # Tried again: the same run is RUNNING once more.
    begin(folder, attempt=2)
    sync(out, store_uri=uri(database))
    assert {status for _, status in rows(sql, "SELECT name, status FROM runs WHERE name LIKE '50k%'")} == {"RUNNING"}
    finish(folder, attempt=2)
    sync(out, store_uri=uri(database))
    assert rows(sql, "SELECT value FROM tags WHERE key = 'reason'") == [("",)]  # the earlier one did not stay


def test_a_deleted_run_is_left_alone_and_a_restored_one_goes_on(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    write_points(folder, 1, [0])
    (run_id,) = sync(out, store_uri=uri(database)).run_ids.values()
    sql.execute(f"UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = '{run_id}'")
    sql.commit()
    write_points(folder, 1, [10])
    report = sync(out, store_uri=uri(database))
    assert report.ok and report.deleted == 1 and report.created == 0
    assert rows(sql, "SELECT count(*) FROM runs") == [(2,)]
    assert [step for step, _ in points(sql)] == [0]
    sql.execute("UPDATE runs SET lifecycle_stage = 'active'")
    sql.commit()
    assert sync(out, store_uri=uri(database)).deleted == 0
    assert [step for step, _ in points(sql)] == [0, 10]


def test_a_removed_database_is_filled_again(tmp_path: Path, empty_database: Path, database: Path) -> None:
    out = tmp_path / "runs"
    make_run(out)
    assert sync(out, store_uri=uri(database)).points == 51
    shutil.copy(empty_database, database)
    report = sync(out, store_uri=uri(database))
    assert report.created == 1 and report.points == 51


def test_two_folders_of_one_run_are_refused(tmp_path: Path, database: Path) -> None:
    make_run(tmp_path / "a")
    make_run(tmp_path / "b")
    assert sync(tmp_path / "a", store_uri=uri(database)).ok
    report = sync(tmp_path / "b", store_uri=uri(database))
    assert "is already synced from" in report.problems[0].reason and "another experiment" in report.problems[0].reason
    shutil.rmtree(tmp_path / "a")  # moved, not copied: the run goes on
    assert sync(tmp_path / "b", store_uri=uri(database)).ok


def test_awkward_texts_survive(tmp_path: Path, database: Path, sql: sqlite3.Connection) -> None:
    text = 'it\'s "quoted"\nnew line; naïve 語 💡 \\ % DROP TABLE runs'
    long = "x" * 10_000
    out = tmp_path / "runs"
    make_run(out, seed=1, sweep=text, name=text)
    make_run(out, seed=2, sweep="long", name=long)
    report = sync(out, store_uri=uri(database))
    assert report.ok, report.problems
    params = rows(sql, "SELECT value FROM params WHERE key = 'run.name' ORDER BY length(value)")
    assert params[0] == (text,) and params[1][0] == "x" * 5_999 + "…"
    assert (text,) in rows(sql, "SELECT name FROM experiments")


def test_a_damaged_folder_does_not_stop_the_others(tmp_path: Path, database: Path) -> None:
    out = tmp_path / "runs"
    make_run(out, seed=1)
    broken = make_run(out, seed=2)
    (broken.path / "config.json").write_text('{"config": ')
    damaged = make_run(out, seed=3)
    (damaged.path / "end.json").write_text("{")
    report = sync(out, store_uri=uri(database))
    assert {problem.run for problem in report.problems} == {broken.key, damaged.key}
    assert report.updated == 1 and not report.ok


def test_a_held_lock_is_an_error_naming_its_holder(tmp_path: Path, database: Path) -> None:
    from scaling.tracking.state import single_writer, state_path

    out = tmp_path / "runs"
    make_run(out)
    path = state_path(out, uri(database), None).with_suffix(".lock")
    with single_writer(path, wait_s=0), pytest.raises(StoreError, match=r"process \d+ on .* is syncing; wait for it"):
        sync(out, store_uri=uri(database), lock_wait_s=0.1)


def test_following_sends_new_points_until_it_is_stopped(
    tmp_path: Path, database: Path, sql: sqlite3.Connection
) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    stop = threading.Event()
    seen: list[int] = []

    def on_round(report: Any) -> None:
        seen.append(report.points)
        if report.rounds < 4:
            write_points(folder, 1, [10 * report.rounds])
        else:
            stop.set()

    report = sync(out, store_uri=uri(database), follow=True, interval_s=0.01, stop=stop, on_round=on_round)
    assert seen == [0, 4, 8, 12, 12] and report.rounds == 5  # stopped: once more, then home
    assert [step for step, _ in points(sql)] == [10, 20, 30]


def test_statistics_are_made_for_the_query_planner(tmp_path: Path, database: Path, sql: sqlite3.Connection) -> None:
    make_run(tmp_path / "runs")
    sync(tmp_path / "runs", store_uri=uri(database))
    assert rows(sql, "SELECT count(*) > 0 FROM sqlite_stat1 WHERE tbl = 'metrics'") == [(1,)]


def test_wrong_addresses_and_folders_are_refused(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="is not an MLflow store; give sqlite:///PATH.db"):
        sync(tmp_path, store_uri="file:///tmp/mlruns")
    with pytest.raises(RecordError, match="no such folder of runs"):
        sync(tmp_path / "none", store_uri=uri(tmp_path / "mlflow.db"))


def test_importing_tracking_imports_no_mlflow() -> None:
    code = "import sys, scaling.tracking; assert not {'mlflow', 'pandas', 'numpy', 'torch'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.slow
def test_a_follower_beside_a_sweep_sends_all(tmp_path: Path, database: Path, sql: sqlite3.Connection) -> None:
    from scaling.tracking.follower import Follower

    out = tmp_path / "runs"
    with Follower(out, store_uri=uri(database), interval_s=0.2) as follower:
        make_run(out, seed=1)
        deadline_s = time.monotonic() + 60
        while not points(sql) and time.monotonic() < deadline_s:
            time.sleep(0.1)
        make_run(out, seed=2)
    assert len(points(sql)) == 22, follower.log.read_text()
