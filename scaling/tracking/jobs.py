"""What Slurm says of a job, for runs that left no end record; a ``standing.JobState``.

Used by ``scaling runs sync``. One squeue for all jobs of the user, at most every few seconds, and one sacct for each
job that has left the queue; where Slurm is not installed or out of reach the answer is *unknown*.
"""

from __future__ import annotations

import getpass
import os
import shutil
import subprocess
import time
from collections.abc import Sequence
from typing import Final

QUEUE_S: Final = 10.0  # how old the view of the queue may be
ANSWER_S: Final = 30.0


class Jobs:
    """Callable: Slurm job id -> (state, reason, end in Unix milliseconds), ``None`` where Slurm does not know."""

    def __init__(self) -> None:
        self._queue: dict[str, tuple[str, str, int | None]] | None = None
        self._asked_s = float("-inf")
        self._ended: dict[str, tuple[str, str, int | None]] = {}

    def __call__(self, job: str) -> tuple[str, str, int | None] | None:
        if job in self._ended:
            return self._ended[job]
        if time.monotonic() - self._asked_s > QUEUE_S:
            self._queue, self._asked_s = self._ask_queue(), time.monotonic()
        if self._queue is None:
            return None  # the controller does not answer: nothing is known, so nothing is ended
        if job in self._queue:
            return self._queue[job]
        ended = self._ask_records(job)
        if ended is not None:
            self._ended[job] = ended
        return ended

    def _ask_queue(self) -> dict[str, tuple[str, str, int | None]] | None:
        text = _run(["squeue", "-h", "-a", "-r", "-t", "all", "-u", getpass.getuser(), "-o", "%A|%T|%r"])
        if text is None:
            return None
        found: dict[str, tuple[str, str, int | None]] = {}
        for line in text.splitlines():
            job, _, rest = line.strip().partition("|")
            state, _, reason = rest.partition("|")
            found[job] = (state, reason, None)
        return found

    def _ask_records(self, job: str) -> tuple[str, str, int | None] | None:
        text = _run(["sacct", "-D", "-X", "-n", "-P", "-j", job, "-o", "State,Reason,End"])
        lines = [line for line in (text or "").splitlines() if line.count("|") == 2]
        if not lines:
            return None
        state, reason, ended = lines[-1].split("|")
        return state, reason, _milliseconds(ended)


def _milliseconds(text: str) -> int | None:
    """Local time as sacct writes it, ``2026-11-29T12:00:00``."""
    try:
        return int(time.mktime(time.strptime(text, "%Y-%m-%dT%H:%M:%S")) * 1000)
    except ValueError:
        return None


def _run(command: Sequence[str]) -> str | None:
    if shutil.which(command[0]) is None:
        return None
    environment = {**os.environ, "SLURM_TIME_FORMAT": "standard"}
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False, env=environment)
    except subprocess.TimeoutExpired:
        return None
    return done.stdout if done.returncode == 0 else None
