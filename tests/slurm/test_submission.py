"""Submitting to a real Slurm: cuts, limits, refusals, a controller that is away, the code that jobs run."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import ClusterError
from scaling.sweeps.cancel import cancel
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.site import Site
from scaling.sweeps.slurm import Slurm
from scaling.sweeps.status import status
from scaling.sweeps.submit import feed
from tests.slurm.sweeping import TOY, submitter


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


def test_submitting_from_inside_a_job(make: Any, finish: Any, toy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = make("inside", steps=2)
    toy()
    for name, value in {"SLURM_MEM_PER_CPU": "7", "SLURM_MEM_PER_NODE": "9", "SBATCH_PARTITION": "scavenge"}.items():
        monkeypatch.setenv(name, value)
    submitter(planned, trainer=TOY).submit()
    assert finish(planned, 60).counts == {"done": 1}
    assert os.environ["SLURM_MEM_PER_CPU"] == "7"


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
