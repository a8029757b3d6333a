"""Status against a Slurm in memory: what is asked and how often, rows chosen, watching, telling, cancelling."""

from __future__ import annotations

import json
import os
import socket
import time
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import ConfigError, UsageError
from scaling.record import Attempt, RunFolder
from scaling.sweeps.cancel import cancel
from scaling.sweeps.notify import notify
from scaling.sweeps.status import choose, status
from scaling.sweeps.watch import PatientSlurm, Watch
from tests.sweeps.submitting import over, submitter


def test_cancel_is_one_scancel_of_this_sweep_only(make: Any, fake: Any) -> None:
    planned, other = make(grid={"seed": [0, 1, 2]}), make("other", grid={"lr": [0.5]})
    submitter(planned, fake).submit()
    submitter(other, fake).submit()
    fake.jobs.update({"100_[0-2]": ("PENDING", "x"), "101_0": ("RUNNING", "None")})
    rows = choose(status(planned, slurm=fake.slurm).runs, pattern="s1")
    done = cancel(planned, rows, fake.slurm, everything=False)
    assert len(done.jobs) == 1
    assert [command for command in fake.asked if command[0] == "scancel"] == [("scancel", *done.jobs)]


def test_cancel_names_runs_that_share_the_job(make: Any, fake: Any) -> None:
    planned = make(grid={"seed": [0, 1]}, resources={"runs_per_job": 2})
    submitter(planned, fake).submit()
    fake.jobs["100_0"] = ("PENDING", "x")
    rows = choose(status(planned, slurm=fake.slurm).runs, pattern="s1")
    with pytest.raises(UsageError, match=r"jobs 100_0 also hold the runs [0-9a-f]{16}"):
        cancel(planned, rows, fake.slurm, everything=False)


def test_status_asks_slurm_twice_at_most(make: Any, fake: Any) -> None:
    planned = make(grid={"seed": {"range": [0, 99]}})
    submitter(planned, fake).submit()
    fake.asked.clear()
    now = status(planned, slurm=fake.slurm)
    assert now.counts == {"unknown": 100}
    assert [command[0] for command in fake.asked] == ["squeue", "scontrol", "sacct"]


def test_tasks_that_were_cancelled_before_they_started(make: Any, fake: Any) -> None:
    planned = make(grid={"seed": [0, 1, 2]})
    submitter(planned, fake).submit()
    fake.accounting = False
    fake.jobs.update({"100_0": ("COMPLETED", "None"), "100": ("CANCELLED", "None")})  # one line for 1 and 2
    over(planned, planned.runs[0].key)
    assert status(planned, slurm=fake.slurm).counts == {"done": 1, "cancelled": 2}
    begun = RunFolder.create(planned.out, planned.runs[1].config)
    begun.begin(Attempt(attempt=1, pid=1, host="n", started_ms=2**42, resumed_from_step=0))
    assert status(planned, slurm=fake.slurm).counts == {"done": 1, "cancelled": 1, "unknown": 1}  # that one had started


def test_history_is_asked_by_job(make: Any, fake: Any) -> None:
    planned = make()
    submitter(planned, fake).submit()
    fake.asked.clear()
    fake.records.append(("100_[0]", "CANCELLED by 0", "0:0", "2026-01-01T00:00:00"))
    assert status(planned, slurm=fake.slurm).counts == {"cancelled": 1}
    (command,) = [command for command in fake.asked if command[0] == "sacct"]
    assert command[command.index("-j") + 1] == "100" and "-S" not in command  # -S hides what could never start


def test_status_without_accounting(make: Any, fake: Any) -> None:
    planned = make()
    submitter(planned, fake).submit()
    fake.accounting = False
    fake.jobs["100_0"] = ("FAILED", "NonZeroExitCode")
    (row,) = status(planned, slurm=fake.slurm).runs
    assert row.state.word == "failed:crash"
    assert all(command[0] != "sacct" for command in fake.asked)


