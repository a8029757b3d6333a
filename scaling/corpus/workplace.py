"""The folder for work in progress, ``<out>.partial``: held by one process, kept or taken away by how the work ends.

Before ``preparation`` in ``scaling.corpus``. An interruption leaves it, so that the same call goes on from it; a
refusal of the input or an option leaves nothing, not even folders above it that were made for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scaling.corpus.shards import write_through
from scaling.errors import DataError, DataUnavailable, ScalingError

logger = logging.getLogger(__name__)


@contextmanager
def work_folder(work: Path, request: str) -> Iterator[None]:
    """The folder, held by this process alone, emptied where it is of another request.

    Raises
    ------
    DataError
        If another process holds it.
    """
    with _no_empty_folders_above(work):
        work.mkdir(parents=True, exist_ok=True)
        with (work / "lock").open("a") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise DataError(f"{work}: another process is preparing this store; wait for it to end") from None
            _begin(work, request)
            with _removed_if_refused(work):
                yield


def _begin(work: Path, request: str) -> None:
    note = work / "request"
    if note.exists() and note.read_text(encoding="ascii") == request:
        return
    if note.exists():
        logger.warning("%s: of other inputs or options; starting afresh", work)
    for path in work.iterdir():
        if path.is_dir():
            shutil.rmtree(path)
        elif path.name != "lock":
            path.unlink()
    (work / "shards").mkdir()
    write_through(note, request.encode("ascii"))


@contextmanager
def _removed_if_refused(work: Path) -> Iterator[None]:
    """Within, an error that only other inputs or options can mend takes the work in progress away."""
    try:
        yield
    except DataUnavailable:
        raise  # the same call may succeed, and then goes on
    except ScalingError:
        shutil.rmtree(work, ignore_errors=True)
        raise


@contextmanager
def _no_empty_folders_above(work: Path) -> Iterator[None]:
    """Within, an error leaves no folder above ``work`` that was not there before and holds nothing."""
    missing = [folder for folder in work.parents if not folder.exists()]  # the innermost first
    try:
        yield
    except BaseException:
        for folder in missing:
            with contextlib.suppress(OSError):  # not empty: the work in progress, or somebody else's files
                folder.rmdir()
        raise
