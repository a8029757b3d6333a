"""The local pool with a stand-in trainer: isolation of crashes, resuming, signals, packing, detaching."""

from __future__ import annotations

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import UsageError
from scaling.record import RunFolder
from scaling.sweeps import local
from scaling.sweeps.display import number, span
from scaling.sweeps.glance import glance
from scaling.sweeps.local import pools, run_local, visible_gpus
from scaling.sweeps.logs import log_of
from scaling.sweeps.pool import Pool
from scaling.sweeps.status import held, status

TOY = "toy_trainer:train"


def test_every_run_ends_whatever_its_neighbours_do(make: Any, toy: Any) -> None:
    planned = make(grid={"seed": {"range": [0, 5]}})
    labels = [run.label for run in planned.runs]
    toy(**dict(zip(labels, ["crash", "kill", "diverge", "oom"], strict=False)))
    report = run_local(planned, workers=2, trainer=TOY)
    assert report.count("failed") == 3 and report.count("diverged") == 1 and report.count("done") == 2
    assert not report.complete and report.stopped_by is None
    now = status(planned)
    words = {row.run.label: row.state.word for row in now.runs}
    assert [words[label] for label in labels[:4]] == ["failed:crash", "failed:crash", "diverged", "failed:oom"]
    killed = next(row for row in now.runs if row.run.label == labels[1])
    assert "SIGKILL" in killed.state.reason
    crashed = next(row for row in now.runs if row.run.label == labels[0])
    log = log_of(planned, crashed)
    assert log.error == "RuntimeError: the toy broke" and "toy run" in log.tail(100)
    again = run_local(planned, workers=2, trainer=TOY)
    assert len(again.already) == 6 and not again.outcomes


