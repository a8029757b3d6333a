"""Forward kernel of hyper-connections (hc, mhc): write one sublayer's output into the streams, read for the next.

One launch a sublayer: ``X' = mix X + post f`` is formed, stored and projected in one pass over the width; the
projections give the coefficients of read, write and mixing (Sinkhorn iterations included) in registers; a second pass
over the program's own X', from cache, gives ``h = pre X'``. A token's streams are read once and written once.

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import HC, MHC, SUM, Rule, dot_split, logits, sinkhorn, sinkhorn_start, tile_sides
from scaling.kernels.tile import is_exact, narrow


@triton.jit(do_not_specialize=["num_tokens"])
def _step_kernel(
    stream_ptr,  # (T, M, D)
    update_ptr,  # (T, D) output f of the last sublayer
    post_ptr,  # (T, M)
    mix_ptr,  # (T, M, M)
    phi_ptr,  # (M * D, K), or (D, F) for hc
    shift_ptr,  # (F,) hc: what centring takes off a projection, by unit of the mean
    offset_ptr,  # (F,) hc: what the norm's bias adds
    scale_ptr,  # (K,)
    bias_ptr,  # (K,)
    out_ptr,  # (T, M, D) the new streams
    read_ptr,  # (T, D)
    new_post_ptr,  # (T, M)
    new_mix_ptr,  # (T, M, M)
    projected_ptr,  # (T, K)
    factor_ptr,  # (2, T, norms) RMS factors and means
    sum_ptr,  # (steps, T, M) scratch
    num_tokens,
    eps,
    post_scale,
    WRITE: tl.constexpr,
    KIND: tl.constexpr,
    PROJECT: tl.constexpr,
    TANH: tl.constexpr,
    CENTRED: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    SOFTMAX_START: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < num_tokens
    stream = tl.arange(0, MP)
    pair_mask = token_mask[:, None] & (stream < M)[None, :]
    place = token[:, None] * M + stream[None, :]
    mask = pair_mask[:, :, None]
    field = tl.arange(0, FP)
    if WRITE:
        post = tl.load(post_ptr + place, mask=pair_mask, other=0.0)
    if PROJECT:
        if KIND == HC:
            first = tl.zeros([TOKENS, MP], tl.float32)
            second = tl.zeros([TOKENS, MP], tl.float32)
            projected = tl.zeros([TOKENS * MP, FP], tl.float32)
        else:
            first = tl.zeros([TOKENS], tl.float32)
            second = tl.zeros([TOKENS], tl.float32)
            projected = tl.zeros([TOKENS, FP], tl.float32)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if WRITE or PROJECT:
        for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            if WRITE:
                update = tl.load(update_ptr + token[:, None] * D + column[None, :], mask=token_mask[:, None], other=0.0)
                x = post[:, :, None] * update.to(tl.float32)[:, None, :]
                for other in tl.static_range(M):
                    value = tl.load(
                        stream_ptr + (token * M + other)[:, None] * D + column[None, :],
                        mask=token_mask[:, None], other=0.0,
                    ).to(tl.float32)  # fmt: skip
                    share = tl.load(mix_ptr + place * M + other, mask=pair_mask, other=0.0)
                    x += share[:, :, None] * value[:, None, :]
                rounded = narrow(x, kind)
                tl.store(out_ptr + place[:, :, None] * D + column[None, None, :], rounded, mask=mask)
                x = rounded.to(tl.float32)
            else:
                x = tl.load(stream_ptr + place[:, :, None] * D + column[None, None, :], mask=mask, other=0.0)
                x = x.to(tl.float32)
            if PROJECT:
                if KIND == HC:
                    first += tl.sum(x, 2)
                    second += tl.sum(x * x, 2)
                    phi_row = column
                    rows = tl.reshape(x, [TOKENS * MP, COLUMNS])
                    phi_mask = (field < F)[None, :] & (column < D)[:, None]
                else:
                    second += tl.sum(tl.sum(x * x, 2), 1)
                    side = tl.arange(0, MP * COLUMNS)
                    phi_row = side // COLUMNS * D + start + side % COLUMNS
                    rows = tl.reshape(x, [TOKENS, MP * COLUMNS])
                    phi_mask = (field < F)[None, :] & (side // COLUMNS < M)[:, None]
                phi = tl.load(phi_ptr + phi_row[:, None] * F + field[None, :], mask=phi_mask, other=0.0)
                projected = dot_split(rows, phi, projected, EXACT)
    if PROJECT:
        if KIND == HC:
            mean = tl.zeros([TOKENS, MP], tl.float32)
            if CENTRED:
                mean = first / D
            factor = 1.0 / tl.sqrt_rn(tl.maximum(second / D - mean * mean, 0.0) + eps)
            tl.store(factor_ptr + place, factor, mask=pair_mask)
            tl.store(factor_ptr + num_tokens.to(tl.int64) * M + place, mean, mask=pair_mask)
            shift = tl.load(shift_ptr + field, mask=field < F, other=0.0)
            offset = tl.load(offset_ptr + field, mask=field < F, other=0.0)
            flat_factor = tl.reshape(factor, [TOKENS * MP])[:, None]
            flat_mean = tl.reshape(mean, [TOKENS * MP])[:, None]
            projected = (projected - flat_mean * shift[None, :]) * flat_factor + offset[None, :]
            flat = tl.arange(0, TOKENS * MP)
            row = (tl.program_id(0).to(tl.int64) * TOKENS + flat // MP) * M + flat % MP
            flat_mask = (flat % MP < M) & (tl.program_id(0) * TOKENS + flat // MP < num_tokens)
            tl.store(
                projected_ptr + row[:, None] * F + field[None, :], projected,
                mask=flat_mask[:, None] & (field < F)[None, :],
            )  # fmt: skip
        else:
            factor = 1.0 / tl.sqrt_rn(second / (M * D) + eps)
            tl.store(factor_ptr + token, factor, mask=token_mask)
            tl.store(
                projected_ptr + token[:, None] * F + field[None, :], projected * factor[:, None],
                mask=token_mask[:, None] & (field < F)[None, :],
            )  # fmt: skip
    tl.debug_barrier()  # projections and streams are read back in other layouts
    row = tl.arange(0, MP)[None, :, None]
    other = tl.arange(0, MP)[None, None, :]
    valid = mask & (other < M)
    square = place[:, :, None] * M + other
    pre = tl.full([TOKENS, MP], 1.0, tl.float32)
    base = token[:, None] * K
    index = stream[None, :] + tl.zeros([TOKENS, MP], tl.int32)
    if KIND == HC:
        pre = logits(projected_ptr, scale_ptr, bias_ptr, base + index * F, index * F, pair_mask, PROJECT, TANH)
        last = index * F + M + 1
        new_post = logits(projected_ptr, scale_ptr, bias_ptr, base + last, last, pair_mask, PROJECT, TANH)
        tl.store(new_post_ptr + place, new_post, mask=pair_mask)
        entry = other * F + 1 + row  # stream `other` gives this share to stream `row`
        entry = entry + tl.zeros([TOKENS, MP, MP], tl.int32)
        new_mix = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, TANH)
        tl.store(new_mix_ptr + square, new_mix, mask=valid)
    elif KIND != SUM:
        pre = tl.sigmoid(logits(projected_ptr, scale_ptr, bias_ptr, base + index, index, pair_mask, PROJECT, False))
        if KIND == MHC:
            new_post = tl.sigmoid(
                logits(projected_ptr, scale_ptr, bias_ptr, base + M + index, M + index, pair_mask, PROJECT, False)
            )
            tl.store(new_post_ptr + place, post_scale * new_post, mask=pair_mask)
            entry = 2 * M + row * M + other + tl.zeros([TOKENS, MP, MP], tl.int32)
            value = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, False)
            step_stride = num_tokens.to(tl.int64) * M
            new_mix = sinkhorn(
                sinkhorn_start(value, valid, SOFTMAX_START), sum_ptr + place, pair_mask, valid, step_stride,
                ITERATIONS, ROWS_FIRST, SOFTMAX_START,
            )  # fmt: skip
            if TRANSPOSED:
                square = (token[:, None, None] * M + other) * M + row
            tl.store(new_mix_ptr + square, new_mix, mask=valid)
    for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        where = place[:, :, None] * D + column[None, None, :]
        if WRITE:
            x = tl.load(out_ptr + where, mask=mask, other=0.0)
        else:
            x = tl.load(stream_ptr + where, mask=mask, other=0.0)
        read = tl.sum(x.to(tl.float32) * pre[:, :, None], 1)
        tl.store(read_ptr + token[:, None] * D + column[None, :], narrow(read, kind), mask=token_mask[:, None])


def step(
    rule: Rule,
    *,
    stream_TMD: Tensor,
    update_TD: Tensor | None,
    post_TM: Tensor,
    mix_TMM: Tensor,
    phi: Tensor,
    shift_F: Tensor,
    offset_F: Tensor,
    scale_K: Tensor,
    bias_K: Tensor,
    out_TMD: Tensor,
    read_TD: Tensor,
    new_post_TM: Tensor,
    new_mix_TMM: Tensor,
    projected_TK: Tensor,
    factor: Tensor,
) -> None:
    """Write the update into the streams (none: they stay) and read for the next sublayer, with new coefficients."""
    num_tokens, streams, width = stream_TMD.shape
    sides = tile_sides(streams, width)
    sums = post_TM.new_empty((rule.steps, num_tokens, streams))
    _step_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]),)](
        stream_TMD,
        read_TD if update_TD is None else update_TD,
        post_TM,
        mix_TMM,
        phi,
        shift_F,
        offset_F,
        scale_K,
        bias_K,
        out_TMD,
        read_TD,
        new_post_TM,
        new_mix_TMM,
        projected_TK,
        factor,
        sums,
        num_tokens,
        rule.eps,
        rule.post_scale,
        WRITE=update_TD is not None,
        D=width,
        STAGES=2,
        EXACT=is_exact(read_TD.dtype if update_TD is None else update_TD.dtype),
        **rule.constants(streams),
        **sides,
    )
