"""Syncing into real MLflow servers that die, hang, refuse and come back; nothing is lost, doubled, or waited for."""

from __future__ import annotations

import json
import os
import shutil
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from scaling.analysis.ingest import read_runs
from scaling.record import RunFolder, append_line
from scaling.tracking import sync
from scaling.tracking.server import free_port
from tests.conftest import missing
from tests.tracking.folders import START_MS, awkward, begin, finish, make_config, make_run, write_points
from tests.tracking.servers import MlflowServer, Proxy, silent_port, wait_until

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def count(store: Path, query: str, *values: Any) -> int:
    connection = sqlite3.connect(store, timeout=30)
    try:
        return int(connection.execute(query, values).fetchone()[0])
    finally:
        connection.close()


RUNS = (
    "SELECT count(*) FROM runs r JOIN experiments e USING (experiment_id) JOIN tags t USING (run_uuid) "
    "WHERE e.name = ? AND t.key = 'kind' AND t.value = 'run' AND r.lifecycle_stage = 'active'"
)
POINTS = (
    "SELECT count(*) FROM metrics m JOIN runs r USING (run_uuid) JOIN experiments e USING (experiment_id) "
    "WHERE e.name = ? AND m.key = 'train/loss'"
)


def test_folders_server_and_database_give_the_same(tmp_path: Path, server: MlflowServer, store: Path) -> None:
    awkward(tmp_path / "runs")
    assert sync(tmp_path / "runs", store_uri=server.url, experiment="equal").ok
    assert sync(tmp_path / "runs", store_uri=server.url, experiment="equal").points == 0
    options: Any = {"histories": True, "keep": ["all"]}
    folders = read_runs(tmp_path / "runs", **options)
    for source in (server.url, f"sqlite:///{store}"):
        got = read_runs(source, sweep="equal", **options)
        pd.testing.assert_frame_equal(got.table, folders.table)
        assert got.histories is not None and folders.histories is not None
        pd.testing.assert_frame_equal(got.histories, folders.histories)
    where = "method == 'mhar' and val_loss < 9 and lr == 1e-3"
    assert sorted(read_runs(server.url, sweep="equal", where=where).table["seed"]) == [1, 2]


def test_full_pages_of_the_bulk_end_point_are_asked_for_again(
    tmp_path: Path, server: MlflowServer, store: Path
) -> None:
    out = tmp_path / "runs"
    for seed in range(3):
        make_run(out, seed=seed)
    ids = list(sync(out, store_uri=f"sqlite:///{store}", experiment="pages").run_ids.values())
    connection = sqlite3.connect(store)
    insert = "INSERT INTO metrics (key, value, timestamp, run_uuid, step, is_nan) VALUES ('long', ?, ?, ?, ?, 0)"
    latest = insert.replace("INTO metrics", "INTO latest_metrics")
    for run, points in zip(ids, (60_000, 9_000, 20_000), strict=True):
        rows = [(i / 7, START_MS + i, run, i) for i in range(points)]
        connection.executemany(insert, rows)
        # The shortest looks like the longest, so that the first guess of how many runs fit a page is wrong.
        connection.execute(latest, (0.0, START_MS, run, 99_999 if points == 9_000 else points))
    connection.commit()
    connection.close()
    got = read_runs(server.url, sweep="pages", histories=["long"]).histories
    expected = read_runs(f"sqlite:///{store}", sweep="pages", histories=["long"]).histories
    assert got is not None and expected is not None and len(got) == 89_000
    pd.testing.assert_frame_equal(got, expected)


def test_awkward_texts_and_artifacts_reach_a_server(tmp_path: Path, server: MlflowServer, store: Path) -> None:
    text = 'it\'s "quoted"\nnew line; naïve 語 💡 \\ %'
    make_run(tmp_path / "runs", sweep=text, name="x" * 10_000)
    for _ in range(2):
        report = sync(tmp_path / "runs", store_uri=server.url, experiment="texts")
        assert report.ok, report.problems
    assert count(store, RUNS, "texts") == 1
    (run_id,) = report.run_ids.values()
    files = store.parent.glob(f"artifacts/**/{run_id}/artifacts/*")
    assert sorted(path.name for path in files) == ["attempts.jsonl", "config.json", "config.yaml", "end.json"]


