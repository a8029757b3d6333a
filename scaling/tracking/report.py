"""What a sync did, and what is still to be done; the syncer's answer.

Beside ``syncer`` in the flow: ``session`` fills it, the command line prints it.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProblem:
    """A run that could not be synced, and why."""

    run: str
    reason: str


@dataclass(kw_only=True, slots=True)
class SyncReport:
    """What a sync did: counts of what was sent over all rounds, state and problems as of the last one."""

    store: str
    runs: int = 0
    running: int = 0
    deleted: int = 0
    created: int = 0
    updated: int = 0
    points: int = 0
    doubled: int = 0
    rounds: int = 0
    wall_time_s: float = 0.0
    unavailable: str = ""
    problems: list[RunProblem] = field(default_factory=list)
    run_ids: dict[str, str] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        """Whether everything there was to send has been sent."""
        return not self.problems and not self.unavailable
