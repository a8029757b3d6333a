"""The ledger of a multi-stream bank: its storage behind the token, and what one site does forward and backward.

Between the kernels and the operators of :mod:`scaling.kernels.stream_bank`. Sources are in the bank, streams and mixes
in buffers of the ledger: they live from the first site to the last, are gone while the loss is computed, and come back
for the backward pass. Backward leaves a phase at its first site: then the gradients of the finished sources' streams
are formed from the Go of all its sites.

Shape legend: as in :mod:`scaling.kernels.streams`; W scalars of a token.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, Literal

import torch
import triton
from torch import Tensor

from scaling.kernels.schedule import Order
from scaling.kernels.stream_contract import contract, num_scalars, turn
from scaling.kernels.stream_fold import fold
from scaling.kernels.stream_gather import MAX_SITES, gather, keys
from scaling.kernels.stream_mix import blend, mix
from scaling.kernels.streams import Phase, Streams, chunk, expand, score

Scope = Literal["source", "global", "site"]
_GATHERED_ROWS = 5  # sources whose streams' gradients are in memory at a time
_PROGRAMS = 1056  # eight for each of an H200's 132 multiprocessors


@dataclasses.dataclass(kw_only=True, slots=True)
class StreamLedger(Order):
    """One bank's order and storage."""

    streams: Streams
    block: int
    scope: Scope
    key_SMD: Tensor
    phi_SKV: Tensor | None
    scale_S: Tensor
    bias_SM: Tensor
    base_S: Tensor
    bases: list[int]
    score_TPM: Tensor
    lse_TSM: Tensor
    kept_STM: Tensor  # (S, T, M + 1) projections and RMS factors of the mixes
    made_rows: int = 0  # of ``stream_FMTD``
    made_for: int | None = None  # the site whose kernels made them, where kernels are a site's
    phase: Phase | None = None  # whose mixes, or Go, are in ``mix_LMTD``
    stream_FMTD: Tensor | None = None
    mix_LMTD: Tensor | None = None
    scalar_LWT: Tensor | None = None
    source_gradient_FTD: Tensor | None = None
    tap_gradient_QKD: Tensor | None = None
    key_gradient_SMD: Tensor | None = None
    phi_gradient_SKMD: Tensor | None = None
    scale_gradient_S: Tensor | None = None
    bias_gradient_SM: Tensor | None = None

    @property
    def num_rows(self) -> int:
        """Finished sources."""
        return (self.num_sites - 1) // self.block + 1

    def phase_of(self, site: int) -> Phase:
        """The sites that share one read of the finished sources with this one: of one block, and as equal as can be."""
        start = site - site % self.block
        if self.scope == "site":
            sites = range(site, site + 1)
        else:
            stop = min(start + self.block, self.num_sites)
            size = triton.cdiv(stop - start, triton.cdiv(stop - start, MAX_SITES))
            first = site - (site - start) % size
            sites = range(first, min(first + size, stop))
        return self.over(sites)

    def over(self, sites: range) -> Phase:
        """What sites of one block read."""
        return Phase(
            sites=sites,
            num_rows=sites.start // self.block + 1,
            first_base=self.bases[sites.start],
            first_pairs=newest_row(sites.start, self.block) + 1,
        )

    def owner(self, row: int, site: int) -> int:
        """Whose kernels expand a source at a site."""
        return {"source": row, "global": 0, "site": site}[self.scope]

    def drop_streams(self) -> None:
        """Free the buffers that only a pass over the sites needs."""
        self.stream_FMTD = self.mix_LMTD = self.phase = None
        self.made_rows, self.made_for = 0, None

    def open_backward(self) -> None:
        """Make the buffers of the backward pass."""
        tap, (num_sites, num_streams, width) = self.streams.tap_QKD, self.key_SMD.shape
        num_tokens = self.streams.age_T.shape[0]
        longest = max(len(self.phase_of(site).sites) for site in range(self.num_sites))
        self.scalar_LWT = tap.new_empty((longest, num_scalars(num_streams), num_tokens))
        self.tap_gradient_QKD = torch.zeros_like(tap)
        self.key_gradient_SMD = torch.zeros_like(self.key_SMD)
        if self.phi_SKV is not None:
            self.phi_gradient_SKMD = tap.new_empty((num_sites, num_streams, num_streams, width))
        self.scale_gradient_S = torch.empty_like(self.scale_S)
        self.bias_gradient_SM = torch.empty_like(self.bias_SM)

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Close the backward pass: gradients of taps, keys, projections ``(S, M * D, M)``, scales, biases."""
        self.require_end()
        tap, key, phi = self.tap_gradient_QKD, self.key_gradient_SMD, self.phi_gradient_SKMD
        scale, bias = self.scale_gradient_S, self.bias_gradient_SM
        assert tap is not None and key is not None and scale is not None and bias is not None
        key[0] = 0.0  # the first site has one source: its weight is 1 whatever the query, all else is rounding
        if phi is not None:
            phi = phi.flatten(2).transpose(1, 2).contiguous()
        self.drop_streams()
        self.scalar_LWT = self.source_gradient_FTD = self.tap_gradient_QKD = None
        self.key_gradient_SMD = self.phi_gradient_SKMD = self.scale_gradient_S = self.bias_gradient_SM = None
        return tap, key, phi, scale, bias


@functools.lru_cache(maxsize=64)
def numbers_on(device: torch.device, values: tuple[int, ...]) -> Tensor:
    """Integers on a device; kept, because a CUDA graph cannot copy them there."""
    return torch.tensor(values, dtype=torch.int32).to(device)


def newest_row(site: int, block: int) -> int:
    """Number of the source that is newest at a site."""
    return -(-site // block)


def num_splits(num_tokens: int, programs: int) -> int:
    """Splits of the tokens where a split has so many programs, none empty."""
    wanted = max(1, min(_PROGRAMS // programs, triton.cdiv(num_tokens, 64)))
    return int(triton.cdiv(num_tokens, triton.cdiv(num_tokens, wanted)))


def forward_site(ledger: StreamLedger, bank: Tensor, site: int, source_TD: Tensor, *, again: bool) -> Tensor:
    """A site's output; ``again``: the forward pass is complete, logits and log-sum-exps are known."""
    if site % ledger.block == 0 and not again:
        # behind autograd's back, as the kernels write: .data has a version counter of its own
        bank.data[newest_row(site, ledger.block)] = source_TD
    phase = ledger.phase_of(site)
    _make_streams(ledger, bank, site, phase, final=again)
    mix_MTD = _mixes_again(ledger, site) if again else _mixes(ledger, site, phase)
    newest_MTD = _newest(ledger, site, source_TD, final=again)
    output_TD = torch.empty_like(bank[0])
    blend(mix_MTD, newest_MTD, output_TD=output_TD, eps=ledger.streams.eps, **_site_weights(ledger, site))
    if not again and site == ledger.num_sites - 1:
        ledger.drop_streams()
    return output_TD


