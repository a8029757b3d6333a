"""The run folder, which is the truth about a run: its files, and how they are written and read.

The trainer writes it; the syncer, the status table and the ingester read it. Standard library only, so that all of them
start fast. Layout, under ``<out>/<run key>/``:

==========================  ===========================================================================================
``config.json``             the resolved configuration, its key and format version; written once, never changed
``attempts.jsonl``          one line an attempt: number, host, pid, job, start time, step it resumed from, environment
``metrics-0001.jsonl``      journal of attempt 1: ``{"step": 10, "time_ms": ..., "metrics": {"train/loss": ...}}``
``checkpoints/``            owned by ``scaling.checkpoint``
``evaluations/``            per-sequence losses of the held-out set by step (``step-00001000.npz``)
``downstream/``             downstream results and items by weights (``final/``), written by ``scaling eval``
``end.json``                the end record, written atomically when the run is over, whatever the way
``leases/``                 who writes here, one file a holder; owned by ``scaling.lease``
==========================  ===========================================================================================

NaN and infinities are kept in journals as the words ``"nan"``, ``"inf"``, ``"-inf"`` (JSON has none).
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final, Literal

from scaling.config.strict import build
from scaling.config.tree import RunConfig, to_dict
from scaling.errors import RecordError
from scaling.identity import VERSION, run_key

CONFIG: Final = "config.json"
ATTEMPTS: Final = "attempts.jsonl"
END: Final = "end.json"
CHECKPOINTS: Final = "checkpoints"
EVALUATIONS: Final = "evaluations"
DOWNSTREAM: Final = "downstream"
DOWNSTREAM_RESULTS: Final = "results.json"
DOWNSTREAM_FINAL: Final = "final"  # those of the weights that a run ended with
PROBE: Final = "routing.npz"  # by `scaling probe disagreement --save`; reports find it here

EndStatus = Literal["done", "diverged", "failed", "cancelled"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One start of a run. ``resumed_from_step`` is the checkpoint's step (0: from the beginning)."""

    attempt: int
    host: str
    pid: int
    started_ms: int
    resumed_from_step: int = 0
    job_id: str | None = None
    restart_count: int = 0
    environment: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """One journal line: what was measured at ``step``, at ``time_ms`` (Unix milliseconds), in which attempt."""

    step: int
    time_ms: int
    metrics: Mapping[str, float]
    attempt: int


@dataclass(frozen=True, kw_only=True, slots=True)
class EndRecord:
    """How a run ended. ``final`` holds its last metrics; ``reason`` is one line unless ``done``."""

    status: EndStatus
    step: int
    ended_ms: int
    attempt: int
    reason: str = ""
    final: Mapping[str, float] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)


def now_ms() -> int:
    return time.time_ns() // 1_000_000


def encode(value: float) -> float | str:
    """A JSON value for any float."""
    if math.isfinite(value):
        return value
    return "nan" if math.isnan(value) else ("inf" if value > 0 else "-inf")


def write_atomically(path: Path, text: str) -> None:
    """Write beside and rename, synced to disk, so that a reader sees the old file or the whole new one.

    Raises
    ------
    RecordError
        If the folder cannot be written to (read-only, full); the old file is untouched.
    """
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        with beside.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink()
        raise RecordError(f"{path}: cannot be written ({error.strerror}); free space or choose another --out") from None


