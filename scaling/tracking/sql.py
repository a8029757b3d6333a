"""A sqlite file or PostgreSQL database as an MLflow store, written through MLflow's own client.

One of the two implementations of ``store.Store``. MLflow (seconds to import) is imported when a store is opened, in the
syncing process only. Two things MLflow has no call for are plain SQL: deleting what a resume made void, and ANALYZE.
"""

from __future__ import annotations

import logging
import os
import shutil
import sqlite3
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Final
from urllib.parse import unquote, urlparse

from scaling.errors import StoreError, StoreUnavailable
from scaling.tracking.conventions import EXPERIMENT_TAGS
from scaling.tracking.state import single_writer
from scaling.tracking.store import Sample, StoredRun, redact, requests_of, sqlite_path

logger = logging.getLogger(__name__)

_PAGE: Final = 500  # keys in one IN (...); SQLite allows 999 variables in old builds
_ANALYZE_EVERY_S: Final = 600.0


class SqlStore:
    """See ``store.Store``."""

    deletes = True

    def __init__(self, uri: str, *, artifacts: Path) -> None:
        self.uri = uri
        self._artifacts = artifacts
        self._path = sqlite_path(uri)
        self._places: dict[str, str] = {}
        self._written = False
        self._analyzed_s = float("-inf")
        with self._translated():
            self._client = self._open()
        self._engine = self._client._tracking_client.store.engine

    def _open(self) -> Any:
        client_class = import_mlflow().MlflowClient
        if self._path is None:
            return client_class(self.uri, registry_uri=self.uri)
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreError(f"{self._path}: its folder cannot be made ({error.strerror})") from None
        # MLflow's migrations are not locked: of 16 processes that make one file together, 15 die.
        with single_writer(self._path.with_name(f".{self._path.name}.lock"), wait_s=120):
            return client_class(self.uri, registry_uri=self.uri)

    def experiment(self, name: str) -> str:
        with self._translated():
            found = self._client.get_experiment_by_name(name)
            if found is None:
                folder = "".join(c if c.isalnum() or c in "-_." else "_" for c in name)[:80]
                location = (self._artifacts / folder).absolute().as_uri()
                return str(self._client.create_experiment(name, artifact_location=location, tags=EXPERIMENT_TAGS))
            if found.lifecycle_stage != "active":
                raise StoreError(
                    f"experiment {name!r} is deleted in {redact(self.uri)}; restore it there, or choose another name"
                )
            return str(found.experiment_id)

    def find(self, experiment_id: str, keys: Sequence[str]) -> list[StoredRun]:
        from sqlalchemy import bindparam, text

        query = text(
            "SELECT r.run_uuid, k.value, r.status, r.lifecycle_stage, r.start_time, f.value FROM tags k "
            "JOIN runs r ON r.run_uuid = k.run_uuid "
            "LEFT JOIN tags f ON f.run_uuid = k.run_uuid AND f.key = 'run_folder' "
            "WHERE k.key = 'run_key' AND r.experiment_id = :experiment AND k.value IN :keys ORDER BY r.start_time"
        ).bindparams(bindparam("keys", expanding=True))
        found: list[StoredRun] = []
        with self._translated(), self._engine.connect() as connection:
            for start in range(0, len(keys), _PAGE):
                chunk = {"experiment": int(experiment_id), "keys": list(keys[start : start + _PAGE])}
                for run_id, key, status, stage, started_ms, folder in connection.execute(query, chunk):
                    deleted = stage != "active"
                    found.append(
                        StoredRun(
                            run_id=run_id,
                            key=key,
                            status=status,
                            deleted=deleted,
                            started_ms=started_ms or 0,
                            folder=folder or "",
                        )
                    )
        return found

    def create(self, experiment_id: str, *, name: str, started_ms: int, tags: Mapping[str, str]) -> str:
        with self._translated():
            run = self._client.create_run(experiment_id, start_time=started_ms, tags=dict(tags), run_name=name)
        self._written = True
        self._places[run.info.run_id] = str(run.info.artifact_uri)
        return str(run.info.run_id)

    def log(
        self,
        run_id: str,
        *,
        samples: Sequence[Sample] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        from mlflow.entities import Metric, Param, RunTag

        with self._translated():
            for some, param_list, tag_list in requests_of(samples, params or {}, tags or {}):
                self._client.log_batch(
                    run_id,
                    metrics=[Metric(s.name, s.value, s.time_ms, s.step) for s in some],
                    params=[Param(*pair) for pair in param_list],
                    tags=[RunTag(*pair) for pair in tag_list],
                    synchronous=True,
                )
        self._written = True

    def params(self, run_id: str) -> dict[str, str] | None:
        from sqlalchemy import text

        runs = text("SELECT count(*) FROM runs WHERE run_uuid = :run")
        query = text("SELECT key, value FROM params WHERE run_uuid = :run")
        with self._translated(), self._engine.connect() as connection:
            if not connection.execute(runs, {"run": run_id}).scalar():
                return None
            return {key: value for key, value in connection.execute(query, {"run": run_id})}

    def dataset(self, run_id: str, dataset: Mapping[str, str]) -> None:
        from mlflow.entities import Dataset, DatasetInput, InputTag

        source = {"path": dataset["source"], "fingerprint": dataset["fingerprint"]}
        entity = Dataset(
            name=dataset["name"], digest=dataset["digest"], source_type="local", source=_json(source), schema=None
        )
        with self._translated():
            tags = [InputTag("mlflow.data.context", "training")]
            self._client.log_inputs(run_id, datasets=[DatasetInput(dataset=entity, tags=tags)])

    def status(self, run_id: str, status: str, ended_ms: int | None) -> None:
        with self._translated():
            if ended_ms is None:
                self._client.update_run(run_id, status=status)
            else:
                self._client.set_terminated(run_id, status=status, end_time=ended_ms)

    def upload(self, run_id: str, path: Path, folder: str = "") -> None:
        with self._translated():
            place = urlparse(self._place(run_id))
            if place.scheme not in ("", "file"):
                self._client.log_artifact(run_id, str(path), folder or None)
                return
        target = Path(unquote(place.path)) / folder / path.name
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        except OSError as error:
            raise StoreUnavailable(
                f"{target}: cannot be written ({error.strerror}); free space and sync again"
            ) from None

    def supersede(self, run_id: str, names: Sequence[str], after_step: int) -> None:
        from sqlalchemy import bindparam, text

        values = {"run": run_id, "step": after_step, "names": list(names)}
        which = "WHERE run_uuid = :run AND key IN :names"
        newest = "SELECT key, value, timestamp, is_nan, step FROM metrics " + which + " ORDER BY step, timestamp, value"
        insert = text(
            "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) "
            "VALUES (:key, :value, :timestamp, :step, :is_nan, :run)"
        )
        expand: Any = bindparam("names", expanding=True)
        with self._translated(), self._engine.begin() as connection:
            connection.execute(text(f"DELETE FROM metrics {which} AND step > :step").bindparams(expand), values)
            connection.execute(text(f"DELETE FROM latest_metrics {which}").bindparams(expand), values)
            latest = {row.key: row for row in connection.execute(text(newest).bindparams(expand), values)}
            for row in latest.values():
                connection.execute(insert, {**row._mapping, "run": run_id})

    def delete(self, run_id: str) -> None:
        with self._translated():
            self._client.delete_run(run_id)

    def tidy(self) -> None:
        if self._path is None or not self._written or time.monotonic() - self._analyzed_s < _ANALYZE_EVERY_S:
            return
        # Without statistics SQLite walks one metric of all runs for every get_metric_history (4-27 times slower).
        with self._translated(), self._engine.begin() as connection:
            connection.exec_driver_sql("ANALYZE")
        self._written, self._analyzed_s = False, time.monotonic()

    def close(self) -> None:
        self._engine.dispose()

    def _place(self, run_id: str) -> str:
        """Where a run keeps its artifacts."""
        if run_id not in self._places:
            self._places[run_id] = str(self._client.get_run(run_id).info.artifact_uri)
        return self._places[run_id]

    @contextmanager
    def _translated(self) -> Iterator[None]:
        from sqlalchemy.exc import DBAPIError, SQLAlchemyError

        where = redact(self.uri)
        try:
            yield
        except (SQLAlchemyError, sqlite3.Error) as error:
            passing = isinstance(error, (DBAPIError, sqlite3.Error))
            kind = StoreUnavailable if passing else StoreError
            raise kind(f"{where}: {_first_line(error)}; sync again when it is well") from None
        except StoreError:
            raise
        except Exception as error:
            if type(error).__module__.startswith("mlflow"):
                code = str(getattr(error, "error_code", ""))
                passing = code in ("INTERNAL_ERROR", "TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
                if "out-of-date database schema" in str(error):
                    message = f"made by another MLflow; run `mlflow db upgrade {where}` once, then sync again"
                    raise StoreError(f"{where}: {message}") from None
                kind = StoreUnavailable if passing else StoreError
                raise kind(f"{where}: {_first_line(error)}") from None
            raise


def import_mlflow() -> Any:
    """Import MLflow without its telemetry, import-time warnings, and Alembic's log of every migration."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in ("alembic", "mlflow.store.db.utils"):
        logging.getLogger(name).setLevel(logging.WARNING)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import mlflow
        import mlflow.store.tracking.sqlalchemy_store

        return mlflow


def _json(tree: Mapping[str, str]) -> str:
    import json

    return json.dumps(tree)


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines() or [type(error).__name__]
    return lines[0][:300]
