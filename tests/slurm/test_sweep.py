"""Runs on a real Slurm, to their end and through every fault of theirs that the docs list."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import threading
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scaling.record import RunFolder
from scaling.sweeps.cancel import cancel
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.logs import log_of
from scaling.sweeps.site import Site
from scaling.sweeps.slurm import Slurm
from scaling.sweeps.status import choose, status
from tests.slurm.sweeping import TOY, running, submitter


@pytest.fixture(scope="module", autouse=True)
def limited(make_in: Any, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """A run that needs longer than its time limit: it trains beside all other tests, the last one looks at it."""
    planned = make_in(
        tmp_path_factory.mktemp("limited"),
        "limited",
        steps=560,  # 112 s; the signal comes after 50 to 110 s of 2 minutes
        grid={"seed": [0]},
        resources={"time": 2, "sbatch": {"nodelist": "n3"}},
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOY", json.dumps({planned.runs[0].label: "slow"}))
        submitter(planned, trainer=TOY).submit()
    return planned


def test_24_real_trainings_to_their_end_within_the_throttle(make: Any, finish: Any, check_records: Any) -> None:
    planned = make(
        "main24",
        grid={"method": ["baseline", "mhar"], "lr": [1e-3, 3e-3], "seed": {"range": [0, 5]}},
        resources={"runs_per_job": 4},
        throttle=3,
    )
    assert len(planned.runs) == 24
    most, over = 0, threading.Event()
    begun_s = time.monotonic()
    report = submitter(planned).submit()
    assert time.monotonic() - begun_s < 10
    assert (report.runs, report.jobs, report.waiting) == (24, 6, 0)

    def count() -> None:
        nonlocal most
        while not over.wait(0.5):
            views = Slurm().queue([Ledger(planned.sweep_folder).job_names()[0]])
            most = max(most, sum(view.state == "RUNNING" for view in views.values()))

    watcher = threading.Thread(target=count)
    watcher.start()
    try:
        again = submitter(planned).submit()
        assert again.runs == 0 and again.skipped.get("planned", 0) == 0
        now = finish(planned, 150)
    finally:
        over.set()
        watcher.join()
    assert now.counts == {"done": 24}
    assert 1 <= most <= 3
    check_records(planned, now)
    losses = [row.look.loss for row in now.runs]
    assert all(loss is not None and 3 < loss < 5.6 for loss in losses) and len(set(losses)) == 24
    wider = make(
        "main24",
        grid={"method": ["baseline", "mhar"], "lr": [1e-3, 3e-3], "seed": {"range": [0, 6]}},
        resources={"runs_per_job": 4},
    )
    report = submitter(wider).submit()
    assert (report.runs, report.jobs, report.skipped) == (4, 1, {"done": 24})
    assert finish(wider).counts == {"done": 28}
    assert submitter(wider).submit().runs == 0


def test_killed_worker_is_a_crash_and_a_retry_goes_on_from_its_checkpoint(
    make: Any, wait: Any, finish: Any, check_records: Any
) -> None:
    planned = make("killed", steps=300, grid={"seed": [0]})
    submitter(planned).submit()
    wait(running(planned, step=30), 60, "30 steps")
    folder = RunFolder(planned.out / planned.runs[0].key)
    os.kill(folder.attempts()[-1].pid, signal.SIGKILL)
    now = finish(planned, 60)
    (row,) = now.runs
    assert row.state.word == "failed:crash" and "SIGKILL" in row.state.reason
    assert submitter(planned).submit().runs == 0  # a failure is not tried again by itself
    assert submitter(planned, retry=("failed",)).submit().runs == 1
    now = finish(planned, 90)
    assert now.counts == {"done": 1}
    check_records(planned, now)
    attempts = folder.attempts()
    assert len(attempts) == 2 and attempts[1].resumed_from_step >= 10
    assert (folder.path / "end-0001.json").exists()  # the history is kept


def test_cancelling_a_part_leaves_the_rest(
    make: Any, wait: Any, finish: Any, toy: Any, check_records: Any, cluster: Any
) -> None:
    planned = make("part", steps=100, grid={"lr": [1e-3, 2e-3], "seed": [0, 1]})
    toy(**{run.label: "slow" for run in planned.runs})
    other = make("other", steps=30, grid={"seed": [9]})
    submitter(planned, trainer=TOY).submit()
    submitter(other, trainer=TOY).submit()
    wait(running(planned), 60, "a step of each")
    now = status(planned)
    done = cancel(planned, choose(now.runs, pattern="lr0.002"), Slurm(), everything=False)
    assert len(done.jobs) == 2 and len(done.runs) == 2
    now = finish(planned, 60)
    assert now.counts == {"done": 2, "cancelled": 2}
    cancelled = [row for row in now.runs if row.state.state == "cancelled"]
    assert {row.run.config.optimizer.lr for row in cancelled} == {2e-3}
    assert all(row.state.slurm == "CANCELLED" for row in cancelled)
    assert finish(other, 60).counts == {"done": 1}
    assert submitter(planned, trainer=TOY, retry=("cancelled",)).submit().runs == 2
    now = finish(planned, 60)
    assert now.counts == {"done": 4}


def test_preempted_run_saves_itself_and_comes_back(
    make: Any, wait: Any, finish: Any, check_records: Any, cluster: Any
) -> None:
    planned = make(
        "preempted", steps=400, grid={"seed": [0]}, resources={"memory": "3500M", "sbatch": {"nodelist": "n4"}}
    )
    submitter(planned, site=Site(partition="scavenge")).submit()
    wait(running(planned, step=30), 60, "30 steps")
    (first,) = Ledger(planned.sweep_folder).jobs().values()
    before = RunFolder(planned.out / planned.runs[0].key).attempts()
    high = cluster.run("sbatch", "--parsable", "--mem=3500", "-w", "n4", "-o", "/dev/null", "--wrap", "sleep 3").strip()
    requeued = wait(lambda: [r for r in status(planned).runs if r.state.state == "requeued"], 60, "the requeue")
    assert requeued[0].state.slurm in ("PENDING", "PREEMPTED", "REQUEUED")
    now = finish(planned, 120)
    assert now.counts == {"done": 1}
    check_records(planned, now)
    folder = RunFolder(planned.out / planned.runs[0].key)
    attempts = folder.attempts()
    assert len(attempts) == 2 and attempts[1].restart_count == 1 and attempts[1].job_id == before[0].job_id
    reached = max(point.step for point in folder.points() if point.attempt == 1)
    assert attempts[1].resumed_from_step >= reached  # nothing was lost: it saved itself on SIGTERM
    assert Ledger(planned.sweep_folder).jobs()[planned.runs[0].key] == first
    cluster.run("scancel", high, check=False)


def test_lost_node_and_its_twin_leave_one_record(
    make: Any, wait: Any, finish: Any, toy: Any, check_records: Any, cluster: Any
) -> None:
    planned = make("lost", steps=200, grid={"seed": [0]}, resources={"sbatch": {"exclude": "n[3-4]"}})
    toy(**{planned.runs[0].label: "slow"})  # 40 s: longer than Slurm takes to give the node up
    submitter(planned, trainer=TOY).submit()
    wait(running(planned, step=3), 60, "3 steps")
    (job, _), = Ledger(planned.sweep_folder).jobs().values()  # fmt: skip
    node = Slurm().queue(Ledger(planned.sweep_folder).job_names())[job].node
    cluster.lose_node(node)
    views = wait(
        lambda: [
            v
            for v in Slurm().queue(Ledger(planned.sweep_folder).job_names()).values()
            if v.state == "RUNNING" and v.node not in ("", node)
        ],
        90,
        "the twin on the other node",
    )
    assert views
    word = status(planned).runs[0].state.word
    assert word in ("running", "done")
    now = finish(planned, 120)
    cluster.start_node(node)
    assert now.counts == {"done": 1}
    check_records(planned, now)
    wait(lambda: node in cluster.run("sinfo", "-h", "-N", "-t", "idle,mix", "-o", "%N"), 60, "the node's return")


def started(planned: Any, times: int) -> bool:
    return len(RunFolder(planned.out / planned.runs[0].key).attempts()) == times


def test_bounded_requeues_end_as_timeout(make: Any, wait: Any, finish: Any, toy: Any, cluster: Any) -> None:
    planned = make("bounded", steps=1000, grid={"seed": [0]}, resources={"max_requeues": 1})
    toy(**{planned.runs[0].label: "slow"})
    submitter(planned, trainer=TOY).submit()
    for attempt in (1, 2):
        wait(partial(started, planned, attempt), 60, f"start {attempt}")
        (job, _), = Ledger(planned.sweep_folder).jobs().values()  # fmt: skip
        cluster.run("scancel", "--signal=USR2", job)  # what Slurm sends before the limit
    now = finish(planned, 60)
    (row,) = now.runs
    assert row.state.word == "failed:timeout" and "ran out of time 2 times" in row.state.reason


def test_full_disk_in_the_run_folder(make: Any, finish: Any, toy: Any, tmp_path: Path) -> None:
    planned = make("full", steps=40, grid={"seed": [0]})
    small = planned.out / planned.runs[0].key
    small.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=100k", "tmpfs", str(small)], check=False)
    assert mounted.returncode == 0, "mounting a small tmpfs needs root"
    try:
        submitter(planned).submit()
        now = finish(planned, 90)
        (row,) = now.runs
        assert row.state.word == "failed:crash"
        assert "No space left" in row.state.reason + log_of(planned, row).error, (row.state, log_of(planned, row))
    finally:
        subprocess.run(["umount", "-l", str(small)], check=True)


@pytest.mark.parametrize(("gpus", "nodes"), [(2, 1), (1, 2)], ids=["one-node", "two-nodes"])
def test_run_over_several_processes_by_srun(gpus: int, nodes: int, make: Any, finish: Any, check_records: Any) -> None:
    asked = {"gpus": gpus, "nodes": nodes, "cpus": gpus, "memory": "800M"}
    planned = make(f"spread{nodes}", steps=6, settings=("run.parallel=ddp",), resources=asked)
    # the nodes are names of this host that only Slurm can look up
    site = Site(partition="main", setup=("export MASTER_ADDR=127.0.0.1",) if nodes > 1 else ())
    submitter(planned, site=site).submit()
    now = finish(planned, 120)
    assert now.counts == {"done": 1}, log_of(planned, now.runs[0]).tail(30)
    check_records(planned, now)


def test_time_limit_saves_and_requeues_until_the_end(limited: Any, finish: Any, check_records: Any) -> None:
    now = finish(limited, 240)
    assert now.counts == {"done": 1}
    check_records(limited, now)
    attempts = RunFolder(limited.out / limited.runs[0].key).attempts()
    assert len(attempts) >= 2 and attempts[1].resumed_from_step > 0
    assert [item.restart_count for item in attempts] == list(range(len(attempts)))
    assert len({item.job_id for item in attempts}) == 1


def test_preset_at_toy_size_runs_to_a_report(
    store: Path, cluster: Any, finish: Any, check_records: Any, tmp_path: Path
) -> None:
    from scaling.analysis.ingest import read_runs
    from scaling.analysis.report import build_report
    from scaling.sweeps.plan import plan
    from scaling.sweeps.spec import load_spec

    settings = [
        "size=6k", "method=[baseline,mhar]", "H=4", "seed=[0,1]", "lr=1e-2", f"data.path={store}", "data.seq_len=32",
        "data.batch_size=4", "model.vocab_size=257", "schedule.tokens_per_parameter=null", "schedule.steps=20",
        "evaluation.every_steps=10", "evaluation.num_sequences=16", "evaluation.tail=1", "run.device=cpu",
        "precision.mode=fp32", "resources.time=10", "resources.signal=10", "resources.memory=200M",
        "resources.gpus=0", "resources.cpus=1", "resources.runs_per_job=2",
    ]  # fmt: skip
    planned = plan(load_spec("quickstart", settings), tmp_path / "runs")
    assert submitter(planned).submit().runs == 4
    now = finish(planned, 150)
    assert now.counts == {"done": 4}
    check_records(planned, now)
    read = read_runs(planned.out, histories=True)
    assert sorted(read.table["method"]) == ["baseline", "baseline", "mhar", "mhar"]
    report = build_report(read.table, read.histories, out=tmp_path / "report", formats=("png",))
    text = report.read_text(encoding="utf-8")
    assert report.name == "report.html" and "mhar" in text
