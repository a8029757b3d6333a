"""Submitting a sweep to Slurm: only what is missing, in arrays that the site accepts, all or nothing each.

After ``plan`` and ``status``. Idempotent by run key: what is queued, running or over is left alone, so that a second
submit, or one of a widened grid, adds the difference. Returns at once; what the site has no room for stays planned, for
the next submit or ``feed``.
"""

from __future__ import annotations

import logging
import os
import shutil
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

from scaling.errors import ClusterError, ScalingError
from scaling.record import END, RunFolder, write_atomically
from scaling.sweeps import snapshot as snapshots
from scaling.sweeps.array import Array, Lane, arrays, cut, lanes, manifest
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.plan import Plan, PlannedRun
from scaling.sweeps.request import TRAINER
from scaling.sweeps.resources import clock
from scaling.sweeps.site import Site
from scaling.sweeps.slurm import FINAL, Slurm
from scaling.sweeps.status import RunStatus, status
from scaling.sweeps.task import MANIFEST

logger = logging.getLogger(__name__)

FEED_S: Final = 60.0  # between two looks for free submit slots

# What Slurm's commands say while the controller is away or busy: it may be back at the next look.
_AWAY: Final = ("Unable to contact", "no answer within", "timed out", "temporarily", "Connection refused")

# What sbatch says where a user may not have more jobs in the queue (slurm_strerror, ESLURM_ACCOUNTING_POLICY and kin).
_FULL: Final = ("job submit limit", "SubmitJob", "QOSMaxSubmit", "MaxSubmit")


@dataclass(frozen=True, kw_only=True, slots=True)
class SubmitReport:
    """What a submit did. ``waiting`` runs found no room; ``skipped`` counts the others by state."""

    job_ids: tuple[str, ...] = ()
    jobs: int = 0
    runs: int = 0
    skipped: Mapping[str, int] = field(default_factory=dict)
    folder: Path = Path()
    why_waiting: str = ""
    waiting_keys: tuple[str, ...] = ()

    @property
    def waiting(self) -> int:
        return len(self.waiting_keys)


@dataclass(slots=True)
class Submitter:
    """Submits one plan at one site; ``slurm`` answers questions, the executor of ``batch`` calls sbatch."""

    plan: Plan
    site: Site = field(default_factory=Site)
    slurm: Slurm = field(default_factory=Slurm)
    retry: Sequence[str] = ()
    dependency: str | None = None
    snapshot: bool = True
    trainer: str = TRAINER
    keys: frozenset[str] | None = None

    def submit(self) -> SubmitReport:
        """Submit what is due.

        Raises
        ------
        ClusterError
            If Slurm refuses or cannot be reached. Arrays accepted before stay submitted; of the refused one nothing is
            left.
        """
        check_path(self.plan.sweep_folder.resolve())
        ledger = Ledger(self.plan.sweep_folder)
        with ledger.lock():
            self._adopt(ledger)
            now = status(self.plan, slurm=self.slurm)
            if now.trouble:
                raise ClusterError(f"{now.trouble}; nothing was submitted")
            due: list[RunStatus] = []
            skipped: dict[str, int] = {}
            for row in now.runs:
                if self._due(row):
                    due.append(row)
                else:
                    skipped[row.state.state] = skipped.get(row.state.state, 0) + 1
            if not due:
                return SubmitReport(skipped=skipped, folder=self.plan.sweep_folder)
            check_times([row.run for row in due], self.site, self.slurm)
            code = snapshots.take(self.plan.sweep_folder).path if self.snapshot else None
            return self._arrays(ledger, due, skipped, code)

    def count_due(self) -> int:
        """How many jobs ``submit`` would ask for, room or not."""
        due = [row.run for row in status(self.plan, slurm=self.slurm).runs if self._due(row)]
        return sum(len(array.tasks) for array in arrays(due))

    def _due(self, row: RunStatus) -> bool:
        if self.keys is not None and row.run.key not in self.keys:
            return False
        state = row.state
        if state.state == "planned":
            return True
        return state.state in self.retry or state.kind in self.retry

    def _adopt(self, ledger: Ledger) -> None:
        """Settle arrays of a client that was killed around sbatch: Slurm has them, or never got them."""
        for item in ledger.submissions():
            if not item.pending:
                continue
            name = ledger.job_name(item.token)
            views = list(self.slurm.queue([name]).values()) or [
                view for records in self.slurm.history([name], "now-7days").values() for view in records
            ]
            if views:
                ledger.accept(item.token, views[0].job.partition("_")[0])
            else:
                ledger.refuse(item.token, "never reached Slurm")

    def _arrays(self, ledger: Ledger, due: list[RunStatus], skipped: dict[str, int], code: Path | None) -> SubmitReport:
        width = self.slurm.max_array_index() + 1
        limit = self.slurm.submit_limit()
        free = None if limit is None else max(0, limit - self.slurm.in_queue())
        states = {row.run.key: row for row in due}
        left = cut(arrays([row.run for row in due]), width)
        lanes_left = self._lanes(ledger, left)
        job_ids: list[str] = []
        done_runs = done_jobs = 0
        why = ""
        while left:
            array = left.pop(0)
            if len(array.tasks) > width:
                left[:0] = cut([array], width)
                continue
            if free is not None and free < 1:
                why = f"{limit} jobs in the queue are allowed"
                left.insert(0, array)
                break
            if free is not None and len(array.tasks) > free:
                left[:0] = cut([array], free)
                continue
            lane = min(lanes_left, key=lambda one: one.load)
            try:
                job_id = self._one(ledger, array, states, code, lane)
            except ClusterError as error:
                if any(word in str(error) for word in _FULL):
                    why = str(error)
                    if len(array.tasks) > 1:  # a limit that could not be read: find it by halving
                        width = len(array.tasks) // 2
                        left.insert(0, array)
                        continue
                    left.insert(0, array)
                    break
                before = f"; {done_runs} runs of this sweep were submitted before it" if done_runs else ""
                raise ClusterError(f"{error}; nothing of this array is left{before}") from None
            job_ids.append(job_id)
            lane.take(job_id, len(array.tasks))
            done_runs += sum(len(task) for task in array.tasks)
            done_jobs += len(array.tasks)
            if free is not None:
                free -= len(array.tasks)
        return SubmitReport(
            job_ids=tuple(job_ids),
            jobs=done_jobs,
            runs=done_runs,
            waiting_keys=tuple(run.key for array in left for task in array.tasks for run in task),
            skipped=skipped,
            folder=self.plan.sweep_folder,
            why_waiting=why,
        )

    def _lanes(self, ledger: Ledger, cuts: Sequence[Array]) -> list[Lane]:
        """How the sweep's throttle, which Slurm knows for a single array only, is kept over several arrays."""
        throttle = self.plan.spec.throttle
        if throttle is None:
            return [Lane(throttle=None)]
        running = [item for item in ledger.submissions() if item.job_id is not None]
        names = [ledger.job_name(item.token) for item in running]
        live = {view.job.partition("_")[0] for view in self.slurm.queue(names).values() if view.state not in FINAL}
        used = {item.job_id: int(item.settings.get("throttle") or throttle) for item in running if item.job_id in live}
        return lanes(throttle, used, [len(array.tasks) for array in cuts])

    def _one(self, ledger: Ledger, array: Array, states: Mapping[str, RunStatus], code: Path | None, lane: Lane) -> str:
        """Submit one array; on refusal nothing stays behind but a line in the ledger."""
        from scaling.sweeps.batch import executor, task_command

        token = uuid.uuid4().hex[:8]
        folder = ledger.array_folder(token).resolve()  # made before sbatch: without it jobs fail without a log
        reopened: list[tuple[Path, Path]] = []
        intended = False
        try:
            folder.mkdir(parents=True)
            write_atomically(folder / MANIFEST, manifest(array, self.plan.out.resolve(), self.trainer))
            made = executor(
                folder,
                array.resources,
                self.site,
                name=ledger.job_name(token),
                throttle=lane.throttle,
                code=code.resolve() if code is not None else None,
                dependency=lane.dependency(self.dependency),
            )
            ledger.intend(
                token,
                [[run.key for run in task] for task in array.tasks],
                {"time_s": array.resources.time_s, "throttle": lane.throttle},
            )
            intended = True
            for task in array.tasks:
                for run in task:
                    reopened += _set_aside(self.plan.out / run.key, states[run.key])
            job_id = made.submit_tasks(task_command(folder, self.site, array.resources), len(array.tasks))
        except BaseException as error:
            for now_at, was_at in reversed(reopened):
                os.replace(now_at, was_at)
            if isinstance(error, (ScalingError, OSError)):
                shutil.rmtree(folder, ignore_errors=True)
                if intended:
                    ledger.refuse(token, str(error))
            if isinstance(error, OSError):
                place = error.filename or folder
                raise ClusterError(
                    f"{place}: cannot be written ({error.strerror}); free space, or another --out"
                ) from None
            raise
        ledger.accept(token, job_id)
        return job_id


