"""MLflow kept up to date while a sweep runs: by whoever waits for it, or by a watch that a submit leaves behind."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from scaling.cli import sweep as commands
from scaling.errors import ClusterError, StoreError
from scaling.record import EndRecord, RunFolder
from scaling.sweeps import launch, mirror
from scaling.sweeps.launch import LaunchReport
from scaling.sweeps.plan import Plan

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(
    ("executor", "jobs", "words", "left"),
    [("slurm", 2, [], 1), ("slurm", 0, [], 0), ("slurm", 2, ["--no-sync"], 0), ("local", 0, [], 0)],
)
def test_a_submit_to_slurm_leaves_a_watch_behind(
    make: Callable[..., Plan],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    executor: str,
    jobs: int,
    words: list[str],
    left: int,
) -> None:
    make()
    report = LaunchReport(sweep="toy", executor=executor, folder=tmp_path, jobs=jobs, runs=jobs)
    monkeypatch.setattr(launch, "launch", lambda *_, **__: report)
    started: list[list[str]] = []

    def detach(arguments: list[str], folder: Path) -> tuple[int, Path]:
        started.append(arguments)
        return 77, folder / "log"

    monkeypatch.setattr(mirror, "detach", detach)
    spec, out = str(tmp_path / "toy.yaml"), str(tmp_path / "runs")
    done = CliRunner().invoke(commands.app, ["submit", spec, "--out", out, "--yes", *words])
    assert done.exit_code == 0, done.output
    store = mirror.default_store(tmp_path / "runs")
    assert started == [["sweep", "watch", spec, "--out", out, "--store", store, "--mirror"]] * left
    assert ("process 77" in done.stderr) == bool(left)

    def broken(*_: Any) -> None:
        raise ClusterError("disk full")

    monkeypatch.setattr(mirror, "detach", broken)
    done = CliRunner().invoke(commands.app, ["submit", spec, "--out", out, "--yes", *words])
    assert done.exit_code == 0  # the jobs are submitted all the same
    assert ("not synced" in done.stderr and "disk full" in done.stderr) == bool(left)


@pytest.mark.slow
def test_it_ends_with_the_sweep_and_is_alone(make: Callable[..., Plan], tmp_path: Path) -> None:
    planned = make(grid={"seed": [0, 1]})
    for run in planned.runs:
        folder = RunFolder.create(planned.out, run.config)
        folder.finish(EndRecord(status="done", step=1, ended_ms=1, attempt=1))
    words = ["sweep", "watch", str(tmp_path / "toy.yaml"), "--out", str(planned.out), "--mirror"]
    command = [sys.executable, "-m", "scaling", *words, "--store", f"sqlite:///{tmp_path / 'mlflow.db'}"]
    with mirror.alone(planned):
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and "is syncing; wait for it" in done.stderr
    with mirror.alone(planned), pytest.raises(StoreError), mirror.alone(planned):
        pass
    subprocess.run(command, cwd=ROOT, check=True)
    connection = sqlite3.connect(tmp_path / "mlflow.db")
    assert connection.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone() == (3,)
    connection.close()


@pytest.mark.slow
def test_trouble_is_said_and_never_raised(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "mlflow.db").write_bytes(b"no database, but long enough to look like one" * 40)
    with mirror.synced(tmp_path / "runs", f"sqlite:///{tmp_path / 'mlflow.db'}"):
        pass
    assert "file is not a database" in caplog.text and "`scaling runs sync" in caplog.text
    with mirror.synced(tmp_path, None):
        pass


@pytest.mark.slow
def test_a_sweep_that_is_over_at_once_is_synced_all_the_same(make: Callable[..., Plan], tmp_path: Path) -> None:
    (run,) = make().runs
    with mirror.synced(tmp_path / "runs", f"sqlite:///{tmp_path / 'mlflow.db'}"):
        RunFolder.create(tmp_path / "runs", run.config).finish(EndRecord(status="done", step=1, ended_ms=1, attempt=1))
    connection = sqlite3.connect(tmp_path / "mlflow.db")
    assert connection.execute("SELECT count(*) FROM runs WHERE status = 'FINISHED'").fetchone() == (2,)
    connection.close()
