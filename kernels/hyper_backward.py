"""Backward kernel of hyper-connections (hc, mhc): one launch for all that belongs to tokens.

:func:`step_gradients` takes the gradients of a step's results (:mod:`scaling.kernels.hyper`). A first pass over the
width forms ``<dh, X'_i>``; the coefficients' gradients follow in registers, Sinkhorn iterations recomputed and then
undone step by step; a second pass forms the gradient of X' and from it those of X, f, post and mix.
:mod:`scaling.kernels.hyper_phi` has the projections' weights.

With M' = M / s, s the sums along an axis: dM = (dM' - sum_axis(dM' M')) / s. With x^ = (x - mu) rho and projections
p = <x^, phi>: dx = rho (sum_c dp_c phi_c - mean - x^ sum_c dp_c p_c / D), where mean is 0 without centring.

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import (
    HC,
    MHC,
    SOFTMAX_EPS,
    SUM,
    Rule,
    activate,
    dot_split,
    logits,
    sinkhorn,
    sinkhorn_start,
    tile_sides,
)
from scaling.kernels.tile import is_exact, narrow


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


@triton.jit(do_not_specialize=["num_tokens"])
def _step_gradient_kernel(
    stream_ptr,  # (T, M, D) X
    update_ptr,  # (T, D) f
    post_ptr,  # (T, M)
    mix_ptr,  # (T, M, M)
    phi_ptr,
    shift_ptr,  # (F,)
    offset_ptr,  # (F,)
    scale_ptr,  # (K,)
    bias_ptr,  # (K,)
    out_ptr,  # (T, M, D) X'
    projected_ptr,  # (T, K)
    factor_ptr,  # (2, T, norms)
    sum_ptr,  # (steps, T, M) scratch
    out_gradient_ptr,  # (T, M, D)
    read_gradient_ptr,  # (T, D)
    new_post_gradient_ptr,  # (T, M)
    new_mix_gradient_ptr,  # (T, M, M)
    stream_gradient_ptr,  # (T, M, D) from here on results
    update_gradient_ptr,  # (T, D)
    post_gradient_ptr,  # (T, M)
    mix_gradient_ptr,  # (T, M, M)
    logit_gradient_ptr,  # (T, K)
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
    row = stream[None, :, None]
    other = stream[None, None, :]
    valid = mask & (other < M)
    base = token[:, None] * K
    index = stream[None, :] + tl.zeros([TOKENS, MP], tl.int32)
    cube = tl.zeros([TOKENS, MP, MP], tl.int32)
    pre = tl.full([TOKENS, MP], 1.0, tl.float32)
    if KIND != SUM:
        pre_gradient = tl.zeros([TOKENS, MP], tl.float32)
        for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            where = place[:, :, None] * D + column[None, None, :]
            x = tl.load(out_ptr + where, mask=mask, other=0.0).to(tl.float32)
            read_place = token[:, None] * D + column[None, :]
            gradient = tl.load(read_gradient_ptr + read_place, mask=token_mask[:, None], other=0.0).to(tl.float32)
            pre_gradient += tl.sum(x * gradient[:, None, :], 2)
        if KIND == HC:
            pre = logits(projected_ptr, scale_ptr, bias_ptr, base + index * F, index * F, pair_mask, PROJECT, TANH)
            tl.store(logit_gradient_ptr + base + index * F, pre_gradient, mask=pair_mask)
            post_gradient = tl.load(new_post_gradient_ptr + place, mask=pair_mask, other=0.0)
            tl.store(logit_gradient_ptr + base + index * F + M + 1, post_gradient, mask=pair_mask)
            entry = other * F + 1 + row + cube
            mix_gradient = tl.load(new_mix_gradient_ptr + place[:, :, None] * M + other, mask=valid, other=0.0)
            tl.store(logit_gradient_ptr + base[:, :, None] + entry, mix_gradient, mask=valid)
        else:
            pre = tl.sigmoid(logits(projected_ptr, scale_ptr, bias_ptr, base + index, index, pair_mask, PROJECT, False))
            tl.store(logit_gradient_ptr + base + index, pre_gradient * pre * (1.0 - pre), mask=pair_mask)
        if KIND == MHC:
            post = tl.sigmoid(
                logits(projected_ptr, scale_ptr, bias_ptr, base + M + index, M + index, pair_mask, PROJECT, False)
            )
            post_gradient = tl.load(new_post_gradient_ptr + place, mask=pair_mask, other=0.0)
            tl.store(
                logit_gradient_ptr + base + M + index, post_scale * post_gradient * post * (1.0 - post), mask=pair_mask
            )
            entry = 2 * M + row * M + other + cube
            value = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, False)
            step_stride = num_tokens.to(tl.int64) * M
            begun = sinkhorn_start(value, valid, SOFTMAX_START)
            matrix = sinkhorn(
                begun, sum_ptr + place, pair_mask, valid, step_stride, ITERATIONS, ROWS_FIRST, SOFTMAX_START
            )
            square = place[:, :, None] * M + other
            if TRANSPOSED:
                square = (token[:, None, None] * M + other) * M + row
            gradient = tl.load(new_mix_gradient_ptr + square, mask=valid, other=0.0)
            tl.debug_barrier()
            last_ptr = sum_ptr + place + (2 * ITERATIONS - SOFTMAX_START - 1) * step_stride
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
        tl.debug_barrier()  # gradients of l are read back in another layout
    if PROJECT:
        # Gradients dp of the projections, what they take along the norm's direction, and the weights' shift.
        if KIND == HC:
            flat = tl.arange(0, TOKENS * MP)
            flat_token = tl.program_id(0).to(tl.int64) * TOKENS + flat // MP
            norm_mask = (flat % MP < M) & (flat_token < num_tokens)
            norm = flat_token * M + flat % MP
            which = (flat % MP)[:, None] * F + field[None, :]
            place_of_field = norm[:, None] * F + field[None, :]
        else:
            norm_mask = token_mask
            norm = token
            which = field[None, :] + tl.zeros([TOKENS, FP], tl.int32)
            place_of_field = token[:, None] * K + field[None, :]
        field_mask = norm_mask[:, None] & (field < F)[None, :]
        outer = tl.load(logit_gradient_ptr + place_of_field, mask=field_mask, other=0.0)
        projected = tl.load(projected_ptr + place_of_field, mask=field_mask, other=0.0)
        outer *= tl.load(scale_ptr + which, mask=field_mask, other=0.0)
        if TANH:
            active = activate(projected, TANH)
            outer *= 1.0 - active * active
        factor = tl.load(factor_ptr + norm, mask=norm_mask, other=0.0)
        if KIND == HC:
            offset = tl.load(offset_ptr + field, mask=field < F, other=0.0)
            along = tl.sum(outer * (projected - offset[None, :]), 1) / D
            shift = tl.load(shift_ptr + field, mask=field < F, other=0.0)
            level = tl.sum(outer * shift[None, :], 1) / D
            mean = tl.load(factor_ptr + num_tokens.to(tl.int64) * M + norm, mask=norm_mask, other=0.0)
            along = tl.reshape(along * factor, [TOKENS, MP])[:, :, None]
            level = tl.reshape(level, [TOKENS, MP])[:, :, None]
            mean = tl.reshape(mean, [TOKENS, MP])[:, :, None]
            factor = tl.reshape(factor, [TOKENS, MP])[:, :, None]
        else:
            along = (tl.sum(outer * projected, 1) / (M * D) * factor)[:, None, None]
            factor = factor[:, None, None]
    if WRITE:
        given = tl.load(post_ptr + place, mask=pair_mask, other=0.0)
        given_gradient = tl.zeros([TOKENS, MP], tl.float32)
        share_gradient = tl.zeros([TOKENS, MP, MP], tl.float32)
    kind: tl.constexpr = stream_gradient_ptr.dtype.element_ty
    for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        spot = place[:, :, None] * D + column[None, None, :]
        flat_spot = token[:, None] * D + column[None, :]
        total = tl.load(out_gradient_ptr + spot, mask=mask, other=0.0).to(tl.float32)
        read_gradient = tl.load(read_gradient_ptr + flat_spot, mask=token_mask[:, None], other=0.0).to(tl.float32)
        total += pre[:, :, None] * read_gradient[:, None, :]
        if PROJECT:
            kept = tl.load(out_ptr + spot, mask=mask, other=0.0).to(tl.float32)
            if KIND == HC:
                phi_row = column
                phi_mask = (field < F)[:, None] & (column < D)[None, :]
            else:
                side = tl.arange(0, MP * COLUMNS)
                phi_row = side // COLUMNS * D + start + side % COLUMNS
                phi_mask = (field < F)[:, None] & (side // COLUMNS < M)[None, :]
            phi = tl.load(phi_ptr + phi_row[None, :] * F + field[:, None], mask=phi_mask, other=0.0)
            if KIND == HC:
                back = dot_split(outer, phi, tl.zeros([TOKENS * MP, COLUMNS], tl.float32), EXACT)
                back = tl.reshape(back, [TOKENS, MP, COLUMNS])
                if CENTRED:
                    back -= level
                    kept -= mean
            else:
                back = dot_split(outer, phi, tl.zeros([TOKENS, MP * COLUMNS], tl.float32), EXACT)
                back = tl.reshape(back, [TOKENS, MP, COLUMNS])
            total += factor * (back - kept * along)
        if WRITE:
            total = tl.where(mask, total, 0.0)
            update = tl.load(update_ptr + flat_spot, mask=token_mask[:, None], other=0.0).to(tl.float32)
            given_gradient += tl.sum(total * update[:, None, :], 2)
            tl.store(
                update_gradient_ptr + flat_spot,
                narrow(tl.sum(total * given[:, :, None], 1), update_gradient_ptr.dtype.element_ty),
                mask=token_mask[:, None],
            )  # fmt: skip
            for source in tl.static_range(M):
                portion = tl.load(mix_ptr + place * M + source, mask=pair_mask, other=0.0)
                source_place = (token * M + source)[:, None] * D + column[None, :]
                held = tl.load(stream_ptr + source_place, mask=token_mask[:, None], other=0.0).to(tl.float32)
                product = tl.sum(total * held[:, None, :], 2)
                share_gradient += tl.where(other == source, product[:, :, None], 0.0)
                tl.store(
                    stream_gradient_ptr + source_place, narrow(tl.sum(total * portion[:, :, None], 1), kind),
                    mask=token_mask[:, None],
                )  # fmt: skip
        else:
            tl.store(stream_gradient_ptr + spot, narrow(total, kind), mask=mask)
    if WRITE:
        tl.store(post_gradient_ptr + place, given_gradient, mask=pair_mask)
        tl.store(mix_gradient_ptr + place[:, :, None] * M + other, share_gradient, mask=valid)


def step_gradients(
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
    projected_TK: Tensor,
    factor: Tensor,
    out_gradient_TMD: Tensor,
    read_gradient_TD: Tensor,
    new_post_gradient_TM: Tensor,
    new_mix_gradient_TMM: Tensor,
    stream_gradient_TMD: Tensor,
    update_gradient_TD: Tensor,
    post_gradient_TM: Tensor,
    mix_gradient_TMM: Tensor,
    logit_gradient_TK: Tensor,
) -> None:
    """Write the gradients of what a step took, and of its coefficients' logits."""
    num_tokens, streams, width = out_TMD.shape
    sides = tile_sides(streams, width)
    sums = projected_TK.new_empty((rule.steps, num_tokens, streams))
    _step_gradient_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]),)](
        stream_TMD,
        read_gradient_TD if update_TD is None else update_TD,
        post_TM,
        mix_TMM,
        phi,
        shift_F,
        offset_F,
        scale_K,
        bias_K,
        out_TMD,
        projected_TK,
        factor,
        sums,
        out_gradient_TMD,
        read_gradient_TD,
        new_post_gradient_TM,
        new_mix_gradient_TMM,
        stream_gradient_TMD,
        update_gradient_TD,
        post_gradient_TM,
        mix_gradient_TMM,
        logit_gradient_TK,
        num_tokens,
        rule.eps,
        rule.post_scale,
        WRITE=update_TD is not None,
        D=width,
        STAGES=1,
        EXACT=is_exact(read_gradient_TD.dtype if update_TD is None else update_TD.dtype),
        **rule.constants(streams),
        **{**sides, "num_warps": 8},
    )
