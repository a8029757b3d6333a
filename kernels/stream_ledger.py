"""The ledger of a multi-stream bank: its storage behind the token, and the kernels of one site's backward pass.

Between the kernels and the operators of :mod:`scaling.kernels.stream_bank`.

Shape legend: as in :mod:`scaling.kernels.streams`; L sites of a block, W scalars of a site, G splits of the tokens.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Literal

import torch
from torch import Tensor

from scaling.kernels.schedule import Order
from scaling.kernels.stream_contract import contract, settle
from scaling.kernels.stream_spread import num_splits, spread
from scaling.kernels.streams import Site, Streams

Scope = Literal["source", "global", "site"]


@dataclasses.dataclass(kw_only=True, slots=True)
class StreamLedger(Order):
    """One bank's order and storage."""

    tap_QKD: Tensor
    segment_T: Tensor
    table_2M: Tensor
    eps: float
    block: int
    scope: Scope
    max_taps: int
    key_SMD: Tensor
    phi_SVM: Tensor | None
    scale_S: Tensor
    bias_SM: Tensor
    base_S: Tensor
    bases: list[int]
    score_PMT: Tensor
    lse_SMT: Tensor
    kept: Tensor  # (S, M + 1, T) projections and RMS factors of the mixes
    scalar_LWT: Tensor | None = None
    source_gradient_NTD: Tensor | None = None
    tap_gradient_GQKD: Tensor | None = None
    key_gradient_SMD: Tensor | None = None
    phi_gradient_SVM: Tensor | None = None
    scale_gradient_S: Tensor | None = None
    bias_gradient_SM: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Bank rows that hold sources; behind them a block's rows for G and for running sums each."""
        return newest_row(self.num_sites - 1, self.block) + 1

    def streams(self, bank: Tensor) -> Streams:
        """What the kernels need in every call; the ledger must not hold the bank, whose life bounds its own."""
        return Streams(
            bank_NTD=bank, tap_QKD=self.tap_QKD, segment_T=self.segment_T, table_2M=self.table_2M, eps=self.eps
        )

    def reads(self, site: int, *, last_row: int | None = None) -> Site:
        """What a site reads."""
        newest = newest_row(site, self.block)
        return self.rows(newest + 1, site, last_row=newest if last_row is None else last_row)

    def rows(self, num_sources: int, site: int, *, last_row: int) -> Site:
        """The first sources, with their kernels at a site."""
        first_owner = site if self.scope == "site" else 0
        step = 1 if self.scope == "source" else 0
        return Site(num_sources=num_sources, last_row=last_row, first_owner=first_owner, owner_step=step)

    def owner(self, row: int, site: int) -> int:
        """Whose kernels expand a source at a site."""
        return {"source": row, "global": 0, "site": site}[self.scope]

    def scores(self, site: int) -> Tensor:
        """Logits of a site's sources ``(N, M, T)``."""
        return self.score_PMT[self.bases[site] : self.bases[site + 1]]

    def open_backward(self) -> None:
        """Make the buffers of the backward pass."""
        tap = self.tap_QKD
        num_tokens, width = len(self.segment_T), tap.shape[-1]
        num_streams = self.table_2M.shape[1]
        scalars = 2 * num_streams + 1 + 2 * self.num_rows * num_streams
        self.scalar_LWT = tap.new_empty((self.block, scalars, num_tokens))
        self.source_gradient_NTD = tap.new_zeros((self.num_rows, num_tokens, width))
        self.tap_gradient_GQKD = tap.new_zeros((num_splits(num_tokens, width), *tap.shape))
        self.key_gradient_SMD = torch.empty_like(self.key_SMD)
        self.phi_gradient_SVM = None if self.phi_SVM is None else torch.empty_like(self.phi_SVM)
        self.scale_gradient_S = torch.empty_like(self.scale_S)
        self.bias_gradient_SM = torch.empty_like(self.bias_SM)


@functools.lru_cache(maxsize=64)
def numbers_on(device: torch.device, values: tuple[int, ...]) -> Tensor:
    """Integers on a device; kept, because a CUDA graph cannot copy them there."""
    return torch.tensor(values, dtype=torch.int32).to(device)


