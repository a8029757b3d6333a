"""What a syncer remembers between rounds, and the lock that keeps it the only writer.

Beside ``syncer`` in the flow. The state is a cache: lost, it is rebuilt from the store (runs are found by their key,
batches may be sent again). It lives in ``<out>/.tracking/``, one file a store and experiment.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import json
import os
import socket
import time
from collections.abc import Collection, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Final

from scaling.errors import StoreError
from scaling.record import write_atomically

FOLDER: Final = ".tracking"
VERSION: Final = 1


@dataclass(kw_only=True, slots=True)
class RunState:
    """How far one folder has been sent. Mutable on purpose: it follows the sending."""

    experiment: str = ""
    sweep: str | None = None
    run_id: str | None = None
    adopted: bool = False  # found in the store without knowing what was sent of it
    pending_ms: int | None = None  # a create_run was asked for at this time and never answered
    offsets: dict[str, int] = field(default_factory=dict)  # journal's name -> bytes sent
    last_step: int = -1  # highest step sent
    attempts: int = 0  # attempts whose start has been dealt with
    void: bool = False  # points that a resume made void were sent and cannot be deleted
    names: list[str] = field(default_factory=list)  # metrics sent
    doubled: int = 0  # points that a resume measured again with another value, where the store cannot delete
    params: str = ""  # digests of what was last written
    tags: str = ""
    reason: str | None = None  # tag ``reason`` last written; None: not known
    finals: str = ""
    status: str = ""  # word of conventions.STORE_STATUS last written
    ended_ms: int | None = None
    artifacts: dict[str, str] = field(default_factory=dict)
    seal: list[list[Any]] = field(default_factory=list)  # journal.seal of the folder when all of it was sent
    deleted: bool = False


@dataclass(kw_only=True, slots=True)
class State:
    """Everything remembered about one store and folder of runs."""

    path: Path
    runs: dict[str, RunState] = field(default_factory=dict)  # run key -> state

    @classmethod
    def load(cls, path: Path) -> State:
        """Read the state; an absent, damaged or older file is an empty one, since the store can tell the rest."""
        try:
            tree = json.loads(path.read_text(encoding="utf-8"))
            if tree["version"] != VERSION:
                return cls(path=path)
            runs = {key: RunState(**value) for key, value in tree["runs"].items()}
            return cls(path=path, runs=runs)
        except (FileNotFoundError, ValueError, KeyError, TypeError):
            return cls(path=path)

    def save(self) -> None:
        runs = {key: asdict(run) for key, run in self.runs.items()}
        tree = {"version": VERSION, "runs": runs}
        write_atomically(self.path, json.dumps(tree, separators=(",", ":")))


def state_path(out: Path, store_uri: str, experiment: str | None, only: Collection[str] | None = None) -> Path:
    """Where the state of syncing ``out`` (or some of its runs) into this store and experiment is kept."""
    parts = [store_uri, experiment or "", *sorted(only or ())]
    name = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:12]
    return out / FOLDER / f"{name}.json"


@contextlib.contextmanager
def single_writer(path: Path, *, wait_s: float) -> Iterator[None]:
    """Hold an exclusive lock on ``path``, waiting up to ``wait_s`` for another holder to finish its round.

    Raises
    ------
    StoreError
        If the folder cannot be written, or the other holder (named) does not let go in time.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise StoreError(
            f"{path}: cannot be written ({error.strerror}); choose a state folder you may write to"
        ) from None
    try:
        deadline = time.monotonic() + wait_s
        while True:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except OSError:
                if time.monotonic() >= deadline:
                    holder = os.pread(descriptor, 200, 0).decode("utf-8", "replace").strip() or "another process"
                    raise StoreError(f"{path}: {holder} is syncing; wait for it, or end it and sync again") from None
                time.sleep(0.05)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}".encode(), 0)
        yield
    finally:
        os.close(descriptor)
