"""Following a sweep until it is over: a view that asks Slurm at most twice a minute, and tells when something happens.

Called by ``scaling sweep watch``. Run folders are looked at more often than Slurm, whose controller many users share.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from scaling.errors import ClusterError
from scaling.sweeps.notify import check_command, notify
from scaling.sweeps.plan import Plan
from scaling.sweeps.slurm import JobView, Slurm
from scaling.sweeps.status import SweepStatus, status

SLURM_S: Final = 30.0  # Slurm's controller is shared; sites ask for no more than a query in 30 to 60 s
LOOK_S: Final = 5.0


@dataclass(slots=True)
class PatientSlurm(Slurm):
    """A Slurm whose answers, errors among them, are kept for ``every_s``."""

    every_s: float = SLURM_S
    clock_s: Callable[[], float] = time.monotonic
    _kept: dict[str, tuple[float, Any]] = field(default_factory=dict)

    def queue(self, names: Sequence[str]) -> dict[str, JobView]:
        return self._patiently("queue", lambda: Slurm.queue(self, names))  # type: ignore[no-any-return]

    def history(self, names: Sequence[str], since: str, jobs: Sequence[str] = ()) -> dict[str, list[JobView]]:
        return self._patiently("history", lambda: Slurm.history(self, names, since, jobs))  # type: ignore[no-any-return]

    def _patiently(self, name: str, ask: Callable[[], Any]) -> Any:
        kept = self._kept.get(name)
        if kept is None or self.clock_s() - kept[0] >= self.every_s:
            try:
                answer = ask()
            except ClusterError as error:
                answer = error
            kept = self._kept[name] = (self.clock_s(), answer)
        if isinstance(kept[1], ClusterError):
            raise kept[1]
        return kept[1]


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
        if self.command:
            check_command(self.command)
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
