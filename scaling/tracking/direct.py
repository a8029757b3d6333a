"""Tracking from the training process, where there is no place to run the syncer: a thread that never holds it up.

Beside ``syncer``, which it runs for the one folder that the process writes; ``train`` starts it where the configuration
has ``run.track``. The journal on disk is its queue, so that memory stays bounded and nothing is lost when the server is
slow or gone: the next attempt, or ``scaling runs sync``, sends the rest. MLflow is not imported; only servers can be
written to, since databases must have one writer.
"""

from __future__ import annotations

import logging
import random
import threading
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Final, Self

from scaling.errors import ScalingError, UsageError
from scaling.record import RunFolder
from scaling.tracking.report import SyncReport
from scaling.tracking.store import normalise, redact
from scaling.tracking.syncer import sync

logger = logging.getLogger(__name__)

TIMEOUT_S: Final = 5.0
INTERVAL_S: Final = 10.0
GRACE_S: Final = 5.0  # how long the end of a training may wait for the last points


def tracking(url: str | None, folder: RunFolder) -> AbstractContextManager[object]:
    """What to train inside of: ``Direct`` for the folder where there is a server, else nothing."""
    return nullcontext() if url is None else Direct(folder.path.parent, folder.key, url=url, interval_s=INTERVAL_S)


class Direct:
    """A context manager around a training: ``with Direct(out, key, url=...): ...``.

    Parameters
    ----------
    out, key
        Folder of run folders, and the run's key; the folder may come into being later.
    url
        ``http(s)://HOST:PORT`` of an MLflow server.
    experiment
        MLflow experiment; default: the run's sweep.
    interval_s
        Seconds between sendings; the first comes at a random moment of it, so that a job array spreads out.

    Raises
    ------
    UsageError
        If ``url`` is not a server's.
    """

    def __init__(
        self, out: Path, key: str, *, url: str, experiment: str | None = None, interval_s: float = INTERVAL_S
    ) -> None:
        self._url = normalise(url)
        if not self._url.startswith("http"):
            raise UsageError(
                f"{redact(self._url)}: cannot be written from a training; give a server's http address, or run "
                "`scaling runs sync --follow` beside it"
            )
        self._out, self._key, self._experiment, self._interval_s = out, key, experiment, interval_s
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._follow, name="tracking", daemon=True)
        self._said = ""
        self.report: SyncReport | None = None

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(GRACE_S)
        if self._thread.is_alive() or self.report is None or not self.report.ok:
            logger.warning(
                "not all was sent to MLflow; `scaling runs sync %s --store %s` sends the rest",
                self._out,
                redact(self._url),
            )

    def _follow(self) -> None:
        self._stop.wait(random.uniform(0, self._interval_s))
        while True:
            try:
                self.report = sync(
                    self._out,
                    store_uri=self._url,
                    experiment=self._experiment,
                    follow=not self._stop.is_set(),
                    interval_s=self._interval_s,
                    stop=self._stop,
                    only=(self._key,),
                    timeout_s=TIMEOUT_S,
                    lock_wait_s=TIMEOUT_S,
                    light=True,
                    on_round=self._note,
                )
            except ScalingError as error:  # refused, or no folder yet: tried again, never the training's trouble
                if str(error) != self._said:
                    logger.warning("tracking: %s", error)
                    self._said = str(error)
                self.report = None
            except Exception:
                logger.exception("tracking stopped; the run folder has everything")
                return
            if self._stop.is_set():
                return
            self._stop.wait(self._interval_s)

    def _note(self, report: SyncReport) -> None:
        self.report = report
