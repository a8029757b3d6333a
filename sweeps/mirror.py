"""Keeping MLflow up to date while a sweep trains: the syncer beside it, in a process of its own.

Used by the local executor and by ``watch``; a submit to Slurm, which returns at once, leaves such a watch behind.
Training and watching never wait for it: when it fails, they say so and go on, and ``scaling runs sync`` makes up for it
later.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Final

from scaling.errors import ClusterError
from scaling.sweeps.local import detach
from scaling.sweeps.plan import Plan
from scaling.tracking.follower import Follower
from scaling.tracking.state import single_writer
from scaling.tracking.store import redact

logger = logging.getLogger(__name__)

LOCK: Final = "mirror.lock"  # in the sweep folder, held by the watch that a submit left behind


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
            command = f"scaling runs sync {out} --store {redact(store)}"
            logger.warning("not synced (%s); `%s` makes up for it", follower.trouble, command)


def leave_behind(plan: Plan, spec: str, store: str) -> str:
    """Start a watch that outlives this command and ends with the sweep; returns a line about it."""
    words = ["sweep", "watch", spec, "--out", str(plan.out), "--store", store, "--mirror"]
    shown = redact(store)
    try:
        pid, log = detach(words, plan.sweep_folder)
    except ClusterError as error:  # the jobs are submitted all the same
        return f"not synced into {shown} meanwhile ({error}); `scaling runs sync` makes up for it"
    return f"syncing into {shown} until the sweep is over: process {pid}, log {log} (--no-sync leaves it out)"


def alone(plan: Plan) -> AbstractContextManager[None]:
    """To be entered by the watch that was left behind; ``StoreError`` where an earlier submit's is still there."""
    return single_writer(plan.sweep_folder / LOCK, wait_s=0)
