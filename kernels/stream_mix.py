"""Forward kernels of multi-stream routing (msar): mixes of finished sources, a phase at a time, and a site's output.

Between :mod:`scaling.kernels.streams`, which makes the streams, and :mod:`scaling.kernels.stream_ledger`. The sites of
a block read the same finished sources, and their logits are known when the block begins: :func:`mix` reads each stream
once for all of them. :func:`blend` folds a site's running sum in, projects the mixes on the gates' weights, and adds
the gated streams; a program reads its token's rows a second time, from cache.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Phase, tile
from scaling.kernels.tile import narrow

_MIX = {"COLUMNS": 256, "STAGES": 3, "num_warps": 1}
_BLEND = {"TOKENS": 2, "COLUMNS": 256, "num_warps": 1, "STAGES": 2}  # tokens share what is loaded of the gates' weights


@triton.jit(do_not_specialize=["num_rows", "first_site", "first_base", "first_pairs", "num_tokens", "num_pairs"])
def _mix_kernel(
    stream_ptr,  # (F, M, T, D)
    score_ptr,  # (T, P, M) float32
    lse_ptr,  # (T, S, M) float32; FINAL: of all sources, else out: of the finished ones
    mix_ptr,  # (L, M, T, D) out
    num_rows,
    first_site,
    first_base,
    first_pairs,
    num_tokens,
    num_pairs,
    num_sites,
    FINAL: tl.constexpr,
    SITES: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    plane = tl.cast(num_tokens, tl.int64) * D
    place = stream * plane + token * D + column
    row = tl.arange(0, ROWS)
    pairs_ptr = score_ptr + (token * num_pairs + first_base) * M + stream
    lses_ptr = lse_ptr + (token * num_sites + first_site) * M + stream
    lse = ()
    for local in tl.static_range(SITES):
        if FINAL:
            lse = lse + (tl.load(lses_ptr + local * M),)
        else:
            first = 0
            if local > 0:
                first = first_pairs + (local - 1) * (num_rows + 1)
            score = tl.load(pairs_ptr + (first + row) * M, mask=row < num_rows, other=float("-inf"))
            top = tl.max(score, 0)
            total = top + tl.log(tl.sum(tl.exp(score - top), 0))
            tl.store(lses_ptr + local * M, total)
            lse = lse + (total,)
    for start in range(0, D, COLUMNS):
        mixed = ()
        for _ in tl.static_range(SITES):
            mixed = mixed + (tl.zeros([COLUMNS], tl.float32),)
        for index in tl.range(0, num_rows, num_stages=STAGES):
            x = tl.load(stream_ptr + tl.cast(index, tl.int64) * (M * plane) + place + start).to(tl.float32)
            more = ()
            for local in tl.static_range(SITES):
                first = 0
                if local > 0:
                    first = first_pairs + (local - 1) * (num_rows + 1)
                share = tl.exp(tl.load(pairs_ptr + (first + index) * M) - lse[local])
                more = more + (mixed[local] + share * x,)
            mixed = more
        for local in tl.static_range(SITES):
            out_ptr = mix_ptr + local * (M * plane) + place + start
            tl.store(out_ptr, narrow(mixed[local], mix_ptr.dtype.element_ty))


@triton.jit(do_not_specialize=["site", "pair", "num_tokens", "num_pairs"])
def _blend_kernel(
    mix_ptr,  # (M, T, D) mixes of the finished sources
    newest_ptr,  # (M, T, D) streams of the running sum
    score_ptr,  # (T, P, M) float32
    lse_ptr,  # (T, S, M) float32; in: of the finished sources, out: of all
    phi_ptr,  # (M, M * D) float32 of the site, gates first
    scale_ptr,  # () float32
    bias_ptr,  # (M,) float32
    kept_ptr,  # (T, M + 1) float32 out: projections, and the RMS factor of the mixes together
    output_ptr,  # (T, D)
    site,
    pair,  # of the running sum
    num_tokens,
    num_pairs,
    num_sites,
    eps,
    NEWEST: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    column = tl.arange(0, COLUMNS)
    plane = tl.cast(num_tokens, tl.int64) * D
    place = token[:, None] * D + column[None, :]
    older = ()  # the weight of what is finished, and of the newest
    newer = ()
    for stream in tl.static_range(M):
        lses_ptr = lse_ptr + (token * num_sites + site) * M + stream
        weight = tl.full([TOKENS], 1.0, tl.float32)
        share = tl.zeros([TOKENS], tl.float32)
        if NEWEST:
            lse = tl.load(lses_ptr, mask=mask, other=0.0)
            score = tl.load(score_ptr + (token * num_pairs + pair) * M + stream, mask=mask, other=0.0)
            top = tl.maximum(lse, score)
            total = top + tl.log(tl.exp(lse - top) + tl.exp(score - top))
            weight = tl.exp(lse - total)
            tl.store(lses_ptr, total, mask=mask)
            share = tl.exp(score - total)
        older = older + (weight[:, None],)
        newer = newer + (share[:, None],)
    gates = ()
    if GATED:
        square = tl.zeros([TOKENS, COLUMNS], tl.float32)
        along = ()
        for _ in tl.static_range(M):
            along = along + (tl.zeros([TOKENS, COLUMNS], tl.float32),)
        for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
            for stream in tl.static_range(M):
                spot = stream * plane + place + start
                mixed = older[stream] * tl.load(mix_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
                if NEWEST:
                    value = tl.load(newest_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
                    mixed += newer[stream] * value
                square += mixed * mixed
                more = ()
                for gate in tl.static_range(M):
                    phi = tl.load(phi_ptr + (gate * M + stream) * D + start + column)
                    more = more + (along[gate] + mixed * phi[None, :],)
                along = more
        factor = 1.0 / tl.sqrt_rn(tl.sum(square, 1) / (M * D) + eps)
        tl.store(kept_ptr + token * (M + 1) + M, factor, mask=mask)
        scale = tl.load(scale_ptr)
        for gate in tl.static_range(M):
            projected = tl.sum(along[gate], 1)
            tl.store(kept_ptr + token * (M + 1) + gate, projected, mask=mask)
            gates = gates + (tl.sigmoid(scale * projected * factor + tl.load(bias_ptr + gate))[:, None],)
    for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
        output = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for stream in tl.static_range(M):
            spot = stream * plane + place + start
            mixed = older[stream] * tl.load(mix_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
            if NEWEST:
                mixed += newer[stream] * tl.load(newest_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
            if GATED:
                output += gates[stream] * mixed
            else:
                output += mixed / M
        tl.store(output_ptr + place + start, narrow(output, output_ptr.dtype.element_ty), mask=mask[:, None])


def mix(
    stream_FMTD: Tensor, phase: Phase, *, score_TPM: Tensor, lse_TSM: Tensor, mix_LMTD: Tensor, final: bool
) -> None:
    """Write the mixes of the finished sources for the sites of a phase.

    ``final``: ``lse_TSM`` is of all sources of a site; else it is written, of the finished ones.
    """
    _, num_streams, num_tokens, width = stream_FMTD.shape
    _mix_kernel[(num_tokens, num_streams)](
        stream_FMTD,
        score_TPM,
        lse_TSM,
        mix_LMTD,
        phase.num_rows,
        phase.sites.start,
        phase.first_base,
        phase.first_pairs,
        num_tokens,
        score_TPM.shape[1],
        lse_TSM.shape[1],
        FINAL=final,
        SITES=len(phase.sites),
        ROWS=triton.next_power_of_2(phase.num_rows),
        M=num_streams,
        D=width,
        **tile(_MIX, width),
    )


def blend(
    mix_MTD: Tensor,
    newest_MTD: Tensor | None,
    *,
    site: int,
    pair: int,
    score_TPM: Tensor,
    lse_TSM: Tensor,
    phi_KV: Tensor | None,
    scale: Tensor,
    bias_M: Tensor,
    kept: Tensor,
    output_TD: Tensor,
    eps: float,
) -> None:
    """Write a site's output and the log-sum-exps of all its sources; ``kept`` is for the backward pass."""
    num_streams, num_tokens, width = mix_MTD.shape
    sides = tile(_BLEND, width)
    _blend_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]),)](
        mix_MTD,
        mix_MTD if newest_MTD is None else newest_MTD,
        score_TPM,
        lse_TSM,
        lse_TSM if phi_KV is None else phi_KV,
        scale,
        bias_M,
        kept,
        output_TD,
        site,
        pair,
        num_tokens,
        score_TPM.shape[1],
        lse_TSM.shape[1],
        eps,
        NEWEST=newest_MTD is not None,
        GATED=phi_KV is not None,
        M=num_streams,
        D=width,
        **sides,
    )
