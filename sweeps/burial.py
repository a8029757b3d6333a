"""The end record of a run whose process could not write one itself: it crashed, was killed, or ran out of tries.

Written by ``worker`` after an exception and by ``pool`` after a process died, under the run's lease, never over a
record that is there.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from scaling.config.tree import RunConfig
from scaling.errors import LeaseError
from scaling.lease import Lease
from scaling.record import EndRecord, RunFolder, now_ms
from scaling.sweeps.glance import glance

Kind = Literal["oom", "timeout", "node", "crash"]


def bury(out: Path, config: RunConfig, *, kind: Kind, reason: str) -> bool:
    """Record that a run failed, unless it has an end record or another process holds it.

    Returns
    -------
    bool
        Whether the record was written.

    Raises
    ------
    RecordError
        If the folder cannot be written.
    """
    folder = RunFolder.create(out, config)
    try:
        with Lease.take(folder.path):
            if folder.end() is not None:
                return False
            seen = glance(folder.path)
            folder.finish(
                EndRecord(
                    status="failed",
                    step=seen.step or 0,
                    ended_ms=now_ms(),
                    attempt=max(1, seen.attempts),
                    reason=reason,
                    final=seen.metrics,
                    details={"kind": kind, "schedule_finished": False},
                )
            )
    except LeaseError:
        return False
    return True
