"""Depth routing by the source bank's kernels: the same mixtures as ``DepthState``, at a fraction of its memory traffic.

``DepthRouting.start`` takes it where :mod:`scaling.kernels.dispatch` says so. Sources are handed over when their site
is read, so that a bank row is written by the kernel that routes. Shapes: B batch, T time, D width, S sites.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from scaling.kernels import dispatch
from scaling.models.residual.method import State

if TYPE_CHECKING:
    from scaling.models.residual.attnres import DepthRouting


class BankedState(State):
    """The newest source, or the running sum of the current block, and the bank of the older ones."""

    def __init__(self, embedding_BTD: Tensor, method: DepthRouting) -> None:
        device = embedding_BTD.device.type
        # Under autocast sublayers answer in its dtype; the bank keeps one dtype, so the embedding is narrowed to it.
        kind = torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embedding_BTD.dtype
        self.method = method
        self.newest_BTD = embedding_BTD.to(kind)
        self.stream_BTD = embedding_BTD if method.cumulative else None
        self.within_block = False
        self.bank = dispatch.open_bank(
            method.query_SD.float() * method.gain_SD.float(),
            self.newest_BTD,
            heads=method.heads,
            eps=method.eps,
            block=method.block_sublayers,
        )

    def read(self, site: int) -> Tensor:
        return self.bank.site(site, self.newest_BTD)

    def write(self, site: int, out_BTD: Tensor) -> None:
        if self.stream_BTD is not None:
            self.newest_BTD = self.stream_BTD = self.stream_BTD + out_BTD
        else:
            self.newest_BTD = self.newest_BTD + out_BTD if self.within_block else out_BTD
        self.within_block = not self.method.ends_block(site)
