"""A syncer in a process of its own beside whatever runs a sweep, so that live curves appear and nothing waits for them.

Used by the quickstart and, through ``sweeps.mirror``, by ``scaling sweep submit|watch``. The process is ``scaling runs
sync OUT --follow``; told to stop, it syncs once more.
"""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path
from typing import Final, Self

from scaling.tracking.state import FOLDER
from scaling.tracking.store import normalise
from scaling.tracking.syncer import INTERVAL_S

STOP_S: Final = 600.0  # how long the last round may take
LOG: Final = "sync.log"


class Follower:
    """A context manager: syncs ``out`` while its block runs, and once more at its end.

    Parameters
    ----------
    out
        Folder of run folders; made where missing.
    store_uri, experiment
        See ``sync``.
    interval_s
        Seconds between rounds.

    Raises
    ------
    StoreError
        If the address names no store.
    """

    def __init__(
        self,
        out: Path,
        *,
        store_uri: str,
        experiment: str | None = None,
        interval_s: float = INTERVAL_S,
    ) -> None:
        self.log = out / FOLDER / LOG
        self._command = [sys.executable, "-m", "scaling", "runs", "sync", str(out), "--store", normalise(store_uri)]
        self._interval_s = interval_s
        self._command += ["--experiment", experiment] if experiment else []
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Self:
        self._process = self._start("--follow", "--interval", str(self._interval_s))
        return self

    def __exit__(self, *_: object) -> None:
        assert self._process is not None
        self._process.terminate()
        self._wait()
        if self._process.returncode == -signal.SIGTERM:  # stopped before it could listen: it has sent nothing yet
            self._process = self._start()
            self._wait()

    @property
    def trouble(self) -> str:
        """The last thing it said, where it ended without having sent everything; else empty."""
        if self._process is None or self._process.poll() in (None, 0):
            return ""
        lines = self.log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
        return lines[-1] if lines else "no word"

    def _start(self, *more: str) -> subprocess.Popen[bytes]:
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as log:
            return subprocess.Popen(
                [*self._command, *more], stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )

    def _wait(self) -> None:
        assert self._process is not None
        try:
            self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
