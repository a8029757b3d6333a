"""The ledger of a multi-stream bank: its storage behind the token, and what one site does forward and backward.

Between the kernels and :mod:`scaling.kernels.stream_operators`. Sources are in the bank, streams and mixes
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
from scaling.kernels.stream_expand import expand, score
from scaling.kernels.stream_fold import fold
from scaling.kernels.stream_gather import MAX_SITES, gather
from scaling.kernels.stream_keys import keys
from scaling.kernels.stream_mix import blend, mix
from scaling.kernels.stream_turn import turn
from scaling.kernels.streams import Phase, Streams, chunk

Scope = Literal["source", "global", "site"]
# Sources whose streams' gradients are in memory at a time. With all eight of eight blocks this was the peak of a step
# at d2048; in two calls the last block's costs 0.3 ms more (NOTES.md).
_GATHERED_ROWS = 7
_PROGRAMS = 1056  # of 64 columns; keys, whose tiles have 256, runs a quarter of them, as it was timed


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
    weight_gradient_SCMD: Tensor | None = None  # of the key, and of the gates' projections
    logit_gradient_STM: Tensor | None = None  # of the gates' logits

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
        gates = 0 if self.phi_SKV is None else num_streams
        self.scalar_LWT = tap.new_empty((longest, 2 * num_streams, num_tokens))
        self.tap_gradient_QKD = torch.zeros_like(tap)
        self.weight_gradient_SCMD = tap.new_zeros((num_sites, 1 + gates, num_streams, width))
        self.logit_gradient_STM = tap.new_empty((num_sites, num_tokens, gates))

    def finish(self) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
        """Close the backward pass: gradients of taps, keys, projections ``(S, M * D, M)``, scales, biases."""
        self.require_end()
        tap, weight_SCMD, logit_STM = self.tap_gradient_QKD, self.weight_gradient_SCMD, self.logit_gradient_STM
        assert tap is not None and weight_SCMD is not None and logit_STM is not None
        key = weight_SCMD[:, 0].contiguous()
        key[0] = 0.0  # the first site has one source: its weight is 1 whatever the query, all else is rounding
        phi, scale, bias = None, torch.empty_like(self.scale_S), torch.empty_like(self.bias_SM)
        if self.phi_SKV is not None:
            phi = weight_SCMD[:, 1:].flatten(2).transpose(1, 2).contiguous()
            bias = logit_STM.sum(1)
            scale = (logit_STM * self.kept_STM[..., :-1] * self.kept_STM[..., -1:]).sum((1, 2))
        self.drop_streams()
        self.scalar_LWT = self.source_gradient_FTD = self.tap_gradient_QKD = None
        self.weight_gradient_SCMD = self.logit_gradient_STM = None
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


def forward_site(
    ledger: StreamLedger, bank: Tensor, site: int, source_TD: Tensor, update_TD: Tensor | None = None, *, again: bool
) -> tuple[Tensor, Tensor]:
    """A site's source, with the update added to it if there is one, and output.

    ``again``: the forward pass is complete, logits and log-sum-exps are known.
    """
    assert update_TD is None or site % ledger.block
    if site % ledger.block == 0 and not again:
        # behind autograd's back, as the kernels write: .data has a version counter of its own
        bank.data[newest_row(site, ledger.block)] = source_TD
    phase = ledger.phase_of(site)
    _make_streams(ledger, bank, site, phase, final=again)
    mix_MTD = _mixes_again(ledger, site) if again else _mixes(ledger, site, phase)
    source_TD, newest_MTD = _newest(ledger, site, source_TD, update_TD)
    output_TD = torch.empty_like(bank[0])
    blend(mix_MTD, newest_MTD, output_TD=output_TD, **_site_weights(ledger, site))
    if not again and site == ledger.num_sites - 1:
        ledger.drop_streams()
    return source_TD, output_TD


def backward_site(
    ledger: StreamLedger, bank: Tensor, site: int, gradient_TD: Tensor, source_TD: Tensor, before_TD: Tensor | None
) -> Tensor:
    """The gradient of a site's newest source, added to ``before_TD``, that of others who read a running sum.

    The gradients of the site's weights are added up in the ledger.
    """
    assert before_TD is None or site % ledger.block
    if ledger.scalar_LWT is None:
        ledger.open_backward()
    assert ledger.scalar_LWT is not None and ledger.logit_gradient_STM is not None
    phase = ledger.phase_of(site)
    _make_streams(ledger, bank, site, phase, final=True)
    if ledger.phase != phase:
        _mix_phase(ledger, phase, final=True)
    assert ledger.mix_LMTD is not None
    _, newest_MTD = _newest(ledger, site, source_TD)
    local = site - phase.sites.start
    scalar_WT, mix_MTD = ledger.scalar_LWT[local], ledger.mix_LMTD[local]
    stream_gradient_MTD = None if newest_MTD is None else torch.empty_like(newest_MTD)
    coefficient_M2T = scalar_WT.new_empty((ledger.streams.num_streams, 2, scalar_WT.shape[1]))
    turn(
        mix_MTD, newest_MTD, gradient_TD, stream_gradient_MTD=stream_gradient_MTD, scalar_WT=scalar_WT,
        logit_gradient=ledger.logit_gradient_STM[site], coefficient_M2T=coefficient_M2T, **_site_weights(ledger, site),
    )  # fmt: skip
    result_TD = torch.empty_like(source_TD)
    row = newest_row(site, ledger.block)
    if newest_MTD is not None and stream_gradient_MTD is not None:
        here = range(site, site + 1)
        _keys(ledger, newest_MTD[None], coefficient_M2T[None, :, :, None], scalar_WT[None], num_rows=1, sites=here)
        del newest_MTD
        _fold(ledger, source_TD, stream_gradient_MTD, ledger.owner(row, site), result_TD, before_TD)
    if local == 0:
        _gather_phase(ledger, bank, phase)
    if site % ledger.block == 0:
        assert ledger.source_gradient_FTD is not None
        result_TD.copy_(ledger.source_gradient_FTD[row])
    return result_TD


def _site_weights(ledger: StreamLedger, site: int) -> dict[str, Any]:
    gated = ledger.phi_SKV is not None
    which = site if gated else slice(0)
    return {
        "site": site,
        "eps": ledger.streams.eps,
        "key_MD": ledger.key_SMD[site],
        "pair": ledger.bases[site] + newest_row(site, ledger.block),
        "score_TPM": ledger.score_TPM,
        "lse_TSM": ledger.lse_TSM,
        "phi_KV": None if ledger.phi_SKV is None else ledger.phi_SKV[site],
        "scale": ledger.scale_S[which],
        "bias_M": ledger.bias_SM[which],
        "kept": ledger.kept_STM[which],
    }


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
        expand(ledger.streams, bank[row], ledger.stream_FMTD[row], owner=ledger.owner(row, site))
        if not final:
            score(
                ledger.stream_FMTD[row], key_SMD=ledger.key_SMD, base_S=ledger.base_S, score_TPM=ledger.score_TPM,
                source_row=row, sites=readers, eps=ledger.streams.eps,
            )  # fmt: skip
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


def _newest(
    ledger: StreamLedger, site: int, source_TD: Tensor, update_TD: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """The running sum, with the update added, and its streams; None where the newest source is finished."""
    if site % ledger.block == 0:
        return source_TD, None
    newest_MTD = source_TD.new_empty((ledger.streams.num_streams, *source_TD.shape))
    sum_TD = None if update_TD is None else torch.empty_like(source_TD)
    owner = ledger.owner(newest_row(site, ledger.block), site)
    expand(ledger.streams, source_TD, newest_MTD, owner=owner, update_TD=update_TD, sum_TD=sum_TD)
    return source_TD if sum_TD is None else sum_TD, newest_MTD


def _fold(
    ledger: StreamLedger,
    source_TD: Tensor,
    gradient_MTD: Tensor,
    owner: int,
    result_TD: Tensor,
    before_TD: Tensor | None,
) -> None:
    assert ledger.tap_gradient_QKD is not None
    taps = fold(ledger.streams, source_TD, gradient_MTD, owner=owner, result_TD=result_TD, before_TD=before_TD)
    ledger.tap_gradient_QKD[owner] += taps.sum(0)


def _keys(
    ledger: StreamLedger, stream_FMTD: Tensor, coefficient: Tensor, scalar_LWT: Tensor, *, num_rows: int, sites: range
) -> None:
    """Add what streams give to the gradients of the keys and projections of some sites."""
    assert ledger.weight_gradient_SCMD is not None
    _, num_streams, num_tokens, width = stream_FMTD.shape
    splits = num_splits(num_tokens, width // chunk(width, 64) * num_streams)
    found = keys(
        stream_FMTD, coefficient, scalar_LWT, num_rows=num_rows, splits=splits, gated=ledger.phi_SKV is not None
    )  # fmt: skip
    ledger.weight_gradient_SCMD[sites.start : sites.stop] += found.sum(0)


def _gather_phase(ledger: StreamLedger, bank: Tensor, phase: Phase) -> None:
    """What the sites of a phase add to the gradients of the finished sources, their kernels and the sites' keys."""
    assert ledger.stream_FMTD is not None and ledger.mix_LMTD is not None and ledger.scalar_LWT is not None
    if ledger.source_gradient_FTD is None:  # late, when a block's activations are free
        ledger.source_gradient_FTD = torch.zeros_like(ledger.stream_FMTD[:, 0], dtype=torch.float32)
    _, num_streams, num_tokens, _ = ledger.stream_FMTD.shape
    coefficient = ledger.scalar_LWT.new_empty((phase.num_rows, num_streams, 2, len(phase.sites), num_tokens))
    together = triton.cdiv(phase.num_rows, triton.cdiv(phase.num_rows, _GATHERED_ROWS))
    buffer = torch.empty_like(ledger.stream_FMTD[:together])
    narrow_key_SMD = ledger.key_SMD.to(bank.dtype)
    for first in range(0, phase.num_rows, together):
        rows = range(first, min(first + together, phase.num_rows))
        gather(
            ledger.mix_LMTD, ledger.stream_FMTD, phase, rows=rows, key_SMD=narrow_key_SMD, score_TPM=ledger.score_TPM,
            lse_TSM=ledger.lse_TSM, scalar_LWT=ledger.scalar_LWT, stream_gradient=buffer,
            coefficient_FM2LT=coefficient, eps=ledger.streams.eps,
        )  # fmt: skip
        for row in rows:
            owner = ledger.owner(row, phase.sites.start)
            so_far_TD = ledger.source_gradient_FTD[row]
            _fold(ledger, bank[row], buffer[row - first], owner, so_far_TD, so_far_TD)
    _keys(
        ledger, ledger.stream_FMTD, coefficient, ledger.scalar_LWT, num_rows=phase.num_rows, sites=phase.sites
    )  # fmt: skip