def backward_site(ledger: StreamLedger, bank: Tensor, site: int, gradient_TD: Tensor, source_TD: Tensor) -> Tensor:
    """The gradient of a site's newest source; the gradients of the site's weights are added up in the ledger."""
    if ledger.scalar_LWT is None:
        ledger.open_backward()
    assert ledger.scalar_LWT is not None and ledger.key_gradient_SMD is not None
    phase = ledger.phase_of(site)
    _make_streams(ledger, bank, site, phase, final=True)
    if ledger.phase != phase:
        _mix_phase(ledger, phase, final=True)
    assert ledger.mix_LMTD is not None
    newest_MTD = _newest(ledger, site, source_TD, final=True)
    local = site - phase.sites.start
    scalar_WT, mix_MTD = ledger.scalar_LWT[local], ledger.mix_LMTD[local]
    weights = _site_weights(ledger, site)
    logit_gradient_TM = contract(
        mix_MTD, newest_MTD, gradient_TD, scalar_WT=scalar_WT, eps=ledger.streams.eps, **weights
    )
    num_streams, num_tokens, width = mix_MTD.shape
    splits = num_splits(num_tokens, width // chunk(width, 64) * num_streams)
    del weights["scale"], weights["bias_M"], weights["kept"]
    phi_gradient, key_gradient = turn(
        mix_MTD, newest_MTD, gradient_TD, key_MD=ledger.key_SMD[site], scalar_WT=scalar_WT, splits=splits, **weights
    )
    if ledger.phi_gradient_SKMD is not None:
        assert ledger.bias_gradient_SM is not None and ledger.scale_gradient_S is not None
        kept_TM = ledger.kept_STM[site]
        torch.sum(phi_gradient, 0, out=ledger.phi_gradient_SKMD[site])
        torch.sum(logit_gradient_TM, 0, out=ledger.bias_gradient_SM[site])
        ledger.scale_gradient_S[site] = (logit_gradient_TM * kept_TM[:, :-1] * kept_TM[:, -1:]).sum()
    result_TD = torch.empty_like(source_TD)
    row = newest_row(site, ledger.block)
    if newest_MTD is not None:
        ledger.key_gradient_SMD[site] += key_gradient.sum(0)
        _fold(ledger, source_TD, newest_MTD, ledger.owner(row, site), result_TD, add=False)
    if local == 0:
        _gather_phase(ledger, bank, phase)
    if newest_MTD is None:
        assert ledger.source_gradient_FTD is not None
        result_TD.copy_(ledger.source_gradient_FTD[row])
    return result_TD


def _site_weights(ledger: StreamLedger, site: int) -> dict[str, Any]:
    gated = ledger.phi_SKV is not None
    which = site if gated else slice(0)
    return {
        "site": site,
        "pair": ledger.bases[site] + newest_row(site, ledger.block),
        "score_TPM": ledger.score_TPM,
        "lse_TSM": ledger.lse_TSM,
        "phi_KV": None if ledger.phi_SKV is None else ledger.phi_SKV[site],
        "scale": ledger.scale_S[which],
        "bias_M": ledger.bias_SM[which],
        "kept": ledger.kept_STM[which],
    }


def _expand(
    ledger: StreamLedger, source_TD: Tensor, stream_MTD: Tensor, *, row: int, site: int, sites: range | None
) -> None:
    expand(ledger.streams, source_TD, stream_MTD, owner=ledger.owner(row, site))
    if sites is not None:
        score(
            stream_MTD, key_SMD=ledger.key_SMD, base_S=ledger.base_S, score_TPM=ledger.score_TPM, source_row=row,
            sites=sites, eps=ledger.streams.eps,
        )  # fmt: skip


def _make_streams(ledger: StreamLedger, bank: Tensor, site: int, phase: Phase, *, final: bool) -> None:
    """The streams of all finished sources that the phase reads, and unless ``final`` their logits."""
    if ledger.stream_FMTD is None:
        num_streams = ledger.streams.num_streams
        ledger.stream_FMTD = bank.new_empty((ledger.num_rows, num_streams, *bank.shape[1:]))
    if ledger.scope == "site" and ledger.made_for != site:
        ledger.made_rows, ledger.made_for = 0, site
    # a finished source's logits for all sites to come, in one expansion
    readers = range(site, site + 1 if ledger.scope == "site" else ledger.num_sites)
    for row in range(ledger.made_rows, phase.num_rows):
        _expand(ledger, bank[row], ledger.stream_FMTD[row], row=row, site=site, sites=None if final else readers)
    ledger.made_rows = max(ledger.made_rows, phase.num_rows)


def _mix(ledger: StreamLedger, phase: Phase, mix_LMTD: Tensor, *, final: bool) -> None:
    assert ledger.stream_FMTD is not None
    logits: dict[str, Any] = {"score_TPM": ledger.score_TPM, "lse_TSM": ledger.lse_TSM}
    mix(ledger.stream_FMTD, phase, mix_LMTD=mix_LMTD, final=final, **logits)


def _mix_phase(ledger: StreamLedger, phase: Phase, *, final: bool) -> None:
    assert ledger.stream_FMTD is not None
    if ledger.mix_LMTD is None or len(ledger.mix_LMTD) < len(phase.sites):
        ledger.mix_LMTD = None  # before the larger one is made
        ledger.mix_LMTD = ledger.stream_FMTD.new_empty((len(phase.sites), *ledger.stream_FMTD.shape[1:]))
    _mix(ledger, phase, ledger.mix_LMTD, final=final)
    ledger.phase = phase


def _mixes(ledger: StreamLedger, site: int, phase: Phase) -> Tensor:
    """The site's mixes of the finished sources, in the first forward pass."""
    if ledger.phase != phase:
        _mix_phase(ledger, phase, final=False)
    assert ledger.mix_LMTD is not None
    return ledger.mix_LMTD[site - phase.sites.start]


def _mixes_again(ledger: StreamLedger, site: int) -> Tensor:
    """The same to the bit when a site is recomputed, by itself: backward may hold the Go of its phase or another."""
    assert ledger.stream_FMTD is not None
    mix_LMTD = torch.empty_like(ledger.stream_FMTD[:1])
    _mix(ledger, ledger.over(range(site, site + 1)), mix_LMTD, final=False)
    return mix_LMTD[0]


def _newest(ledger: StreamLedger, site: int, source_TD: Tensor, *, final: bool) -> Tensor | None:
    """The streams of a running sum, and unless ``final`` their logits; None where the newest source is finished."""
    if site % ledger.block == 0:
        return None
    newest_MTD = source_TD.new_empty((ledger.streams.num_streams, *source_TD.shape))
    row = newest_row(site, ledger.block)
    _expand(ledger, source_TD, newest_MTD, row=row, site=site, sites=None if final else range(site, site + 1))
    return newest_MTD


def _fold(
    ledger: StreamLedger, source_TD: Tensor, gradient_MTD: Tensor, owner: int, result_TD: Tensor, *, add: bool
) -> None:
    assert ledger.tap_gradient_QKD is not None
    taps = fold(ledger.streams, source_TD, gradient_MTD, owner=owner, result_TD=result_TD, add=add)
    ledger.tap_gradient_QKD[owner] += taps.sum(0)


def _gather_phase(ledger: StreamLedger, bank: Tensor, phase: Phase) -> None:
    """What the sites of a phase add to the gradients of the finished sources, their kernels and the sites' keys."""
    assert ledger.stream_FMTD is not None and ledger.mix_LMTD is not None and ledger.scalar_LWT is not None
    assert ledger.key_gradient_SMD is not None
    if ledger.source_gradient_FTD is None:  # late, when a block's activations are free
        ledger.source_gradient_FTD = torch.zeros_like(ledger.stream_FMTD[:, 0], dtype=torch.float32)
    _, num_streams, num_tokens, width = ledger.stream_FMTD.shape
    coefficient_FMLT = ledger.scalar_LWT.new_empty((phase.num_rows, num_streams, len(phase.sites), num_tokens))
    together = triton.cdiv(phase.num_rows, triton.cdiv(phase.num_rows, _GATHERED_ROWS))
    buffer = torch.empty_like(ledger.stream_FMTD[:together])
    narrow_key_SMD = ledger.key_SMD.to(bank.dtype)
    for first in range(0, phase.num_rows, together):
        rows = range(first, min(first + together, phase.num_rows))
        gather(
            ledger.mix_LMTD, ledger.stream_FMTD, phase, rows=rows, key_SMD=narrow_key_SMD, score_TPM=ledger.score_TPM,
            lse_TSM=ledger.lse_TSM, scalar_LWT=ledger.scalar_LWT, stream_gradient=buffer,
            coefficient_FMLT=coefficient_FMLT, eps=ledger.streams.eps,
        )  # fmt: skip
        for row in rows:
            owner = ledger.owner(row, phase.sites.start)
            _fold(ledger, bank[row], buffer[row - first], owner, ledger.source_gradient_FTD[row], add=True)
    splits = num_splits(num_tokens, width // chunk(width, 64) * num_streams)
    found = keys(ledger.stream_FMTD, coefficient_FMLT, num_rows=phase.num_rows, splits=splits)
    ledger.key_gradient_SMD[phase.sites.start : phase.sites.stop] += found.sum(0)
