"""Trying ended runs again: which kinds are meant, and setting their end record aside (the history stays).

Used by both executors; ``RunFolder.reopen`` keeps every earlier end record as ``end-<attempt>.json``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from scaling.errors import UsageError, nearest
from scaling.record import EndRecord, RunFolder

FAILURES: Final = ("oom", "timeout", "node", "crash")
KINDS: Final = ("failed", *FAILURES, "diverged", "cancelled", "unknown")


def check_kinds(kinds: Sequence[str]) -> tuple[str, ...]:
    """The kinds, checked; each may be a comma-separated list.

    >>> check_kinds(["failed,diverged"])
    ('failed', 'diverged')
    """
    words = tuple(word.strip() for text in kinds for word in text.split(",") if word.strip())
    for word in words:
        if word not in KINDS:
            raise UsageError(f"--retry {word}: not a kind of ended run; {nearest(word, KINDS)}")
    return words


def failure_kind(record: EndRecord) -> str:
    """``oom``, ``timeout``, ``node`` or ``crash`` for a failed run's end record."""
    kind = str(record.details.get("kind", ""))
    if kind in FAILURES:
        return kind
    return "oom" if "out of memory" in record.reason.lower() else "crash"


def asked_for(record: EndRecord, retry: Sequence[str]) -> bool:
    """Whether a run that ended like this is among the kinds to try again."""
    if record.status == "failed":
        return "failed" in retry or failure_kind(record) in retry
    return record.status in retry


def reopen_if_asked(folder: RunFolder, record: EndRecord, retry: Sequence[str]) -> bool:
    """Set the end record aside where its kind is to be tried again; says whether it was."""
    if not asked_for(record, retry):
        return False
    folder.reopen()
    return True
