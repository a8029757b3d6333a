"""Checkpoints: written atomically, verified before use, readable on another number of processes.

Between ``optim``/``distributed`` and ``train``. A checkpoint is a folder ``checkpoints/step-00001000`` in the run
folder: safetensors files that ``torch.distributed.checkpoint`` wrote (each process its shards, no pickle) and
``complete.json``, which holds everything else and a checksum of every file. It is written beside under a hidden name
and renamed when whole, so that a name without a dot means a complete checkpoint; damage after that is found by the
checksums, and the checkpoint before is used. Saving copies the state to the host and writes it on a thread.

``final/`` holds the weights alone, when a run is over: ``model.safetensors``, and ``ema.safetensors`` with an average.
"""

from __future__ import annotations

import copy
import hashlib
import json
import logging
import os
import shutil
import threading
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from scaling.distributed import World, local_part
from scaling.errors import CheckpointError, LeaseError
from scaling.peers import is_lost

logger = logging.getLogger(__name__)

FORMAT: Final = 1
COMPLETE: Final = "complete.json"
FINAL: Final = "final"
_FIELDS: Final = {"format", "step", "permanent", "world_size", "progress", "files"}  # of a checkpoint's record
MODEL: Final = "model/"  # prefix of the weights' names inside a checkpoint
EMA: Final = "ema/"


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry:
    """A tensor to save and restore: this process's part, and the tensor whose layout over processes it has."""

    local: Tensor
    layout: Tensor

    @classmethod
    def whole(cls, tensor: Tensor) -> Entry:
        """A tensor that every process holds whole."""
        return cls(local=local_part(tensor), layout=tensor)


@dataclass(frozen=True, kw_only=True, slots=True)
class Checkpoint:
    """A complete checkpoint on disk; ``progress`` is what ``save`` was given."""

    path: Path
    step: int
    permanent: bool
    world_size: int
    progress: Mapping[str, Any]


