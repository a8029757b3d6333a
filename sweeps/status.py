"""The states of all runs of a sweep, gathered: run folders, one squeue, one sacct, and what they cost so far.

Read by the commands ``status``, ``watch``, ``plan`` and ``submit``. Works where there is no Slurm (local sweeps), no
accounting, and while the controller is down: then it says what was last known.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from scaling.errors import ClusterError, UsageError, nearest
from scaling.lease import LEASES, TTL_S, holder
from scaling.sweeps.glance import Glance, glance_all
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.plan import Plan, PlannedRun
from scaling.sweeps.slurm import FINAL, JobView, Slurm
from scaling.sweeps.states import OVER, STALL_S, STATES, RunState, reconcile


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """One row of the status table."""

    run: PlannedRun
    look: Glance | None
    state: RunState
    gpu_hours_used: float

    @property
    def steps(self) -> int:
        assert self.run.config.schedule.steps is not None
        return self.run.config.schedule.steps

    @property
    def step(self) -> int | None:
        return self.look.step if self.look else None

    @property
    def eta_s(self) -> float | None:
        """Seconds to the end at the last speed, for a run that trains."""
        speed = self.look.tokens_per_s if self.look else None
        if self.state.state != "running" or not speed or self.step is None:
            return None
        return (self.steps - self.step) * self.run.config.data.tokens_per_step / speed

    @property
    def gpu_hours_asked(self) -> float:
        asked = self.run.resources
        return asked.time_s * asked.devices / 3600 / asked.runs_per_gpu

    def row(self) -> dict[str, Any]:
        """The row as plain data, for ``--json``."""
        look = self.look or Glance()
        return {
            "key": self.run.key,
            "label": self.run.label,
            "block": self.run.block,
            "state": self.state.state,
            "kind": self.state.kind,
            "slurm_state": self.state.slurm,
            "reason": self.state.reason,
            "job": self.state.job,
            "step": self.step,
            "steps": self.steps,
            "loss": look.loss,
            "tokens_per_s": look.tokens_per_s,
            "eta_s": self.eta_s,
            "attempts": look.attempts,
            "gpu_hours_used": self.gpu_hours_used,
            "gpu_hours_asked": self.gpu_hours_asked,
        }


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepStatus:
    """All rows, when they were gathered, what could not be asked. ``left_over`` were submitted but left the grid."""

    plan: Plan
    runs: tuple[RunStatus, ...]
    checked_s: float
    trouble: str = ""
    left_over: int = 0

    @property
    def counts(self) -> dict[str, int]:
        """How many runs are in each state, in the order of ``states.STATES``."""
        found = Counter(run.state.state for run in self.runs)
        return {state: found[state] for state in STATES if found[state]}

    @property
    def over(self) -> bool:
        return all(run.state.state in OVER for run in self.runs)

    @property
    def good(self) -> bool:
        """Whether every run has a result (diverged is one)."""
        return all(run.state.state in ("done", "diverged") for run in self.runs)


def status(
    plan: Plan,
    *,
    slurm: Slurm | None = None,
    clock: Callable[[], float] = time.time,
    stall_s: float = STALL_S,
) -> SweepStatus:
    """Gather the states of a sweep's runs.

    Parameters
    ----------
    slurm
        Who to ask; by default Slurm itself. It is asked only where the sweep has been submitted.
    """
    keys = {run.key for run in plan.runs}
    own = Ledger(plan.sweep_folder)
    ledgers = [own, *own.beside(keys)]
    names = [name for ledger in ledgers for name in ledger.job_names()]
    jobs = _jobs(ledgers, ())
    queue: dict[str, JobView] = {}
    records: dict[str, list[JobView]] = {}
    trouble = ""
    if names:
        slurm = slurm or Slurm()
        try:
            queue = slurm.queue(names)
        except ClusterError as error:
            trouble = str(error)
        jobs = _jobs(ledgers, queue.values())
        if jobs and any(job not in queue or queue[job].state in FINAL for job, _ in jobs.values()):
            first_ms = min(time_ms for _, time_ms in jobs.values())
            try:
                since = datetime.fromtimestamp(first_ms / 1000 - 86_400).strftime("%Y-%m-%d")
                records = slurm.history(names, since, sorted({job.partition("_")[0] for job, _ in jobs.values()}))
            except ClusterError as error:
                trouble = trouble or str(error)
    looks = glance_all(plan.out, [run.key for run in plan.runs])
    now_s = clock()
    rows = []
    for run in plan.runs:
        look, (job, submitted_ms) = looks.get(run.key), jobs.get(run.key, (None, 0))
        queued = queue.get(job) if job else None
        started = look is not None and (look.started_ms or 0) >= submitted_ms
        if job and queued is None and not started and job not in records:
            queued = queue.get(job.partition("_")[0])  # squeue has one line for all tasks that never started
        needed = look is not None and look.end is None and look.attempts > 0
        needed = needed and (queued is None or queued.state in FINAL)
        state = reconcile(
            look,
            alive=needed and held(plan.out / run.key, now_s),
            job=job,
            submitted_ms=submitted_ms,
            queued=queued,
            records=records.get(job, ()) if job else (),
            now_s=now_s,
            reachable=not trouble,
            stall_s=stall_s,
        )
        views = records.get(job, ()) if job else ()
        rows.append(RunStatus(run=run, look=look, state=state, gpu_hours_used=_used_h(run, look, queued, views)))
    return SweepStatus(
        plan=plan,
        runs=tuple(rows),
        checked_s=now_s,
        trouble=trouble,
        left_over=sum(key not in keys for key in own.jobs()),
    )


def _jobs(ledgers: Sequence[Ledger], seen: Iterable[JobView]) -> dict[str, tuple[str, int]]:
    """For each run the array task it was last submitted in, by whichever sweep, and when."""
    views, last = list(seen), dict[str, tuple[str, int]]()
    for ledger in ledgers:
        for key, task in ledger.jobs(views).items():
            if key not in last or task[1] > last[key][1]:
                last[key] = task
    return last


def held(run: Path, now_s: float) -> bool:
    """Whether a process seems to hold the run's lease: its heartbeat is fresh, and it exists where that can be seen."""
    own = holder(run)
    if own is None:
        return False
    try:
        age_s = now_s - (run / LEASES / f"{own.number:04d}.json").stat().st_mtime
    except OSError:
        return False
    import socket

    import psutil

    if own.host == socket.gethostname() and not psutil.pid_exists(own.pid):
        return False
    return age_s <= TTL_S