def test_watch_polls_slurm_every_30_s_at_most_and_notifies(make: Any, fake: Any, tmp_path: Path) -> None:
    planned = make(grid={"seed": [0, 1]})
    submitter(planned, fake).submit()
    fake.jobs["100_[0-1]"] = ("PENDING", "x")
    fake.asked.clear()
    time_s = 0.0
    shown: list[Any] = []

    def sleep(total_s: float) -> None:
        nonlocal time_s
        time_s += total_s
        if time_s == 100:
            over(planned, planned.runs[0].key, "failed")
        if time_s == 200:
            over(planned, planned.runs[1].key)

    log = tmp_path / "told"
    command = f"sh -c 'echo \"$SWEEP_EVENT $SWEEP_RUNS\" >>{log}'"
    slurm = PatientSlurm(ask=fake.ask, user="me", clock_s=lambda: time_s)
    now = Watch(plan=planned, slurm=slurm, show=shown.append, command=command, sleep=sleep).run()
    assert now.over and not now.good
    asked = sum(command[0] == "squeue" for command in fake.asked)
    assert len(shown) == 41 and asked == 7  # 200 s at a look in 5 s and a query in 30 s
    assert log.read_text(encoding="utf-8").splitlines() == [f"failed {planned.runs[0].label}", "finished "]


def test_watch_does_not_ask_a_controller_that_is_away_more_often(make: Any, fake: Any) -> None:
    planned = make()
    submitter(planned, fake).submit()
    fake.asked.clear()
    fake.down = True
    time_s = 0.0

    def sleep(total_s: float) -> None:
        nonlocal time_s
        time_s += total_s
        if time_s == 200:
            over(planned, planned.runs[0].key)

    Watch(plan=planned, slurm=PatientSlurm(ask=fake.ask, user="me", clock_s=lambda: time_s), sleep=sleep).run()
    assert sum(command[0] == "squeue" for command in fake.asked) == 7


def test_notify_refuses_unknown_words_and_survives_a_bad_command(make: Any, fake: Any) -> None:
    now = status(make())
    with pytest.raises(ConfigError, match=r"allowed in braces: sweep, event, runs, summary"):
        notify("echo {nobody}", "finished", now)
    for command in ("echo {nobody}", "echo '", " ", "echo {sweep.x}"):
        with pytest.raises(ConfigError, match=r"give a command; allowed in braces"):
            Watch(plan=make(), slurm=fake.slurm, command=command).run()  # at once, not at the first failure
    assert notify("false", "finished", now) is False
    assert notify("no-such-command-here", "finished", now) is False


def test_choosing_rows(make: Any) -> None:
    planned = make(grid={"lr": [1e-3, 2e-3], "seed": [0, 1]})
    over(planned, planned.runs[0].key, "failed", kind="oom")
    rows = status(planned).runs
    assert len(choose(rows, states=["failed:oom"])) == 1 and len(choose(rows, states=["planned,failed"])) == 4
    assert len(choose(rows, pattern="lr0.001")) == 2 and len(choose(rows, pattern="*-s1")) == 2
    assert choose(rows, pattern=rows[1].run.key[:8]) == [rows[1]]
    assert [row.run.label for row in choose(rows, sort="label", reverse=True)][0].endswith("lr0.002-s1")
    with pytest.raises(UsageError, match=r"--state faled: no such state; did you mean 'failed'"):
        choose(rows, states=["faled"])
    with pytest.raises(UsageError, match=r"--sort lss: no such column; did you mean 'loss'"):
        choose(rows, sort="lss")


def test_a_local_pool_is_cancelled_whole_or_not_at_all(make: Any, fake: Any) -> None:
    planned = make(grid={"seed": [0, 1]})
    file = planned.sweep_folder / "local" / "x.json"
    file.parent.mkdir(parents=True)
    keys = [run.key for run in planned.runs]
    tree = {"pid": os.getpid(), "host": socket.gethostname(), "started_ms": time.time_ns() // 10**6, "keys": keys}
    file.write_text(json.dumps(tree), encoding="utf-8")
    rows = choose(status(planned).runs, pattern="s1")
    with pytest.raises(UsageError, match=r"process \d+ here trains .*cancel the whole sweep"):
        cancel(planned, rows, fake.slurm, everything=False)
    file.write_text(json.dumps({**tree, "started_ms": 1}), encoding="utf-8")  # its process id has been used again
    cancel(planned, rows, fake.slurm, everything=False)
    assert not file.exists()
