"""Backward kernel of hyper-connections' coefficients (hc, mhc): gradients of logits, and what follows by token.

Second in a step's backward pass, after the inner products of X' with the read's gradient and before the pass over the
width (:mod:`scaling.kernels.hyper_backward`). Sinkhorn's iterations are made again and then undone step by step: with
M' = M / s, s the sums along an axis, dM = (dM' - sum_axis(dM' M')) / s.

With x^ = (x - mu) rho and projections p = <x^, phi>, dx = rho (sum_c dp_c phi_c - mean - x^ sum_c dp_c p_c / D), where
mean is 0 without centring. For the pass over the width the kernel leaves rho dp, the slope that x takes (rho^2 / D
times the last sum) and the level that all columns share.

Shape legend: as in :mod:`scaling.kernels.hyper`; P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import HC, MHC, SOFTMAX_EPS, Rule, activate, logits, sinkhorn, sinkhorn_start, tanh_slope
from scaling.kernels.hyper_coefficients import fields_of_rows

TOKENS = 32  # of a program
SUMS = 4  # over tokens: gradients of bias, scale, offset, and shift but for its sign
_SUMS = tl.constexpr(SUMS)


@triton.jit
def _denormalise(matrix, gradient, sum_ptr, sum_mask, valid, ROWS: tl.constexpr):
    """The matrix before a division by its sums, and its gradient."""
    total = tl.load(sum_ptr, mask=sum_mask, other=1.0)
    if ROWS:
        along = tl.sum(gradient * matrix, 2)[:, :, None]
        total = total[:, :, None]
    else:
        along = tl.sum(gradient * matrix, 1)[:, None, :]
        total = total[:, None, :]
    return tl.where(valid, matrix * total, 0.0), tl.where(valid, (gradient - along) / total, 0.0)


@triton.jit
def _add_up(sum_ptr, value, M: tl.constexpr, F: tl.constexpr, FP: tl.constexpr, TOKENS: tl.constexpr):
    """Store the sum over a program's tokens of ``(rows, FP)`` values, a row for each token, or for its streams."""
    SIDE: tl.constexpr = value.shape[0] * FP // TOKENS
    side = tl.arange(0, SIDE)
    total = tl.sum(tl.reshape(value, [TOKENS, SIDE]), 0)
    inside = (side % FP < F) & (side // FP < M)
    tl.store(sum_ptr + side // FP * F + side % FP, total, mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _logits_kernel(
    shift_ptr,  # (F,)
    offset_ptr,  # (F,)
    scale_ptr,  # (K,)
    bias_ptr,  # (K,)
    projected_ptr,  # (T, K)
    factor_ptr,  # (2, T, norms)
    division_ptr,  # (steps, T, M) scratch
    weight_ptr,  # (T, M) inner products of X' with the read's gradient
    new_post_gradient_ptr,  # (T, M)
    new_mix_gradient_ptr,  # (T, M, M)
    logit_gradient_ptr,  # (T, K) scratch; from here on results
    pre_ptr,  # (T, M)
    outer_ptr,  # (T, K) rho dp
    slope_ptr,  # (T, norms)
    level_ptr,  # (T, norms)
    sum_ptr,  # (P, 4, K)
    num_tokens,
    post_scale,
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
    D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    stream = tl.arange(0, MP)
    pair_mask = (token < num_tokens)[:, None] & (stream < M)[None, :]
    place = token[:, None] * M + stream[None, :]
    base = token[:, None] * K
    index = stream[None, :] + tl.zeros([TOKENS, MP], tl.int32)
    line = stream[None, :, None] + tl.zeros([TOKENS, MP, MP], tl.int32)
    other = stream[None, None, :]
    valid = pair_mask[:, :, None] & (other < M)
    weight = tl.load(weight_ptr + place, mask=pair_mask, other=0.0)
    if KIND == HC:
        pre = logits(projected_ptr, scale_ptr, bias_ptr, base + index * F, index * F, pair_mask, PROJECT, TANH)
        tl.store(logit_gradient_ptr + base + index * F, weight, mask=pair_mask)
        post_gradient = tl.load(new_post_gradient_ptr + place, mask=pair_mask, other=0.0)
        tl.store(logit_gradient_ptr + base + index * F + M + 1, post_gradient, mask=pair_mask)
        entry = other * F + 1 + line
        mix_gradient = tl.load(new_mix_gradient_ptr + place[:, :, None] * M + other, mask=valid, other=0.0)
        tl.store(logit_gradient_ptr + base[:, :, None] + entry, mix_gradient, mask=valid)
    else:
        pre = tl.sigmoid(logits(projected_ptr, scale_ptr, bias_ptr, base + index, index, pair_mask, PROJECT, False))
        tl.store(logit_gradient_ptr + base + index, weight * pre * (1.0 - pre), mask=pair_mask)
    tl.store(pre_ptr + place, pre, mask=pair_mask)
    if KIND == MHC:
        post = tl.sigmoid(
            logits(projected_ptr, scale_ptr, bias_ptr, base + M + index, M + index, pair_mask, PROJECT, False)
        )
        post_gradient = tl.load(new_post_gradient_ptr + place, mask=pair_mask, other=0.0)
        tl.store(
            logit_gradient_ptr + base + M + index, post_scale * post_gradient * post * (1.0 - post), mask=pair_mask
        )
        entry = 2 * M + line * M + other
        value = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, False)
        step_stride = num_tokens.to(tl.int64) * M
        begun = sinkhorn_start(value, valid, SOFTMAX_START)
        matrix = sinkhorn(
            begun, division_ptr + place, pair_mask, valid, step_stride, ITERATIONS, ROWS_FIRST, SOFTMAX_START, True
        )
        square = place[:, :, None] * M + other
        if TRANSPOSED:
            square = (token[:, None, None] * M + other) * M + line
        gradient = tl.load(new_mix_gradient_ptr + square, mask=valid, other=0.0)
        tl.debug_barrier()
        last_ptr = division_ptr + place + (2 * ITERATIONS - SOFTMAX_START - 1) * step_stride
        for _ in range(ITERATIONS - SOFTMAX_START):
            matrix, gradient = _denormalise(matrix, gradient, last_ptr, pair_mask, valid, not ROWS_FIRST)
            last_ptr -= step_stride
            matrix, gradient = _denormalise(matrix, gradient, last_ptr, pair_mask, valid, ROWS_FIRST)
            last_ptr -= step_stride
        if SOFTMAX_START:
            matrix, gradient = _denormalise(matrix, gradient, last_ptr, pair_mask, valid, False)
            share = tl.where(valid, begun - SOFTMAX_EPS, 0.0)
            gradient = share * (gradient - tl.sum(gradient * share, 2)[:, :, None])
        else:
            gradient *= begun
        tl.store(logit_gradient_ptr + base[:, :, None] + entry, gradient, mask=valid)
    tl.debug_barrier()  # gradients of logits are read back in another layout
    row, row_mask, spot, spot_mask = fields_of_rows(num_tokens, KIND, M, MP, F, FP, TOKENS)
    logit_gradient = tl.load(logit_gradient_ptr + spot, mask=spot_mask, other=0.0)
    sum_ptr += tl.program_id(0).to(tl.int64) * (_SUMS * K)
    GROUPS: tl.constexpr = M if KIND == HC else 1
    _add_up(sum_ptr, logit_gradient, GROUPS, F, FP, TOKENS)
    if PROJECT:
        field = tl.arange(0, FP)[None, :]
        active = tl.load(projected_ptr + spot, mask=spot_mask, other=0.0)
        outer = logit_gradient * tl.load(scale_ptr + row[:, None] % GROUPS * F + field, mask=spot_mask, other=0.0)
        projected = active
        if TANH:
            active = activate(projected, TANH)
            outer *= tanh_slope(projected)
        _add_up(sum_ptr + K, logit_gradient * active, GROUPS, F, FP, TOKENS)
        factor = tl.load(factor_ptr + row, mask=row_mask, other=0.0)
        if KIND == HC:
            _add_up(sum_ptr + 2 * K, outer, GROUPS, F, FP, TOKENS)
            projected -= tl.load(offset_ptr + field, mask=field < F, other=0.0)
        scaled = outer * factor[:, None]
        tl.store(outer_ptr + spot, scaled, mask=spot_mask)
        WIDTH: tl.constexpr = D if KIND == HC else M * D
        slope = tl.sum(scaled * projected, 1) / WIDTH * factor
        tl.store(slope_ptr + row, slope, mask=row_mask)
        if KIND == HC:
            mean = tl.load(factor_ptr + num_tokens.to(tl.int64) * M + row, mask=row_mask, other=0.0)
            _add_up(sum_ptr + 3 * K, scaled * mean[:, None], GROUPS, F, FP, TOKENS)
            shift = tl.load(shift_ptr + field, mask=field < F, other=0.0)
            tl.store(level_ptr + row, tl.sum(scaled * shift, 1) / D - slope * mean, mask=row_mask)


def logit_gradients(
    rule: Rule,
    *,
    width: int,
    shift_F: Tensor,
    offset_F: Tensor,
    scale_K: Tensor,
    bias_K: Tensor,
    projected_TK: Tensor,
    factor: Tensor,
    weight_TM: Tensor,
    new_post_gradient_TM: Tensor,
    new_mix_gradient_TMM: Tensor,
    pre_TM: Tensor,
    outer_TK: Tensor,
    slope: Tensor,
    level: Tensor,
    sums_PSK: Tensor,
) -> None:
    """Write coefficients of the read, gradients of projections, and sums over tokens by program."""
    num_tokens, streams = weight_TM.shape
    constants = rule.constants(streams)
    del constants["CENTRED"]
    _logits_kernel[(triton.cdiv(num_tokens, TOKENS),)](
        shift_F,
        offset_F,
        scale_K,
        bias_K,
        projected_TK,
        factor,
        weight_TM.new_empty((rule.steps, num_tokens, streams)),
        weight_TM,
        new_post_gradient_TM,
        new_mix_gradient_TMM,
        weight_TM.new_empty((num_tokens, rule.coefficients(streams))),
        pre_TM,
        outer_TK,
        slope,
        level,
        sums_PSK,
        num_tokens,
        rule.post_scale,
        D=width,
        TOKENS=TOKENS,
        **constants,
        num_warps=4,
    )