def choose(
    rows: Sequence[RunStatus], *, states: Sequence[str] = (), pattern: str = "", sort: str = "", reverse: bool = False
) -> list[RunStatus]:
    """Rows of these states (``failed:oom`` works) whose key or label matches the pattern, sorted by a column.

    Raises
    ------
    UsageError
        If a state or column does not exist.
    """
    words = [word.strip() for text in states for word in text.split(",") if word.strip()]
    for word in words:
        if word.partition(":")[0] not in STATES:
            raise UsageError(f"--state {word}: no such state; {nearest(word, STATES)}")
    chosen = [
        row
        for row in rows
        if (not words or row.state.state in words or row.state.word in words) and matches(row.run, pattern)
    ]
    if sort:
        columns = rows[0].row() if rows else {sort: None}
        if sort not in columns:
            raise UsageError(f"--sort {sort}: no such column; {nearest(sort, columns)}")
        known = [row for row in chosen if row.row()[sort] is not None]
        known.sort(key=lambda row: row.row()[sort], reverse=reverse)
        chosen = known + [row for row in chosen if row.row()[sort] is None]
    return chosen


def matches(run: PlannedRun, pattern: str) -> bool:
    """Whether a run is meant by a pattern: the start of its key, or a part or shell pattern of its label."""
    from fnmatch import fnmatchcase

    if not pattern:
        return True
    return run.key.startswith(pattern) or pattern in run.label or fnmatchcase(run.label, pattern)


def _used_h(run: PlannedRun, look: Glance | None, queued: JobView | None, records: Sequence[JobView]) -> float:
    """GPU-hours so far: by the end record, else by Slurm's clock over all starts, shared among packed runs."""
    if look is not None and look.end is not None and "perf/gpu_seconds" in look.end.final:
        return look.end.final["perf/gpu_seconds"] / 3600
    elapsed_s = sum(view.elapsed_s for view in records)
    if queued is not None and not any(view.elapsed_s >= queued.elapsed_s for view in records[-1:]):
        elapsed_s += queued.elapsed_s
    return elapsed_s * run.resources.gpus * run.resources.nodes / 3600 / max(1, run.resources.per_job)
