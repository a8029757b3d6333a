"""Slurm's commands, and what they say: one query for all jobs of a sweep, texts parsed, nothing guessed.

Asked by ``status`` and ``submit``. Everything goes through ``Slurm.ask``, so that tests put a fake in its place; sites
without accounting (no ``sacct``) and older versions are served: only ``--parsable2`` and ``-o`` formats are read.
"""

from __future__ import annotations

import os
import pwd
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from scaling.errors import ClusterError
from scaling.sweeps.resources import seconds

ANSWER_S: Final = 60.0  # a busy controller answers late; longer than this it counts as out of reach

# Of squeue(1), JOB STATE CODES. In all others the job may still run, or run again.
FINAL: Final = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "TIMEOUT",
     "REVOKED"}
)  # fmt: skip
# Final in name only where requeue is on: the job comes back within seconds as PENDING.
RETURNING: Final = frozenset({"BOOT_FAIL", "NODE_FAIL", "PREEMPTED", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD"})
WAITING: Final = frozenset({"PENDING", "REQUEUED", "REQUEUE_FED", "REQUEUE_HOLD", "SPECIAL_EXIT", "RESV_DEL_HOLD"})


@dataclass(frozen=True, kw_only=True, slots=True)
class JobView:
    """What Slurm says of one job or array task. ``source`` is the command that said it."""

    job: str
    state: str
    reason: str = ""
    node: str = ""
    exit_code: str = ""
    elapsed_s: int = 0
    ended: str = ""
    name: str = ""
    source: str = "squeue"


def _me() -> str:
    """This user's name as Slurm knows it; $LOGNAME and $USER may name somebody else."""
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())


def _run(command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=ANSWER_S, check=False)
    except FileNotFoundError:
        raise ClusterError(
            f"{command[0]}: not installed here; run this where Slurm is, or use --executor local"
        ) from None
    except subprocess.TimeoutExpired:
        raise ClusterError(
            f"{command[0]}: no answer within {ANSWER_S:.0f} s; is slurmctld up? try `scontrol ping`"
        ) from None


@dataclass(slots=True)
class Slurm:
    """Slurm as this user sees it; ``ask`` runs one command."""

    ask: Callable[[Sequence[str]], subprocess.CompletedProcess[str]] = _run
    user: str = field(default_factory=lambda: _me())
    has_sacct: bool | None = None
    _config: dict[str, str] | None = field(default=None, init=False, repr=False)

    def text(self, *command: str) -> str:
        """Standard output of a command.

        Raises
        ------
        ClusterError
            If it failed; the text carries Slurm's own message.
        """
        done = self.ask(command)
        if done.returncode != 0:
            raise ClusterError(f"{command[0]}: {_message(done)}")
        return done.stdout

    def queue(self, names: Sequence[str]) -> dict[str, JobView]:
        """Every job of these names that squeue still knows, by id (``12_3`` for array tasks); one query."""
        if not names:
            return {}
        lines = self.text("squeue", "-h", "-a", "-r", "-t", "all", "-u", self.user, "--name", ",".join(names),
                          "-o", "%i|%T|%r|%N|%j|%M")  # fmt: skip
        views = {}
        for line in lines.splitlines():
            job, state, reason, node, name, elapsed = (part.strip() for part in line.split("|", 5))
            for one in expand_ids(job):
                views[one] = JobView(
                    job=one,
                    state=state.split()[0],
                    reason="" if reason == "None" else reason,
                    node=node,
                    name=name,
                    elapsed_s=_elapsed(elapsed),
                )
        return views

    def history(self, names: Sequence[str], since: str, jobs: Sequence[str] = ()) -> dict[str, list[JobView]]:
        """Every record that accounting has of jobs of these names, oldest first; else nothing.

        Asked by job id where ids are known: since a date, sacct leaves out what was cancelled before it could start.
        """
        if self.has_sacct is False or (self.has_sacct is None and not self._accounting()):
            self.has_sacct = False
            return {}
        self.has_sacct = True
        chosen = ("-j", ",".join(jobs)) if jobs else ("-S", since)
        lines = self.text("sacct", "-D", "-X", "-n", "-P", "-u", self.user, "--name", ",".join(names), *chosen,
                          "-o", "JobID,State,Reason,NodeList,ExitCode,ElapsedRaw,End,JobName")  # fmt: skip
        views: dict[str, list[JobView]] = {}
        for line in lines.splitlines():
            job, state, reason, node, exit_code, elapsed, ended, name = line.split("|", 7)
            for one in expand_ids(job):
                views.setdefault(one, []).append(
                    JobView(
                        job=one,
                        state=state.split()[0],
                        reason="" if reason == "None" else reason,
                        node=node,
                        exit_code=exit_code,
                        elapsed_s=int(elapsed or 0),
                        ended="" if ended == "Unknown" else ended,
                        name=name,
                        source="sacct",
                    )
                )
        return views

    def _accounting(self) -> bool:
        """Whether this cluster keeps records that sacct can read."""
        if shutil.which("sacct") is None and self.ask is _run:
            return False
        return "accounting_storage/none" not in self.config().get("AccountingStorageType", "accounting_storage/none")

    def config(self) -> dict[str, str]:
        """The controller's configuration, asked for once: it does not change under a command."""
        if self._config is None:
            lines = self.text("scontrol", "show", "config").splitlines()
            pairs = (line.partition("=") for line in lines if "=" in line)
            self._config = {key.strip(): value.strip() for key, _, value in pairs}
        return self._config

    def max_time_s(self, partition: str | None) -> int | None:
        """The partition's MaxTime, which sbatch itself may not enforce; ``None``: unlimited.

        Of several partitions (``a,b``: Slurm takes the one that starts first) the longest.

        Raises
        ------
        ClusterError
            If there is no such partition; the text lists those there are.
        """
        limits: list[int] = []
        there = self._partitions()
        for name in [None] if partition is None else partition.split(","):
            text = _named(there, name).get("MaxTime", "UNLIMITED")
            if text in ("UNLIMITED", "NONE", "INFINITE"):
                return None
            limits.append(seconds(text))
        return max(limits)

    def _partitions(self) -> list[dict[str, str]]:
        return [dict(word.partition("=")[::2] for word in line.split())
                for line in self.text("scontrol", "-o", "show", "partition").splitlines() if line]  # fmt: skip

    def max_array_index(self) -> int:
        """The highest index an array task may have: MaxArraySize bounds the index, not the count."""
        return int(self.config().get("MaxArraySize", "1001")) - 1

    def submit_limit(self) -> int | None:
        """How many jobs this user may have in the queue, where accounting enforces it; array tasks count one by one."""
        if "limits" not in self.config().get("AccountingStorageEnforce", "none"):
            return None
        done = self.ask(("sacctmgr", "-n", "-P", "show", "assoc", "where", f"user={self.user}", "format=MaxSubmitJobs"))
        limits = [int(word) for word in done.stdout.split() if word.isdigit()]
        return min(limits, default=None)

    def in_queue(self) -> int:
        """How many jobs (array tasks one by one) this user has in the queue now."""
        return len(self.text("squeue", "-h", "-r", "-u", self.user, "-o", "%i").splitlines())

    def cancel(self, jobs: Sequence[str]) -> None:
        """Cancel jobs and array tasks, all in one scancel."""
        if jobs:
            self.text("scancel", *jobs)


def _named(partitions: Sequence[Mapping[str, str]], name: str | None) -> Mapping[str, str]:
    for tree in partitions:
        if tree.get("PartitionName") == name or (name is None and tree.get("Default") == "YES"):
            return tree
    if name is None:
        return {}  # a site may have no default partition; sbatch says so
    names = ", ".join(sorted(tree.get("PartitionName", "") for tree in partitions))
    raise ClusterError(f"partition={name!r}: no such partition; allowed: {names}; set it in the site profile")


def expand_ids(job: str) -> Iterator[str]:
    """Single ids of Slurm's notation for several array tasks.

    >>> list(expand_ids("13_[2-3,5%4]")), list(expand_ids("13_7")), list(expand_ids("13"))
    (['13_2', '13_3', '13_5'], ['13_7'], ['13'])
    """
    match = re.fullmatch(r"(\d+)_\[([^\]%]*)(?:%\d+)?\]", job)
    if match is None:
        yield job
        return
    for part in match[2].split(","):
        first, _, last = part.partition("-")
        end, _, step = (last or first).partition(":")
        for index in range(int(first), int(end) + 1, int(step or 1)):
            yield f"{match[1]}_{index}"


def _elapsed(text: str) -> int:
    if not re.fullmatch(r"[\d:-]+", text) or not re.search(r"[1-9]", text):
        return 0
    return seconds(text if ":" in text or "-" in text else f"0:{text}")


def _message(done: subprocess.CompletedProcess[str]) -> str:
    """Slurm's last word, which names the cause; the lines before it say how it got there."""
    lines = [line.strip() for line in (done.stderr or done.stdout).splitlines() if line.strip()]
    if not lines:
        return f"exit status {done.returncode}"
    return re.sub(r"^(?:\w+: )?(?:(?:error|fatal): )*", "", lines[-1])
