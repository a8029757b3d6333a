"""One run folder into one MLflow run: described, its new points sent, ended.

Between ``syncer`` (which goes over all folders and finds or makes their runs) and ``store``. Every step may be repeated
after a crash or a lost answer without changing what MLflow shows; a folder whose files did not change since all of it
was sent costs one look at it.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import yaml

from scaling.config.tree import RunConfig, to_dict
from scaling.errors import RecordError, StoreError
from scaling.identity import EXCLUDED
from scaling.record import (
    ATTEMPTS,
    CONFIG,
    DOWNSTREAM,
    DOWNSTREAM_FINAL,
    DOWNSTREAM_RESULTS,
    END,
    Attempt,
    EndRecord,
    RunFolder,
)
from scaling.tracking import conventions
from scaling.tracking.conventions import CURVES, STORE_STATUS, TERMINAL, RunView
from scaling.tracking.journal import journal_names, new_pieces, seal, void_values
from scaling.tracking.metrics import store_name
from scaling.tracking.standing import JobState, standing
from scaling.tracking.state import RunState
from scaling.tracking.store import MAX_METRICS, Sample, Store, redact

logger = logging.getLogger(__name__)

FIGURES: Final = "figures"


def unchanged(folder: RunFolder, known: RunState) -> bool:
    """Whether the run is over and all of its files were sent as they are now."""
    return known.status in TERMINAL and bool(known.seal) and known.seal == seal(folder)


def send(
    folder: RunFolder, known: RunState, store: Store, job_state: JobState | None, make: Callable[[RunView], str]
) -> int:
    """Send what is new in ``folder`` to its run, and note in ``known`` what was sent.

    Parameters
    ----------
    make
        Makes the run where there is none yet, and returns its id.

    Returns
    -------
    int
        Metric values sent.

    Raises
    ------
    RecordError
        If a file of the folder is damaged.
    StoreUnavailable
        If the store does not answer; ``known`` says how far it went.
    StoreError
        If the store refuses something, or has another value for a parameter.
    """
    files = seal(folder)
    config, attempts, end = folder.config(), folder.attempts(), folder.end()
    stands = standing(folder, attempts, end, job_state)
    over = stands.status in TERMINAL
    last, curve = _summary(folder) if over else ({}, "")
    view = conventions.view(folder, config=config, attempts=attempts, end=end, standing=stands, curve=curve)
    fresh = known.run_id is None
    if fresh:
        known.run_id = make(view)
        known.tags, known.reason = _digest(view.tags), view.tags.get("reason", "")
    assert known.run_id is not None
    if known.status in TERMINAL and not over:
        store.status(known.run_id, STORE_STATUS[stands.status], None)
        known.status, known.finals = stands.status, ""
    params = _parameters(folder, view, known, store, fresh=fresh)
    _resume(folder, attempts, known, store)
    finals, digest = _finals(end, last, known) if over and end is not None else ([], known.finals)
    sent = _points(folder, attempts, known, store, params, finals)
    known.params, known.finals = _digest(view.params), digest
    _tags(view, known, store)
    if not known.artifacts:
        _describe(folder, config, view, known, store)
    _downstream(folder, known, store, end)
    _artifacts(folder, known, store, over=over)
    if (known.status, known.ended_ms) != (stands.status, stands.ended_ms):
        store.status(known.run_id, STORE_STATUS[stands.status], stands.ended_ms)
        known.status, known.ended_ms = stands.status, stands.ended_ms
    known.seal = files if over else []
    return sent


def _summary(folder: RunFolder) -> tuple[dict[str, tuple[int, float]], str]:
    """Last (step, value) of each metric, and the hash of the loss curves."""
    last: dict[str, tuple[int, float]] = {}
    curves: dict[str, list[tuple[int, float]]] = {name: [] for name in CURVES}
    for point in folder.points():
        for name, value in point.metrics.items():
            last[name] = (point.step, value)
            if name in curves:
                curves[name].append((point.step, value))
    return last, conventions.curve_hash(curves)


def _parameters(folder: RunFolder, view: RunView, known: RunState, store: Store, *, fresh: bool) -> dict[str, str]:
    """Parameters still to be sent; ``StoreError`` where the store has another value for one that counts."""
    if known.params == _digest(view.params):
        return {}
    assert known.run_id is not None
    stored = {} if fresh else store.params(known.run_id) or {}
    for name, value in view.params.items():
        if name in stored and stored[name] != value and name not in EXCLUDED:
            raise StoreError(
                f"{folder.path / CONFIG}: parameter {name!r} is {value[:200]!r}, but {stored[name][:200]!r} in run "
                f"{known.run_id} of {redact(store.uri)}; a resume must keep it: restore it, or sync elsewhere"
            )
    return {name: value for name, value in view.params.items() if name not in stored}


def _describe(folder: RunFolder, config: RunConfig, view: RunView, known: RunState, store: Store) -> None:
    assert known.run_id is not None
    if view.dataset is not None:
        store.dataset(known.run_id, view.dataset)
    with TemporaryDirectory() as scratch:
        path = Path(scratch) / "config.yaml"
        path.write_text(yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True), encoding="utf-8")
        store.upload(known.run_id, path)
    _upload(folder.path / CONFIG, known, store)


def _resume(folder: RunFolder, attempts: Sequence[Attempt], known: RunState, store: Store) -> None:
    """Drop what was sent of steps beyond the checkpoint that a new attempt started from."""
    assert known.run_id is not None
    started = attempts[max(1, known.attempts) :]
    known.attempts = len(attempts)
    if known.adopted and started and store.deletes:
        # What an earlier syncer sent is not known, so any name of the journals may have points to drop.
        known.names, known.last_step = journal_names(folder, attempts), sys.maxsize
    known.adopted = False
    cut = min((attempt.resumed_from_step for attempt in started), default=known.last_step)
    if known.last_step <= cut or not known.names:
        return
    if store.deletes:
        store.supersede(known.run_id, known.names, cut)
        known.last_step = cut
    else:  # the points stay; those measured again with the same value are then not sent a second time
        known.void = True


def _points(
    folder: RunFolder,
    attempts: Sequence[Attempt],
    known: RunState,
    store: Store,
    params: Mapping[str, str],
    finals: Sequence[Sample],
) -> int:
    """Send new points, the parameters with the first of them and the final values behind the last."""
    assert known.run_id is not None
    void = void_values(folder, attempts, known.offsets) if known.void else {}
    names = set(known.names)
    samples: list[Sample] = []
    sent = 0
    offsets = dict(known.offsets)
    reached = known.last_step

    def flush() -> None:
        nonlocal sent, samples, params
        assert known.run_id is not None
        store.log(known.run_id, samples=samples, params=params)
        sent += len(samples)
        samples, params = [], {}
        known.offsets, known.last_step, known.names = dict(offsets), reached, sorted(names)

    for piece in new_pieces(folder, attempts, known.offsets):
        point = piece.point
        if len(samples) + len(params) + len(point.metrics) > MAX_METRICS:
            flush()
        for name, value in point.metrics.items():
            before = void.get((point.step, name))
            if before is not None:
                if conventions.same(before, value):
                    continue
                known.doubled += 1
            samples.append(Sample(name=store_name(name), value=value, time_ms=point.time_ms, step=point.step))
            names.add(store_name(name))
        offsets[piece.journal] = piece.end
        reached = max(reached, point.step)
    samples.extend(finals)
    names.update(sample.name for sample in finals)
    reached = max([reached, *(sample.step for sample in finals)])
    flush()
    return sent


def _finals(end: EndRecord, last: Mapping[str, tuple[int, float]], known: RunState) -> tuple[list[Sample], str]:
    """Final values still to be sent, and their digest."""
    finals = conventions.final_metrics(end, last)
    digest = _digest({name: repr(value) for name, value in finals.items()} | {"": str(end.step)})
    if known.finals == digest:
        return [], digest
    time_ms, step = end.ended_ms, end.step
    return [Sample(store_name(name), value, time_ms, step) for name, value in finals.items()], digest


def _tags(view: RunView, known: RunState, store: Store) -> None:
    assert known.run_id is not None
    tags = dict(view.tags)
    if known.doubled:
        tags["doubled_points"] = str(known.doubled)
    digest = _digest(tags)
    if known.tags != digest:
        # An earlier reason must not stay; where there was none, no empty tag is shown.
        store.log(known.run_id, tags={"reason": "", **tags} if known.reason != "" else tags)
        known.tags, known.reason = digest, tags.get("reason", "")


def _downstream(folder: RunFolder, known: RunState, store: Store, end: EndRecord | None) -> None:
    """Metrics of downstream tasks, ``downstream/<task>/<metric>``, and the files with their items."""
    for path in sorted((folder.path / DOWNSTREAM).glob(f"*/{DOWNSTREAM_RESULTS}")):
        name = f"{DOWNSTREAM}/{path.parent.name}"
        if known.artifacts.get(f"{name}/{path.name}") == _mark(path):
            continue
        front = DOWNSTREAM if path.parent.name == DOWNSTREAM_FINAL else name
        try:
            tasks = json.loads(path.read_text(encoding="utf-8"))
            values = {
                f"{front}/{task}/{metric}": number["value"]
                for task, found in tasks.items()
                for metric, number in found["metrics"].items()
            }
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise RecordError(f"{path}: damaged ({error!r}); evaluate the run again") from None
        stated = re.match(r"step-(\d+)", path.parent.name)
        step = int(stated[1]) if stated else 0 if end is None else end.step
        time_ms = path.stat().st_mtime_ns // 10**6
        samples = [Sample(store_name(key), value, time_ms, step) for key, value in values.items() if value is not None]
        assert known.run_id is not None
        store.log(known.run_id, samples=samples)
        for items in sorted(path.parent.glob("*.csv")):
            _upload(items, known, store, name)
        _upload(path, known, store, name)


def _artifacts(folder: RunFolder, known: RunState, store: Store, *, over: bool) -> None:
    if over:
        for name in (ATTEMPTS, END):
            _upload(folder.path / name, known, store)
    for path in sorted((folder.path / FIGURES).glob("*")):
        if path.is_file():
            _upload(path, known, store, FIGURES)


def _upload(path: Path, known: RunState, store: Store, folder: str = "") -> None:
    mark = _mark(path)
    if mark is None:
        return
    name = f"{folder}/{path.name}" if folder else path.name
    if known.artifacts.get(name) != mark:
        assert known.run_id is not None
        store.upload(known.run_id, path, folder)
        known.artifacts[name] = mark


def _mark(path: Path) -> str | None:
    """What tells a file from what it was; None where there is none."""
    try:
        stat = path.stat()
    except FileNotFoundError:
        return None
    return f"{stat.st_size} {stat.st_mtime_ns}"


def _digest(tree: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()[:16]
