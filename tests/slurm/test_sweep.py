"""Sweeps on a real Slurm, to their end and through every fault that the docs list."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import ClusterError
from scaling.record import RunFolder
from scaling.sweeps.cancel import cancel
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.logs import log_of
from scaling.sweeps.site import Site
from scaling.sweeps.slurm import Slurm
from scaling.sweeps.status import choose, status
from scaling.sweeps.submit import Submitter, feed

TOY = "toy_trainer:train"


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


@pytest.fixture(autouse=True)
def empty_queue(cluster: Any) -> Iterator[None]:
    """Nothing of one test is left for the next one."""

    def others() -> list[str]:
        lines = cluster.run("squeue", "-h", "-o", "%A %j", check=False).splitlines()
        return [line.split()[0] for line in lines if not line.split()[1].startswith("limited.")]

    yield
    if jobs := others():
        cluster.run("scancel", *jobs, check=False)
        try:  # a controller that was away ends a job only once a node has answered it again: about a minute
            cluster.wait(lambda: not others(), 120, "an empty queue")
        except TimeoutError:
            raise AssertionError(cluster.run("squeue", "-l", check=False)) from None


def submitter(planned: Any, **rest: Any) -> Submitter:
    return Submitter(plan=planned, site=rest.pop("site", Site(partition="main")), **rest)


def running(planned: Any, step: int = 1) -> Callable[[], Any]:
    """For ``wait``: the status, once every run has journalled a step and none is over."""

    def look() -> Any:
        now = status(planned)
        steps = [row.look.step if row.look is not None and row.look.attempts else None for row in now.runs]
        return now if all(reached is not None and reached >= step for reached in steps) else None

    return look


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


def test_arrays_are_cut_at_the_highest_index_and_300_runs_end_right(make: Any, finish: Any, toy: Any) -> None:
    planned = make("many", steps=2, grid={"seed": {"range": [0, 299]}}, resources={"runs_per_job": 5})
    toy(**{run.label: mood for run, mood in zip(planned.runs, ["crash", "diverge", "oom"], strict=False)})
    begun_s = time.monotonic()
    report = submitter(planned, trainer=TOY).submit()
    assert time.monotonic() - begun_s < 10
    assert (report.runs, report.jobs, len(report.job_ids)) == (300, 60, 3)  # 26 tasks an array
    names = Ledger(planned.sweep_folder).job_names()
    end_s = time.monotonic() + 240
    while any(view.state in ("PENDING", "RUNNING", "COMPLETING") for view in Slurm().queue(names).values()):
        assert time.monotonic() < end_s
        time.sleep(0.5)
    now = status(planned)  # at once: sacct does not know all of them yet
    assert now.counts == {"done": 297, "diverged": 1, "failed": 2}
    assert sorted(row.state.word for row in now.runs if row.state.state == "failed") == ["failed:crash", "failed:oom"]
    files = [path for path in planned.sweep_folder.rglob("*") if path.is_file() and "code" not in path.parts]
    assert len(files) <= 300  # of the sweep: a log a task and a few an array; the run folders come on top


def test_times_that_cannot_work_are_refused(make: Any) -> None:
    with pytest.raises(ValueError, match=r"time=0:01:00 must exceed signal=10s by more than 90s"):
        make("short", resources={"time": 1})
    planned = make("long", resources={"time": "2h"})
    with pytest.raises(ClusterError, match=r"time=2:00:00 exceeds the MaxTime 1:00:00 of partition scavenge"):
        submitter(planned, site=Site(partition="scavenge")).submit()
    with pytest.raises(ClusterError, match=r"partition='gpu': no such partition; allowed: main, scavenge"):
        submitter(planned, site=Site(partition="gpu")).submit()


def test_refused_sbatch_leaves_nothing(make: Any, finish: Any, toy: Any) -> None:
    planned = make("refused", steps=2, resources={"sbatch": {"constraint": "nosuchfeature"}})
    toy()
    with pytest.raises(ClusterError, match=r"sbatch: .*Invalid feature specification; nothing of this array is left"):
        submitter(planned, trainer=TOY).submit()
    assert list((planned.sweep_folder / "arrays").iterdir()) == []
    assert status(planned).counts == {"planned": 1}
    good = make("refused", steps=2)
    assert submitter(good, trainer=TOY).submit().runs == 1
    assert finish(good, 60).counts == {"done": 1}


def test_controller_down_at_submit_and_during_status(make: Any, wait: Any, finish: Any, toy: Any, cluster: Any) -> None:
    planned = make("down", steps=150, grid={"seed": [0, 1]}, resources={"time": 10})
    new = make("new", steps=2)
    held = make("held", steps=3, resources={"sbatch": {"hold": True}})
    toy(**{run.label: "slow" for run in planned.runs[:1]})
    submitter(planned, trainer=TOY).submit()
    submitter(held, trainer=TOY).submit()
    assert status(held).counts == {"queued": 1}
    wait(
        lambda: status(planned).counts.get("done", 0) == 1 and status(planned).counts.get("running", 0) == 1, 60, "one"
    )
    cluster.end("slurmctld")
    try:
        now = status(planned)
        assert now.trouble and {row.state.state for row in now.runs} == {"done", "running"}  # the folders still know
        (row,) = status(held).runs
        assert row.state.state == "unknown" and "cannot be reached" in row.state.reason
        with pytest.raises(ClusterError, match=r"[Uu]nable to contact slurm controller"):
            submitter(new, trainer=TOY).submit()
        assert not (new.sweep_folder / "arrays").exists()
        with pytest.raises(ClusterError, match=r"nothing was submitted"):
            submitter(planned, trainer=TOY).submit()
    finally:
        cluster.start_controller()
    wait(lambda: not status(planned).trouble, 30, "the controller")
    assert status(held).counts == {"queued": 1}
    cancel(held, status(held).runs, Slurm(), everything=True)
    assert status(held).counts == {"cancelled": 1}  # it could never start: squeue has no line for its task
    assert submitter(new, trainer=TOY).submit().runs == 1
    assert finish(new, 60).counts == {"done": 1}
    assert finish(planned, 90).counts == {"done": 2}


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


def test_jobs_run_the_code_as_it_was_at_submit(make: Any, finish: Any, toy: Any, tmp_path: Path) -> None:
    from scaling.sweeps import snapshot

    root = tmp_path / "checkout"
    source = Path(snapshot.__file__).resolve().parent.parent
    subprocess.run(["git", "clone", "-q", str(source), str(root)], check=True)
    (root / "scaling" / "marker.py").write_text("VALUE = 'as submitted'\n", encoding="utf-8")
    taken = snapshot.take(tmp_path / "sweep", root)
    (root / "scaling" / "marker.py").write_text("VALUE = 'edited since'\n", encoding="utf-8")
    code = "import scaling.marker as m; print(m.VALUE)"
    job = subprocess.run(
        ["sbatch", "--parsable", "--wait", "-D", str(root), "-o", str(tmp_path / "out"), "--wrap",
         f"export PYTHONSAFEPATH=1 PYTHONPATH={taken.path}; {sys.executable} -c '{code}'"],
        check=True, capture_output=True, text=True,
    )  # fmt: skip
    assert job.stdout.strip().isdigit()
    assert (tmp_path / "out").read_text(encoding="utf-8").strip() == "as submitted"
    assert taken.dirty and snapshot.take(tmp_path / "sweep", root).path != taken.path


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


def test_submitting_from_inside_a_job(make: Any, finish: Any, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = make("inside", steps=2)
    toy()
    for name, value in {"SLURM_MEM_PER_CPU": "7", "SLURM_MEM_PER_NODE": "9", "SBATCH_PARTITION": "scavenge"}.items():
        monkeypatch.setenv(name, value)
    submitter(planned, trainer=TOY).submit()
    assert finish(planned, 60).counts == {"done": 1}
    assert os.environ["SLURM_MEM_PER_CPU"] == "7"


def test_time_limit_saves_and_requeues_until_the_end(limited: Any, finish: Any, check_records: Any) -> None:
    now = finish(limited, 240)
    assert now.counts == {"done": 1}
    check_records(limited, now)
    attempts = RunFolder(limited.out / limited.runs[0].key).attempts()
    assert len(attempts) >= 2 and attempts[1].resumed_from_step > 0
    assert [item.restart_count for item in attempts] == list(range(len(attempts)))
    assert len({item.job_id for item in attempts}) == 1


def test_submit_limit_is_fed(make: Any, finish: Any, toy: Any, cluster: Any) -> None:
    cluster.run("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=5")
    try:
        planned = make("fed", steps=2, grid={"seed": {"range": [0, 11]}})
        toy()
        one = submitter(planned, trainer=TOY)
        report = one.submit()
        assert (report.runs, report.waiting) == (5, 7) and "5 jobs in the queue are allowed" in report.why_waiting
        sleeps: list[float] = []

        def sleep(total_s: float) -> None:
            sleeps.append(total_s)
            time.sleep(2)

        total = feed(one, sleep=sleep)
        assert total.waiting == 0 and total.runs == 7 and min(sleeps) >= 30
        assert finish(planned, 60).counts == {"done": 12}
    finally:
        cluster.run("sacctmgr", "-i", "modify", "user", "root", "set", "MaxSubmitJobs=-1")


def test_unreadable_submit_limit_is_found_by_trying(make: Any, finish: Any, toy: Any, cluster: Any) -> None:
    cluster.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxSubmitJobsPerUser=3")
    try:
        planned = make("tried", steps=2, grid={"seed": {"range": [0, 6]}})
        toy()
        report = submitter(planned, trainer=TOY).submit()
        assert report.runs == 3 and report.waiting == 4 and "job submit limit" in report.why_waiting
        arrays = [path for path in (planned.sweep_folder / "arrays").iterdir()]
        assert len(arrays) == len(report.job_ids)  # refused tries left nothing
        assert finish_part(planned, 3, 60)
    finally:
        cluster.run("sacctmgr", "-i", "modify", "qos", "normal", "set", "MaxSubmitJobsPerUser=-1")


def finish_part(planned: Any, count: int, limit_s: float) -> bool:
    end_s = time.monotonic() + limit_s
    while status(planned).counts.get("done", 0) < count:
        if time.monotonic() > end_s:
            return False
        time.sleep(0.5)
    return True


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
