"""Keeping MLflow up to date while a sweep trains: the syncer beside it, in a process of its own.

Used by the local executor and by ``watch``. Training and watching never wait for it: when it fails, they say so and go
on, and ``scaling runs sync`` makes up for it later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from scaling.tracking.follower import Follower

logger = logging.getLogger(__name__)


def default_store(out: Path) -> str:
    """The store that a sweep is synced into where none is named: a database beside its run folders."""
    return f"sqlite:///{out.resolve() / 'mlflow.db'}"


@contextmanager
def synced(out: Path, store: str | None) -> Iterator[None]:
    """Sync the run folders under ``out`` into ``store`` within, and once more at the end; ``None``: do nothing."""
    if store is None:
        yield
        return
    follower = Follower(out, store_uri=store)
    try:
        with follower:
            yield
    finally:
        if follower.trouble:
            command = f"scaling runs sync {out} --store {store}"
            logger.warning("not synced (%s); `%s` makes up for it", follower.trouble, command)
