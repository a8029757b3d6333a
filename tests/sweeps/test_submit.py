"""Submitting against a Slurm in memory: what is due, cuts, limits, throttles, refusals, crashes of the client."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from scaling.errors import ClusterError, ConfigError, GridError, RecordError, UsageError
from scaling.record import Attempt, EndRecord, RunFolder
from scaling.sweeps import batch
from scaling.sweeps import preview as preview_module
from scaling.sweeps.array import lanes
from scaling.sweeps.cancel import cancel
from scaling.sweeps.launch import launch, remembered, remembering
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.notify import notify
from scaling.sweeps.preview import preview
from scaling.sweeps.site import Site, load_site
from scaling.sweeps.slurm import Slurm
from scaling.sweeps.status import choose, status
from scaling.sweeps.submit import Submitter, feed
from scaling.sweeps.watch import PatientSlurm, Watch


def submitter(planned: Any, fake: Any, **rest: Any) -> Submitter:
    return Submitter(plan=planned, slurm=fake.slurm, snapshot=rest.pop("snapshot", False), **rest)


def over(planned: Any, key: str, word: str = "done", **details: str) -> None:
    run = planned.by_key[key]
    folder = RunFolder.create(planned.out, run.config)
    folder.finish(EndRecord(status=word, step=1, ended_ms=1, attempt=1, reason="x", details=details))  # type: ignore[arg-type]


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


def test_refusal_leaves_nothing_and_undoes_a_retry(make: Any, fake: Any) -> None:
    planned = make()
    key = planned.runs[0].key
    over(planned, key, "failed", kind="oom")
    fake.refuse(
        "sbatch: error: Batch job submission failed: Invalid account or account/partition combination specified"
    )
    with pytest.raises(ClusterError, match=r"sbatch: .*Invalid account.*; nothing of this array is left"):
        submitter(planned, fake, retry=("oom",)).submit()
    assert list((planned.sweep_folder / "arrays").iterdir()) == []
    assert status(planned, slurm=fake.slurm).runs[0].state.word == "failed:oom"  # its record is where it was
    fake.refuse(None)
    assert submitter(planned, fake, retry=("oom",)).submit().runs == 1
    assert (planned.out / key / "end-0001.json").exists() and not (planned.out / key / "end.json").exists()


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


def test_unreachable_controller_submits_nothing(make: Any, fake: Any) -> None:
    planned = make()
    fake.down = True
    with pytest.raises(ClusterError, match="Unable to contact slurm controller"):
        submitter(planned, fake).submit()
    assert not (planned.sweep_folder / "arrays").exists() and fake.accepted() == []


def test_client_killed_after_sbatch_loses_nothing(make: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = make(grid={"seed": [0, 1]})

    def killed(self: Ledger, token: str, job_id: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "accept", killed)
        with pytest.raises(KeyboardInterrupt):
            submitter(planned, fake).submit()
    fake.jobs["100_[0-1]"] = ("PENDING", "Resources")
    again = submitter(planned, fake).submit()
    assert (again.runs, again.skipped) == (0, {"queued": 2})  # the array was found by its name


def test_client_killed_after_sbatch_is_seen_by_status_and_cancel(
    make: Any, fake: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    planned = make(grid={"seed": [0, 1]})

    def killed(self: Ledger, token: str, job_id: str) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(Ledger, "accept", killed)
        with pytest.raises(KeyboardInterrupt):
            submitter(planned, fake).submit()
    assert status(planned, slurm=fake.slurm).counts == {"planned": 2}  # Slurm has not heard of it
    fake.jobs["100_[0-1]"] = ("PENDING", "Resources")
    now = status(planned, slurm=fake.slurm)
    assert now.counts == {"queued": 2}
    assert submitter(make("sister", grid={"seed": [0, 1]}), fake).submit().skipped == {"queued": 2}
    assert cancel(planned, now.runs, fake.slurm, everything=True).jobs == ("100_0", "100_1")


def test_folder_that_cannot_be_made_leaves_the_ledger_whole(make: Any, fake: Any) -> None:
    planned = make()
    planned.sweep_folder.mkdir(parents=True)
    (planned.sweep_folder / "arrays").write_text("in the way", encoding="utf-8")
    with pytest.raises(ClusterError, match=r"arrays/[0-9a-f]{8}: cannot be written \(Not a directory\)"):
        submitter(planned, fake).submit()
    assert status(planned, slurm=fake.slurm).counts == {"planned": 1}
    (planned.sweep_folder / "arrays").unlink()
    assert submitter(planned, fake).submit().runs == 1


def test_damaged_ledger_is_named(make: Any, fake: Any) -> None:
    planned = make()
    planned.sweep_folder.mkdir(parents=True)
    (planned.sweep_folder / "submissions.jsonl").write_text('{"event":"refused","token":"a"}\n', encoding="utf-8")
    with pytest.raises(RecordError, match=r"submissions\.jsonl: record 1 is damaged"):
        status(planned, slurm=fake.slurm)


def test_folder_that_slurm_would_read_as_a_pattern_is_refused(make: Any, fake: Any) -> None:
    planned = replace(make(), out=make().out / "50%j")
    with pytest.raises(ClusterError, match="Slurm reads % in the names of logs as a pattern"):
        submitter(planned, fake).submit()
    assert fake.accepted() == [] and not planned.sweep_folder.exists()


def test_client_killed_before_sbatch_starts_over(make: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    planned = make(grid={"seed": [0, 1]})

    def killed(self: Any, command: str, count: int) -> str:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(batch.ArrayExecutor, "submit_tasks", killed)
        with pytest.raises(KeyboardInterrupt):
            submitter(planned, fake).submit()
    assert submitter(planned, fake).submit().runs == 2


def test_two_submits_at_once_are_kept_apart(make: Any, fake: Any) -> None:
    planned = make()
    with (
        Ledger(planned.sweep_folder).lock(),
        pytest.raises(ClusterError, match="another submit of this sweep is at work"),
    ):
        submitter(planned, fake).submit()


def test_variables_of_a_job_do_not_reach_sbatch(make: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SLURM_MEM_PER_CPU", "SLURM_JOB_ID", "SBATCH_PARTITION"):
        monkeypatch.setenv(name, "1")
    monkeypatch.setenv("SLURM_CONF", "/etc/slurm.conf")
    submitter(make(), fake).submit()
    assert (fake.folder / "environment").read_text(encoding="utf-8") == "SLURM_CONF=/etc/slurm.conf\n"
    assert os.environ["SLURM_JOB_ID"] == "1"


def test_time_over_the_partition_s_is_refused(make: Any, fake: Any) -> None:
    planned = make(resources={"time": 60})
    with pytest.raises(ClusterError, match=r"time=1:00:00 exceeds the MaxTime 0:30:00 of partition short"):
        submitter(planned, fake, site=Site(partition="short")).submit()
    with pytest.raises(ClusterError, match=r"partition='gpu': no such partition; allowed: main, short"):
        submitter(planned, fake, site=Site(partition="gpu")).submit()


def test_of_several_partitions_the_longest_time_counts(make: Any, fake: Any) -> None:
    assert submitter(make(resources={"time": 60}), fake, site=Site(partition="short,main")).submit().runs == 1
    with pytest.raises(ClusterError, match=r"partition='gpu': no such partition"):
        submitter(make(grid={"seed": [7]}), fake, site=Site(partition="short,gpu")).submit()


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
    import time

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


def test_preview_shows_script_cuts_and_limits(make: Any, fake: Any) -> None:
    fake.max_array, fake.limit = 4, 6
    planned = make(grid={"seed": {"range": [0, 9]}}, price_per_gpu_hour=2.0)
    seen = preview(planned, gpu="h100", site=Site(), slurm=fake.slurm)
    notes = "\n".join(seen.notes)
    assert "10 jobs in 1 group(s)" in notes and "3 array(s), an array has at most 4 jobs" in notes
    assert "at most 6 jobs of yours in the queue, 6 free now; 4 wait for --feed" in notes
    assert any(command[:2] == ("sbatch", "--test-only") for command in fake.asked)
    assert "#SBATCH --array=0-9" in seen.script and fake.accepted() == []
    tree = seen.tree()
    assert tree["cost"] == pytest.approx(tree["gpu_hours"] * 2.0) and len(tree["runs"]) == 10
    late = preview(make(resources={"time": "2d"}), site=Site(), slurm=fake.slurm)
    assert any("refused as planned" in note and "exceeds the MaxTime" in note for note in late.notes)
    assert "exceeds the MaxTime" in late.refused and late.refused == late.tree()["refused"] and not seen.refused
    fake.down = True
    away = preview(planned, site=Site(), slurm=fake.slurm)
    assert "Slurm: cannot be asked now" in away.notes[-1] and not away.refused


def test_a_plan_asks_scontrol_each_question_once(make: Any, fake: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where runs were submitted before, whose states are asked for, and jobs may go to several partitions."""
    fake.limit = 100
    submitter(make(grid={"seed": [0]}), fake).submit()
    fake.asked.clear()
    monkeypatch.setattr(preview_module, "Slurm", lambda: fake.slurm)  # as the command calls it, without one of its own
    seen = preview(make(grid={"seed": [0, 1, 2]}), site=Site(partition="main,short"))
    assert any(command[0] == "sacct" for command in fake.asked)
    assert not seen.refused and "at most 100 jobs of yours" in " ".join(seen.notes)
    asked = [command for command in fake.asked if command[0] == "scontrol"]
    assert sorted(asked) == [("scontrol", "-o", "show", "partition"), ("scontrol", "show", "config")]


