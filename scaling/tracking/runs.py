"""Which MLflow run belongs to which run folder: found by the run key, made once, its sweep's parent above it.

Used by ``syncer``. ``create_run`` is not idempotent and a stalled server may carry it out after the answer was given
up, so that it is sent once, never before looking, and what an unanswered one may have left is looked for again later.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from scaling.errors import RecordError, StoreError, StoreUnavailable
from scaling.record import CONFIG, RunFolder, now_ms
from scaling.tracking import parent as parents
from scaling.tracking.conventions import RunView, sweep_key
from scaling.tracking.state import RunState, State, single_writer
from scaling.tracking.store import Store, StoredRun, redact

logger = logging.getLogger(__name__)

SUSPECT_MS: Final = 15 * 60_000  # how long an unanswered create_run may still make a run


class Runs:
    """The state's runs of one round, with their experiments and parents."""

    def __init__(self, state: State, store: Store, *, default: str | None, out: Path, lock: Path) -> None:
        self._state, self._store = state, store
        self._default, self._out, self._lock = default, out, lock
        self._experiments: dict[str, str] = {}
        self._folders: Sequence[RunFolder] = ()
        self.damaged: dict[str, str] = {}

    def prepare(self, folders: Sequence[RunFolder]) -> None:
        """Give every folder a state, and find the runs that the store has already."""
        wanted: dict[str, list[str]] = defaultdict(list)
        self._folders = folders
        for folder in folders:
            known = self._state.runs.setdefault(folder.key, RunState())
            if not known.experiment:
                try:
                    run = json.loads((folder.path / CONFIG).read_text(encoding="utf-8"))["config"]["run"]
                    known.sweep = run.get("sweep")
                except (OSError, ValueError, KeyError, TypeError, AttributeError):
                    del self._state.runs[folder.key]
                    self.damaged[folder.key] = f"{folder.path / CONFIG}: damaged; restore it or remove the folder"
                    continue
                known.experiment = self._default or known.sweep or self._out.resolve().name
            if known.run_id is None or known.deleted or known.pending_ms is not None:
                wanted[known.experiment].append(folder.key)
        places = {folder.key: folder for folder in folders}
        for experiment, keys in wanted.items():
            found: dict[str, list[StoredRun]] = defaultdict(list)
            for run in self._store.find(self._experiment(experiment), keys):
                found[run.key].append(run)
            for key in keys:
                try:
                    self._adopt(key, found[key], places[key].path)
                except StoreError as error:
                    self.damaged[key] = str(error)

    def create(self, known: RunState, view: RunView) -> str:
        """Make a folder's run, below its sweep's parent; returns its id."""
        tags = dict(view.tags)
        if known.sweep:
            tags["mlflow.parentRunId"] = self._parent(known.experiment, known.sweep, view.started_ms)
        return self._make(known, view.name, view.started_ms, tags)

    def vanished(self, folder: RunFolder, known: RunState) -> bool:
        """Whether the folder's run was deleted by somebody; then it is left alone from now on."""
        found = self._store.find(self._experiment(known.experiment), [folder.key])
        if any(run.run_id == known.run_id and not run.deleted for run in found):
            return False
        if found:
            known.deleted = all(run.deleted for run in found)
            logger.info("%s: its run was deleted in the store; restore it there to sync it again", folder.key)
            return known.deleted
        self._state.runs[folder.key] = RunState(experiment=known.experiment, sweep=known.sweep)
        raise StoreError(f"run {known.run_id} was removed from {redact(self._store.uri)}; sync again to make it anew")

    def finish_parents(self, figures: Sequence[Path]) -> None:
        """Bring every sweep's parent up to date with its children."""
        sweeps = {
            (run.experiment, run.sweep)
            for key, run in self._state.runs.items()
            if run.sweep and run.run_id and not key.startswith(sweep_key(""))
        }
        for experiment, sweep in sorted(sweeps, key=str):
            assert sweep is not None
            self._parent(experiment, sweep, now_ms())
            known = self._state.runs[sweep_key(sweep)]
            if not known.deleted:
                parents.finish(sweep, known, self._state, self._store, figures)

    def _adopt(self, key: str, found: Sequence[StoredRun], place: Path) -> None:
        known = self._state.runs[key]
        active = [run for run in found if not run.deleted]
        if known.pending_ms is not None:
            kept = known.run_id or (active[0].run_id if active else None)
            for run in active:
                if run.run_id != kept:
                    logger.warning("%s: removing a second run that an unanswered request made", key)
                    self._store.delete(run.run_id)
            active = [run for run in active if run.run_id == kept]
            if now_ms() - known.pending_ms > SUSPECT_MS:
                known.pending_ms = None
        if not active:
            known.deleted = bool(found)
            known.run_id = found[0].run_id if found else None
            return
        known.deleted = False
        if known.run_id is not None and any(run.run_id == known.run_id for run in active):
            return
        other = Path(active[0].folder)
        if active[0].folder and other != place.resolve() and (other / CONFIG).exists():
            raise StoreError(
                f"{place}: run {active[0].run_id} is already synced from {other}; remove one of the folders, or sync "
                "this one to another experiment"
            )
        experiment, sweep, pending_ms = known.experiment, known.sweep, known.pending_ms
        # Nothing is known of what was sent: everything is sent again, and what a resume made void is dropped first.
        self._state.runs[key] = RunState(
            experiment=experiment, sweep=sweep, pending_ms=pending_ms, run_id=active[0].run_id, adopted=True
        )

    def _parent(self, experiment: str, sweep: str, started_ms: int) -> str:
        key = sweep_key(sweep)
        known = self._state.runs.setdefault(key, RunState(experiment=experiment, sweep=sweep))
        if known.run_id is not None and known.pending_ms is None:
            return known.run_id
        with single_writer(self._lock, wait_s=60):  # trainings that track directly make parents too
            self._adopt(key, self._store.find(self._experiment(experiment), [key]), Path())
            known = self._state.runs[key]
            if known.run_id is None:
                # MLflow takes a start once; the run that is sent first need not be the one that started first.
                first_ms = min([started_ms, *self._starts_ms(sweep)])
                known.run_id = self._make(known, sweep, first_ms, parents.tags(sweep))
        return known.run_id

    def _starts_ms(self, sweep: str) -> Iterator[int]:
        for folder in self._folders:
            known = self._state.runs.get(folder.key)
            if known is not None and known.sweep == sweep:
                try:
                    attempts = folder.attempts()
                except RecordError:
                    continue  # said when the folder itself is sent
                if attempts:
                    yield attempts[0].started_ms

    def _make(self, known: RunState, name: str, started_ms: int, tags: dict[str, str]) -> str:
        try:
            experiment_id = self._experiment(known.experiment)
            return self._store.create(experiment_id, name=name, started_ms=started_ms, tags=tags)
        except StoreUnavailable:
            known.pending_ms = now_ms()
            raise

    def _experiment(self, name: str) -> str:
        if name not in self._experiments:
            self._experiments[name] = self._store.experiment(name)
        return self._experiments[name]
