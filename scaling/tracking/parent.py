"""The parent run of each sweep: made before its first child, ended after its last.

Used by ``syncer``. A parent holds no metrics; its tags count its children by status, its artifacts are the sweep's
figures.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from scaling.record import now_ms
from scaling.tracking.conventions import SCHEMA, STORE_STATUS, TERMINAL, sweep_key
from scaling.tracking.state import RunState, State
from scaling.tracking.store import Store


def tags(sweep: str) -> dict[str, str]:
    """Tags of a sweep's parent run."""
    return {
        "kind": "sweep",
        "schema_version": str(SCHEMA),
        "run_key": sweep_key(sweep),
        "sweep": sweep,
        "mlflow.source.type": "LOCAL",
        "mlflow.source.name": "scaling sweep",
    }


def finish(sweep: str, parent: RunState, state: State, store: Store, figures: Sequence[Path]) -> None:
    """Set the parent's status and tags from its children's, and attach new figures."""
    assert parent.run_id is not None
    children = [run for run in state.runs.values() if run.sweep == sweep and run is not parent and not run.deleted]
    counts = Counter(run.status or "running" for run in children)
    if any(status not in TERMINAL for status in counts):
        status, ended_ms = "running", None
    else:
        status = "done" if set(counts) <= {"done"} else "failed"
        ended_ms = max((run.ended_ms or 0 for run in children), default=0) or now_ms()
    written = {"status": status, **{f"runs_{word}": str(counts.get(word, 0)) for word in STORE_STATUS}}
    written["mlflow.note.content"] = _note(sweep, counts)
    digest = hashlib.sha256(json.dumps(written, sort_keys=True).encode()).hexdigest()[:16]
    if parent.tags != digest:
        store.log(parent.run_id, tags=written)
        parent.tags = digest
    if (parent.status, parent.ended_ms) != (status, ended_ms):
        store.status(parent.run_id, STORE_STATUS[status], ended_ms)
        parent.status, parent.ended_ms = status, ended_ms
    for path in figures:
        mark = str(path.stat().st_mtime_ns)
        if parent.artifacts.get(path.name) != mark:
            store.upload(parent.run_id, path, "figures")
            parent.artifacts[path.name] = mark


def _note(sweep: str, counts: Counter[str]) -> str:
    listing = ", ".join(f"{number} {word}" for word, number in sorted(counts.items()))
    return (
        f"Sweep `{sweep}`: {sum(counts.values())} runs ({listing}).\n\nThey are below this one: expand it, or sort the "
        "experiment by a metric, e.g. `val/loss`, to list and chart them all."
    )
