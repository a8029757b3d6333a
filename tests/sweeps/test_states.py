"""Reconciliation: every word that Slurm has, beside what the run folder says; parsing of what Slurm prints."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from datetime import datetime

import pytest

from scaling.errors import ClusterError
from scaling.record import EndRecord
from scaling.sweeps.glance import Glance
from scaling.sweeps.slurm import JobView, Slurm, expand_ids
from scaling.sweeps.states import STATES, reconcile

NOW_S = 2_000_000_000.0
BEGUN = Glance(attempts=1, started_ms=int(NOW_S * 1000) - 60_000, step=7, touched_s=NOW_S - 5)


def end(status: str, reason: str = "", **details: str) -> Glance:
    record = EndRecord(status=status, step=9, ended_ms=1, attempt=1, reason=reason, details=details)  # type: ignore[arg-type]
    return Glance(end=record, attempts=1, started_ms=1, step=9)


def view(state: str, **rest: str) -> JobView:
    return JobView(job="1_0", state=state, **rest)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("look", "word"),
    [
        (end("done"), "done"),
        (end("diverged", "nan"), "diverged"),
        (end("cancelled"), "cancelled"),
        (end("failed", "RuntimeError: x"), "failed:crash"),
        (end("failed", "CUDA out of memory"), "failed:oom"),
        (end("failed", "x", kind="timeout"), "failed:timeout"),
    ],
)
@pytest.mark.parametrize("slurm", ["TIMEOUT", "NODE_FAIL", "RUNNING", "FAILED", "PREEMPTED", "PENDING"])
def test_end_record_outranks_slurm(look: Glance, word: str, slurm: str) -> None:
    state = reconcile(look, alive=False, job="1_0", queued=view(slurm), now_s=NOW_S)
    assert (state.word, state.slurm) == (word, slurm)


@pytest.mark.parametrize(
    ("look", "state", "word"),
    [
        (None, "PENDING", "queued"),
        (None, "CONFIGURING", "queued"),
        (None, "RUNNING", "queued"),  # started, but this run has not begun in it
        (BEGUN, "RUNNING", "running"),
        (BEGUN, "COMPLETING", "running"),
        (BEGUN, "SUSPENDED", "running"),
        (BEGUN, "PENDING", "requeued"),
        (None, "REQUEUED", "requeued"),
        (BEGUN, "REQUEUE_HOLD", "requeued"),
        (BEGUN, "PREEMPTED", "requeued"),  # squeue only: it may come back
        (BEGUN, "NODE_FAIL", "requeued"),
        (BEGUN, "FAILED", "failed:crash"),
        (BEGUN, "COMPLETED", "failed:crash"),
        (BEGUN, "OUT_OF_MEMORY", "failed:oom"),
        (BEGUN, "TIMEOUT", "failed:timeout"),
        (BEGUN, "DEADLINE", "failed:timeout"),
        (BEGUN, "CANCELLED", "cancelled"),
    ],
)
def test_slurm_s_words(look: Glance | None, state: str, word: str) -> None:
    assert reconcile(look, alive=False, job="1_0", queued=view(state), now_s=NOW_S).word == word


@pytest.mark.parametrize("state", ["NODE_FAIL", "PREEMPTED", "BOOT_FAIL"])
def test_a_lost_job_gets_time_to_come_back(state: str) -> None:
    def word(ago_s: float) -> str:
        ended = datetime.fromtimestamp(NOW_S - ago_s).isoformat()
        record = view(state, ended=ended, source="sacct")
        return reconcile(BEGUN, alive=False, job="1_0", records=[record], now_s=NOW_S).word

    assert word(10) == "requeued"
    assert word(1000) in ("failed:node", "cancelled")


def test_nowhere_is_unknown_and_says_why() -> None:
    state = reconcile(BEGUN, alive=False, job="1_0", now_s=NOW_S)
    assert state.state == "unknown"
    assert state.reason == "neither squeue nor sacct knows the job; last seen at step 7"
    down = reconcile(None, alive=False, job="1_0", now_s=NOW_S, reachable=False)
    assert (down.state, down.reason) == ("unknown", "Slurm cannot be reached")
    assert reconcile(BEGUN, alive=True, job="1_0", now_s=NOW_S, reachable=False).state == "running"


def test_queue_outranks_records_and_history_shows_a_requeue() -> None:
    old = view("NODE_FAIL", ended="2033-05-18T00:00:00", source="sacct")
    assert (
        reconcile(None, alive=False, job="1_0", queued=view("PENDING"), records=[old, old], now_s=NOW_S).state
        == "requeued"
    )
    assert reconcile(None, alive=False, job="1_0", queued=view("PENDING"), records=[old], now_s=NOW_S).state == "queued"


def test_orphan_that_still_trains_is_running() -> None:
    state = reconcile(BEGUN, alive=True, job="1_0", queued=view("NODE_FAIL"), now_s=NOW_S)
    assert (state.state, state.reason) == ("running", "its process holds the run folder")


def test_retried_run_is_queued_although_it_has_begun_before() -> None:
    submitted_ms = int(NOW_S * 1000) - 1000
    state = reconcile(BEGUN, alive=False, job="2_0", submitted_ms=submitted_ms, queued=view("PENDING"), now_s=NOW_S)
    assert state.state == "queued"


def test_silence_is_stalled() -> None:
    silent = Glance(attempts=1, started_ms=int(NOW_S * 1000), step=7, touched_s=NOW_S - 1000)
    state = reconcile(silent, alive=False, job="1_0", queued=view("RUNNING"), now_s=NOW_S)
    assert (state.state, state.reason) == ("stalled", "no journal line for 17 min")


def test_local_runs() -> None:
    assert reconcile(None, alive=False, now_s=NOW_S).state == "planned"
    assert reconcile(BEGUN, alive=True, now_s=NOW_S).state == "running"
    interrupted = reconcile(BEGUN, alive=False, now_s=NOW_S)
    assert (interrupted.state, interrupted.reason) == ("planned", "interrupted at step 7")


def test_damaged_record_is_unknown() -> None:
    state = reconcile(Glance(damaged="end.json: damaged"), alive=False, now_s=NOW_S)
    assert (state.state, state.reason) == ("unknown", "end.json: damaged")


def test_exit_code_and_reason_are_kept() -> None:
    state = reconcile(
        BEGUN, alive=False, job="1_0", queued=view("FAILED", exit_code="0:53", reason="JobLaunchFailure"), now_s=NOW_S
    )
    assert state.reason == "Slurm: FAILED, exit 0:53 (JobLaunchFailure), without an end record"
    assert state.slurm == "FAILED"


def test_every_state_is_described() -> None:
    assert set(STATES) == {"planned", "queued", "running", "stalled", "requeued", "done", "diverged", "failed",
                           "cancelled", "unknown"}  # fmt: skip


def answering(**texts: str) -> Slurm:
    def ask(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
        text = texts.get(command[0], "")
        return subprocess.CompletedProcess(command, 1 if text.startswith("error") else 0, text, text)

    return Slurm(ask=ask, user="me")


def test_queue_is_parsed() -> None:
    slurm = answering(squeue="13_[2-3%4]|PENDING|Resources||t.a|0:00\n13_1|RUNNING|None|n2|t.a|1-02:00:00\n")
    views = slurm.queue(["t.a"])
    assert {job: (v.state, v.reason, v.node) for job, v in views.items()} == {
        "13_2": ("PENDING", "Resources", ""),
        "13_3": ("PENDING", "Resources", ""),
        "13_1": ("RUNNING", "", "n2"),
    }
    assert views["13_1"].elapsed_s == 93_600


def test_records_are_parsed_and_kept_in_order() -> None:
    config = "AccountingStorageType = accounting_storage/slurmdbd\n"
    slurm = answering(
        scontrol=config,
        sacct="7_0|PREEMPTED|None|n1|0:0|20|2033-05-18T00:00:00|t.a\n7_0|CANCELLED by 0|None|n2|0:15|5|Unknown|t.a\n",
    )
    assert [(v.state, v.elapsed_s, v.ended) for v in slurm.history(["t.a"], "now-1days")["7_0"]] == [
        ("PREEMPTED", 20, "2033-05-18T00:00:00"),
        ("CANCELLED", 5, ""),
    ]


def test_sites_without_accounting_are_asked_once() -> None:
    slurm = answering(scontrol="AccountingStorageType = accounting_storage/none\n", sacct="error: no")
    assert slurm.history(["t.a"], "now") == {} and slurm.has_sacct is False


def test_slurm_s_own_message_is_shown() -> None:
    slurm = answering(squeue="error: \nslurm_load_jobs error: Unable to contact slurm controller (connect failure)")
    with pytest.raises(ClusterError, match=r"squeue: slurm_load_jobs error: Unable to contact slurm controller"):
        slurm.queue(["t.a"])


def test_ids() -> None:
    assert list(expand_ids("5_[1,3-5:2%7]")) == ["5_1", "5_3", "5_5"]
