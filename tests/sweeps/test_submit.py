"""Submitting against a Slurm in memory: what is due, scripts, packs, cuts, limits, throttles, what is remembered."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import ClusterError, RecordError
from scaling.record import RunFolder
from scaling.sweeps import batch
from scaling.sweeps.array import lanes
from scaling.sweeps.cancel import cancel
from scaling.sweeps.launch import remembered, remembering
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.site import Site
from scaling.sweeps.status import status
from scaling.sweeps.submit import feed
from tests.sweeps.submitting import over, submitter


def test_second_submit_adds_only_what_is_new(make: Any, fake: Any) -> None:
    planned = make(grid={"seed": [0, 1, 2]})
    report = submitter(planned, fake).submit()
    assert (report.job_ids, report.runs, report.jobs) == (("100",), 3, 3)
    fake.jobs["100_[0-2]"] = ("PENDING", "Resources")
    again = submitter(planned, fake).submit()
    assert (again.runs, again.skipped) == (0, {"queued": 3})
    wider = make(grid={"seed": [0, 1, 2, 3]})
    report = submitter(wider, fake).submit()
    assert (report.job_ids, report.runs) == (("101",), 1)
    assert fake.accepted() == ["100", "101"]


def test_script_says_what_was_asked(make: Any, fake: Any) -> None:
    planned = make(
        resources={
            "time": "2h",
            "gpus": 1,
            "cpus": 4,
            "memory": "16G",
            "signal": 300,
            "sbatch": {"constraint": "h100"},
        },
        throttle=1,
        grid={"seed": [0, 1]},
    )
    site = Site(partition="main", account="a", qos="q", setup=("source x",), modules=("cuda",), env={"A": "b c"})
    submitter(planned, fake, site=site, dependency="afterok:7").submit()
    script = fake.script("100")
    for line in ("--array=0-1%1", "--time=120", "--gpus-per-node=1", "--cpus-per-task=4", "--mem=16384M", "--requeue",
                 "--signal=USR2@300", "--constraint=h100", "--partition=main", "--account=a", "--qos=q",
                 "--open-mode=append", "--dependency=afterok:7", "--kill-on-invalid-dep=yes"):  # fmt: skip
        assert f"#SBATCH {line}\n" in script, line
    for line in ("module load cuda\n", "source x\n", "export A='b c'\n", "srun --unbuffered "):
        assert line in script
    assert "submitit.core" not in script


def test_several_processes_get_the_signal_through_the_batch_shell(make: Any, fake: Any) -> None:
    planned = make(resources={"gpus": 4, "nodes": 2, "cpus": 8}, settings=("run.parallel=fsdp2",))
    submitter(planned, fake, site=Site(gpu_option="gres", gres="gpu:h100")).submit()
    script = fake.script("100")
    for text in ("--nodes=2\n", "--ntasks-per-node=4\n", "--cpus-per-task=2\n", "--gres=gpu:h100:4\n",
                 "--signal=B:USR2@120\n", "\nexec "):  # fmt: skip
        assert text in script, text
    assert "trap '' USR2" in script and "\nsrun" not in script


def test_packed_runs_share_jobs(make: Any, fake: Any) -> None:
    planned = make(grid={"seed": {"range": [0, 9]}}, resources={"gpus": 1, "runs_per_gpu": 2, "runs_per_job": 4})
    report = submitter(planned, fake).submit()
    assert (report.runs, report.jobs) == (10, 3)
    (item,) = Ledger(planned.sweep_folder).submissions()
    assert [len(task) for task in item.tasks] == [4, 4, 2]
    lines = (Ledger(planned.sweep_folder).array_folder(item.token) / "tasks.jsonl").read_text().splitlines()
    assert [(json.loads(line)["concurrent"], len(json.loads(line)["runs"])) for line in lines] == [
        (2, 4),
        (2, 4),
        (2, 2),
    ]


def test_different_resources_are_different_arrays(make: Any, fake: Any) -> None:
    planned = make(
        grid={"size": ["50k", "160k"], "seed": [0, 1]},
        resources={"time": 10, "by": [{"when": {"size": "160k"}, "time": 60}]},
    )
    report = submitter(planned, fake).submit()
    assert len(report.job_ids) == 2
    assert "--time=60" in fake.script("100") and "--time=10" in fake.script("101")  # the larger runs first


def test_arrays_are_cut_by_index(make: Any, fake: Any) -> None:
    fake.max_array = 4
    planned = make(grid={"seed": {"range": [0, 9]}})
    assert len(submitter(planned, fake).submit().job_ids) == 3
    assert ["--array=0-3" in fake.script("100"), "--array=0-1" in fake.script("102")] == [True, True]


def test_known_limit_leaves_the_rest_for_later(make: Any, fake: Any) -> None:
    fake.limit = 4
    planned = make(grid={"seed": {"range": [0, 9]}})
    one = submitter(planned, fake)
    report = one.submit()
    assert (report.runs, report.waiting) == (4, 6)
    assert report.why_waiting == "4 jobs in the queue are allowed"
    fake.jobs["100_[0-3]"] = ("PENDING", "Priority")
    assert one.submit().runs == 0
    slept: list[float] = []

    def sleep(total_s: float) -> None:
        slept.append(total_s)
        fake.jobs.clear()
        for run in planned.runs:  # what was submitted has ended meanwhile
            if run.key in Ledger(planned.sweep_folder).jobs() and RunFolder(planned.out / run.key).end() is None:
                over(planned, run.key)

    total = feed(one, sleep=sleep)
    assert (total.runs, total.waiting) == (6, 0) and min(slept) >= 30


def test_feed_tries_each_failed_run_once_and_outlasts_the_controller(make: Any, fake: Any) -> None:
    fake.limit = 2
    planned = make(grid={"seed": {"range": [0, 8]}})
    for run in planned.runs:
        over(planned, run.key, "failed", kind="crash")
    looks = 0

    def sleep(total_s: float) -> None:
        nonlocal looks
        looks += 1
        assert looks < 30
        fake.down = looks % 2 == 1
        fake.jobs.clear()
        for run in planned.runs:  # what was tried again fails again
            if RunFolder(planned.out / run.key).end() is None:
                over(planned, run.key, "failed", kind="crash")

    total = feed(submitter(planned, fake, retry=("failed",)), sleep=sleep)
    assert (total.runs, total.waiting) == (9, 0)
    tried = [key for item in Ledger(planned.sweep_folder).submissions() for task in item.tasks for key in task]
    assert sorted(tried) == sorted(run.key for run in planned.runs)


def test_unknown_limit_is_found_by_halving(make: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = make(grid={"seed": {"range": [0, 9]}})
    room = 3
    original = batch.ArrayExecutor.submit_tasks

    def limited(self: Any, command: str, count: int) -> str:
        nonlocal room
        if count > room:
            raise ClusterError("sbatch: Job violates accounting/QOS policy (job submit limit)")
        room -= count
        return original(self, command, count)

    monkeypatch.setattr(batch.ArrayExecutor, "submit_tasks", limited)
    report = submitter(planned, fake).submit()
    assert (report.runs, report.waiting) == (3, 7) and "job submit limit" in report.why_waiting


@pytest.mark.parametrize(
    ("retry", "count"),
    [((), 0), (("failed",), 2), (("oom",), 1), (("timeout", "diverged"), 2), (("cancelled",), 0)],
)
def test_kinds_of_retry(make: Any, fake: Any, retry: tuple[str, ...], count: int) -> None:
    planned = make(grid={"seed": [0, 1, 2, 3]})
    keys = [run.key for run in planned.runs]
    over(planned, keys[0], "failed", kind="oom")
    over(planned, keys[1], "failed", kind="timeout")
    over(planned, keys[2], "diverged")
    over(planned, keys[3], "done")
    assert submitter(planned, fake, retry=retry).submit().runs == count


def test_throttle_is_shared_between_arrays() -> None:
    def shares(*arguments: Any) -> list[tuple[int | None, str | None]]:
        return [(lane.throttle, lane.last) for lane in lanes(*arguments)]

    assert shares(10, {}, [100]) == [(10, None)]
    assert shares(10, {}, [30, 10]) == [(7, None), (3, None)] or sum(s or 0 for s, _ in shares(10, {}, [30, 10])) == 10
    assert shares(2, {}, [5, 5, 5]) == [(1, None), (1, None)]
    assert shares(4, {"7": 3}, [5]) == [(1, None)]
    assert shares(2, {"7": 1, "8": 1}, [5]) == [(1, "7"), (1, "8")]


def test_arrays_beyond_the_throttle_wait_for_each_other(make: Any, fake: Any) -> None:
    fake.max_array = 2
    planned = make(grid={"seed": {"range": [0, 5]}}, throttle=1)
    submitter(planned, fake).submit()
    assert "--dependency" not in fake.script("100")
    assert "--dependency=afterany:100" in fake.script("101") and "--dependency=afterany:101" in fake.script("102")
    assert all("%1" in fake.script(job) for job in fake.accepted())


def test_thousand_runs_submit_fast_with_few_files(make: Any, fake: Any) -> None:

    planned = make(grid={"seed": {"range": [0, 999]}})
    begun_s = time.process_time()
    assert submitter(planned, fake).submit().runs == 1000
    assert time.process_time() - begun_s < 10
    assert sum(path.is_file() for path in planned.out.rglob("*")) < 10


def test_snapshot_is_put_first_and_made_once(make: Any, fake: Any) -> None:
    planned = make()
    submitter(planned, fake, snapshot=True).submit()
    found = re.search(r"export PYTHONPATH=(\S+?)\$", fake.script("100"))
    assert found is not None
    code = Path(found[1])
    assert (code / "scaling" / "identity.py").is_file() and (code / "scaling" / "sweeps" / "task.py").is_file()
    assert "export PYTHONSAFEPATH=1" in fake.script("100")
    wider = make(grid={"seed": [5]})
    submitter(wider, fake, snapshot=True).submit()
    assert len(list(code.parent.iterdir())) == 1


def test_settings_are_remembered_unless_nothing_came_of_them(make: Any, fake: Any) -> None:
    planned = make()
    assert remembered(planned) == []
    with remembering(planned, ["lr=0.1"]):
        pass
    assert remembered(planned) == ["lr=0.1"]
    with pytest.raises(ClusterError), remembering(planned, ["lr=0.2"]):
        raise ClusterError("refused")
    assert remembered(planned) == ["lr=0.1"]
    with pytest.raises(ClusterError), remembering(planned, ["lr=0.3"]):
        submitter(planned, fake).submit()
        raise ClusterError("the second array was refused")
    assert remembered(planned) == ["lr=0.3"]
    (planned.sweep_folder / "settings.json").write_text("x", encoding="utf-8")
    with pytest.raises(RecordError, match=r"settings\.json: damaged; submit again"):
        remembered(planned)


def test_runs_of_another_sweep_in_the_same_folder_are_not_submitted_twice(make: Any, fake: Any) -> None:
    planned, wider = make(grid={"seed": [0, 1]}), make("wider", grid={"seed": [0, 1, 2]})
    submitter(planned, fake).submit()
    fake.jobs["100_[0-1]"] = ("PENDING", "Resources")
    report = submitter(wider, fake).submit()
    assert (report.runs, report.skipped) == (1, {"queued": 2})
    fake.jobs["101_0"] = ("PENDING", "Resources")
    now = status(wider, slurm=fake.slurm)
    assert cancel(wider, now.runs, fake.slurm, everything=True).jobs == ("101_0",)  # its own alone
    assert status(planned, slurm=fake.slurm).counts == {"queued": 2}
