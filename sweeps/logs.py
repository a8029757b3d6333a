"""The logs of a run: what its training printed, what its job printed, and the first line that says what went wrong.

A run's own log is ``log.txt`` in its folder; each array task has one more, with Slurm's own messages, in the array's
folder.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from scaling.sweeps.ledger import Ledger
from scaling.sweeps.plan import Plan
from scaling.sweeps.request import LOG
from scaling.sweeps.status import RunStatus

TAIL_BYTES: Final = 262_144

# What a failure begins with: our own line, Python's last traceback line, Slurm's and the kernel's words, CUDA's.
_ERROR: Final = re.compile(
    r"^error: .*|^(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*|^(?:slurmstepd|srun|slurmd): error:.*"
    r"|.*\b(?:CUDA error|out of memory|oom-kill|Killed|Segmentation fault|No space left on device|Bus error)\b.*"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunLog:
    """Files of a run's logs (the run's own first) and its first error line."""

    label: str
    key: str
    files: tuple[Path, ...]
    error: str = ""

    def tail(self, lines: int) -> str:
        """The last lines of the run's own log, else of its job's."""
        for file in self.files:
            text = _read(file)
            if text.strip():
                return "\n".join(text.splitlines()[-lines:])
        return ""


def log_of(plan: Plan, row: RunStatus) -> RunLog:
    """Find a run's logs."""
    files = [plan.out / row.run.key / LOG]
    ledger = Ledger(plan.sweep_folder)
    if row.state.job:
        job_id, _, index = row.state.job.partition("_")
        for item in ledger.submissions():
            if item.job_id == job_id:
                files += sorted(ledger.array_folder(item.token).glob(f"{job_id}_{index}_*log.out"))
    present = tuple(file for file in files if file.is_file())
    return RunLog(label=row.run.label, key=row.run.key, files=present, error=first_error(present))


def first_error(files: tuple[Path, ...]) -> str:
    """The first line, in the newest part of the logs, that names an error.

    Of a traceback it is the line below it, not the frames.
    """
    for file in files:
        for line in _read(file).splitlines():
            if _ERROR.match(line.strip()):
                return line.strip()
    return ""


def _read(file: Path) -> str:
    try:
        with file.open("rb") as stream:
            size = stream.seek(0, 2)
            stream.seek(max(0, size - TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except OSError:
        return ""
