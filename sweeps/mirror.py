"""Keeping MLflow up to date while a sweep trains: the syncer beside it, in a process of its own.

Used by the local executor and by ``watch``. Training and watching never wait for it: when it fails, they say so and go
on, and ``scaling runs sync`` makes up for it later.
"""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final

logger = logging.getLogger(__name__)

LEAVE_S: Final = 60.0
LAST_ROUND_S: Final = 600.0


def default_store(out: Path) -> str:
    """The store that a sweep is synced into where none is named: a database beside its run folders."""
    return f"sqlite:///{out.resolve() / 'mlflow.db'}"


@contextmanager
def synced(out: Path, store: str | None) -> Iterator[None]:
    """Sync the run folders under ``out`` into ``store`` within, and once more at the end; ``None``: do nothing."""
    if store is None:
        yield
        return
    command = [sys.executable, "-m", "scaling", "runs", "sync", str(out), "--store", store]
    with tempfile.TemporaryFile() as said:
        out.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            [*command, "--follow"], stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True
        )
        try:
            yield
        finally:
            process.send_signal(signal.SIGINT)
            try:
                process.wait(LEAVE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            _last_round(command, said)


def _last_round(command: list[str], said: IO[bytes]) -> None:
    said.seek(0, 2)
    done = subprocess.run(command, stdout=said, stderr=said, timeout=LAST_ROUND_S, check=False)
    if done.returncode != 0:
        said.seek(0)
        lines = said.read().decode("utf-8", errors="replace").strip().splitlines()
        logger.warning(
            "not synced (%s); `%s` makes up for it", lines[-1] if lines else "no word", " ".join(command[2:])
        )
