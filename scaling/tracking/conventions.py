"""How a run folder looks in MLflow: name, parameters, tags, status, dataset, description.

Between ``scaling.record`` (the folder) and the syncer (which writes what is said here) or the ingester (which reads
folders through the same functions, so that a table from folders equals one from a store). Standard library only.
"""

from __future__ import annotations

import hashlib
import json
import math
import struct
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from scaling.config.tree import RunConfig, flatten, to_dict
from scaling.identity import label, size_label, variant
from scaling.record import Attempt, EndRecord, Point, RunFolder
from scaling.tracking.metrics import store_name

# Tags of an experiment: MLflow's word for training (not for language-model applications), and its description. MLflow
# hides runs below another until that is expanded, unless they are sorted by something else than the date.
EXPERIMENT_TAGS: Final[dict[str, str]] = {
    "mlflow.experimentKind": "custom_model_development",
    "mlflow.note.content": (
        "Written by `scaling runs sync` from run folders, one run a folder, below the run of their sweep. Sort by a "
        "metric, e.g. `val/loss`, to list and chart all runs."
    ),
}
SCHEMA: Final = 1  # version of these conventions, tag ``schema_version``
MAX_PARAM: Final = 6_000  # characters; MLflow 3.17 cuts silently beyond
MAX_TAG: Final = 8_000  # characters; MLflow 3.17 refuses beyond
MAX_DIGEST: Final = 36  # characters of a dataset's digest

