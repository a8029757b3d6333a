"""The other processes of a run: telling that one of them is gone from what the communication library says, in one line.

Below ``distributed``, which meets them here, and ``train``, which ends with the run. Libraries report a lost process as
a failed read in whatever call came next; which process it was they seldom know, its own log does.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import torch.distributed as dist

from scaling.errors import ProcessLost
from scaling.resumption import goes_on

# Gloo's transport and NCCL's own words for the other side. A wrong use of NCCL (two processes on one GPU) is none.
_SIGNS: Final = re.compile(
    r"gloo/transport|Connection (?:reset|closed) by peer|Broken pipe|Timed out waiting \d+ms for (?:recv|send)|"
    r"ncclRemoteError|NCCL communicator was aborted|collective operation timeout"
)
# What a person can use of such a message.
_CAUSES: Final = re.compile(
    r"Connection (?:reset|closed) by peer|Connection refused|Broken pipe|Timed out [^.,\[]*|timed out [^.,\[]*|"
    r"EADDRINUSE|ncclRemoteError"
)
_LONGEST: Final = 120  # characters of a cause that is not among those


def is_lost(error: BaseException) -> bool:
    """Whether an exception says that another process of the run does not answer any more."""
    if isinstance(error, (dist.DistNetworkError, dist.DistStoreError)):
        return True
    return isinstance(error, RuntimeError) and _SIGNS.search(str(error)) is not None


@contextlib.contextmanager
def meeting(rank: int, size: int, address: str) -> Iterator[None]:
    """Within, processes form their group.

    Raises
    ------
    ProcessLost
        If they do not meet at ``address`` (``host:port``).
    """
    try:
        yield
    except Exception as error:
        if not is_lost(error):
            raise
        raise ProcessLost(
            f"rank {rank} of {size} ends: the run's processes did not meet at {address} ({_cause(error)}); see the "
            "other ranks' logs, make sure that all were launched and that nothing else uses that port (MASTER_PORT), "
            "then run again"
        ) from error


@contextlib.contextmanager
def explained(rank: int, size: int, checkpoints: Path | None = None) -> Iterator[None]:
    """Within, the loss of another process has one line; ``checkpoints`` is where those of the run are, once known.

    Raises
    ------
    ProcessLost
        If a call failed because another process is gone.
    """
    try:
        yield
    except Exception as error:
        if size == 1 or not is_lost(error):
            raise
        raise ProcessLost(
            f"rank {rank} of {size} ends: another process of the run was lost ({_cause(error)}); see the other ranks' "
            f"logs for the reason, then run again: {goes_on(checkpoints)}"
        ) from error


def _cause(error: BaseException) -> str:
    text = str(error).strip()
    found = _CAUSES.search(text)
    if found is not None:
        return found.group().strip()
    line = text.splitlines()[0] if text else type(error).__name__
    return line if len(line) <= _LONGEST else f"{line[:_LONGEST]}..."