def test_preview_asks_slurm_about_every_kind_of_job_that_is_due(make: Any, fake: Any) -> None:
    by = [{"when": {"size": "160k"}, "time": 60}]
    planned = make(grid={"size": ["50k", "160k"], "seed": [0, 1]}, resources={"time": 10, "by": by})
    preview(planned, site=Site(), slurm=fake.slurm)
    assert sum(command[:2] == ("sbatch", "--test-only") for command in fake.asked) == 2
    for run in planned.runs[:2]:
        over(planned, run.key)
    seen = preview(planned, site=Site(), slurm=fake.slurm)
    assert seen.notes[0] == "Slurm: 2 jobs in 1 group(s) of equal resources" and "--time=10\n" in seen.script
    original = fake.ask

    def refuses(command: Any) -> Any:
        if command[0] == "sbatch":
            return subprocess.CompletedProcess(command, 1, "", "allocation failure: Invalid feature specification\n")
        return original(command)

    seen = preview(planned, site=Site(), slurm=Slurm(ask=refuses, user="me"))
    assert "Invalid feature specification (time=0:10:00 gpus=0 nodes=1, 2 jobs)" in seen.refused
    for run in planned.runs[2:]:
        over(planned, run.key)
    assert preview(planned, site=Site(), slurm=fake.slurm).notes == ("Slurm: nothing to submit",)


