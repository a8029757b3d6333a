"""Taking runs of a sweep out: one scancel for this sweep's jobs only, SIGTERM to its local pools.

A run that shares its job with others can only be cancelled with all of them: cancelling names the jobs, and says which
runs go.
"""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from dataclasses import dataclass

from scaling.errors import UsageError
from scaling.sweeps.ledger import Ledger
from scaling.sweeps.local import pools
from scaling.sweeps.plan import Plan
from scaling.sweeps.slurm import FINAL, Slurm
from scaling.sweeps.status import RunStatus


@dataclass(frozen=True, kw_only=True, slots=True)
class Cancelled:
    """Jobs that were cancelled, the runs in them, and local pools that were told to stop."""

    jobs: tuple[str, ...]
    runs: tuple[str, ...]
    pools: tuple[int, ...] = ()


def jobs_of(plan: Plan, rows: Sequence[RunStatus], slurm: Slurm) -> tuple[list[str], list[str]]:
    """The live jobs that hold these runs, and the keys of all runs in them.

    Raises
    ------
    UsageError
        If a job also holds runs that were not named.
    """
    ledger = Ledger(plan.sweep_folder)
    names = ledger.job_names()
    if not names:
        return [], []
    queue = slurm.queue(names)
    jobs = {key: job for key, (job, _) in ledger.jobs(queue.values()).items()}
    live = {job for job, view in queue.items() if view.state not in FINAL}
    named = {row.run.key for row in rows}
    wanted = {jobs[key] for key in named if key in jobs} & live
    inside = {key for key, job in jobs.items() if job in wanted}
    over = {row.run.key for row in rows if row.look is not None and row.look.end is not None}
    strangers = inside - named - over
    if strangers:
        raise UsageError(
            f"jobs {', '.join(sorted(wanted))} also hold the runs {', '.join(sorted(strangers))} "
            "(runs_per_job packs them); name those too, or cancel the whole sweep"
        )
    return sorted(wanted), sorted(inside)


def cancel(plan: Plan, rows: Sequence[RunStatus], slurm: Slurm, *, everything: bool) -> Cancelled:
    """Cancel the jobs of these runs; with ``everything`` also the local pools of this sweep on this host.

    Raises
    ------
    UsageError
        If a job or pool also holds runs that were not named.
    """
    here = [pool for pool in pools(plan.sweep_folder) if pool["host"] == socket.gethostname()]
    named = {row.run.key for row in rows}
    for pool in here:
        if not everything and named.intersection(pool["keys"]):
            raise UsageError(f"process {pool['pid']} here trains these runs and others; cancel the whole sweep")
    jobs, runs = jobs_of(plan, rows, slurm) if Ledger(plan.sweep_folder).path.exists() else ([], [])
    slurm.cancel(jobs)
    stopped = []
    if everything:
        for pool in here:
            os.kill(int(pool["pid"]), signal.SIGTERM)
            stopped.append(int(pool["pid"]))
    return Cancelled(jobs=tuple(jobs), runs=tuple(runs), pools=tuple(stopped))
