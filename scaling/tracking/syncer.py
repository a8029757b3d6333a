"""From run folders to MLflow: the only writer of it, once or again and again.

Last module of ``scaling.tracking`` before the command line; ``folder`` says how one run is sent, this one which runs,
under which lock, and what happens when the store fails. Training never waits for it, and what one round leaves undone
the next one does: batches are idempotent, runs are found by their key, the folders stay the truth.
"""

from __future__ import annotations

import logging
import sqlite3
import threading
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

from scaling.errors import ScalingError, StoreError, StoreUnavailable
from scaling.record import RunFolder, run_folders
from scaling.tracking.conventions import TERMINAL, sweep_key
from scaling.tracking.folder import send, unchanged
from scaling.tracking.runs import Runs
from scaling.tracking.standing import JobState
from scaling.tracking.state import State, single_writer, state_path
from scaling.tracking.store import Store, normalise, open_store, redact, sqlite_path

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 15.0
SAVE_EVERY_S: Final = 5.0
MAX_PAUSE_S: Final = 60.0  # longest wait between rounds while the store is down


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


def sync(
    out: Path,
    *,
    store_uri: str,
    experiment: str | None = None,
    follow: bool = False,
    interval_s: float = INTERVAL_S,
    until_over: int | None = None,
    stop: threading.Event | None = None,
    only: Collection[str] | None = None,
    job_state: JobState | None = None,
    figures: Sequence[Path] = (),
    state_folder: Path | None = None,
    lock_wait_s: float = 120.0,
    timeout_s: float = 20.0,
    on_round: Callable[[SyncReport], None] | None = None,
    on_run: Callable[[int, int], None] | None = None,
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
        Again every ``interval_s`` seconds until ``stop`` is set, and then once more; a store that does not answer is
        tried again, later and later.
    until_over
        End following when this many runs are over and sent.
    only
        Run keys to sync, with a state and lock of their own; sweeps' parents are made but not brought up to date.
    job_state
        Asked for runs without an end record: Slurm job id -> (state, reason, end in ms), or ``None`` where Slurm does
        not know.
    figures
        Files to attach to each sweep's parent run.
    state_folder
        Where to remember what was sent; default ``out/.tracking``.
    lock_wait_s
        How long to wait for another syncer's round to end.
    timeout_s
        Longest wait for one answer of a server.
    on_round, on_run
        Called after each round with the report, and after each run with (runs done, runs in all).

    Returns
    -------
    SyncReport
        With ``ok`` false where something is still to be sent; the next sync sends it.

    Raises
    ------
    RecordError
        If ``out`` is not a folder.
    StoreError
        If the address names no store, or another syncer holds the lock; while following only in the first round.
    """
    stop = stop or threading.Event()
    address = normalise(store_uri)
    report = SyncReport(store=redact(address))
    path = state_path(state_folder or out, address, experiment, only)
    started_s, pause_s = time.monotonic(), interval_s
    session = _Session(out=out, address=address, experiment=experiment, only=only, path=path, timeout_s=timeout_s)
    last = not follow
    try:
        while True:
            report.unavailable, report.problems = "", []
            try:
                session.round(report, job_state, figures, lock_wait_s, on_run)
                pause_s = interval_s
            except StoreUnavailable as error:
                report.unavailable = str(error)
                pause_s = min(2 * pause_s, max(MAX_PAUSE_S, interval_s))
                session.close()
            except StoreError as error:
                if report.rounds == 0:
                    raise
                report.unavailable = str(error)
            report.rounds += 1
            report.wall_time_s = time.monotonic() - started_s
            if report.unavailable:
                logger.warning("%s", report.unavailable)
            if on_round is not None:
                on_round(report)
            if last:
                return report
            if until_over is not None and report.ok and report.runs - report.running >= until_over:
                return report
            last = stop.wait(pause_s)
    finally:
        session.close()


class _Session:
    """An open store over several rounds; opened again after it failed."""

    def __init__(
        self,
        *,
        out: Path,
        address: str,
        experiment: str | None,
        only: Collection[str] | None,
        path: Path,
        timeout_s: float,
    ) -> None:
        self.out, self.address, self.experiment, self.only, self.path = out, address, experiment, only, path
        self.timeout_s = timeout_s
        self.store: Store | None = None

    def round(
        self,
        report: SyncReport,
        job_state: JobState | None,
        figures: Sequence[Path],
        lock_wait_s: float,
        on_run: Callable[[int, int], None] | None,
    ) -> None:
        """One pass over all folders, as the only writer of this state and (sqlite) of this file."""
        folders = [folder for folder in run_folders(self.out) if self.only is None or folder.key in self.only]
        with ExitStack() as stack:
            stack.enter_context(single_writer(self.path.with_suffix(".lock"), wait_s=lock_wait_s))
            database = sqlite_path(self.address)
            if database is not None:
                lock = database.with_name(f".{database.name}.sync.lock")
                stack.enter_context(single_writer(lock, wait_s=lock_wait_s))
            state = State.load(self.path)
            if self.store is None and not figures and database is not None and self._done(folders, state, database):
                self._tell(report, folders, state)
                return
            if self.store is None:
                artifacts = (database.parent if database is not None else self.out) / "mlartifacts"
                self.store = open_store(self.address, artifacts=artifacts, timeout_s=self.timeout_s)
                state = self._checked(state, self.store)
            try:
                self._send(folders, state, self.store, report, job_state, figures, on_run)
                self.store.tidy()
            finally:
                state.save()

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None

    def _checked(self, state: State, store: Store) -> State:
        """The state, or an empty one where it speaks of another database (the file was removed and made again)."""
        sample = next((run.run_id for run in state.runs.values() if run.run_id and not run.deleted), None)
        if sample is not None and store.params(sample) is None:
            logger.warning("%s does not hold the runs sent before; all is sent again", redact(self.address))
            return State(path=self.path)
        return state

    def _send(
        self,
        folders: Sequence[RunFolder],
        state: State,
        store: Store,
        report: SyncReport,
        job_state: JobState | None,
        figures: Sequence[Path],
        on_run: Callable[[int, int], None] | None,
    ) -> None:
        runs = Runs(state, store, default=self.experiment, out=self.out, lock=self.path.parent / "parents.lock")
        runs.prepare(folders)
        report.problems.extend(RunProblem(run=key, reason=reason) for key, reason in runs.damaged.items())
        saved_s = time.monotonic()
        for number, folder in enumerate(folders):
            if folder.key not in runs.damaged:
                try:
                    self._send_one(folder, runs, state, store, report, job_state)
                except StoreUnavailable:
                    raise
                except ScalingError as error:
                    report.problems.append(RunProblem(run=folder.key, reason=str(error)))
                    logger.warning("%s: %s", folder.key, error)
            if time.monotonic() - saved_s > SAVE_EVERY_S:
                state.save()
                saved_s = time.monotonic()
            if on_run is not None:
                on_run(number + 1, len(folders))
        try:
            if self.only is None:
                runs.finish_parents(figures)
        except StoreUnavailable:
            raise
        except StoreError as error:
            report.problems.append(RunProblem(run="(parent of the sweep)", reason=str(error)))
        self._tell(report, folders, state)

    def _done(self, folders: Sequence[RunFolder], state: State, database: Path) -> bool:
        """Whether a sqlite store has everything already; spares importing MLflow (seconds) to find nothing to do."""
        keys = {folder.key for folder in folders}
        known = [state.runs.get(key) for key in keys] + [run for key, run in state.runs.items() if key not in keys]
        if not folders or any(run is None or run.run_id is None or run.deleted or run.pending_ms for run in known):
            return False
        over = all(unchanged(folder, state.runs[folder.key]) for folder in folders)
        parents = [run for key, run in state.runs.items() if key.startswith(sweep_key(""))]
        if not over or any(run.status not in TERMINAL for run in parents) or not database.is_file():
            return False
        try:
            with closing(sqlite3.connect(f"file:{quote(str(database))}?mode=ro", uri=True)) as connection:
                query = "SELECT count(*) FROM runs WHERE run_uuid = ?"
                sample = state.runs[folders[0].key].run_id
                return bool(connection.execute(query, (sample,)).fetchone()[0])
        except sqlite3.Error:
            return False

    def _tell(self, report: SyncReport, folders: Sequence[RunFolder], state: State) -> None:
        known = [state.runs[folder.key] for folder in folders if folder.key in state.runs]
        report.runs = len(folders)
        report.running = sum(run.status not in TERMINAL for run in known if not run.deleted)
        report.deleted = sum(run.deleted for run in known)
        report.doubled = sum(run.doubled for run in known)
        report.run_ids = {
            folder.key: state.runs[folder.key].run_id or "" for folder in folders if folder.key in state.runs
        }

    def _send_one(
        self,
        folder: RunFolder,
        runs: Runs,
        state: State,
        store: Store,
        report: SyncReport,
        job_state: JobState | None,
    ) -> None:
        known = state.runs[folder.key]
        if known.deleted or unchanged(folder, known):
            return
        fresh = known.run_id is None
        try:
            sent = send(folder, known, store, job_state, partial(runs.create, known))
        except StoreUnavailable:
            raise
        except StoreError:
            if not runs.vanished(folder, known):
                raise
            return
        report.created += fresh
        report.points += sent
        report.updated += bool(sent)
