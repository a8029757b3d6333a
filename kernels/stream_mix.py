"""Forward kernels of multi-stream routing (msar): mixes of finished sources, a phase at a time, and a site's output.

Between :mod:`scaling.kernels.stream_expand`, which makes the streams, and :mod:`scaling.kernels.stream_ledger`. The
sites of a block read the same finished sources, and their logits are known when the block begins: :func:`mix` reads
each stream once for all of them. :func:`blend` scores a site's running sum and folds it in, projects the mixes on the
gates' weights, and adds the gated streams: a program holds all rows of a token.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.stream_rows import added, read_row, repeated, row_sides, sums, write_row
from scaling.kernels.streams import Phase, tile
from scaling.kernels.tile import narrow

_MIX = {"COLUMNS": 512, "STAGES": 4, "num_warps": 1}
_BLEND = {"tokens": 1, "per_warp": 512}


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
    phi_ptr,  # (M, M * D) of the site, gates first, in the streams' dtype
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
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    PARTS: tl.constexpr = len(WIDTHS)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    plane = tl.cast(num_tokens, tl.int64) * D
    mixed = ()  # by token, stream and part of the width, as all rows here
    values = ()
    lses = ()
    for index in tl.static_range(TOKENS):
        token = tl.minimum(first + index, num_tokens - 1)
        for stream in tl.static_range(M):
            place = stream * plane + token * D
            for part in tl.static_range(PARTS):
                mixed = mixed + (read_row(mix_ptr + place, STARTS[part], WIDTHS[part], D),)
                if NEWEST:
                    values = values + (read_row(newest_ptr + place, STARTS[part], WIDTHS[part], D),)
            if NEWEST:  # every warp reads them, one writes them behind the barrier below
                lses = lses + (tl.load(lse_ptr + (token * num_sites + site) * M + stream),)
    if NEWEST:
        totals = repeated(0.0, 2 * TOKENS * M)  # <u, X> and <X, X>
        for part in tl.static_range(PARTS):
            rows = ()
            for stream in tl.static_range(M):
                key = read_row(key_ptr + stream * D, STARTS[part], WIDTHS[part], D)
                for index in tl.static_range(TOKENS):
                    value = values[(index * M + stream) * PARTS + part]
                    rows = rows + (value * key, value * value)
            totals = added(totals, sums(rows), 2 * TOKENS * M)
        tl.debug_barrier()
        blended = ()
        for index in tl.static_range(TOKENS):
            token = first + index
            for stream in tl.static_range(M):
                along = totals[2 * (stream * TOKENS + index)]
                score = along * (1.0 / tl.sqrt_rn(totals[2 * (stream * TOKENS + index) + 1] / D + eps))
                lse = lses[index * M + stream]
                top = tl.maximum(lse, score)
                total = top + tl.log(tl.exp(lse - top) + tl.exp(score - top))
                tl.store(score_ptr + (token * num_pairs + pair) * M + stream, score, mask=token < num_tokens)
                tl.store(lse_ptr + (token * num_sites + site) * M + stream, total, mask=token < num_tokens)
                older = tl.exp(lse - total)
                newer = tl.exp(score - total)
                for part in tl.static_range(PARTS):
                    value = newer * values[(index * M + stream) * PARTS + part]
                    blended = blended + (older * mixed[(index * M + stream) * PARTS + part] + value,)
        mixed = blended
    gates = repeated(1.0 / M, TOKENS * M)
    if GATED:
        totals = repeated(0.0, (M + 1) * TOKENS)  # projections, gates first, and squares
        for part in tl.static_range(PARTS):
            rows = ()
            for gate in tl.static_range(M + 1):
                projected = repeated(tl.zeros_like(mixed[part]), TOKENS)
                for stream in tl.static_range(M):
                    if gate < M:
                        phi = read_row(phi_ptr + (gate * M + stream) * D, STARTS[part], WIDTHS[part], D)
                    more = ()
                    for index in tl.static_range(TOKENS):
                        value = mixed[(index * M + stream) * PARTS + part]
                        if gate < M:
                            more = more + (projected[index] + value * phi,)
                        else:
                            more = more + (projected[index] + value * value,)
                    projected = more
                rows = rows + projected
            totals = added(totals, sums(rows), (M + 1) * TOKENS)
        gates = ()
        scale = tl.load(scale_ptr)
        for index in tl.static_range(TOKENS):
            token = first + index
            factor = 1.0 / tl.sqrt_rn(totals[M * TOKENS + index] / (M * D) + eps)
            tl.store(kept_ptr + token * (M + 1) + M, factor, mask=token < num_tokens)
            for gate in tl.static_range(M):
                projected = totals[gate * TOKENS + index]
                tl.store(kept_ptr + token * (M + 1) + gate, projected, mask=token < num_tokens)
                gates = gates + (tl.sigmoid(scale * projected * factor + tl.load(bias_ptr + gate)),)
    for index in tl.static_range(TOKENS):
        token = first + index
        for part in tl.static_range(PARTS):
            output = tl.zeros_like(mixed[part])
            for stream in tl.static_range(M):
                output += gates[index * M + stream] * mixed[(index * M + stream) * PARTS + part]
            output = narrow(output, output_ptr.dtype.element_ty)
            write_row(output_ptr + token * D, output, token < num_tokens, STARTS[part], D)


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
    _blend_kernel[(triton.cdiv(num_tokens, _BLEND["tokens"]),)](
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
        **row_sides(width, num_streams, **_BLEND),
    )