def test_site_profile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "site.yaml"
    monkeypatch.setenv("SCALING_SITE", str(file))
    file.write_text(
        "partition: gpu\nsetup: [a, b]\nsbatch: {--exclusive: true, nice: 5}\nenv: {A: 1}\n", encoding="utf-8"
    )
    site = load_site()
    assert (site.partition, site.setup, site.sbatch, site.env) == (
        "gpu",
        ("a", "b"),
        {"exclusive": "", "nice": "5"},
        {"A": "1"},
    )
    file.write_text("partitoin: gpu\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"site\.yaml:1: unknown key 'partitoin'; did you mean 'partition'"):
        load_site()
    file.write_text("sbatch: {signal: KILL@5}\n", encoding="utf-8")
    with pytest.raises(
        GridError, match=r"site\.yaml: sbatch: signal is set by the sweep itself; use resources\.signal"
    ):
        load_site()
    file.write_text("env: {a-b: 1}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match="'a-b' is no name of a variable"):
        load_site()
    monkeypatch.delenv("SCALING_SITE")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "none"))
    assert load_site() == Site()


def test_launch_refusals(make: Any, fake: Any) -> None:
    planned = make()
    with pytest.raises(UsageError, match="--executor slrum: unknown; did you mean 'slurm'"):
        launch(planned, executor="slrum")
    with pytest.raises(UsageError, match="--retry oops: not a kind of ended run"):
        launch(planned, executor="local", retry=["oops"])
    with pytest.raises(UsageError, match="--feed and --after need Slurm"):
        launch(planned, executor="local", feed_all=True)
    with pytest.raises(UsageError, match="--workers and --threads are for --executor local"):
        launch(planned, executor="slurm", workers=2)
    wrong: list[dict[str, Any]] = [{"workers": 0}, {"workers": -1}, {"threads": 0}]
    for options in wrong:
        with pytest.raises(UsageError, match=r"--(workers|threads) -?\d: allowed: 1 or more"):
            launch(planned, executor="local", **options)


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
