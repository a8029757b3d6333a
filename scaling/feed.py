"""Batches on their way to the device: read ahead on a thread, padded alike on every process, counted in waiting time.

Between ``loader``, which knows what step s trains on, and ``loop``. Process r gets its consecutive part of the global
batch; where the batch does not divide, shorter parts are filled up with sequences whose targets do not count, so that
every process makes the same passes and the sum is the same for any number of them.
"""

from __future__ import annotations

import time
from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from scaling.distributed import World
from scaling.loader import Batch, Loader
from scaling.loss import IGNORED

AHEAD: Final = 3  # batches read before they are asked for


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """What one forward pass sees, on the device (int64)."""

    tokens_BT: Tensor
    targets_BT: Tensor
    document_BT: Tensor | None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Host:
    tokens_BT: Tensor
    targets_BT: Tensor
    document_BT: Tensor | None
    num_targets: int


class Feed:
    """This process's micro-batches, step after step.

    Parameters
    ----------
    loader
        The run's batches.
    world
        This process's place.
    rows
        Sequences in one micro-batch.
    first_step
        The step to begin with.
    """

    def __init__(self, loader: Loader, world: World, *, rows: int, first_step: int) -> None:
        self._loader = loader
        self._world = world
        self._rows = rows
        self._next = first_step
        self._share = -(-loader.batch_size // world.size)
        # On a CPU a thread would only take a core from the computation; reading is a copy out of a memory map there.
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="feed") if world.device.type == "cuda" else None
        self._ahead: deque[Future[_Host]] = deque()
        self.waited_s = 0.0

    def take(self) -> tuple[list[MicroBatch], int]:
        """The next step's micro-batches and the number of targets of the whole step, over all processes."""
        start_s = time.perf_counter()
        if self._pool is None:
            host = self._read(self._next)
        else:
            while len(self._ahead) < AHEAD:
                self._ahead.append(self._pool.submit(self._read, self._next + len(self._ahead)))
            host = self._ahead.popleft().result()
        self._next += 1
        self.waited_s += time.perf_counter() - start_s
        total = self._world.total(host.num_targets) if self._loader.document_masking else host.num_targets
        return [self._piece(host, first) for first in range(0, self._share, self._rows)], total

    def close(self) -> None:
        """End the reading thread."""
        if self._pool is not None:
            self._pool.shutdown(cancel_futures=True)

    def _piece(self, host: _Host, first: int) -> MicroBatch:
        rows = slice(first, first + self._rows)
        device = self._world.device
        return MicroBatch(
            tokens_BT=host.tokens_BT[rows].to(device, non_blocking=True),
            targets_BT=host.targets_BT[rows].to(device, non_blocking=True),
            document_BT=None if host.document_BT is None else host.document_BT[rows].to(device, non_blocking=True),
        )

    def _read(self, step: int) -> _Host:
        batch = self._loader.batch(step, self._world.rank, self._world.size)
        # without masking every position counts, so the global number needs no exchange
        whole = self._loader.batch_size * self._loader.seq_len
        num_targets = batch.num_targets if self._loader.document_masking else whole
        document = None if batch.document_BT is None else self._filled(batch, batch.document_BT, -1)
        return _Host(
            tokens_BT=self._filled(batch, batch.tokens_BT, 0),
            targets_BT=self._filled(batch, batch.targets_BT, IGNORED),
            document_BT=document,
            num_targets=num_targets,
        )

    def _filled(self, batch: Batch, array: npt.NDArray[Any], value: int) -> Tensor:
        missing = self._share - len(batch)
        if missing:
            array = np.concatenate([array, np.full((missing, array.shape[1]), value, dtype=array.dtype)])
        tensor = torch.from_numpy(array)
        return tensor.pin_memory() if self._pool is not None else tensor