def test_a_resume_on_a_server_sends_equal_values_once(tmp_path: Path, server: MlflowServer) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    write_points(folder, 1, range(0, 60, 10))
    sync(out, store_uri=server.url, experiment="resume")
    begin(folder, attempt=2, resumed=30)
    append_line(folder.journal(2), {"step": 40, "time_ms": START_MS + 99_000, "metrics": {"train/loss": 9.0}})
    write_points(folder, 2, range(50, 101, 10))
    finish(folder, attempt=2)
    report = sync(out, store_uri=server.url, experiment="resume")
    assert report.doubled == 1  # step 40, measured anew with another value
    for source in (server.url, out):
        points = read_runs(source, sweep="resume" if source != out else None, histories=["train/loss"]).histories
        assert points is not None
        assert points["step"].tolist() == list(range(0, 101, 10))
        assert points.loc[points["step"] == 40, "value"].tolist() == [9.0]


def test_a_run_deleted_in_the_ui_is_left_alone(tmp_path: Path, server: MlflowServer, store: Path) -> None:
    from scaling.tracking.rest import RestStore

    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    write_points(folder, 1, [0])
    (run_id,) = sync(out, store_uri=server.url, experiment="deleted").run_ids.values()
    RestStore(server.url, timeout_s=20).delete(run_id)
    write_points(folder, 1, [10])
    report = sync(out, store_uri=server.url, experiment="deleted")
    assert report.ok and report.deleted == 1 and count(store, RUNS, "deleted") == 0


def test_errors_of_the_server_are_recovered_by_the_next_sync(tmp_path: Path, proxy: Proxy, store: Path) -> None:
    out = tmp_path / "runs"
    make_run(out)
    proxy.fault = lambda path: (0.0, 0.0, 500)
    report = sync(out, store_uri=proxy.url, experiment="errors")
    assert not report.ok and "answered 500 (broken); nothing is lost" in report.unavailable
    proxy.fault = lambda path: (0.0, 0.0, 500 if "log-batch" in path else 0)
    assert not sync(out, store_uri=proxy.url, experiment="errors").ok
    proxy.fault = lambda path: (0.0, 0.0, 400 if "log-batch" in path else 0)
    report = sync(out, store_uri=proxy.url, experiment="errors")
    assert not report.ok and "answered 400" in report.problems[0].reason
    proxy.fault = lambda path: (0.0, 0.0, 0)
    assert sync(out, store_uri=proxy.url, experiment="errors").ok
    assert count(store, RUNS, "errors") == 1 and count(store, POINTS, "errors") == 11


@pytest.mark.parametrize("late", ["answer", "work"])
def test_a_create_that_was_never_answered_makes_one_run(tmp_path: Path, proxy: Proxy, store: Path, late: str) -> None:
    """The server makes the run but answers after 60 s; or it is stalled and makes the run later still."""
    name = f"unanswered {late}"
    out = tmp_path / "runs"
    make_run(out, sweep=None)
    delay = (0.0, 60.0, 0) if late == "answer" else (4.0, 0.0, 0)
    proxy.fault = lambda path: delay if "runs/create" in path else (0.0, 0.0, 0)
    started_s = time.monotonic()
    report = sync(out, store_uri=proxy.url, experiment=name, timeout_s=1.0)
    assert "no answer within 1 s" in report.unavailable and time.monotonic() - started_s < 20
    proxy.fault = lambda path: (0.0, 0.0, 0)
    assert sync(out, store_uri=proxy.url, experiment=name).ok
    wait_until(lambda: count(store, RUNS, name) == (1 if late == "answer" else 2), 30)
    assert sync(out, store_uri=proxy.url, experiment=name).ok
    assert count(store, RUNS, name) == 1 and count(store, POINTS, name) == 11


