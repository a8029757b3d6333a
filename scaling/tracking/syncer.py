"""From run folders to MLflow: the only writer of it, once or again and again.

Last module of ``scaling.tracking`` before the command line; ``folder`` says how one run is sent, this one which runs, in what order, under
which lock, and what happens when the store fails. Training never waits for it, and what one round leaves undone the next one does:
batches are idempotent, runs are found by their key, the folders stay the truth.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from scaling.errors import ScalingError, StoreError, StoreUnavailable
from scaling.record import RunFolder, run_folders
from scaling.tracking.folder import FolderSync, JobState
from scaling.tracking.parent import ParentSync
from scaling.tracking.state import State, single_writer, state_path
from scaling.tracking.store import Store, normalise, open_store, redact, sqlite_path

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 15.0
SAVE_EVERY_S: Final = 5.0
MAX_PAUSE_S: Final = 300.0  # longest wait between rounds while the store is down


@dataclass(frozen=True, kw_only=True, slots=True)
class RunProblem:
    """A run that could not be synced, and why."""

    run: str
    reason: str


@dataclass(kw_only=True, slots=True)
class SyncReport:
    """What a sync did: counts over all its rounds, problems of the last one."""

    store: str
    runs: int = 0
    created: int = 0
    updated: int = 0
    points: int = 0
    running: int = 0
    deleted: int = 0
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


def sync(
    out: Path,
    *,
    store_uri: str,
    experiment: str | None = None,
    follow: bool = False,
    interval_s: float = INTERVAL_S,
    stop: threading.Event | None = None,
    job_state: JobState | None = None,
    figures: Sequence[Path] = (),
    state_folder: Path | None = None,
    lock_wait_s: float = 120.0,
    timeout_s: float = 20.0,
    on_round: Callable[[SyncReport], None] | None = None,
) -> SyncReport:
    """Bring an MLflow store up to date with the run folders under ``out``.

    Parameters
    ----------
    out
        Folder of run folders.
    store_uri
        ``sqlite:///PATH.db`` (made where missing), ``http(s)://HOST:PORT`` or ``postgresql://USER@HOST/DB``.
    experiment
        MLflow experiment; default: each run's sweep, or the name of ``out``.
    follow
        Again every ``interval_s`` seconds until ``stop`` is set; a store that does not answer is tried again, later and later.
    job_state
        Asked for runs without an end record: Slurm job id -> (state, reason, end in ms), or ``None`` for *unknown*.
    figures
        Files to attach to each sweep's parent run.
    state_folder
        Where to remember what was sent; default ``out/.tracking``.
    lock_wait_s
        How long to wait for another syncer's round to end.
    timeout_s
        Longest wait for one answer of a server.

    Returns
    -------
    SyncReport
        With ``ok`` false where something is still to be sent; the next sync sends it.

    Raises
    ------
    RecordError
        If ``out`` is not a folder.
    StoreError
        If the address names no store, or another syncer holds the lock (not while following).
    """
    stop = stop or threading.Event()
    address = normalise(store_uri)
    report = SyncReport(store=redact(address))
    path = state_path(state_folder or out, address, experiment)
    started_s, pause_s = time.monotonic(), interval_s
    store: Store | None = None
    try:
        while True:
            report.unavailable, report.problems = "", []
            try:
                with _locked(path, address, lock_wait_s):
                    if store is None:
                        store = open_store(address, artifacts=_artifacts(address, out), timeout_s=timeout_s)
                        state = _load(path, store)
                    else:
                        state = State.load(path)
                    _round(out, experiment, store, state, report, job_state, figures)
                pause_s = interval_s
            except StoreUnavailable as error:
                report.unavailable = str(error)
                pause_s = min(2 * pause_s, MAX_PAUSE_S)
                if store is not None:
                    store.close()
                    store = None
            except StoreError as error:
                if not follow or report.rounds == 0:
                    raise
                report.unavailable = str(error)
            report.rounds += 1
            report.wall_time_s = time.monotonic() - started_s
            if report.unavailable:
                logger.warning("%s", report.unavailable)
            if on_round is not None:
                on_round(report)
            if not follow or stop.wait(pause_s):
                return report
    finally:
        if store is not None:
            store.close()


def _round(
    out: Path,
    experiment: str | None,
    store: Store,
    state: State,
    report: SyncReport,
    job_state: JobState | None,
    figures: Sequence[Path],
) -> None:
    folders = run_folders(out)
    report.runs, report.running, report.deleted, report.doubled = len(folders), 0, 0, 0
    parents = ParentSync(store, figures=figures)
    worker = FolderSync(store, state, job_state=job_state)
    saved_s = time.monotonic()
    try:
        worker.prepare([(folder, _experiment(folder, experiment, out)) for folder in folders])
        for folder, name, sweep in worker.work:
            try:
                parent = parents.ensure(name, sweep, worker.started_ms(folder)) if sweep else None
                worker.send(folder, name, parent, report)
            except StoreUnavailable:
                raise
            except ScalingError as error:
                report.problems.append(RunProblem(run=folder.key, reason=str(error)))
                logger.warning("%s: %s", folder.key, error)
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                state.save()
                saved_s = time.monotonic()
        parents.finish(worker.standings)
        store.tidy()
    finally:
        state.save()
