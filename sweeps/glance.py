"""A quick look at a run folder: end record, attempts, last journal line; without loading the run.

Read by ``states`` and the live table, over thousands of folders: only the end of the newest journal is read.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scaling.errors import RecordError
from scaling.record import ATTEMPTS, EndRecord, RunFolder, read_lines

TAIL_BYTES: Final = 32_768  # of a journal: dozens of lines, enough to find the last training and evaluation points
READERS: Final = 16  # network file systems answer slowly but many at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Glance:
    """What a run folder says at once. ``touched_s`` is when its journal was last written (Unix seconds)."""

    end: EndRecord | None = None
    damaged: str = ""
    attempts: int = 0
    job_id: str | None = None
    restart_count: int = 0
    host: str = ""
    started_ms: int | None = None
    first_started_ms: int | None = None
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    touched_s: float | None = None

    @property
    def loss(self) -> float | None:
        """The last loss known: held out at the end, else of training."""
        source = self.end.final if self.end is not None and self.end.final else self.metrics
        for name in ("val/loss", "train/loss"):
            if name in source:
                return source[name]
        return None

    @property
    def tokens_per_s(self) -> float | None:
        return self.metrics.get("perf/tokens_per_s")


def glance(path: Path) -> Glance:
    """Look at one run folder (which need not exist)."""
    folder = RunFolder(path)
    end, damaged = None, ""
    try:
        end = folder.end()
    except (RecordError, TypeError, KeyError, AttributeError) as error:
        damaged = str(error)
    attempts = read_lines(path / ATTEMPTS)
    last: dict[str, Any] = attempts[-1] if attempts else {}
    journal = folder.journal(int(last["attempt"])) if last else None
    step, metrics, touched_s = _tail(journal) if journal is not None else (None, {}, None)
    if last and step is None:
        step = int(last.get("resumed_from_step", 0))
    if end is not None:
        step = end.step
    return Glance(
        end=end,
        damaged=damaged,
        attempts=len(attempts),
        job_id=last.get("job_id"),
        restart_count=int(last.get("restart_count", 0)),
        host=str(last.get("host", "")),
        started_ms=last.get("started_ms"),
        first_started_ms=attempts[0].get("started_ms") if attempts else None,
        step=step,
        metrics=metrics,
        touched_s=touched_s if touched_s is not None else (last["started_ms"] / 1000 if last else None),
    )


def glance_all(out: Path, keys: Iterable[str]) -> dict[str, Glance]:
    """Look at the run folders of these keys under ``out``; those that do not exist are left out."""
    try:
        there = {entry.name for entry in os.scandir(out)}
    except FileNotFoundError:
        return {}
    wanted = [key for key in keys if key in there]
    if len(wanted) < 2 * READERS:
        return {key: glance(out / key) for key in wanted}
    with ThreadPoolExecutor(READERS) as pool:
        return dict(zip(wanted, pool.map(lambda key: glance(out / key), wanted), strict=True))


def _tail(path: Path) -> tuple[int | None, dict[str, float], float | None]:
    """Last step, last value of each metric near the end, and time of the last write of a journal."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - TAIL_BYTES))
            data = file.read()
            touched_s = os.fstat(file.fileno()).st_mtime
    except FileNotFoundError:
        return None, {}, None
    step: int | None = None
    metrics: dict[str, float] = {}
    lines = data.split(b"\n")
    for raw in lines[1 if size > TAIL_BYTES else 0 : -1]:
        try:
            line = json.loads(raw)
            step = int(line["step"])
            metrics.update({name: float(value) for name, value in line["metrics"].items()})
        except (ValueError, KeyError, TypeError):
            continue
    return step, metrics, touched_s