def test_a_server_that_was_never_there_or_says_nothing(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    make_run(out)
    started_s = time.monotonic()
    report = sync(out, store_uri=f"http://127.0.0.1:{free_port()}")
    assert "cannot be reached (connection refused)" in report.unavailable
    listener, port = silent_port()
    report = sync(out, store_uri=f"http://127.0.0.1:{port}", timeout_s=1.0)
    assert "no answer within 1 s" in report.unavailable
    assert time.monotonic() - started_s < 15
    listener.close()


def test_killed_in_the_middle_of_eight_trainings(tmp_path: Path, empty_database: Path) -> None:
    shutil.copy(empty_database, tmp_path / "mlflow.db")
    server = MlflowServer(f"sqlite:///{tmp_path / 'mlflow.db'}", tmp_path).start()
    out = tmp_path / "runs"
    out.mkdir()
    stop = threading.Event()
    options: Any = {"store_uri": server.url, "follow": True, "interval_s": 0.5, "timeout_s": 3.0, "stop": stop}
    follower = threading.Thread(target=lambda: sync(out, **options))
    follower.start()
    steps = 120
    script = [sys.executable, "-m", "tests.tracking.training", str(out)]
    trainings = [
        subprocess.Popen([*script, str(seed), str(steps), "0.1"], stdout=subprocess.PIPE, text=True, cwd=ROOT)
        for seed in range(8)
    ]
    try:
        wait_until(lambda: count(tmp_path / "mlflow.db", POINTS, "tiny") > 50, 60)
        server.kill()
        longest_s = [float(training.communicate(timeout=120)[0]) for training in trainings]
        assert all(training.returncode == 0 for training in trainings)
        assert max(longest_s) < 5.0  # a step's writing: the disk, never the server
        server.start()
        done = RUNS.replace("AND r.life", "AND r.status = 'FINISHED' AND r.life")
        wait_until(lambda: count(tmp_path / "mlflow.db", done, "tiny") == 8, 120)
    finally:
        stop.set()
        follower.join(60)
        server.kill()
    assert count(tmp_path / "mlflow.db", RUNS, "tiny") == 8
    assert count(tmp_path / "mlflow.db", POINTS, "tiny") == 8 * steps
    assert count(tmp_path / "mlflow.db", "SELECT count(*) FROM runs WHERE status = 'RUNNING'") == 0


def test_the_server_answers_to_its_names_and_to_no_others(server: MlflowServer) -> None:
    import requests

    def status(host: str) -> int:
        url = f"{server.url}/api/2.0/mlflow/experiments/search?max_results=1"
        return requests.get(url, headers={"Host": host}, timeout=20).status_code

    assert status("node-7") == status(f"node-7:{server.port}") == status("localhost") == 200
    assert status("evil.example.org") == 403


def test_pool_of_the_server_outlasts_64_writers_at_once(tmp_path: Path, server: MlflowServer, store: Path) -> None:
    """Sixty-four clients at the same moment: with its default pool MLflow answers 400 to a part of them."""
    from scaling.tracking.rest import RestStore
    from scaling.tracking.store import Sample

    first = RestStore(server.url, timeout_s=60)
    experiment = first.experiment("burst")
    runs = [first.create(experiment, name=str(i), started_ms=START_MS, tags={"kind": "run"}) for i in range(64)]
    failures: list[BaseException] = []
    ready = threading.Barrier(64)

    def write(run: str) -> None:
        try:
            own = RestStore(server.url, timeout_s=120, tries=1)
            ready.wait()
            for part in range(2):
                samples = [Sample("train/loss", float(i), START_MS + i, 50 * part + i) for i in range(50)]
                own.log(run, samples=samples)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=write, args=(run,)) for run in runs]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures[0]
    assert count(store, POINTS, "burst") == 64 * 100


