"""The state of a run from all that is known of it: end record, then Slurm's queue, then its records, else unknown.

A pure function of a glance at the run folder, the lease, and Slurm's views; ``status`` gathers those. Slurm's own word
and reason are kept beside ours. Nothing is guessed: a run that was submitted and is nowhere is ``unknown``, not dead.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Final, Literal

from scaling.sweeps.glance import Glance
from scaling.sweeps.retry import failure_kind
from scaling.sweeps.slurm import FINAL, RETURNING, WAITING, JobView

State = Literal[
    "planned", "queued", "running", "stalled", "requeued", "done", "diverged", "failed", "cancelled", "unknown"
]

STATES: Final[dict[State, str]] = {
    "planned": "not submitted (or interrupted here: goes on from its checkpoint)",
    "queued": "waits in Slurm's queue, or for its turn in a job",
    "running": "trains now",
    "stalled": "its job runs, but its journal has had no line for a while",
    "requeued": "preempted, out of time or on a lost node, and waits in the queue again",
    "done": "trained to the end of its schedule",
    "diverged": "ended with a loss that is not finite; a result",
    "failed": "ended with an error: oom, timeout, node or crash",
    "cancelled": "taken out by somebody",
    "unknown": "was submitted, but neither its folder nor Slurm says what became of it",
}
OVER: Final = frozenset({"done", "diverged", "failed", "cancelled"})

STALL_S: Final = 900.0  # an evaluation or a compilation may be silent for minutes
RETURN_S: Final = 180.0  # how long after NODE_FAIL or PREEMPTED Slurm may take to put a job back into the queue


@dataclass(frozen=True, kw_only=True, slots=True)
class RunState:
    """Our word (with ``kind`` for failures), Slurm's own beside it, and the reason."""

    state: State
    kind: str = ""
    slurm: str = ""
    reason: str = ""
    job: str = ""

    @property
    def word(self) -> str:
        """``failed:oom``, ``running``, ..."""
        return f"{self.state}:{self.kind}" if self.kind else self.state


def reconcile(
    look: Glance | None,
    *,
    alive: bool,
    job: str | None = None,
    submitted_ms: int = 0,
    queued: JobView | None = None,
    records: Sequence[JobView] = (),
    now_s: float,
    reachable: bool = True,
    stall_s: float = STALL_S,
) -> RunState:
    """The state of one run.

    Parameters
    ----------
    look
        Its folder, ``None`` where there is none.
    alive
        Whether a process is known to hold its lease.
    job, submitted_ms
        The Slurm job (array task) it was last submitted in, and when (Unix milliseconds).
    queued, records
        What squeue, and sacct in order of time, say of that job.
    reachable
        Whether Slurm answered at all.
    """
    look = look or Glance()
    view = queued or (records[-1] if records else None)
    word, where = (view.state if view else ""), job or ""
    if look.damaged:
        return RunState(state="unknown", slurm=word, job=where, reason=look.damaged)
    if look.end is not None:
        kind = failure_kind(look.end) if look.end.status == "failed" else ""
        return RunState(state=look.end.status, kind=kind, slurm=word, reason=look.end.reason, job=where)
    begun = look.attempts > 0
    if job is None:
        if alive:
            return _running(look, now_s, stall_s, "", "", "")
        reason = f"interrupted at step {look.step}" if begun else ""
        return RunState(state="planned", reason=reason)
    begun = begun and (look.started_ms or 0) >= submitted_ms  # in this job, not in one before it
    if view is None:
        if alive:
            return _running(look, now_s, stall_s, "", where, "")
        reason = "neither squeue nor sacct knows the job" if reachable else "Slurm cannot be reached"
        if begun:
            reason += f"; last seen at step {look.step}"
        return RunState(state="unknown", reason=reason, job=where)
    reason = view.reason
    if view.state in WAITING:
        restarted = begun or len(records) > 1 or view.state != "PENDING"
        return RunState(state="requeued" if restarted else "queued", slurm=word, reason=reason, job=where)
    if view.state not in FINAL:
        if not begun and not alive:
            return RunState(state="queued", slurm=word, reason="starts, or waits for its turn in the job", job=where)
        return _running(look, now_s, stall_s, word, where, reason)
    if alive:  # out of touch, or a twin: the folder knows better
        return _running(look, now_s, stall_s, word, where, "its process holds the run folder")
    if view.state in RETURNING and _age_s(view, now_s) < RETURN_S:
        return RunState(state="requeued", slurm=word, reason=f"{view.state}: may come back", job=where)
    return _ended(view, where)


def _ended(view: JobView, job: str) -> RunState:
    """For a job that is over without an end record of the run."""
    exit_code = f", exit {view.exit_code}" if view.exit_code not in ("", "0:0") else ""
    said = f"Slurm: {view.state}{exit_code}" + (f" ({view.reason})" if view.reason else "")
    match view.state:
        case "CANCELLED" | "REVOKED":
            return RunState(state="cancelled", slurm=view.state, reason=said, job=job)
        case "PREEMPTED":
            return RunState(state="cancelled", slurm=view.state, reason=f"{said}, not requeued", job=job)
        case "OUT_OF_MEMORY":
            kind = "oom"
        case "TIMEOUT" | "DEADLINE":
            kind = "timeout"
        case "NODE_FAIL" | "BOOT_FAIL":
            kind = "node"
        case _:
            kind, said = "crash", f"{said}, without an end record"
    return RunState(state="failed", kind=kind, slurm=view.state, reason=said, job=job)


def _running(look: Glance, now_s: float, stall_s: float, word: str, job: str, reason: str) -> RunState:
    silent_s = now_s - look.touched_s if look.touched_s is not None else 0.0
    if silent_s > stall_s:
        text = f"no journal line for {silent_s / 60:.0f} min"
        return RunState(state="stalled", slurm=word, job=job, reason=text)
    return RunState(state="running", slurm=word, job=job, reason=reason)


def _age_s(view: JobView, now_s: float) -> float:
    """Seconds since the job ended; zero where only squeue has it (which forgets ended jobs after MinJobAge)."""
    if not view.ended:
        return 0.0
    return now_s - datetime.fromisoformat(view.ended).timestamp()