def newest_row(site: int, block: int) -> int:
    """Number of the source that is newest at a site."""
    return -(-site // block)


def settle_site(ledger: StreamLedger, bank: Tensor, site: int, reads: Site) -> None:
    """The scalars of a site's backward pass, and the gradients of its gates' scale and bias."""
    assert ledger.scalar_LWT is not None and ledger.scale_gradient_S is not None
    assert ledger.bias_gradient_SM is not None
    local, width = site % ledger.block, bank.shape[-1]
    scores, lse = ledger.scores(site), ledger.lse_SMT[site]
    gated = ledger.phi_SVM is not None
    stat = contract(
        ledger.streams(bank),
        reads,
        gradient_TD=bank[ledger.num_rows + local],
        phi_VM=None if ledger.phi_SVM is None else ledger.phi_SVM[site],
        score_NMT=scores,
        lse_MT=lse,
    )
    logit_gradient_MT = settle(
        stat,
        score_NMT=scores,
        lse_MT=lse,
        kept=ledger.kept[site] if gated else None,
        scale=ledger.scale_S[site] if gated else None,
        bias_M=ledger.bias_SM[site] if gated else None,
        scalar_WT=ledger.scalar_LWT[local],
        max_sources=ledger.num_rows,
        width=width,
        eps=ledger.eps,
    )
    if gated:
        kept = ledger.kept[site]
        torch.sum(logit_gradient_MT, 1, out=ledger.bias_gradient_SM[site])
        ledger.scale_gradient_S[site] = (logit_gradient_MT * kept[:-1] * kept[-1]).sum()


def spread_finished(ledger: StreamLedger, bank: Tensor, sites: range) -> None:
    """What sites of one block add to the gradients of the finished sources, and the gradients of their own weights."""
    assert ledger.source_gradient_NTD is not None and ledger.key_gradient_SMD is not None
    finished = newest_row(sites.start - sites.start % ledger.block, ledger.block) + 1
    reads = ledger.rows(finished, sites.start, last_row=finished - 1)
    key_GLMD, phi_GLMMD = _spread(ledger, bank, sites, reads, ledger.source_gradient_NTD, last=False)
    torch.sum(key_GLMD, 0, out=ledger.key_gradient_SMD[sites.start : sites.stop])
    if ledger.phi_gradient_SVM is not None:
        phi_LMMD = phi_GLMMD.sum(0)  # stream, gate, column -> stream and column, gate
        ledger.phi_gradient_SVM[sites.start : sites.stop] = phi_LMMD.transpose(-1, -2).flatten(1, 2)


def _spread(
    ledger: StreamLedger, bank: Tensor, sites: range, reads: Site, result: Tensor, *, last: bool
) -> tuple[Tensor, Tensor]:
    assert ledger.scalar_LWT is not None and ledger.tap_gradient_GQKD is not None
    local = sites.start % ledger.block
    later = ledger.num_rows + ledger.block + local
    return spread(
        ledger.streams(bank),
        reads,
        sites=sites,
        gradient_LTD=bank[ledger.num_rows + local :],
        later_LTD=bank[later:],
        later_from=0 if local else 1,
        later_owner=ledger.owner(reads.num_sources, sites.start),
        key_SMD=ledger.key_SMD,
        phi_SVM=ledger.phi_SVM,
        base_S=ledger.base_S,
        score_PMT=ledger.score_PMT,
        lse_SMT=ledger.lse_SMT,
        scalar_LWT=ledger.scalar_LWT[local:],
        max_sources=ledger.num_rows,
        max_taps=ledger.max_taps,
        result=result,
        tap_gradient_GQKD=ledger.tap_gradient_GQKD,
        last=last,
    )


def spread_newest(ledger: StreamLedger, bank: Tensor, site: int, reads: Site, result_TD: Tensor) -> None:
    """Write the gradient of the running sum that a site reads."""
    _spread(ledger, bank, range(site, site + 1), reads, result_TD, last=True)