# How a run can stand (first three: no end record), and MLflow's word for it.
STORE_STATUS: Final[dict[str, str]] = {
    "running": "RUNNING",
    "unknown": "RUNNING",
    "scheduled": "SCHEDULED",
    "done": "FINISHED",
    "diverged": "FAILED",
    "failed": "FAILED",
    "cancelled": "KILLED",
}
CURVES: Final = ("train/loss", "val/loss")  # what the curve hash is made of
CURVE_HEX: Final = 16
TERMINAL: Final = frozenset({"done", "diverged", "failed", "cancelled"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """Where a run stands: a word of ``STORE_STATUS``, why, and when it ended (Unix milliseconds)."""

    status: str
    reason: str = ""
    ended_ms: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class RunView:
    """A run folder as MLflow is to show it; metrics apart."""

    key: str
    name: str
    params: Mapping[str, str]
    tags: Mapping[str, str]
    standing: Standing
    started_ms: int
    dataset: Mapping[str, str] | None


def view(
    folder: RunFolder,
    *,
    config: RunConfig,
    attempts: Sequence[Attempt],
    end: EndRecord | None,
    standing: Standing,
    curve: str = "",
) -> RunView:
    """What MLflow is to show of a folder whose files hold these."""
    started_ms = attempts[0].started_ms if attempts else int((folder.path / "config.json").stat().st_mtime * 1000)
    name = config.run.name or label(config)
    tags = _tags(folder, config, attempts, end, standing)
    if curve:
        tags["curve_hash"] = curve
    return RunView(
        key=folder.key,
        name=name,
        params=params(to_dict(config)),
        tags={store_name(key): clip(value, MAX_TAG) for key, value in tags.items()},
        standing=standing,
        started_ms=started_ms,
        dataset=_dataset(config),
    )


def params(tree: Mapping[str, Any]) -> dict[str, str]:
    """Flat dotted parameters; text as it is, everything else as JSON (``1e-05``, ``true``, ``null``).

    >>> params({"model": {"d_model": 8, "size": None}, "optimizer": {"lr": 1e-3}, "run": {"compile": False}})
    {'model.d_model': '8', 'model.size': 'null', 'optimizer.lr': '0.001', 'run.compile': 'false'}
    """
    return {store_name(key): clip(encode(value), MAX_PARAM) for key, value in flatten(tree).items()}


def encode(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, sort_keys=True)


def clip(text: str, limit: int) -> str:
    """``text`` itself, or its beginning and an ellipsis: the whole is in the artifact ``config.json``."""
    return text if len(text) <= limit else text[: limit - 1] + "…"


def final_metrics(end: EndRecord, last: Mapping[str, tuple[int, float]]) -> dict[str, float]:
    """Metrics of the end record that the journal's last points (name -> (step, value)) do not already say."""
    return {
        name: value
        for name, value in end.final.items()
        if not (name in last and last[name][0] == end.step and same(last[name][1], value))
    }


def same(a: float, b: float) -> bool:
    """Equal, NaN being equal to itself."""
    return a == b or (math.isnan(a) and math.isnan(b))


def last_values(points: Iterable[Point]) -> dict[str, tuple[int, int, float]]:
    """Latest (step, time in ms, value) of each metric, in MLflow's order: highest step, then time, then value."""
    last: dict[str, tuple[int, int, float]] = {}
    for point in points:
        for name, value in point.metrics.items():
            new = (point.step, point.time_ms, value)
            old = last.get(name)
            if old is None or new[:2] > old[:2] or (new[:2] == old[:2] and value > old[2]):
                last[name] = new
    return last


def curve_hash(curves: Mapping[str, Sequence[tuple[int, float]]]) -> str:
    """Sixteen hex digits over the (step, value) curves of ``train/loss`` and ``val/loss``; empty without any.

    Copies of one run share it, whatever their names, times and places.
    """
    digest = hashlib.sha256()
    found = False
    for name in CURVES:
        pairs = sorted(curves.get(name, ()), key=lambda pair: pair[0])
        if pairs:
            found = True
            digest.update(name.encode())
            digest.update(struct.pack(f"<{len(pairs)}q", *(step for step, _ in pairs)))
            digest.update(struct.pack(f"<{len(pairs)}d", *(value for _, value in pairs)))
    return digest.hexdigest()[:CURVE_HEX] if found else ""


def sweep_key(sweep: str) -> str:
    """The ``run_key`` tag of a sweep's parent run."""
    return f"sweep:{sweep}"


def _tags(
    folder: RunFolder, config: RunConfig, attempts: Sequence[Attempt], end: EndRecord | None, standing: Standing
) -> dict[str, str]:
    residual = config.model.residual
    heads = getattr(residual, "heads", None)
    last = attempts[-1] if attempts else None
    environment = dict(last.environment) if last else {}
    details = dict(end.details) if end else {}
    job = last.job_id if last else None
    tags: dict[str, Any] = {
        "kind": "run",
        "schema_version": SCHEMA,
        "run_key": folder.key,
        "sweep": config.run.sweep,
        "method": residual.method,
        "size": size_label(config.model),
        "heads": heads,
        "variant": variant(residual) or None,
        "kv": config.model.num_kv_heads,
        "lr": config.optimizer.lr,
        "seed": config.run.seed,
        "status": standing.status,
        "reason": standing.reason or None,
        "attempts": len(attempts),
        "attempt": last.attempt if last else None,
        "host": last.host if last else None,
        "host_kind": environment.get("host_kind") or environment.get("gpu") or environment.get("device"),
        "slurm.job_id": job,
        "slurm.restart_count": last.restart_count if last and job else None,
        "run_folder": str(folder.path.resolve()),
        "mlflow.source.type": "JOB" if job else "LOCAL",
        "mlflow.source.name": "scaling train",
        "mlflow.source.git.commit": environment.get("git_commit"),
        "mlflow.source.git.dirty": environment.get("git_dirty"),
        "mlflow.note.content": _note(folder, config),
        "final_step": end.step if end else None,
    }
    for name in ("n_params", "n_params_non_embedding", "eval_fingerprint", "schedule_finished"):
        tags[name] = details.get(name)
    for name, value in environment.items():
        tags[f"environment.{name}"] = value
    return {name: encode(value) for name, value in tags.items() if value is not None}


def _note(folder: RunFolder, config: RunConfig) -> str:
    sweep = f" of the sweep `{config.run.sweep}`" if config.run.sweep else ""
    return (
        f"Run `{folder.key}`{sweep}.\n\nTo train it again: save the artifact `config.yaml`, then\n\n"
        f"    scaling train config.yaml\n\nIts folder: `{folder.path.resolve()}`"
    )


def _dataset(config: RunConfig) -> dict[str, str] | None:
    data = config.data
    if not data.fingerprint:
        return None
    return {
        "name": data.path.rstrip("/").rsplit("/", 1)[-1] or "tokens",
        "digest": data.fingerprint[:MAX_DIGEST],
        "source": data.path,
        "fingerprint": data.fingerprint,
    }
