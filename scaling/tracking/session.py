"""One round of syncing after another over an open store: which runs, under which locks, what was said already.

Between ``syncer`` (which decides when) and ``folder`` (which sends one run).
"""

from __future__ import annotations

import logging
import sqlite3
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from functools import partial
from pathlib import Path
from typing import Final
from urllib.parse import quote

from scaling.errors import RecordError, ScalingError, StoreError, StoreUnavailable
from scaling.record import CONFIG, RunFolder, run_folders
from scaling.tracking.conventions import TERMINAL, sweep_key
from scaling.tracking.folder import send, unchanged
from scaling.tracking.report import RunProblem, SyncReport
from scaling.tracking.runs import Runs
from scaling.tracking.standing import JobState
from scaling.tracking.state import State, single_writer
from scaling.tracking.store import Store, open_store, redact, sqlite_path

logger = logging.getLogger(__name__)

SAVE_EVERY_S: Final = 5.0


class Session:
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
        light: bool,
    ) -> None:
        self.out, self.address, self.experiment, self.only, self.path = out, address, experiment, only, path
        self.timeout_s, self.light = timeout_s, light
        self.store: Store | None = None
        self._told: dict[str, str] = {}  # run -> its problem, as last logged

    def round(
        self,
        report: SyncReport,
        job_state: JobState | None,
        figures: Sequence[Path],
        lock_wait_s: float,
        on_run: Callable[[int, int], None] | None,
    ) -> None:
        """One pass over all folders, as the only writer of this state and (sqlite) of this file."""
        folders = self._folders()
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
                self.store = open_store(self.address, artifacts=artifacts, timeout_s=self.timeout_s, light=self.light)
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

    def _folders(self) -> list[RunFolder]:
        if self.only is None:
            return run_folders(self.out)
        # Hundreds of trainings that track themselves must not each walk a folder of thousands.
        if not self.out.is_dir():
            raise RecordError(f"{self.out}: no such folder of runs; give the --out of a sweep or training")
        return [RunFolder(self.out / key) for key in sorted(self.only) if (self.out / key / CONFIG).exists()]

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
                    if self._told.get(folder.key) != str(error):
                        logger.warning("%s: %s", folder.key, error)
                        self._told[folder.key] = str(error)
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
