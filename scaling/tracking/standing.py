"""Where a run stands: its end record, else Slurm, else its process, else *unknown*; so that no dead run stays RUNNING.

A process that was asked to leave, by a person or by Slurm, releases its lease: its run is cancelled. One that is gone
without having released it was killed or crashed: its run has failed.

Beside ``conventions`` in the flow. Slurm is asked through a callable that the caller gives, since the queue's owner is
``sweeps``.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Final

from scaling.record import Attempt, EndRecord, RunFolder
from scaling.tracking.conventions import Standing

# Slurm job id -> (state, reason, end in Unix milliseconds or None), or None where Slurm does not know.
JobState = Callable[[str], tuple[str, str, int | None] | None]

LEASES: Final = "leases"  # scaling.lease: the newest file is touched every 10 s while its holder lives
SILENT_S: Final = 600.0  # a holder on another host whose lease was not touched for this long is dead

# Slurm's job states (man sacct, JOB STATE CODES). All others mean that the job may still run.
_KILLED: Final = frozenset({"CANCELLED", "TIMEOUT", "PREEMPTED", "DEADLINE", "REVOKED", "STOPPED"})
_FAILED: Final = frozenset({"FAILED", "OUT_OF_MEMORY", "NODE_FAIL", "BOOT_FAIL", "LAUNCH_FAILED", "COMPLETED"})


def standing(
    folder: RunFolder, attempts: Sequence[Attempt], end: EndRecord | None, job_state: JobState | None
) -> Standing:
    """Status, reason and end time of a run.

    Raises
    ------
    RecordError
        If the end record is damaged.
    """
    if end is not None:
        return Standing(status=end.status, reason=end.reason, ended_ms=end.ended_ms)
    if not attempts:
        return Standing(status="scheduled")
    last = attempts[-1]
    if last.job_id and job_state is not None:
        answer = job_state(last.job_id)
        if answer is not None:
            return _of_job(folder, last, *answer)
    return _of_process(folder, last)


def _of_job(folder: RunFolder, last: Attempt, state: str, reason: str, ended_ms: int | None) -> Standing:
    word = state.split()[0].rstrip("+").upper()  # sacct: "CANCELLED by 1000", squeue and sacct shorten with "+"
    if word not in _KILLED | _FAILED:
        return Standing(status="running")
    text = f"Slurm job {last.job_id}: {state}" + (f" ({reason})" if reason and reason != "None" else "")
    if word == "COMPLETED":
        text += ", but the run left no end record"
    status = "cancelled" if word in _KILLED else "failed"
    return Standing(status=status, reason=text, ended_ms=ended_ms or _last_write_ms(folder))


def _of_process(folder: RunFolder, last: Attempt) -> Standing:
    newest = max(folder.path.glob(f"{LEASES}/[0-9]*.json"), default=None)
    if newest is not None:
        try:
            released = bool(json.loads(newest.read_text(encoding="utf-8")).get("released"))
            silent_s = _clock_s(folder) - newest.stat().st_mtime
        except (OSError, ValueError, AttributeError):
            released, silent_s = False, 0.0
        if released:
            reason = f"process {last.pid} on {last.host} left without an end record"
            return Standing(status="cancelled", reason=reason, ended_ms=_last_write_ms(folder))
        if silent_s > SILENT_S:
            return _died(folder, f"process {last.pid} on {last.host} gave no sign of life for {silent_s / 60:.0f} min")
    if last.host == socket.gethostname() and not _alive(last):
        return _died(folder, f"process {last.pid} on {last.host} was killed or crashed: gone without an end record")
    if newest is None and last.host != socket.gethostname():
        return Standing(status="unknown", reason=f"process {last.pid} on {last.host} cannot be asked from here")
    return Standing(status="running")


def _died(folder: RunFolder, reason: str) -> Standing:
    return Standing(status="failed", reason=reason, ended_ms=_last_write_ms(folder))


def _alive(attempt: Attempt) -> bool:
    import psutil

    try:
        process = psutil.Process(attempt.pid)
        if process.status() == psutil.STATUS_ZOMBIE:
            return False
        # A process that began after the attempt did only has its number; 2 s for the clocks' rounding.
        return bool(process.create_time() * 1000 <= attempt.started_ms + 2_000)
    except psutil.NoSuchProcess:
        return False
    except psutil.AccessDenied:
        return True


def _last_write_ms(folder: RunFolder) -> int:
    """When the run last wrote its journals or attempts."""
    files: list[Path] = [*folder.path.glob("metrics-*.jsonl"), folder.path / "attempts.jsonl"]
    return max((int(path.stat().st_mtime * 1000) for path in files if path.exists()), default=0)


def _clock_s(folder: RunFolder) -> float:
    """Now, by this host's clock but never behind the folder's files (hosts' clocks differ)."""
    import time

    return max(time.time(), folder.path.stat().st_mtime)