class Checkpoints:
    """The checkpoints of one run folder, for the process (or processes) that hold its lease.

    Parameters
    ----------
    folder
        ``<run folder>/checkpoints``.
    world
        The processes that save and load together.
    keep
        Number of latest checkpoints kept; permanent ones come on top.
    guard
        Called before a checkpoint takes its name; raises where another process has taken the run over.
    """

    def __init__(self, folder: Path, world: World, *, keep: int, guard: Callable[[], None] = lambda: None) -> None:
        self.folder = folder
        self._world = world
        self._keep = keep
        self._guard = guard
        self._thread: threading.Thread | None = None
        self._error: str | None = None
        self._lost: RuntimeError | None = None  # what the saving thread met when another process was gone
        # a single process is what is meant, not an oversight
        warnings.filterwarnings("ignore", message="torch.distributed is disabled, unavailable or uninitialized")
        # the saving thread's collectives must not mix with the training's
        self._group = dist.new_group(backend="gloo") if world.size > 1 else None
        if world.is_first and folder.exists():
            for left in folder.glob(".*"):  # of a process that died while it wrote
                shutil.rmtree(left, ignore_errors=True)

    def save(
        self, step: int, entries: Mapping[str, Entry], progress: Mapping[str, Any], *, permanent: bool = False
    ) -> None:
        """Save the state after ``step`` updates: copy it now, write it on a thread; ``finish`` tells how that went."""
        self.finish()
        from scaling import shards  # takes seconds to import, and short runs save nothing

        staged = {name: shards.staged(entry.local, entry.layout) for name, entry in entries.items()}
        record = {
            "format": FORMAT,
            "step": step,
            "permanent": permanent,
            "world_size": self._world.size,
            "progress": copy.deepcopy(dict(progress)),  # training goes on with the originals
        }
        self._thread = threading.Thread(target=self._write, args=(step, staged, record), name="checkpoint")
        self._thread.start()

    def finish(self, *, required: bool = False, outlook: str = "training goes on") -> None:
        """Wait for the write that is under way. A failed one is logged with the outlook, what happens without it.

        Raises
        ------
        CheckpointError
            With ``required``, if the checkpoint could not be written; those before it are untouched.
        RuntimeError
            The communication library's, if another process was lost meanwhile: no training goes on after that.
        """
        if self._thread is None:
            return
        self._thread.join()
        self._thread = None
        if self._lost is not None:
            raise self._lost
        if self._error is None:
            return
        if required:
            raise CheckpointError(f"{self._error}; free space and run again, it goes on from the checkpoint before")
        logger.warning("%s; %s", self._error, outlook)

    def latest(self) -> Checkpoint | None:
        """The newest checkpoint that is whole; damaged ones are named in the log and left where they are."""
        found = self._newest() if self._world.is_first else None
        chosen: Checkpoint | None = self._world.share(found)
        return chosen

    def load(self, checkpoint: Checkpoint, entries: Mapping[str, Entry]) -> None:
        """Fill the entries' tensors from a checkpoint, whatever number of processes wrote it.

        Raises
        ------
        CheckpointError
            If the checkpoint lacks one of the tensors, or its shape differs.
        """
        from scaling import shards

        targets = {name: shards.staged(entry.local, entry.layout) for name, entry in entries.items()}
        try:
            shards.read(checkpoint.path, targets, self._group)
        except shards.ShardError as error:
            raise CheckpointError(
                f"{checkpoint.path}: does not fit this run ({error}); remove it to start over"
            ) from None
        for name, entry in entries.items():
            entry.local.copy_(local_part(targets[name]))

    def write_final(self, weights: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Write whole tensors as ``final/<name>.safetensors``; ``CheckpointError`` where they cannot be."""
        self.finish()
        beside, final = self.folder / f".{FINAL}", self.folder / FINAL
        try:
            shutil.rmtree(beside, ignore_errors=True)
            beside.mkdir(parents=True)
            for name, tensors in weights.items():
                save_file(dict(tensors), beside / f"{name}.safetensors")
                # the library makes files that only their owner can read
                (beside / f"{name}.safetensors").chmod(beside.stat().st_mode & 0o666)
            _replace_folder(beside, final)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(beside, ignore_errors=True)
            raise CheckpointError(f"{final}: cannot be written ({_cause(error)})") from None

    def holds(self, step: int) -> bool:
        """Whether there is a complete checkpoint of this step."""
        return _read(self.folder / f"step-{step:08d}") is not None

    def make_room(self) -> bool:
        """Remove checkpoints that are older than the newest, where that is whole; whether there were any."""
        before = _folders(self.folder)
        if not before or damage(before[-1]) is not None:
            return False
        self.prune(keep=0 if _is_permanent(before[-1]) else 1)
        return len(_folders(self.folder)) < len(before)

    def prune(self, keep: int | None = None) -> None:
        """Remove all but the latest ``keep`` and the permanent checkpoints."""
        complete = [item for item in (_read(path) for path in _folders(self.folder)) if item is not None]
        passing = [item for item in complete if not item.permanent]
        number = self._keep if keep is None else keep
        for item in passing[: max(0, len(passing) - number)]:
            hidden = item.path.with_name(f".old-{item.path.name}")
            os.replace(item.path, hidden)
            shutil.rmtree(hidden, ignore_errors=True)

    def _write(self, step: int, staged: dict[str, Tensor], record: dict[str, Any]) -> None:
        from scaling import shards

        name = f"step-{step:08d}"
        beside = self.folder / f".{name}"
        problem: str | None = None
        files: dict[str, Any] = {}
        try:
            beside.mkdir(parents=True, exist_ok=True)
            shards.write(beside, staged, self._group)
            own = sorted(beside.glob("*.safetensors"))[self._world.rank :: self._world.size]
            files = {path.name: {"bytes": path.stat().st_size, "sha256": _digest(path)} for path in own}
        except (shards.ShardError, OSError) as error:
            problem = f"{self.folder / name}: checkpoint not written ({_cause(error)})"
        parts: list[Any] = [(problem, files)]
        if self._group is not None:
            parts = [None] * self._world.size
            try:
                dist.all_gather_object(parts, (problem, files), group=self._group)
            except RuntimeError as error:
                if not is_lost(error):
                    raise
                self._lost = error
                return
        problem = next((found for found, _ in parts if found is not None), None)
        if self._world.is_first and problem is None:
            try:
                record["files"] = {name: item for _, part in parts for name, item in part.items()}
                _write_record(beside / COMPLETE, record)
                self._guard()
                _replace_folder(beside, self.folder / name)
                self.prune()
            except (OSError, LeaseError) as error:
                problem = f"{self.folder / name}: checkpoint not written ({_cause(error)})"
        if problem is not None and self._world.is_first:
            shutil.rmtree(beside, ignore_errors=True)
        self._error = problem

    def _newest(self) -> Checkpoint | None:
        paths = _folders(self.folder)
        for path in reversed(paths):
            found = damage(path)
            if found is None:
                return _read(path)
            logger.warning("%s: %s; going back to the checkpoint before", path, found)
        if paths:
            logger.warning("%s: no checkpoint is usable; starting from the beginning", self.folder)
        return None


def load_weights(path: Path, *, average: bool = False) -> dict[str, Tensor]:
    """Whole weights by name, on the host, from a run folder, a checkpoint's folder or a safetensors file.

    Parameters
    ----------
    path
        A run folder (its ``final``, else its newest whole checkpoint), ``final``, ``step-...``, or a file.
    average
        The moving average instead of the weights.

    Raises
    ------
    CheckpointError
        If there is nothing to load, it is damaged, or has no average.
    """
    if path.is_file():
        return _load(path)
    for folder in (path, path / FINAL, path / "checkpoints" / FINAL):
        file = folder / ("ema.safetensors" if average else "model.safetensors")
        if file.is_file():
            return _load(file)
    candidates = [path] if (path / COMPLETE).exists() else _folders(path / "checkpoints") or _folders(path)
    for folder in reversed(candidates):
        found = damage(folder)
        if found is not None:
            logger.warning("%s: %s", folder, found)
            continue
        from scaling import shards

        tensors = shards.read_whole(folder, EMA if average else MODEL)
        if not tensors:
            raise CheckpointError(f"{folder}: holds no moving average; train with optimizer.ema_decay")
        return tensors
    raise CheckpointError(
        f"{path}: no usable checkpoint; give a run folder, a checkpoint's folder or a safetensors file"
    )


def _load(path: Path) -> dict[str, Tensor]:
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(
            f"{path}: damaged ({error}); give a checkpoint's folder, or train the run again"
        ) from None


def _folders(folder: Path) -> list[Path]:
    return sorted(folder.glob("step-*"))


def _record_digest(record: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(record, sort_keys=True).encode("utf-8")).hexdigest()


def _write_record(path: Path, record: Mapping[str, Any]) -> None:
    with path.open("w", encoding="utf-8") as file:
        json.dump({"record": record, "sha256": _record_digest(record)}, file)
        file.flush()
        os.fsync(file.fileno())


def _read_record(path: Path) -> dict[str, Any] | None:
    try:
        stored = json.loads((path / COMPLETE).read_text(encoding="utf-8"))
        record: dict[str, Any] = stored["record"]
        whole = stored["sha256"] == _record_digest(record) and _FIELDS <= record.keys()
        return record if whole else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _read(path: Path) -> Checkpoint | None:
    record = _read_record(path)
    if record is None:
        return None
    return Checkpoint(path=path, **{name: record[name] for name in _FIELDS - {"format", "files"}})


def _is_permanent(path: Path) -> bool:
    found = _read(path)
    return found is not None and found.permanent


def damage(path: Path) -> str | None:
    """What is wrong with a checkpoint's files; ``None`` where they are as they were written."""
    record = _read_record(path)
    if record is None:
        return f"{COMPLETE} is missing or damaged"
    if record["format"] != FORMAT:
        return f"format {record['format']}, this program reads {FORMAT}"
    for name, expected in record["files"].items():
        file = path / name
        if not file.exists() or file.stat().st_size != expected["bytes"]:
            return f"{name} is missing or cut short"
        if _digest(file) != expected["sha256"]:
            return f"{name} does not match its checksum"
    return None


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _replace_folder(source: Path, target: Path) -> None:
    """Rename a folder to its name, and make the rename durable; an older one of that name goes."""
    aside = target.with_name(f".old-{target.name}")
    if target.exists():
        shutil.rmtree(aside, ignore_errors=True)
        os.replace(target, aside)
    os.replace(source, target)
    shutil.rmtree(aside, ignore_errors=True)
    descriptor = os.open(target.parent, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _cause(error: Exception) -> str:
    return error.strerror if isinstance(error, OSError) and error.strerror else str(error)
