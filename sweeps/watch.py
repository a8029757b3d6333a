"""Following a sweep until it is over: a view that asks Slurm at most twice a minute, and tells when something happens.

Called by ``scaling sweep watch``. Run folders are looked at more often than Slurm, whose controller many users share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from scaling.sweeps.notify import notify
from scaling.sweeps.plan import Plan
from scaling.sweeps.slurm import JobView, Slurm
from scaling.sweeps.status import SweepStatus, status

SLURM_S: Final = 30.0  # Slurm's controller is shared; sites ask for no more than a query in 30 to 60 s
LOOK_S: Final = 5.0


@dataclass(slots=True)
class PatientSlurm(Slurm):
    """A Slurm whose answers are kept for ``every_s``."""

    every_s: float = SLURM_S
    clock_s: Callable[[], float] = time.monotonic
    _queue: tuple[float, dict[str, JobView]] | None = None
    _history: tuple[float, dict[str, list[JobView]]] | None = None

    def queue(self, names: Sequence[str]) -> dict[str, JobView]:
        if self._queue is None or self.clock_s() - self._queue[0] >= self.every_s:
            self._queue = (self.clock_s(), Slurm.queue(self, names))
        return self._queue[1]

    def history(self, names: Sequence[str], since: str) -> dict[str, list[JobView]]:
        if self._history is None or self.clock_s() - self._history[0] >= self.every_s:
            self._history = (self.clock_s(), Slurm.history(self, names, since))
        return self._history[1]


@dataclass(slots=True)
class Watch:
    """Looks until every run is over; ``show`` gets each status, ``command`` runs on failures and at the end."""

    plan: Plan
    slurm: Slurm = field(default_factory=PatientSlurm)
    show: Callable[[SweepStatus], None] = lambda now: None
    command: str | None = None
    sleep: Callable[[float], None] = time.sleep
    look_s: float = LOOK_S

    def run(self) -> SweepStatus:
        """Returns the last status, when nothing is queued, running or unknown any more."""
        told: set[str] = set()
        while True:
            now = status(self.plan, slurm=self.slurm)
            self.show(now)
            failed = {row.run.key: row.run.label for row in now.runs if row.state.state == "failed"}
            new = [label for key, label in failed.items() if key not in told]
            told |= set(failed)
            if new and self.command:
                notify(self.command, "failed", now, new)
            if not any(row.state.state in ("queued", "running", "stalled", "requeued", "unknown") for row in now.runs):
                if self.command:
                    notify(self.command, "finished", now)
                return now
            self.sleep(self.look_s)
