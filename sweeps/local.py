"""Sweeps on this machine: a pool of workers, as many as there are GPUs (or cores), that can outlive the terminal.

The executor for laptops, single hosts and the quickstart; ``submit`` is its Slurm sibling. Both train the same run
folders, so one can go on where the other stopped.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from scaling.config.tree import to_dict
from scaling.errors import ClusterError, UsageError
from scaling.record import RunFolder, now_ms, write_atomically
from scaling.sweeps.glance import glance_all
from scaling.sweeps.plan import Plan, PlannedRun
from scaling.sweeps.pool import Pool
from scaling.sweeps.request import TRAINER, Outcome, Request

LOCAL: Final = "local"  # in the sweep folder: one file for each pool that runs now
_CLOCK_SLACK_MS = 10_000  # a process's start is counted from the boot, and the clock may have been set since

Tick = Callable[[frozenset[str]], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalReport:
    """What a local pool did. ``already`` were over before; ``stopped_by`` names the signal that ended it early."""

    outcomes: Mapping[str, Outcome]
    already: tuple[str, ...]
    workers: int
    threads: int
    stopped_by: str | None = None

    def count(self, *words: str) -> int:
        return sum(outcome.outcome in words for outcome in self.outcomes.values())

    @property
    def complete(self) -> bool:
        """Whether every run is over (done, or diverged, which is a result)."""
        return all(outcome.outcome in ("done", "diverged") for outcome in self.outcomes.values())


def run_local(
    plan: Plan,
    *,
    workers: int | None = None,
    threads: int | None = None,
    retry: Sequence[str] = (),
    keys: frozenset[str] | None = None,
    on_tick: Tick = lambda keys: None,
    on_outcome: Callable[[Outcome], None] = lambda outcome: None,
    trainer: str = TRAINER,
) -> LocalReport:
    """Train what is not over yet, the largest runs first.

    Parameters
    ----------
    workers
        Runs at a time; default: one a GPU (times ``runs_per_gpu``), else one a core.
    threads
        Threads of each run; default: the cores divided by the workers.
    retry
        Kinds of ended runs to try again: ``failed`` (all), ``oom``, ``timeout``, ``node``, ``crash``, ``diverged``,
        ``cancelled``.
    keys
        Only these runs.

    Raises
    ------
    UsageError
        If a run asks for more GPUs than this machine has.
    """
    gpus = [] if all(run.config.run.device == "cpu" for run in plan.runs) else visible_gpus()
    chosen, already = _due(plan, retry, keys)
    single = [run for run in chosen if not run.resources.distributed]
    spread = [run for run in chosen if run.resources.distributed]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if gpus:
        packed = max((run.resources.runs_per_gpu for run in single), default=1)
        slots = [{"CUDA_VISIBLE_DEVICES": gpu} for _ in range(packed) for gpu in gpus][:workers]
    else:
        slots = [{} for _ in range(min(workers or cores, max(1, len(single))))]
    count = len(slots)
    per_run = threads if threads is not None else max(1, cores // count)
    environment = {name: str(per_run) for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS")}
    slots = [{**environment, **slot} for slot in slots]
    outcomes: dict[str, Outcome] = {}
    stopped: signal.Signals | None = None
    with _announced(plan, [run.key for run in chosen]):
        groups = [(slots, single)] if single else []
        for size in sorted({run.resources.devices for run in spread}):
            groups.append((_groups(gpus, size, environment), [r for r in spread if r.resources.devices == size]))
        for places, runs in groups:
            pool = Pool(slots=places, trainer=trainer, on_tick=on_tick, on_outcome=on_outcome)
            if stopped is None:
                outcomes.update(pool.run(_request(run, plan.out, per_run) for run in runs))
                stopped = pool.stopped_by
            else:
                outcomes.update({run.key: Outcome(key=run.key, outcome="waiting") for run in runs})
    return LocalReport(
        outcomes=outcomes,
        already=already,
        workers=count,
        threads=per_run,
        stopped_by=None if stopped is None else stopped.name,
    )


def visible_gpus() -> list[str]:
    """Identifiers of the GPUs that runs may use here, as ``CUDA_VISIBLE_DEVICES`` takes them."""
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is not None:
        return [name for name in named.split(",") if name.strip() not in ("", "-1", "NoDevFiles")]
    if shutil.which("nvidia-smi") is None:
        return []
    listing = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, check=False)
    return [str(index) for index, line in enumerate(listing.stdout.splitlines()) if line.startswith("GPU ")]


def _groups(gpus: Sequence[str], size: int, environment: Mapping[str, str]) -> list[dict[str, str]]:
    """Places of ``size`` GPUs each; one place without GPUs where there are none (processes on the CPU)."""
    if not gpus:
        return [dict(environment)]
    if size > len(gpus):
        raise UsageError(f"a run asks for {size} GPUs, this machine has {len(gpus)}; lower resources.gpus or use Slurm")
    cuts = [gpus[i : i + size] for i in range(0, len(gpus) - size + 1, size)]
    return [{**environment, "CUDA_VISIBLE_DEVICES": ",".join(cut)} for cut in cuts]


def _due(plan: Plan, retry: Sequence[str], keys: frozenset[str] | None) -> tuple[list[PlannedRun], tuple[str, ...]]:
    """Runs that are to be trained now, and the keys of those that are over."""
    from scaling.sweeps.retry import reopen_if_asked

    seen = glance_all(plan.out, [run.key for run in plan.runs])
    due, already = [], []
    for run in plan.runs:
        if keys is not None and run.key not in keys:
            continue
        look = seen.get(run.key)
        if look is None or look.end is None or reopen_if_asked(RunFolder(plan.out / run.key), look.end, retry):
            due.append(run)
        else:
            already.append(run.key)
    return due, tuple(already)


def _request(run: PlannedRun, out: Path, threads: int) -> Request:
    settings = run.config.run
    if settings.threads is None:
        settings = replace(settings, threads=threads)
    launcher: tuple[str, ...] = ()
    if run.resources.distributed:
        launcher = (sys.executable, "-m", "torch.distributed.run", "--standalone",
                    f"--nproc-per-node={run.resources.devices}", "--no-python")  # fmt: skip
    return Request(
        key=run.key,
        config={**to_dict(run.config), "run": to_dict(settings)},
        out=str(out),
        launcher=launcher,
    )


class _announced:
    """A file in the sweep folder that says which process trains which runs here, while it does."""

    def __init__(self, plan: Plan, keys: Sequence[str]) -> None:
        self.path = plan.sweep_folder / LOCAL / f"{socket.gethostname()}-{os.getpid()}.json"
        self.tree = {"pid": os.getpid(), "host": socket.gethostname(), "started_ms": now_ms(), "keys": list(keys)}

    def __enter__(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        write_atomically(self.path, json.dumps(self.tree) + "\n")

    def __exit__(self, *_: object) -> None:
        self.path.unlink(missing_ok=True)


def pools(sweep_folder: Path) -> list[dict[str, Any]]:
    """Local pools that run now on this host (files of dead ones are removed)."""
    found = []
    for path in sorted((sweep_folder / LOCAL).glob("*.json")):
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            continue
        if tree["host"] == socket.gethostname() and not _is_pool(int(tree["pid"]), int(tree["started_ms"])):
            path.unlink(missing_ok=True)
            continue
        found.append(tree)
    return found


def _is_pool(pid: int, started_ms: int) -> bool:
    """Whether the process is the one that wrote the file: ids are used again, by processes that began later."""
    import psutil

    try:
        began_s: float = psutil.Process(pid).create_time()
    except psutil.Error:
        return False
    return began_s * 1e3 <= started_ms + _CLOCK_SLACK_MS


def detach(arguments: Sequence[str], sweep_folder: Path) -> tuple[int, Path]:
    """Start ``scaling`` with these arguments in a session of its own; returns its process id and its log."""
    log = sweep_folder / LOCAL / f"detached-{now_ms()}.log"
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as file:
            process = subprocess.Popen(
                [sys.executable, "-m", "scaling", *arguments],
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
            )
    except OSError as error:
        raise ClusterError(f"{log}: cannot be written ({error.strerror}); choose another --out") from None
    return process.pid, log
