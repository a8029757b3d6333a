"""Depth routing by the source bank's kernels: the same mixtures as ``DepthState``, at a fraction of its memory traffic.

``DepthRouting.start`` takes these states where :mod:`scaling.kernels.dispatch` says so. Sources are handed over when
their site is read, so that a bank row is written by the kernel that routes.

Shapes: B batch, T time, D width, H heads, G key/value groups, S sites.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from scaling.kernels import dispatch
from scaling.models.layers import Attention, Context, RMSNorm, SwiGLU
from scaling.models.residual.method import Inputs, State
from scaling.models.residual.routing import by_head, widen

if TYPE_CHECKING:
    from scaling.models.residual.attnres import DepthRouting
    from scaling.models.residual.delta import Delta
    from scaling.models.residual.mhar import GroupRouting


def bank_dtype(embedding_BTD: Tensor) -> torch.dtype:
    """The one dtype of a pass's sources: under autocast, in which sublayers answer, autocast's."""
    device = embedding_BTD.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else embedding_BTD.dtype


class BankedState(State):
    """The newest source, or the running sum of the current block, and the bank of the older ones."""

    def __init__(self, embedding_BTD: Tensor, method: DepthRouting) -> None:
        self.method = method
        self.newest_BTD = embedding_BTD.to(bank_dtype(embedding_BTD))
        self.stream_BTD = embedding_BTD if method.cumulative else None
        self.within_block = False
        self.bank = dispatch.open_bank(
            self.query_SD(),
            self.newest_BTD,
            heads=method.heads,
            eps=method.eps,
            block=method.block_sublayers,
            per_head=method.norm_per_head,
        )

    def query_SD(self) -> Tensor:
        """u of every site, in float32."""
        return self.method.query_SD.float() * self.method.gain_SD.float()

    def read(self, site: int) -> Inputs:
        return self.bank.site(site, self.newest_BTD)

    def write(self, site: int, out_BTD: Tensor) -> None:
        if self.stream_BTD is not None:
            self.newest_BTD = self.stream_BTD = self.stream_BTD + out_BTD
        else:
            self.newest_BTD = self.newest_BTD + out_BTD if self.within_block else out_BTD
        self.within_block = not self.method.ends_block(site)

    def step(self, site: int, sublayer: nn.Module, context: Context) -> None:
        gain_D = self.fused_gain(sublayer)
        if gain_D is None:
            super().step(site, sublayer, context)
            return
        norm = cast(RMSNorm, sublayer.norm)
        normed_BTD = self.bank.normed_site(site, self.newest_BTD, gain_D, norm.eps)
        self.write(site, sublayer(normed_BTD, context, normed=True))

    def fused_gain(self, sublayer: nn.Module) -> Tensor | None:
        """The gain of the sublayer's norm, if the kernel that routes shall norm as well.

        Not for experts: their router reads the norm in float32.
        """
        if type(sublayer) not in (Attention, SwiGLU) or not isinstance(sublayer.norm, RMSNorm):
            return None
        gain_D: Tensor = sublayer.norm.weight
        sharded = hasattr(gain_D, "device_mesh")
        choice = dispatch.choose_norm(gain_D.device, sharded=sharded, recomputed=self.method.recomputed)
        return gain_D if choice.runs == "triton" else None


class BankedGroups(BankedState):
    """Slices at feed-forward sites and the last, in one bank; a mixture for each key/value group at attention sites.

    Groups have full-width queries, slices not, so that each kind has a bank of its own, and the other kind's sites hand
    in their sources without reading.
    """

    method: GroupRouting

    def __init__(self, embedding_BTD: Tensor, method: GroupRouting) -> None:
        super().__init__(embedding_BTD, method)
        query_LGD = method.group_query_LGD.float() * method.group_gain_LD.float().unsqueeze(1)
        silent_LGD = torch.zeros_like(query_LGD)
        by_site = torch.stack((query_LGD, silent_LGD), dim=1).flatten(0, 1)[:-1]  # attention, feed-forward, attention
        self.groups = query_LGD.shape[1]
        self.group_bank = dispatch.open_bank(
            by_site.flatten(0, 1),
            self.newest_BTD,
            heads=1,
            eps=method.eps,
            block=method.block_sublayers,
            readers=self.groups,
        )

    def query_SD(self) -> Tensor:
        # Row r of the parameters is site 2 r + 1, the last row site 2 L.
        query_SD = super().query_SD()
        *sliced, last = query_SD.unbind()
        silent = torch.zeros_like(last)
        return torch.stack([*(row for query in sliced for row in (silent, query)), last])

    def read(self, site: int) -> Inputs:
        last = site == self.method.num_sublayers
        if site % 2 or last:
            if site + 1 < self.method.num_sublayers:
                self.group_bank.silent_site(site, self.newest_BTD)
            return self.bank.site(site, self.newest_BTD)
        self.bank.silent_site(site, self.newest_BTD)
        mixed = self.group_bank.site(site, self.newest_BTD)
        return tuple(mixed.unbind()) if self.groups > 1 else (mixed,)

    def fused_gain(self, sublayer: nn.Module) -> Tensor | None:
        """None: attention norms each group's input, and a feed-forward's source goes to two banks."""
        return None


class BankedDelta(BankedState):
    """The stream, and the bank of its changes."""

    method: Delta

    def __init__(self, embedding_BTD: Tensor, method: Delta) -> None:
        super().__init__(embedding_BTD, method)
        self.h_BTD = embedding_BTD
        self.last_BTD = embedding_BTD  # the newest finished source
        self.gates = method.gate_S.unbind() if method.gate_S is not None else None
        self.null_logits = None
        if method.null_D is not None:  # the same for all tokens
            query_SD = method.query_SD.float() * method.gain_SD.float()
            key_D = method.null_D.float()
            key_D = key_D * torch.rsqrt(key_D.square().mean() + method.eps)
            self.null_logits = by_head(query_SD * key_D, method.heads).sum(dim=-1)

    def read(self, site: int) -> Tensor:
        if site == self.method.num_sublayers:
            return self.h_BTD
        routed_BTD = self._route(site)
        return self.h_BTD + (routed_BTD if self.gates is None else self.gates[site] * routed_BTD)

    def _route(self, site: int) -> Tensor:
        null_D = self.method.null_D
        if self.null_logits is None or null_D is None:
            return self.bank.site(site, self.newest_BTD)
        mixed_BTD, lse_BTH = self.bank.site_with_lse(site, self.newest_BTD)
        share_BTH1 = torch.sigmoid(self.null_logits[site] - lse_BTH).unsqueeze(-1)
        mixed_BTHC = by_head(widen(mixed_BTD), self.method.heads)
        return (mixed_BTHC + share_BTH1 * (by_head(null_D, self.method.heads) - mixed_BTHC)).flatten(-2)

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.h_BTD = self.h_BTD + out_BTD
        if not self.method.recursive:
            super().write(site, out_BTD)
            return
        self.newest_BTD = self.h_BTD - self.last_BTD
        if self.method.ends_block(site):
            self.last_BTD = self.newest_BTD

    def fused_gain(self, sublayer: nn.Module) -> Tensor | None:
        """None: what is normed is the stream with the mix added."""
        return None
