"""Submits that go wrong, with a Slurm in memory: refusals, a controller that is away, clients killed, damaged files."""

from __future__ import annotations

import os
from dataclasses import replace
from typing import Any

import pytest

from scaling.errors import ClusterError, RecordError, UsageError
from scaling.sweeps import batch
from scaling.sweeps.cancel import cancel
from scaling.sweeps.launch import launch
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.site import Site
from scaling.sweeps.status import status
from tests.sweeps.submitting import over, submitter


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
