"""What a sweep has submitted to Slurm: an append-only list of arrays, with the keys of each task.

Written by ``submit``, read by ``status``, ``cancel``, ``logs``. An array is written down before sbatch is called, so
that a client killed in between loses nothing: the next one finds the job by its token, which Slurm keeps as the job's
comment.
"""

from __future__ import annotations

import fcntl
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final, Literal

from scaling.errors import ClusterError, RecordError
from scaling.record import append_line, now_ms, read_lines
from scaling.sweeps.slurm import JobView

SUBMISSIONS: Final = "submissions.jsonl"
ARRAYS: Final = "arrays"
LOCK: Final = "lock"


@dataclass(frozen=True, kw_only=True, slots=True)
class Submission:
    """One array: the keys of the runs in each of its tasks, and its job id once Slurm has given one."""

    token: str
    tasks: tuple[tuple[str, ...], ...]
    time_ms: int
    job_id: str | None = None
    refused: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    @property
    def pending(self) -> bool:
        """Whether it is not known what Slurm made of it."""
        return self.job_id is None and not self.refused


@dataclass(frozen=True, slots=True)
class Ledger:
    """The submissions of the sweep in this folder."""

    folder: Path

    @property
    def path(self) -> Path:
        return self.folder / SUBMISSIONS

    def array_folder(self, token: str) -> Path:
        return self.folder / ARRAYS / token

    def job_name(self, token: str) -> str:
        """The name of an array's jobs: the sweep's and the token, by which a submit finds what it lost sight of."""
        return f"{re.sub(r'[^A-Za-z0-9._-]', '-', self.folder.name)}.{token}"

    def job_names(self) -> list[str]:
        """The names of all jobs that Slurm may know."""
        return [self.job_name(item.token) for item in self.submissions() if not item.refused]

    @contextmanager
    def lock(self) -> Iterator[None]:
        """Keep a second submit of the same sweep out.

        Raises
        ------
        ClusterError
            If another one is at it, or the folder cannot be made.
        """
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
            descriptor = os.open(self.folder / LOCK, os.O_RDWR | os.O_CREAT, 0o666)
        except OSError as error:
            raise RecordError(f"{self.folder}: cannot be written ({error.strerror}); choose another --out") from None
        try:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise ClusterError(f"{self.folder}: another submit of this sweep is at work; wait for it") from None
            yield
        finally:
            os.close(descriptor)

    def submissions(self) -> list[Submission]:
        """All arrays in the order they were submitted."""
        found: dict[str, Submission] = {}
        for number, line in enumerate(read_lines(self.path), start=1):
            try:
                token = line["token"]
                if line["event"] == "intent":
                    found[token] = Submission(
                        token=token,
                        tasks=tuple(tuple(task) for task in line["tasks"]),
                        time_ms=line["time_ms"],
                        settings=line.get("settings", {}),
                    )
                elif line["event"] == "accepted":
                    found[token] = replace(found[token], job_id=line["job_id"])
                else:
                    found[token] = replace(found[token], refused=line["message"])
            except (KeyError, TypeError) as error:
                raise RecordError(
                    f"{self.path}: record {number} is damaged ({type(error).__name__}: {error}); without it a submit "
                    "could train runs twice: mend or move the file when none of its jobs is in the queue"
                ) from None
        return list(found.values())

    def jobs(self, seen: Iterable[JobView] = ()) -> dict[str, tuple[str, int]]:
        """For each run the array task it was last submitted in, as Slurm writes it (``12_3``), and when.

        Parameters
        ----------
        seen
            What Slurm says of jobs of this sweep: it tells the job ids of arrays whose client was killed around sbatch.
        """
        ids = {view.name: view.job.partition("_")[0] for view in seen}
        last = {}
        for item in self.submissions():
            job_id = item.job_id or (ids.get(self.job_name(item.token)) if item.pending else None)
            if job_id is not None:
                for index, keys in enumerate(item.tasks):
                    last.update(dict.fromkeys(keys, (f"{job_id}_{index}", item.time_ms)))
        return last

    def beside(self, keys: Set[str]) -> list[Ledger]:
        """The ledgers of other sweeps in the same folder of runs that have submitted, or may have, some of these."""
        others = [Ledger(path.parent) for path in sorted(self.folder.parent.glob(f"*/{SUBMISSIONS}"))]
        return [other for other in others if other.folder.name != self.folder.name and other._may_have(keys)]

    def _may_have(self, keys: Set[str]) -> bool:
        return any(not item.refused and any(not keys.isdisjoint(t) for t in item.tasks) for item in self.submissions())

    def intend(self, token: str, tasks: Sequence[Sequence[str]], settings: Mapping[str, Any]) -> None:
        """Write down that an array is about to be submitted."""
        self._append("intent", token=token, tasks=[list(task) for task in tasks], time_ms=now_ms(), settings=settings)

    def accept(self, token: str, job_id: str) -> None:
        """Write down the job id that Slurm gave."""
        self._append("accepted", token=token, job_id=job_id)

    def refuse(self, token: str, message: str) -> None:
        """Write down that Slurm refused an array, or never got it."""
        self._append("refused", token=token, message=message)

    def _append(self, event: Literal["intent", "accepted", "refused"], **rest: Any) -> None:
        try:
            append_line(self.path, {"event": event, **rest}, sync=True)
        except OSError as error:
            raise RecordError(
                f"{self.path}: cannot be written ({error.strerror}); free space, then try again"
            ) from None
