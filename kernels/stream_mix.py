"""Forward kernels of multi-stream routing (msar): mixes of finished sources, a phase at a time, and a site's output.

Between :mod:`scaling.kernels.streams`, which makes the streams, and :mod:`scaling.kernels.stream_ledger`. The sites of
a block read the same finished sources, and their logits are known when the block begins: :func:`mix` reads each stream
once for all of them. :func:`blend` scores a site's running sum and folds it in, projects the mixes on the gates'
weights, and adds the gated streams: a program holds all rows of a token.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.stream_rows import read_rows, row_sides
from scaling.kernels.streams import Phase, tile
from scaling.kernels.tile import narrow

_MIX = {"COLUMNS": 256, "STAGES": 3, "num_warps": 1}


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
    key_ptr,  # (M, D) float32 of the site
    score_ptr,  # (T, P, M) float32; out: of the running sum
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
    ROWS: tl.constexpr,
    D: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    plane = tl.cast(num_tokens, tl.int64) * D
    stream = tl.arange(0, ROWS)
    some = stream < M
    lses_ptr = lse_ptr + (token * num_sites + site) * M + stream
    if NEWEST:  # every warp reads them, one writes them: the barriers of the sums must lie between
        lse = tl.load(lses_ptr, mask=some, other=0.0)
    mixed = ()
    values = ()
    for part in tl.static_range(len(WIDTHS)):
        mixed = mixed + (read_rows(mix_ptr + token * D, plane, STARTS[part], WIDTHS[part], M, ROWS, D),)
        if NEWEST:
            values = values + (read_rows(newest_ptr + token * D, plane, STARTS[part], WIDTHS[part], M, ROWS, D),)
    if NEWEST:
        along = tl.zeros([ROWS], tl.float32)
        square = tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(len(WIDTHS)):
            key = read_rows(key_ptr, D, STARTS[part], WIDTHS[part], M, ROWS, D)
            along += tl.sum(values[part] * key, 1)
            square += tl.sum(values[part] * values[part], 1)
        score = along * (1.0 / tl.sqrt_rn(square / D + eps))
        tl.store(score_ptr + (token * num_pairs + pair) * M + stream, score, mask=some)
        top = tl.maximum(lse, score)
        total = top + tl.log(tl.exp(lse - top) + tl.exp(score - top))
        tl.store(lses_ptr, total, mask=some)
        older = tl.exp(lse - total)[:, None]
        newer = tl.exp(score - total)[:, None]
        blended = ()
        for part in tl.static_range(len(WIDTHS)):
            blended = blended + (older * mixed[part] + newer * values[part],)
        mixed = blended
    gate = tl.full([ROWS], 1.0 / M, tl.float32)
    if GATED:
        whole = 0.0
        for part in tl.static_range(len(WIDTHS)):
            whole += tl.sum(tl.sum(mixed[part] * mixed[part], 0), 0)
        factor = 1.0 / tl.sqrt_rn(whole / (M * D) + eps)
        projected = tl.zeros([ROWS], tl.float32)
        for k in tl.static_range(M):
            found = 0.0
            for part in tl.static_range(len(WIDTHS)):
                phi = read_rows(phi_ptr + k * M * D, D, STARTS[part], WIDTHS[part], M, ROWS, D)
                found += tl.sum(tl.sum(mixed[part] * phi, 0), 0)
            projected = tl.where(stream == k, found, projected)
        tl.store(kept_ptr + token * (M + 1) + stream, projected, mask=some)
        tl.store(kept_ptr + token * (M + 1) + M, factor)
        bias = tl.load(bias_ptr + stream, mask=some, other=0.0)
        gate = tl.sigmoid(tl.load(scale_ptr) * projected * factor + bias)
    for part in tl.static_range(len(WIDTHS)):
        output = narrow(tl.sum(gate[:, None] * mixed[part], 0), output_ptr.dtype.element_ty)
        column = STARTS[part] + tl.arange(0, WIDTHS[part])
        tl.store(output_ptr + token * D + column, output, mask=column < D)


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
    key_MD: Tensor,
    score_TPM: Tensor,
    lse_TSM: Tensor,
    phi_KV: Tensor | None,
    scale: Tensor,
    bias_M: Tensor,
    kept: Tensor,
    output_TD: Tensor,
    eps: float,
) -> None:
    """Write a site's output, the running sum's logits and the log-sum-exps of all sources; ``kept`` is for backward."""
    num_streams, num_tokens, width = mix_MTD.shape
    _blend_kernel[(num_tokens,)](
        mix_MTD,
        mix_MTD if newest_MTD is None else newest_MTD,
        key_MD,
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
        **row_sides(width, num_streams),
    )
