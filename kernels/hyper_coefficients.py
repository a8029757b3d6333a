"""Kernel of hyper-connections (hc, mhc) that turns projections into coefficients: norm, logits, Sinkhorn.

Third in a step's forward pass, between projecting and reading (:mod:`scaling.kernels.hyper_forward`). Numbers by token
only, a few hundred bytes each: what counts here is that the Sinkhorn iterations, a chain of dependent divisions, run
for many tokens at a time.

Shape legend: as in :mod:`scaling.kernels.hyper`; S splits of a projected row.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import HC, MHC, Rule, logits, sinkhorn, sinkhorn_start

_TOKENS = 32


@triton.jit
def fields_of_rows(
    num_tokens,
    KIND: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    """Rows that are normed, their mask, and places and mask of their projections, a program's ``(rows, FP)`` tile."""
    field = tl.arange(0, FP)[None, :]
    first = tl.program_id(0).to(tl.int64) * TOKENS
    if KIND == HC:
        flat = tl.arange(0, TOKENS * MP)
        row = (first + flat // MP) * M + flat % MP
        row_mask = (flat % MP < M) & (first + flat // MP < num_tokens)
    else:
        row = first + tl.arange(0, TOKENS)
        row_mask = row < num_tokens
    return row, row_mask, row[:, None] * F + field, row_mask[:, None] & (field < F)


@triton.jit(do_not_specialize=["num_tokens"])
def _coefficients_kernel(
    partial_ptr,  # (S, T, K)
    factor_ptr,  # (2, T, norms) RMS factors and means
    shift_ptr,  # (F,) hc: what centring takes off a projection, by unit of the mean
    offset_ptr,  # (F,) hc: what the norm's bias adds
    scale_ptr,  # (K,)
    bias_ptr,  # (K,)
    projected_ptr,  # (T, K)
    pre_ptr,  # (T, M)
    new_post_ptr,  # (T, M)
    new_mix_ptr,  # (T, M, M)
    num_tokens,
    post_scale,
    SPLITS: tl.constexpr,
    KIND: tl.constexpr,
    PROJECT: tl.constexpr,
    TANH: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    SOFTMAX_START: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    TOKENS: tl.constexpr,
):
    if PROJECT:
        row, row_mask, spot, spot_mask = fields_of_rows(num_tokens, KIND, M, MP, F, FP, TOKENS)
        projected = tl.load(partial_ptr + spot, mask=spot_mask, other=0.0)
        for split in tl.static_range(1, SPLITS):
            projected += tl.load(partial_ptr + split * num_tokens.to(tl.int64) * K + spot, mask=spot_mask, other=0.0)
        factor = tl.load(factor_ptr + row, mask=row_mask, other=0.0)[:, None]
        if KIND == HC:
            field = tl.arange(0, FP)
            shift = tl.load(shift_ptr + field, mask=field < F, other=0.0)[None, :]
            offset = tl.load(offset_ptr + field, mask=field < F, other=0.0)[None, :]
            mean = tl.load(factor_ptr + num_tokens.to(tl.int64) * M + row, mask=row_mask, other=0.0)[:, None]
            tl.store(projected_ptr + spot, (projected - mean * shift) * factor + offset, mask=spot_mask)
        else:
            tl.store(projected_ptr + spot, projected * factor, mask=spot_mask)
        tl.debug_barrier()  # projections are read back in other layouts
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    stream = tl.arange(0, MP)
    pair_mask = (token < num_tokens)[:, None] & (stream < M)[None, :]
    place = token[:, None] * M + stream[None, :]
    base = token[:, None] * K
    index = stream[None, :] + tl.zeros([TOKENS, MP], tl.int32)
    line = stream[None, :, None] + tl.zeros([TOKENS, MP, MP], tl.int32)
    other = stream[None, None, :]
    valid = pair_mask[:, :, None] & (other < M)
    square = place[:, :, None] * M + other
    if KIND == HC:
        pre = logits(projected_ptr, scale_ptr, bias_ptr, base + index * F, index * F, pair_mask, PROJECT, TANH)
        last = index * F + M + 1
        new_post = logits(projected_ptr, scale_ptr, bias_ptr, base + last, last, pair_mask, PROJECT, TANH)
        tl.store(new_post_ptr + place, new_post, mask=pair_mask)
        entry = other * F + 1 + line  # stream `other` gives this share to stream `line`
        new_mix = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, TANH)
        tl.store(new_mix_ptr + square, new_mix, mask=valid)
    else:
        pre = tl.sigmoid(logits(projected_ptr, scale_ptr, bias_ptr, base + index, index, pair_mask, PROJECT, False))
        if KIND == MHC:
            new_post = tl.sigmoid(
                logits(projected_ptr, scale_ptr, bias_ptr, base + M + index, M + index, pair_mask, PROJECT, False)
            )
            tl.store(new_post_ptr + place, post_scale * new_post, mask=pair_mask)
            entry = 2 * M + line * M + other
            value = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, False)
            new_mix = sinkhorn(
                sinkhorn_start(value, valid, SOFTMAX_START), new_mix_ptr + place, pair_mask, valid, 0,
                ITERATIONS, ROWS_FIRST, SOFTMAX_START, False,
            )  # fmt: skip
            if TRANSPOSED:
                square = (token[:, None, None] * M + other) * M + line
            tl.store(new_mix_ptr + square, new_mix, mask=valid)
    tl.store(pre_ptr + place, pre, mask=pair_mask)


def coefficients(
    rule: Rule,
    *,
    partial: Tensor,
    factor: Tensor,
    shift_F: Tensor,
    offset_F: Tensor,
    scale_K: Tensor,
    bias_K: Tensor,
    projected_TK: Tensor,
    pre_TM: Tensor,
    new_post_TM: Tensor,
    new_mix_TMM: Tensor,
) -> None:
    """Write the normed projections and the coefficients that follow from them."""
    num_tokens, streams = pre_TM.shape
    constants = rule.constants(streams)
    del constants["CENTRED"]
    _coefficients_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        partial,
        factor,
        shift_F,
        offset_F,
        scale_K,
        bias_K,
        projected_TK,
        pre_TM,
        new_post_TM,
        new_mix_TMM,
        num_tokens,
        rule.post_scale,
        SPLITS=partial.shape[0],
        TOKENS=_TOKENS,
        **constants,
        num_warps=4,
    )