class RunFolder:
    """A run's folder on disk.

    Opening one with ``create`` writes ``config.json`` or checks that the one there is the same run.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def key(self) -> str:
        return self.path.name

    @classmethod
    def create(cls, out: Path, config: RunConfig) -> RunFolder:
        """Make (or reopen) ``out/<run key>``.

        Raises
        ------
        RecordError
            If the folder cannot be made, or holds another run's configuration.
        """
        key = run_key(config)
        folder = cls(out / key)
        try:
            folder.path.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise RecordError(f"{folder.path}: cannot be made ({error.strerror}); choose another --out") from None
        if (folder.path / CONFIG).exists():
            if run_key(folder.config()) != key:
                raise RecordError(f"{folder.path / CONFIG}: holds another run's configuration; move the folder away")
        else:
            text = json.dumps({"key": key, "version": VERSION, "config": to_dict(config)}, indent=1)
            write_atomically(folder.path / CONFIG, text + "\n")
        return folder

    def config(self) -> RunConfig:
        """The resolved configuration; ``RecordError`` where it is missing or damaged."""
        path = self.path / CONFIG
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            tree = stored["config"]
        except FileNotFoundError:
            raise RecordError(f"{path}: missing; this is not a run folder") from None
        except (ValueError, KeyError, TypeError):
            raise RecordError(f"{path}: damaged; restore it or remove the folder") from None
        return build(RunConfig, tree, source=str(path))

    def attempts(self) -> list[Attempt]:
        try:
            return [Attempt(**line) for line in read_lines(self.path / ATTEMPTS)]
        except TypeError as error:
            reason = str(error).removeprefix("Attempt.__init__() ")
            raise RecordError(f"{self.path / ATTEMPTS}: a line is no attempt ({reason}); repair or remove it") from None

    def next_attempt(self) -> int:
        """Number of an attempt that begins now: above all that have a line or a journal."""
        journals = (path.stem.removeprefix("metrics-") for path in self.path.glob("metrics-*.jsonl") if path.is_file())
        known = [*(attempt.attempt for attempt in self.attempts()), *(int(name) for name in journals if name.isdigit())]
        return max(known, default=0) + 1

    def begin(self, attempt: Attempt) -> None:
        """Record the start of an attempt."""
        append_line(self.path / ATTEMPTS, asdict(attempt), sync=True)

    def journal(self, attempt: int) -> Path:
        return self.path / f"metrics-{attempt:04d}.jsonl"

    def points(self) -> Iterator[Point]:
        """Journal points in order, what a resume made void left out.

        An attempt that resumed from step s replaces every earlier point with a step beyond s.
        """
        attempts = self.attempts()
        for position, attempt in enumerate(attempts):
            cut = min((later.resumed_from_step for later in attempts[position + 1 :]), default=None)
            for line in read_lines(self.journal(attempt.attempt)):
                if cut is None or line["step"] <= cut:
                    metrics = {name: float(value) for name, value in line["metrics"].items()}
                    yield Point(step=line["step"], time_ms=line["time_ms"], metrics=metrics, attempt=attempt.attempt)

    def end(self) -> EndRecord | None:
        """The end record, or ``None`` while the run is not over."""
        path = self.path / END
        try:
            stored = json.loads(path.read_text(encoding="utf-8"))
            stored["final"] = {name: float(value) for name, value in stored["final"].items()}
            return EndRecord(**stored)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RecordError(f"{path}: damaged; remove it to let the run go on from its checkpoint") from None

    def finish(self, record: EndRecord) -> None:
        """Write the end record, atomically and once per way of ending."""
        tree = asdict(record)
        tree["final"] = {name: encode(value) for name, value in record.final.items()}
        write_atomically(self.path / END, json.dumps(tree, indent=1) + "\n")

    def reopen(self) -> None:
        """Set the end record of a failed attempt aside (kept as ``end-<attempt>.json``), before it is tried again."""
        record = self.end()
        if record is not None:
            os.replace(self.path / END, self.path / f"end-{record.attempt:04d}.json")


def append_line(path: Path, tree: Mapping[str, Any], *, sync: bool = False) -> None:
    """Append one JSON line in a single write.

    Raises
    ------
    RecordError
        If the line cannot be written whole (read-only, disk full); readers leave a torn line out.
    """
    line = (json.dumps(tree, separators=(",", ":"), allow_nan=False) + "\n").encode("utf-8")
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o666)
        try:
            size = os.fstat(descriptor).st_size
            # a line that a crash or a full disk tore stays by itself
            if size and os.pread(descriptor, 1, size - 1) != b"\n":
                line = b"\n" + line
            if os.write(descriptor, line) < len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            if sync:
                os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        raise RecordError(f"{path}: cannot be written ({error.strerror}); free space or choose another --out") from None


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Whole JSON lines of a file; a torn last line is left out, a missing file is empty."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return []
    lines = []
    for raw in data.split(b"\n")[:-1]:
        try:
            lines.append(json.loads(raw))
        except ValueError:
            continue  # torn by a crash in the middle of a file that a later attempt went on with
    return lines


def run_folders(out: Path) -> list[RunFolder]:
    """Every run folder directly under ``out``, sorted by key."""
    if not out.is_dir():
        raise RecordError(f"{out}: no such folder of runs; give the --out of a sweep or training")
    return [RunFolder(child.parent) for child in sorted(out.glob(f"*/{CONFIG}"))]
