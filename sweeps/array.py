"""Job arrays before they are submitted: which runs share one, how it is cut, and its part of the sweep's throttle.

Between ``plan``, whose runs it takes, and ``submit``, which hands the arrays to Slurm one at a time. Nothing here asks
Slurm.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from scaling.config.tree import to_dict
from scaling.sweeps.plan import PlannedRun
from scaling.sweeps.resources import Resources


@dataclass(frozen=True, kw_only=True, slots=True)
class Array:
    """Tasks that ask for the same: each task is the runs of one job."""

    resources: Resources
    tasks: tuple[tuple[PlannedRun, ...], ...]


@dataclass(kw_only=True, slots=True)
class Lane:
    """A part of the throttle; an array waits for the one before it in its lane (unless there is no throttle)."""

    throttle: int | None
    last: str | None = None
    load: int = 0

    def take(self, job_id: str, count: int) -> None:
        self.load += count
        self.last = job_id

    def dependency(self, other: str | None) -> str | None:
        """sbatch's dependency for the next array of this lane."""
        own = f"afterany:{self.last}" if self.throttle is not None and self.last is not None else None
        return ",".join(word for word in (other, own) if word) or None


def arrays(runs: Sequence[PlannedRun]) -> list[Array]:
    """Runs that ask for the same, packed into jobs, in the order of the runs (the largest first)."""
    groups: dict[str, list[PlannedRun]] = {}
    for run in runs:
        groups.setdefault(repr(run.resources), []).append(run)
    made = []
    for members in groups.values():
        size = members[0].resources.per_job
        tasks = tuple(tuple(members[i : i + size]) for i in range(0, len(members), size))
        made.append(Array(resources=members[0].resources, tasks=tasks))
    return made


def manifest(array: Array, out: Path, trainer: str) -> str:
    """What the tasks read: one JSON line a task."""
    asked = array.resources
    lines = []
    for task in array.tasks:
        tree: dict[str, Any] = {
            "runs": [{"key": run.key, "config": to_dict(run.config), "out": str(out)} for run in task],
            "concurrent": asked.concurrent,
            "distributed": asked.distributed,
            "gpus": asked.gpus,
            "nodes": asked.nodes,
            "signal_s": asked.signal_s,
            "max_requeues": asked.max_requeues,
            "trainer": trainer,
        }
        lines.append(json.dumps(tree, separators=(",", ":")))
    return "\n".join(lines) + "\n"


def lanes(throttle: int, used: Mapping[str, int], counts: Sequence[int]) -> list[Lane]:
    """Share a throttle among new arrays of these sizes, beside live arrays that use some of it.

    Where there is a place for each, every array gets a lane with its share, the larger the more; else arrays queue up
    in lanes, each waiting for the one before it.

    >>> [lane.throttle for lane in lanes(8, {}, [90, 10])]
    [7, 1]
    >>> [(lane.throttle, lane.last) for lane in lanes(2, {"7": 2}, [5, 5, 5])]
    [(1, '7'), (1, '7')]
    """
    free = throttle - sum(used.values())
    if free < 1:
        before = list(used)
        return [Lane(throttle=1, last=before[index % len(before)]) for index in range(throttle)]
    if len(counts) > free:
        return [Lane(throttle=1) for _ in range(free)]
    shares = [1] * len(counts)
    for _ in range(free - len(counts)):
        neediest = max(range(len(counts)), key=lambda index: counts[index] / shares[index])
        shares[neediest] += 1
    return [Lane(throttle=share) for share in shares]


def cut(groups: Sequence[Array], width: int) -> list[Array]:
    """Arrays of at most ``width`` tasks: Slurm bounds the index of a task."""
    return [
        replace(group, tasks=group.tasks[i : i + width]) for group in groups for i in range(0, len(group.tasks), width)
    ]
