"""From run folders to MLflow: the only writer of it, once or again and again.

Last module of ``scaling.tracking`` before the command line; ``session`` does a round, this one says when the next comes
and what happens when the store fails. Training never waits for it, and what one round leaves undone the next one does:
batches are idempotent, runs are found by their key, the folders stay the truth.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Final

from scaling.errors import StoreError, StoreUnavailable
from scaling.tracking.report import SyncReport
from scaling.tracking.session import Session
from scaling.tracking.standing import JobState
from scaling.tracking.state import state_path
from scaling.tracking.store import normalise, redact

logger = logging.getLogger(__name__)

INTERVAL_S: Final = 15.0
MAX_PAUSE_S: Final = 60.0  # longest wait between rounds while the store is down


def sync(
    out: Path,
    *,
    store_uri: str,
    experiment: str | None = None,
    follow: bool = False,
    interval_s: float = INTERVAL_S,
    until_over: int | None = None,
    stop: threading.Event | None = None,
    only: Collection[str] | None = None,
    job_state: JobState | None = None,
    figures: Sequence[Path] = (),
    state_folder: Path | None = None,
    lock_wait_s: float = 120.0,
    timeout_s: float = 20.0,
    light: bool = False,
    on_round: Callable[[SyncReport], None] | None = None,
    on_run: Callable[[int, int], None] | None = None,
) -> SyncReport:
    """Bring an MLflow store up to date with the run folders under ``out``.

    Parameters
    ----------
    out
        Folder of run folders.
    store_uri
        ``sqlite:///PATH.db`` (made where missing), ``http(s)://HOST:PORT`` or ``postgresql://USER@HOST/DB``.
    experiment
        MLflow experiment; default: each run's sweep, or the name of ``out``.
    follow
        Again every ``interval_s`` seconds until ``stop`` is set, and then once more; a store that does not answer is
        tried again, later and later.
    until_over
        End following when this many runs are over and sent.
    only
        Run keys to sync, with a state and lock of their own; sweeps' parents are made but not brought up to date.
    job_state
        Asked for runs without an end record: Slurm job id -> (state, reason, end in ms), or ``None`` where Slurm does
        not know.
    figures
        Files to attach to each sweep's parent run.
    state_folder
        Where to remember what was sent; default ``out/.tracking``.
    lock_wait_s
        How long to wait for another syncer's round to end.
    timeout_s
        Longest wait for one answer of a server.
    light
        Never import MLflow: what only it could upload (a server's artifacts in S3 and the like) waits for another sync.
    on_round, on_run
        Called after each round with the report, and after each run with (runs done, runs in all).

    Returns
    -------
    SyncReport
        With ``ok`` false where something is still to be sent; the next sync sends it.

    Raises
    ------
    RecordError
        If ``out`` is not a folder.
    StoreError
        If the address names no store, or another syncer holds the lock; while following only in the first round.
    """
    stop = stop or threading.Event()
    address = normalise(store_uri)
    report = SyncReport(store=redact(address))
    path = state_path(state_folder or out, address, experiment, only)
    started_s, pause_s = time.monotonic(), interval_s
    session = Session(
        out=out, address=address, experiment=experiment, only=only, path=path, timeout_s=timeout_s, light=light
    )
    last, said = not follow, ""
    try:
        while True:
            report.unavailable, report.problems = "", []
            try:
                session.round(report, job_state, figures, lock_wait_s, on_run)
                pause_s = interval_s
            except StoreUnavailable as error:
                report.unavailable = str(error)
                pause_s = min(2 * pause_s, max(MAX_PAUSE_S, interval_s))
                session.close()
            except StoreError as error:
                if report.rounds == 0:
                    raise
                report.unavailable = str(error)
            report.rounds += 1
            report.wall_time_s = time.monotonic() - started_s
            if report.unavailable and report.unavailable != said:
                logger.warning("%s", report.unavailable)
            said = report.unavailable
            if on_round is not None:
                on_round(report)
            if last:
                return report
            if until_over is not None and report.ok and report.runs - report.running >= until_over:
                return report
            last = stop.wait(pause_s)
    finally:
        session.close()
