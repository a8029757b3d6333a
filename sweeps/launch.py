"""One verb for both executors: choose Slurm or this machine, ask before much, train, and report the same way.

Between the command line and ``submit`` / ``local``.
"""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scaling.errors import RecordError, ScalingError, UsageError, nearest
from scaling.record import write_atomically
from scaling.sweeps.plan import Plan
from scaling.sweeps.retry import check_kinds

SETTINGS: Final = "settings.json"
ASK_ABOVE_JOBS: Final = 50

Confirm = Callable[[str], bool]


@dataclass(frozen=True, kw_only=True, slots=True)
class LaunchReport:
    """What was started (Slurm) or done (here)."""

    sweep: str
    executor: str
    folder: Path
    job_ids: tuple[str, ...] = ()
    jobs: int = 0
    runs: int = 0
    waiting: int = 0
    why_waiting: str = ""
    skipped: Mapping[str, int] = field(default_factory=dict)
    outcomes: Mapping[str, int] = field(default_factory=dict)
    stopped_by: str | None = None

    @property
    def good(self) -> bool:
        """For Slurm: all that is due is submitted. For this machine: every run has its result."""
        return not self.waiting and self.stopped_by is None and set(self.outcomes) <= {"done", "diverged"}

    def tree(self) -> dict[str, Any]:
        """As plain data, for ``--json``."""
        return {
            "sweep": self.sweep, "executor": self.executor, "folder": str(self.folder), "job_ids": list(self.job_ids),
            "jobs": self.jobs, "runs": self.runs, "waiting": self.waiting, "why_waiting": self.why_waiting,
            "skipped": dict(self.skipped), "outcomes": dict(self.outcomes), "stopped_by": self.stopped_by,
        }  # fmt: skip

    def text(self) -> str:
        """A line or two for people."""
        rest = "".join(f", {count} {state}" for state, count in self.skipped.items())
        if self.executor == "local":
            counted = ", ".join(f"{count} {word}" for word, count in self.outcomes.items()) or "nothing to train"
            stopped = f"; stopped by {self.stopped_by}, submit again to go on" if self.stopped_by else ""
            return f"{self.sweep}: {counted}{rest and '; before: ' + rest[2:]}{stopped}; run folders in {self.folder}"
        ids = f"jobs {', '.join(self.job_ids)}: " if self.job_ids else ""
        lines = [
            f"{self.sweep}: {ids}{self.runs} runs in {self.jobs} array tasks{rest and '; left alone: ' + rest[2:]}"
        ]
        if self.waiting:
            lines.append(f"{self.waiting} runs wait for room ({self.why_waiting}): submit again, or use --feed")
        return "\n".join([*lines, f"folder {self.folder}"])


def executor_name(named: str | None) -> str:
    """``slurm`` or ``local``: as named, else Slurm where ``sbatch`` is."""
    name = named or ("slurm" if shutil.which("sbatch") else "local")
    if name not in ("slurm", "local"):
        raise UsageError(f"--executor {name}: unknown; {nearest(name, ('slurm', 'local'))}")
    return name


def launch(
    plan: Plan,
    *,
    executor: str | None = None,
    retry: Sequence[str] = (),
    keys: frozenset[str] | None = None,
    workers: int | None = None,
    threads: int | None = None,
    feed_all: bool = False,
    dependency: str | None = None,
    snapshot: bool = True,
    store: str | None = None,
    confirm: Confirm | None = None,
) -> LaunchReport:
    """Train what is due.

    Parameters
    ----------
    executor
        ``slurm`` or ``local``; default: Slurm where ``sbatch`` is.
    store
        MLflow store that a local sweep is synced into while it trains; ``None``: none.
    confirm
        Asked before more than ``ASK_ABOVE_JOBS`` jobs; ``None``: nobody is asked.

    Raises
    ------
    UsageError
        If the executor is unknown, options do not go with it, or the answer was no.
    """
    name = executor_name(executor)
    kinds = check_kinds(retry)
    if name == "local":
        if feed_all or dependency:
            raise UsageError("--feed and --after need Slurm; leave them out, or --executor slurm")
        for option, count in {"--workers": workers, "--threads": threads}.items():
            if count is not None and count < 1:
                raise UsageError(f"{option} {count}: allowed: 1 or more")
        return _local(plan, kinds, keys, workers, threads, store)
    if workers is not None or threads is not None:
        raise UsageError("--workers and --threads are for --executor local; set resources.cpus, runs_per_gpu for Slurm")
    from scaling.sweeps.site import load_site
    from scaling.sweeps.submit import Submitter, feed

    submitter = Submitter(plan=plan, site=load_site(), retry=kinds, keys=keys, dependency=dependency, snapshot=snapshot)
    if confirm is not None:
        count = submitter.count_due()
        if count > ASK_ABOVE_JOBS and not confirm(f"Submit {count} jobs of {plan.spec.name}?"):
            raise UsageError(f"{plan.spec.name}: not submitted")
    report = feed(submitter) if feed_all else submitter.submit()
    return LaunchReport(
        sweep=plan.spec.name,
        executor="slurm",
        folder=report.folder,
        job_ids=report.job_ids,
        jobs=report.jobs,
        runs=report.runs,
        waiting=report.waiting,
        why_waiting=report.why_waiting,
        skipped=report.skipped,
    )


def _local(
    plan: Plan,
    kinds: tuple[str, ...],
    keys: frozenset[str] | None,
    workers: int | None,
    threads: int | None,
    store: str | None,
) -> LaunchReport:
    from scaling.sweeps.display import Progress
    from scaling.sweeps.local import run_local
    from scaling.sweeps.mirror import synced

    with synced(plan.out, store), Progress(plan) as progress:
        report = run_local(plan, workers=workers, threads=threads, retry=kinds, keys=keys, on_tick=progress.tick)
    return LaunchReport(
        sweep=plan.spec.name,
        executor="local",
        folder=plan.out,
        runs=len(report.outcomes),
        skipped={"over": len(report.already)} if report.already else {},
        outcomes=dict(Counter(outcome.outcome for outcome in report.outcomes.values())),
        stopped_by=report.stopped_by,
    )


@contextmanager
def remembering(plan: Plan, settings: Sequence[str]) -> Iterator[None]:
    """Keep a submit's ``--set`` options, so that ``status`` and the others need not repeat them.

    Where an error comes before anything was submitted, the options of the submit before count again.
    """
    from scaling.sweeps.ledger import Ledger

    try:
        plan.sweep_folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise RecordError(f"{plan.sweep_folder}: cannot be made ({error.strerror}); choose another --out") from None
    file, ledger = plan.sweep_folder / SETTINGS, Ledger(plan.sweep_folder)
    before = file.read_text(encoding="utf-8") if file.exists() else json.dumps([])
    jobs = ledger.jobs()
    write_atomically(file, json.dumps(list(settings)) + "\n")
    try:
        yield
    except ScalingError:
        if ledger.jobs() == jobs:
            write_atomically(file, before)
        raise


def remembered(plan: Plan) -> list[str]:
    """The ``--set`` options of the last submit; none where there was none."""
    try:
        return [str(text) for text in json.loads((plan.sweep_folder / SETTINGS).read_text(encoding="utf-8"))]
    except FileNotFoundError:
        return []
    except (ValueError, TypeError):
        raise RecordError(f"{plan.sweep_folder / SETTINGS}: damaged; submit again with the same --set") from None
