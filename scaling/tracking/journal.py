"""New journal lines of a run folder since the last look, what a resume made void left out.

Between ``scaling.record`` (which writes journals) and the syncer: the same rules as ``RunFolder.points``, but from a
byte offset on.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scaling.record import ATTEMPTS, CONFIG, DOWNSTREAM, DOWNSTREAM_RESULTS, END, Attempt, Point, RunFolder
from scaling.tracking.metrics import store_name

READ_BYTES = 4 << 20  # one bite of a journal, so that a long one does not fill memory


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A point and the offset just behind its line."""

    journal: str
    end: int
    point: Point


def cuts(attempts: Sequence[Attempt]) -> list[int | None]:
    """For each attempt the last step that still counts: the lowest step that a later attempt resumed from."""
    return [min((later.resumed_from_step for later in attempts[i + 1 :]), default=None) for i in range(len(attempts))]


def new_pieces(folder: RunFolder, attempts: Sequence[Attempt], offsets: Mapping[str, int]) -> Iterator[Piece]:
    """Points behind ``offsets`` (journal name -> bytes) that count, attempt by attempt."""
    for attempt, cut in zip(attempts, cuts(attempts), strict=True):
        path = folder.journal(attempt.attempt)
        for end, line in lines_from(path, offsets.get(path.name, 0)):
            if cut is None or line["step"] <= cut:
                yield Piece(journal=path.name, end=end, point=_point(line, attempt.attempt))


def void_values(
    folder: RunFolder, attempts: Sequence[Attempt], offsets: Mapping[str, int]
) -> dict[tuple[int, str], float]:
    """(step, name) -> value of points that lie before ``offsets`` but that a resume made void."""
    void: dict[tuple[int, str], float] = {}
    for attempt, cut in zip(attempts, cuts(attempts), strict=True):
        if cut is None:
            continue
        path = folder.journal(attempt.attempt)
        for end, line in lines_from(path, 0):
            if end > offsets.get(path.name, 0):
                break
            if line["step"] > cut:
                for name, value in line["metrics"].items():
                    void[line["step"], name] = float(value)
    return void


def journal_names(folder: RunFolder, attempts: Sequence[Attempt]) -> list[str]:
    """Names of all metrics in a folder's journals, as a store spells them."""
    journals = [folder.journal(attempt.attempt) for attempt in attempts]
    return sorted(
        {store_name(name) for path in journals for _, line in lines_from(path, 0) for name in line["metrics"]}
    )


def lines_from(path: Path, offset: int) -> Iterator[tuple[int, dict[str, Any]]]:
    """Whole JSON lines behind ``offset``, and where each ends; a torn last line waits, a torn inner one is left out."""
    try:
        file = path.open("rb")
    except FileNotFoundError:
        return
    with file:
        file.seek(offset)
        rest = b""
        while block := file.read(READ_BYTES):
            *whole, rest = (rest + block).split(b"\n")
            for raw in whole:
                offset += len(raw) + 1
                try:
                    yield offset, json.loads(raw)
                except ValueError:
                    continue


def seal(folder: RunFolder) -> list[list[Any]]:
    """Names, sizes and times of the files that decide what MLflow shows; equal seals need no second look."""
    found: list[list[Any]] = []
    with os.scandir(folder.path) as entries:
        for entry in entries:
            if entry.name in (CONFIG, ATTEMPTS, END) or entry.name.startswith("metrics-"):
                stat = entry.stat()
                found.append([entry.name, stat.st_size, stat.st_mtime_ns])
            elif entry.name == DOWNSTREAM:
                for path in Path(entry.path).glob(f"*/{DOWNSTREAM_RESULTS}"):
                    stat = path.stat()
                    found.append([str(path.relative_to(folder.path)), stat.st_size, stat.st_mtime_ns])
    return sorted(found)


def _point(line: Mapping[str, Any], attempt: int) -> Point:
    metrics = {name: float(value) for name, value in line["metrics"].items()}
    return Point(step=int(line["step"]), time_ms=int(line["time_ms"]), metrics=metrics, attempt=attempt)
