"""The job's side of a sweep, without Slurm: a task trains its runs, saves them, comes back, or gives up."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from scaling.record import RunFolder
from scaling.sweeps.array import arrays, manifest
from scaling.sweeps.plan import Plan
from scaling.sweeps.task import MANIFEST

Start = Callable[..., "subprocess.Popen[bytes]"]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Start:
    """Start the first task of a plan as Slurm would."""
    (tmp_path / "scontrol").write_text(f'#!/bin/sh\necho "$@" >>{tmp_path}/asked\n', encoding="utf-8")
    (tmp_path / "scontrol").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}{os.pathsep}{os.environ['PATH']}")

    def begin(planned: Plan, *, restarts: int = 0) -> subprocess.Popen[bytes]:
        (array,) = arrays(planned.runs)
        (tmp_path / MANIFEST).write_text(manifest(array, planned.out, "toy_trainer:train"), encoding="utf-8")
        environment = {**os.environ, "SLURM_ARRAY_TASK_ID": "0", "SLURM_ARRAY_JOB_ID": "7", "SLURM_JOB_ID": "9"}
        if restarts:
            environment["SLURM_RESTART_COUNT"] = str(restarts)
        command = [sys.executable, "-m", "scaling.sweeps.task", str(tmp_path)]
        with (tmp_path / "log").open("wb") as log:
            return subprocess.Popen(command, env=environment, stderr=log)

    return begin


def test_who_imports_the_job_still_ends_on_a_signal() -> None:
    """Submitting imports names of the job's module, whose handlers would swallow SIGTERM, in forked children too."""
    code = (
        "import scaling.sweeps.submit, signal\n"
        "assert [signal.getsignal(n) for n in (signal.SIGTERM, signal.SIGUSR2)] == [signal.SIG_DFL] * 2"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def begun(planned: Plan) -> RunFolder:
    folder = RunFolder(planned.out / planned.runs[0].key)
    end_s = time.monotonic() + 30
    while not folder.journal(1).exists():
        assert time.monotonic() < end_s, "the run did not begin"
        time.sleep(0.05)
    return folder


def test_task_trains_its_runs_and_a_second_start_leaves_at_once(
    make: Any, toy: Any, start: Start, tmp_path: Path
) -> None:
    toy()
    planned = make(grid={"seed": [0, 1, 2]}, resources={"runs_per_job": 3, "runs_per_gpu": 2})
    assert start(planned).wait(60) == 0
    assert all(RunFolder(planned.out / run.key).end() is not None for run in planned.runs)
    assert start(planned, restarts=1).wait(30) == 0
    assert "0 of 3 runs to train" in (tmp_path / "log").read_text(encoding="utf-8")
    assert all(len(RunFolder(planned.out / run.key).attempts()) == 1 for run in planned.runs)


def test_task_with_a_failed_run_trains_the_others_and_says_so(make: Any, toy: Any, start: Start) -> None:
    planned = make(grid={"seed": [0, 1]}, resources={"runs_per_job": 2})
    toy(**{planned.runs[0].label: "kill"})
    assert start(planned).wait(60) == 1
    records = [RunFolder(planned.out / run.key).end() for run in planned.runs]
    assert [record.status for record in records if record] == ["failed", "done"]


def test_usr2_saves_and_requeues_and_waits_for_its_end(make: Any, toy: Any, start: Start, tmp_path: Path) -> None:
    planned = make(steps=100)
    toy(**{planned.runs[0].label: "slow"})
    task = start(planned)
    folder = begun(planned)
    task.send_signal(signal.SIGUSR2)
    end_s = time.monotonic() + 30
    while not (tmp_path / "asked").exists():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    assert (tmp_path / "asked").read_text(encoding="utf-8") == "requeue 9\n"
    time.sleep(1.0)
    assert task.poll() is None and folder.end() is None  # a task that left would count as ended
    task.kill()
    task.wait()
    toy()
    assert start(planned, restarts=1).wait(60) == 0
    assert [point.step for point in folder.points()] == list(range(1, 101))


def test_sigterm_saves_and_does_not_requeue(make: Any, toy: Any, start: Start, tmp_path: Path) -> None:
    planned = make(steps=100)
    toy(**{planned.runs[0].label: "slow"})
    task = start(planned)
    begun(planned)
    task.send_signal(signal.SIGTERM)
    end_s = time.monotonic() + 30
    while "SIGTERM: 1 runs saved" not in (tmp_path / "log").read_text(encoding="utf-8"):
        assert time.monotonic() < end_s and task.poll() is None
        time.sleep(0.05)
    assert not (tmp_path / "asked").exists()
    task.kill()
    task.wait()


def test_requeues_are_bounded(make: Any, toy: Any, start: Start) -> None:
    toy()
    planned = make(resources={"max_requeues": 2})
    assert start(planned, restarts=3).wait(60) == 1
    record = RunFolder(planned.out / planned.runs[0].key).end()
    assert record is not None and record.details["kind"] == "timeout"
    assert record.reason == "started 3 times again without coming to its end"
