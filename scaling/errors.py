"""Exceptions that a user can cause, first module of the flow: everything imports from here, it imports nothing.

Each is a ``ValueError`` whose text is one line: what is wrong, where, what is allowed, what to do next. The command
line prints that line and exits with the class's ``exit_code``; a programmer's mistake stays an ``AssertionError`` or
a traceback.
"""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import ClassVar


class ScalingError(ValueError):
    """Base of everything a user can cause; ``exit_code`` is the command line's exit status."""

    exit_code: ClassVar[int] = 1


class UsageError(ScalingError):
    """A command was called with options that do not belong together."""

    exit_code = 2


class ConfigError(ScalingError):
    """A configuration has an unknown key, a wrong type or values that contradict each other."""

    exit_code = 2


class GridError(ScalingError):
    """A sweep specification cannot be expanded into runs."""

    exit_code = 2


class DataError(ScalingError):
    """A corpus, token store or tokenizer is missing, damaged, or too small."""


class DataUnavailable(DataError):
    """Input cannot be read now (permissions, a file system or worker that failed); the same call may succeed later."""


class RecordError(ScalingError):
    """A run folder is missing, damaged, or belongs to another configuration."""


class LeaseError(ScalingError):
    """Another process holds the run folder."""


class CheckpointError(ScalingError):
    """A checkpoint is missing, torn, or does not fit the run."""


class MemoryShortage(ScalingError):
    """A run needs more memory than its device has."""


class ProcessLost(ScalingError):
    """Another process of a run over several is gone, or was never there."""


class StoreError(ScalingError):
    """An MLflow store cannot be reached, is locked, or has an unknown layout."""


class StoreUnavailable(StoreError):
    """An MLflow store does not answer now (down, slow, full, broken); the same request may succeed later."""


class ClusterError(ScalingError):
    """Slurm refused a request or cannot be reached."""


class TableError(ScalingError):
    """A table of runs lacks columns or holds values that an analysis cannot use."""


class FitError(ScalingError):
    """The data cannot determine what was asked of a fit or comparison."""


class KernelError(ScalingError):
    """A kernel was used in a way it cannot be right for."""


def nearest(word: str, allowed: Iterable[str]) -> str:
    """Say which of ``allowed`` is meant: ``did you mean 'x'?`` or the whole list.

    >>> nearest("sheduler", ["schedule", "model"])
    "did you mean 'schedule'? (allowed: model, schedule)"
    >>> nearest("KV", ["kv", "size"])
    "did you mean 'kv'? (allowed: kv, size)"
    >>> nearest("zzz", ["schedule", "model"])
    'allowed: model, schedule'
    """
    names = sorted(allowed)
    if not names:
        return "allowed: none"
    close = [name for name in names if name.casefold() == word.casefold()] or get_close_matches(word, names, n=1)
    listing = f"allowed: {', '.join(names)}"
    return f"did you mean {close[0]!r}? ({listing})" if close else listing
