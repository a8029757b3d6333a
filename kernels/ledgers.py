"""Which ledger belongs to which bank: kept while the bank's storage lives, and found from any tensor that shares it.

Between the ledgers (:mod:`scaling.kernels.schedule`, :mod:`scaling.kernels.stream_ledger`) and the operators, which
compiled graphs hand tensors alone. A pass that is given up, by an error or by its caller, leaves nothing behind: the
ledger goes with the last tensor of its bank.
"""

from __future__ import annotations

import weakref
from typing import Generic, TypeVar

import torch
from torch import Tensor

from scaling.errors import KernelError

L = TypeVar("L")
_Key = tuple[torch.device, int]


class Ledgers(Generic[L]):
    """Ledgers of open banks, by device and address.

    Parameters
    ----------
    what, opener
        What errors call the banks, and the class that opens them.
    """

    def __init__(self, what: str, opener: str) -> None:
        self._what, self._opener = what, opener
        self._open: dict[_Key, L] = {}

    def __len__(self) -> int:
        return len(self._open)

    def keep(self, bank: Tensor, ledger: L) -> None:
        """Keep a ledger as long as the storage of its bank."""
        key = bank.device, bank.data_ptr()
        self._open[key] = ledger
        weakref.finalize(bank.untyped_storage(), self._drop, key, ledger).atexit = False

    def of(self, bank: Tensor) -> L:
        """Find a bank's ledger.

        Raises
        ------
        KernelError
            If the tensor is no open bank.
        """
        ledger = self._open.get((bank.device, bank.data_ptr()))
        if ledger is None:
            raise KernelError(
                f"{self._what}: unknown bank; open it with {self._opener} in the same process before routing, and keep "
                "hooks that copy saved tensors (offloading) away from it"
            )
        return ledger

    def _drop(self, key: _Key, ledger: L) -> None:
        if self._open.get(key) is ledger:  # another bank may have the address by now
            del self._open[key]