@pytest.mark.parametrize("debug", [False, True])
def test_what_a_user_can_cause_is_one_line_of_the_log(
    debug: bool, make: Any, toy: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """Such as a process that was lost; its traceback only where debugging was asked for."""
    planned = make()
    toy(**{planned.runs[0].label: "lost"})
    with caplog.at_level(logging.DEBUG if debug else logging.INFO):
        assert run_local(planned, trainer=TOY).count("failed") == 1
    now = status(planned)
    log = log_of(planned, now.runs[0])
    lines = log.tail(100).splitlines()
    assert now.runs[0].state.reason == "rank 0 of 2 ends: another process of the run was lost"
    assert log.error == f"error: {now.runs[0].state.reason}" and log.error in lines
    if debug:
        assert "Traceback (most recent call last):" in lines and "RuntimeError: gloo" in lines
    else:
        assert [line for line in lines if not line.startswith("toy run")] == [log.error]


def test_retry_goes_on_and_keeps_the_history(make: Any, toy: Any) -> None:
    planned = make(steps=6)
    toy(**{planned.runs[0].label: "kill"})
    run_local(planned, trainer=TOY)
    report = run_local(planned, retry=("failed",), trainer=TOY)
    assert report.complete
    folder = RunFolder(planned.out / planned.runs[0].key)
    attempts = folder.attempts()
    assert [item.resumed_from_step for item in attempts] == [0, 1]
    assert (folder.path / "end-0001.json").exists()
    assert [point.step for point in folder.points()] == [1, 2, 3, 4, 5, 6]


def test_interrupt_saves_and_the_next_call_goes_on(make: Any, toy: Any, caplog: pytest.LogCaptureFixture) -> None:
    planned = make(steps=30, grid={"seed": [0, 1]})
    toy(**{run.label: "slow" for run in planned.runs})

    def interrupt() -> None:
        end_s = time.monotonic() + 20
        while time.monotonic() < end_s and not list(planned.out.glob("*/metrics-0001.jsonl")):
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    report = run_local(planned, workers=1, trainer=TOY)
    thread.join()
    assert report.stopped_by == "SIGINT"
    assert "SIGINT: 1 runs save their state and leave, at most 60 s; Ctrl-C again" in caplog.text
    assert sorted(outcome.outcome for outcome in report.outcomes.values()) == ["interrupted", "waiting"]
    assert status(planned).counts == {"planned": 2}
    assert not any(held(planned.out / run.key, time.time()) for run in planned.runs)
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    toy()
    assert run_local(planned, workers=2, trainer=TOY).complete
    for run in planned.runs:
        steps = [point.step for point in RunFolder(planned.out / run.key).points()]
        assert steps == list(range(1, 31))


def test_no_worker_outlives_a_killed_pool(make: Any, toy: Any, tmp_path: Path) -> None:
    planned = make(steps=3)
    toy(**{planned.runs[0].label: "stuck"})
    code = (
        "from pathlib import Path; from scaling.sweeps.spec import load_spec; from scaling.sweeps.plan import plan;"
        "from scaling.sweeps.local import run_local;"
        f"run_local(plan(load_spec({str(tmp_path / 'toy.yaml')!r}), Path({str(planned.out)!r})), trainer={TOY!r})"
    )
    pool = subprocess.Popen([sys.executable, "-c", code])
    folder = RunFolder(planned.out / planned.runs[0].key)
    end_s = time.monotonic() + 20
    while not folder.attempts():
        assert time.monotonic() < end_s
        time.sleep(0.05)
    worker = folder.attempts()[0].pid
    assert [tree["pid"] for tree in pools(planned.sweep_folder)] == [pool.pid]
    pool.kill()
    pool.wait()
    while (
        Path(f"/proc/{worker}").exists() and "Z" not in Path(f"/proc/{worker}/stat").read_text().rpartition(")")[2][:3]
    ):
        assert time.monotonic() < end_s, "the worker goes on"
        time.sleep(0.05)
    assert pools(planned.sweep_folder) == []


def test_places_are_gpus_times_packing(make: Any, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,5")
    assert visible_gpus() == ["3", "5"]
    planned = make(
        grid={"seed": {"range": [0, 3]}}, resources={"gpus": 1, "runs_per_gpu": 2}, settings=("run.device=auto",)
    )
    seen: list[Any] = []

    class Spy(Pool):
        def run(self, requests: Any) -> Any:
            seen.extend(slot["CUDA_VISIBLE_DEVICES"] for slot in self.slots)
            return {}

    monkeypatch.setattr(local, "Pool", Spy)
    run_local(planned, trainer=TOY)
    assert seen == ["3", "5", "3", "5"]
    wide = make("wide", resources={"gpus": 4}, settings=("run.device=auto", "run.parallel=ddp"))
    with pytest.raises(UsageError, match=r"a run asks for 4 GPUs, this machine has 2"):
        run_local(wide, trainer=TOY)


def test_glance_reads_only_the_end_of_a_long_journal(make: Any, tmp_path: Path) -> None:
    from scaling.record import Attempt

    planned = make()
    folder = RunFolder.create(planned.out, planned.runs[0].config)
    folder.begin(Attempt(attempt=1, host="h", pid=1, started_ms=5))
    lines = [json.dumps({"step": s, "time_ms": s, "metrics": {"train/loss": 1 / s}}) for s in range(1, 5001)]
    folder.journal(1).write_text("\n".join(lines) + '\n{"step": 50', encoding="utf-8")  # a torn last line
    seen = glance(folder.path)
    assert (seen.step, seen.attempts, seen.loss) == (5000, 1, 1 / 5000)
    assert glance(tmp_path / "nothing").step is None


def test_units() -> None:
    assert [number(value) for value in (0, 12, 1234, 5.6e6, 7e9, 8e12, 9e17)] == [
        "0",
        "12",
        "1.2k",
        "5.6M",
        "7B",
        "8T",
        "9.0e+17",
    ]
    assert [span(value) for value in (None, 5, 65, 3700)] == ["", "5s", "1m05s", "1h01m"]


def scaling(*words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "SCALING_SITE": "", "XDG_CONFIG_HOME": str(cwd)}
    return subprocess.run(
        [sys.executable, "-m", "scaling", "sweep", *words],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )


def test_commands(make: Any, toy: Any, tmp_path: Path) -> None:
    planned = make(grid={"seed": [0, 1]})
    toy(**{planned.runs[1].label: "crash"})
    run_local(planned, trainer=TOY)
    spec, out = str(tmp_path / "toy.yaml"), ("--out", str(planned.out))
    plan = scaling("plan", spec, *out, "--json", cwd=tmp_path)
    tree = json.loads(plan.stdout)
    assert plan.returncode == 0 and tree["counts"] == {"done": 1, "failed": 1} and tree["to_train"] == 1
    status_ = scaling("status", spec, *out, "--json", "--state", "failed", cwd=tmp_path)
    rows = json.loads(status_.stdout)["runs"]
    assert status_.returncode == 1 and [row["kind"] for row in rows] == ["crash"]
    text = scaling("status", spec, *out, cwd=tmp_path)
    assert "failed:crash" in text.stdout and "RuntimeError: the toy broke" in text.stdout
    logs = scaling("logs", spec, *out, "--state", "failed", cwd=tmp_path)
    assert "first error: RuntimeError: the toy broke" in logs.stdout
    wrong = scaling("status", spec, *out, "--state", "faild", cwd=tmp_path)
    assert wrong.returncode == 2 and wrong.stderr.startswith(
        "error: --state faild: no such state; did you mean 'failed'?"
    )
    assert wrong.stdout == "" and "Traceback" not in wrong.stderr
    missing = scaling("plan", "no_such.yaml", cwd=tmp_path)
    assert missing.returncode == 2 and "neither a file nor a preset" in missing.stderr
    nobody = scaling("cancel", spec, *out, cwd=tmp_path)
    assert nobody.returncode == 0 and "cancelled 0 jobs" in nobody.stdout