def _set_aside(run: Path, row: RunStatus) -> list[tuple[Path, Path]]:
    """Keep the end record of a run that is tried again under another name; returns (where it is, where it was)."""
    if row.look is None or row.look.end is None:
        return []
    RunFolder(run).reopen()
    return [(run / f"end-{row.look.end.attempt:04d}.json", run / END)]


def check_path(folder: Path) -> None:
    """Refuse a folder whose name Slurm would read as a pattern: jobs would fail without a log."""
    if "%" in str(folder):
        raise ClusterError(f"{folder}: Slurm reads % in the names of logs as a pattern; choose another --out or name")


def check_times(runs: Sequence[PlannedRun], site: Site, slurm: Slurm) -> None:
    """Refuse a time over the partition's MaxTime: where the site does not enforce it, such a job waits for ever."""
    limits: dict[str | None, int | None] = {}
    for run in runs:
        name = run.resources.sbatch.get("partition", site.sbatch.get("partition", site.partition))
        if name not in limits:
            limits[name] = slurm.max_time_s(name)
        limit = limits[name]
        if limit is not None and run.resources.time_s > limit:
            raise ClusterError(
                f"{run.label}: time={clock(run.resources.time_s)} exceeds the MaxTime {clock(limit)} of partition "
                f"{name or '(default)'}; lower resources.time (runs are requeued and go on)"
            )


def feed(
    submitter: Submitter,
    *,
    poll_s: float = FEED_S,
    sleep: Callable[[float], None] = time.sleep,
    on_report: Callable[[SubmitReport], None] = lambda report: None,
) -> SubmitReport:
    """Submit again and again as the queue makes room, until nothing waits; returns the sum of all."""
    total = submitter.submit()
    on_report(total)
    while total.waiting:
        sleep(poll_s)
        submitter.keys = frozenset(total.waiting_keys)  # each run once: what fails again is not tried for ever
        try:
            more = submitter.submit()
        except ClusterError as error:
            if not any(word in str(error) for word in _AWAY):
                raise
            logger.warning("%s; trying again in %.0f s", error, poll_s)
            continue
        on_report(more)
        total = replace(
            total,
            job_ids=(*total.job_ids, *more.job_ids),
            jobs=total.jobs + more.jobs,
            runs=total.runs + more.runs,
            waiting_keys=more.waiting_keys,
        )
    return total
