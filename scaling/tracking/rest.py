"""An MLflow server as a store, spoken to over HTTP without importing MLflow.

The other implementation of ``store.Store``. A server has no call to delete metric values, so that what a resume
measures again is sent only where its value differs.
"""

from __future__ import annotations

import json
import logging
import math
import re
import shutil
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final
from urllib.parse import quote, urlparse

from scaling.errors import StoreError
from scaling.tracking.connection import Missing, Server
from scaling.tracking.conventions import EXPERIMENT_TAGS
from scaling.tracking.store import Sample, StoredRun, requests_of

logger = logging.getLogger(__name__)

API: Final = "/api/2.0/mlflow"
FILES: Final = "/api/2.0/mlflow-artifacts/artifacts"
PAGE: Final = 1_000
_FEW: Final = 20  # keys looked for one by one; more are found by listing the experiment
_PLAIN: Final = re.compile(r"[\w.:\- ]+")  # keys that need no quoting in MLflow's filter language
_LOOPBACK: Final = ("localhost", "127.0.0.1", "::1")


class RestStore:
    """See ``store.Store``."""

    deletes = False

    def __init__(self, url: str, *, timeout_s: float, tries: int = 3, light: bool = False) -> None:
        self.uri = url
        self._light = light
        self._server = Server(url, timeout_s=timeout_s, tries=tries)
        self._places: dict[str, str] = {}

    def experiment(self, name: str) -> str:
        try:
            found = self._server.get(f"{API}/experiments/get-by-name", experiment_name=name)["experiment"]
        except Missing:
            try:
                tags = [{"key": key, "value": value} for key, value in EXPERIMENT_TAGS.items()]
                made = self._server.post(f"{API}/experiments/create", {"name": name, "tags": tags})
                return str(made["experiment_id"])
            except StoreError as error:
                if "RESOURCE_ALREADY_EXISTS" not in str(error) and "already exists" not in str(error):
                    raise
                found = self._server.get(f"{API}/experiments/get-by-name", experiment_name=name)["experiment"]
        if found.get("lifecycle_stage", "active") != "active":
            raise StoreError(
                f"experiment {name!r} is deleted on {self._server.where}; restore it there, or choose another name"
            )
        return str(found["experiment_id"])

    def find(self, experiment_id: str, keys: Sequence[str]) -> list[StoredRun]:
        if len(keys) <= _FEW and all(_PLAIN.fullmatch(key) for key in keys):
            return [run for key in keys for run in self._search(experiment_id, f"tags.run_key = '{key}'")]
        wanted = set(keys)
        return [run for run in self._search(experiment_id, "") if run.key in wanted]

    def create(self, experiment_id: str, *, name: str, started_ms: int, tags: Mapping[str, str]) -> str:
        body = {
            "experiment_id": experiment_id,
            "run_name": name,
            "start_time": started_ms,
            "tags": _pairs(tags.items()),
        }
        info = self._server.post(f"{API}/runs/create", body, once=True)["run"]["info"]
        self._places[info["run_id"]] = info.get("artifact_uri", "")
        return str(info["run_id"])

    def log(
        self,
        run_id: str,
        *,
        samples: Sequence[Sample] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        for some, param_list, tag_list in requests_of(samples, params or {}, tags or {}):
            metrics = [{"key": s.name, "value": _number(s.value), "timestamp": s.time_ms, "step": s.step} for s in some]
            body = {"run_id": run_id, "metrics": metrics, "params": _pairs(param_list), "tags": _pairs(tag_list)}
            self._server.post(f"{API}/runs/log-batch", body)

    def params(self, run_id: str) -> dict[str, str] | None:
        try:
            run = self._server.get(f"{API}/runs/get", run_id=run_id)["run"]
        except Missing:
            return None
        return {pair["key"]: pair.get("value", "") for pair in run["data"].get("params", [])}

    def dataset(self, run_id: str, dataset: Mapping[str, str]) -> None:
        source = json.dumps({"path": dataset["source"], "fingerprint": dataset["fingerprint"]})
        entity = {"name": dataset["name"], "digest": dataset["digest"], "source_type": "local", "source": source}
        context = [{"key": "mlflow.data.context", "value": "training"}]
        body = {"run_id": run_id, "datasets": [{"tags": context, "dataset": entity}]}
        self._server.post(f"{API}/runs/log-inputs", body)

    def status(self, run_id: str, status: str, ended_ms: int | None) -> None:
        body: dict[str, Any] = {"run_id": run_id, "status": status}
        if ended_ms is not None:
            body["end_time"] = ended_ms
        self._server.post(f"{API}/runs/update", body)

    def upload(self, run_id: str, path: Path, folder: str = "") -> None:
        place = self._place(run_id)
        scheme = urlparse(place).scheme
        name = f"{folder}/{path.name}" if folder else path.name
        if scheme == "mlflow-artifacts":
            inner = urlparse(place).path.strip("/")
            self._server.put_file(f"{FILES}/{quote(f'{inner}/{name}')}", path)
        elif scheme in ("", "file") and urlparse(self.uri).hostname in _LOOPBACK:
            target = Path(urlparse(place).path) / name
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, target)
        elif scheme in ("", "file"):
            logger.debug("%s keeps artifacts in a folder of its own host; %s is not uploaded", self.uri, path)
        elif self._light:
            logger.debug("%s keeps artifacts at %s; %s waits for `scaling runs sync`", self.uri, scheme, path)
        else:
            from scaling.tracking.sql import import_mlflow

            import_mlflow().store.artifact.artifact_repository_registry.get_artifact_repository(place).log_artifact(
                str(path), folder or None
            )

    def supersede(self, run_id: str, names: Sequence[str], after_step: int) -> None:
        raise AssertionError("a server has no call to delete metric values")

    def delete(self, run_id: str) -> None:
        self._server.post(f"{API}/runs/delete", {"run_id": run_id})

    def tidy(self) -> None:
        """A server's database is not ours."""

    def close(self) -> None:
        self._server.close()

    def _search(self, experiment_id: str, text: str) -> list[StoredRun]:
        found: list[StoredRun] = []
        body: dict[str, Any] = {"experiment_ids": [experiment_id], "run_view_type": "ALL", "max_results": PAGE}
        if text:
            body["filter"] = text
        while True:
            answer = self._server.post(f"{API}/runs/search", body)
            for run in answer.get("runs", []):
                info = run["info"]
                tags = {pair["key"]: pair.get("value", "") for pair in run["data"].get("tags", [])}
                self._places[info["run_id"]] = info.get("artifact_uri", "")
                found.append(
                    StoredRun(
                        run_id=info["run_id"],
                        key=tags.get("run_key", ""),
                        status=info["status"],
                        deleted=info.get("lifecycle_stage") != "active",
                        started_ms=int(info.get("start_time") or 0),
                        folder=tags.get("run_folder", ""),
                    )
                )
            if not answer.get("next_page_token"):
                return sorted(found, key=lambda run: run.started_ms)
            body["page_token"] = answer["next_page_token"]

    def _place(self, run_id: str) -> str:
        if not self._places.get(run_id):
            run = self._server.get(f"{API}/runs/get", run_id=run_id)["run"]
            self._places[run_id] = run["info"].get("artifact_uri", "")
        return self._places[run_id]


def _pairs(pairs: Iterable[tuple[str, str]]) -> list[dict[str, str]]:
    return [{"key": key, "value": value} for key, value in pairs]


def _number(value: float) -> float | str:
    """A JSON value for any float, as protobuf's JSON spells it."""
    if math.isfinite(value):
        return value
    return "NaN" if math.isnan(value) else ("Infinity" if value > 0 else "-Infinity")