def test_sixty_four_trainings_one_syncer_no_row_lost(tmp_path: Path, database: Path) -> None:
    out = tmp_path / "runs"
    out.mkdir()
    stop = threading.Event()
    options: Any = {"store_uri": f"sqlite:///{database}", "follow": True, "interval_s": 0.5, "stop": stop}
    reports: list[Any] = []
    follower = threading.Thread(target=lambda: reports.append(sync(out, **options)))
    follower.start()
    # Eight processes of eight trainings each, so that a small machine can start them together.
    code = (
        "import sys, threading; from pathlib import Path; from tests.tracking.training import main\n"
        "seeds = range(int(sys.argv[2]), int(sys.argv[2]) + 8)\n"
        "threads = [threading.Thread(target=main, args=(Path(sys.argv[1]), s, 40, 0.02)) for s in seeds]\n"
        "[t.start() for t in threads]; [t.join() for t in threads]"
    )
    workers = [subprocess.Popen([sys.executable, "-c", code, str(out), str(8 * i)], cwd=ROOT) for i in range(8)]
    assert [worker.wait(120) for worker in workers] == [0] * 8
    stop.set()
    follower.join(240)
    assert reports and reports[0].ok, reports
    assert count(database, RUNS, "tiny") == 64
    assert count(database, POINTS, "tiny") == 64 * 40
    assert count(database, "SELECT count(*) FROM runs WHERE status != 'FINISHED'") == 0


def test_a_full_disk_loses_nothing(tmp_path: Path, empty_database: Path) -> None:
    """A real one: a file system of 1.6 MB that grows when it was full."""
    small = tmp_path / "small"
    small.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=1600k", "none", str(small)]
    if os.geteuid() != 0 or subprocess.run(command, capture_output=True).returncode:
        missing("the right to mount a small file system (root, and mount of tmpfs)")
    try:
        shutil.copy(empty_database, small / "mlflow.db")
        out = tmp_path / "runs"
        for seed in range(6):
            make_run(out, seed=seed, steps=2000, metrics=8)
        uri = f"sqlite:///{small / 'mlflow.db'}"
        report = sync(out, store_uri=uri, state_folder=tmp_path / "state")
        assert not report.ok and "full" in report.unavailable
        subprocess.run(["mount", "-o", "remount,size=64m", str(small)], check=True)
        assert sync(out, store_uri=uri, state_folder=tmp_path / "state").ok
        assert count(small / "mlflow.db", POINTS, "tiny") == 6 * 201
    finally:
        subprocess.run(["umount", str(small)], check=False)


def test_a_folder_of_a_thousand_runs(empty_database: Path) -> None:
    memory = Path("/dev/shm")  # spares 5,000 waits for a disk, which are not what is tested
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:
        shutil.copy(empty_database, Path(folder) / "mlflow.db")
        sync_a_thousand(Path(folder) / "runs", Path(folder) / "mlflow.db")


def sync_a_thousand(out: Path, database: Path) -> None:
    for seed in range(1000):
        make_run(out, seed=seed, steps=10, fingerprint=None)
    report = sync(out, store_uri=f"sqlite:///{database}")
    assert report.ok and report.created == 1000
    started_s = time.monotonic()
    assert sync(out, store_uri=f"sqlite:///{database}").points == 0
    assert time.monotonic() - started_s < 20.0  # one look at each folder
    assert len(read_runs(f"sqlite:///{database}").table) == 1000


def test_the_command_line_syncs_lists_and_ingests(tmp_path: Path, database: Path) -> None:
    for seed in range(3):
        make_run(tmp_path / "runs", seed=seed)
    store = f"sqlite:///{database}"

    def scaling(*arguments: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "scaling", "runs", *arguments]
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)

    done = scaling("sync", str(tmp_path / "runs"), "--store", store, "--json")
    assert done.returncode == 0 and json.loads(done.stdout)["created"] == 3, done.stderr
    done = scaling("list", store, "--sort", "-val_loss", "--json")
    losses = [run["val_loss"] for run in json.loads(done.stdout)["runs"]]
    assert losses == sorted(losses, reverse=True) and len(losses) == 3
    table = tmp_path / "runs.parquet"
    done = scaling("ingest", store, "--out", str(table), "--histories", "--json")
    assert json.loads(done.stdout)["n"] == 3, done.stderr
    done = scaling("list", str(table), "--where", "seed >= 1", "--show", "name,val_loss")
    assert done.stdout.count("50k-baseline") == 2
    done = scaling("list", str(table), "--sort", "val_los")
    assert done.returncode == 1 and "did you mean 'val_loss'" in done.stderr
    done = scaling("serve", "--store", store, "--host", "0.0.0.0")
    assert done.returncode == 2 and "is open to everybody" in done.stderr
