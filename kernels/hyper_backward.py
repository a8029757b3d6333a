"""Backward pass of hyper-connections (hc, mhc) for all that belongs to tokens.

:func:`step_gradients` takes the gradients of a step's results (:mod:`scaling.kernels.hyper`). Three passes (U is one
tensor of the width): ``<dh, X'_i>`` (:mod:`scaling.kernels.hyper_tokens`, (M + 1) U), gradients of the coefficients
(:mod:`scaling.kernels.hyper_logits`, numbers by token), and here one over the width, (4 M + 3) U: the gradient of X', of
which the part that comes through the projections is made on tensor cores, and from it those of X, f, post and mix.
:mod:`scaling.kernels.hyper_phi` has the projections' weights.

Shape legend: as in :mod:`scaling.kernels.hyper`; P programs.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import HC, SUM, Rule, largest_part
from scaling.kernels.hyper_forward import part_dtype
from scaling.kernels.hyper_logits import logit_gradients
from scaling.kernels.hyper_phi import split
from scaling.kernels.hyper_tokens import weigh
from scaling.kernels.tile import dot, is_exact, narrow


@triton.jit(do_not_specialize=["num_tokens"])
def _spread_kernel(
    stream_ptr,  # (T, M, D) X
    update_ptr,  # (T, D) f
    post_ptr,  # (T, M)
    mix_ptr,  # (T, M, M)
    part_ptr,  # (M * D, 2 * FP) projections' weights, high and low; for hc (D, 2 * FP)
    out_ptr,  # (T, M, D) X'
    pre_ptr,  # (T, M)
    outer_ptr,  # (T, K) rho dp
    slope_ptr,  # (T, norms)
    level_ptr,  # (T, norms)
    out_gradient_ptr,  # (T, M, D)
    read_gradient_ptr,  # (T, D)
    stream_gradient_ptr,  # (T, M, D) from here on results
    update_gradient_ptr,  # (T, D)
    post_gradient_ptr,  # (T, M)
    mix_gradient_ptr,  # (T, M, M)
    num_tokens,
    WRITE: tl.constexpr,
    KIND: tl.constexpr,
    PROJECT: tl.constexpr,
    CENTRED: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    LANE: tl.constexpr,
    EXACT: tl.constexpr,
):
    block = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: the last rows weighed are still in the L2
    token = block.to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    SIDE: tl.constexpr = FP if EXACT else 2 * FP
    PER_STREAM: tl.constexpr = KIND == HC
    OWN: tl.constexpr = 1 if PER_STREAM else 0
    field = tl.arange(0, FP)
    kind: tl.constexpr = stream_gradient_ptr.dtype.element_ty
    narrow_kind: tl.constexpr = part_ptr.dtype.element_ty
    highs = ()
    lows = ()
    if PROJECT:
        for i in tl.static_range(M if PER_STREAM else 1):
            outer = tl.load(
                outer_ptr + token[:, None] * K + i * F + field[None, :],
                mask=(token < num_tokens)[:, None] & (field < F)[None, :], other=0.0,
            )  # fmt: skip
            high = outer
            if not EXACT:
                high = narrow(outer, narrow_kind)
                lows += (narrow(outer - high.to(tl.float32), narrow_kind),)
            highs += (high,)
    given = ()
    shared = ()
    zero = tl.zeros([TOKENS, COLUMNS // LANE], tl.float32)
    for i in tl.static_range(M if WRITE else 0):
        given += (zero,)
        for _ in tl.static_range(M):
            shared += (zero,)
    row = token[:, None, None]
    mask = row < num_tokens
    columns = tl.arange(0, COLUMNS // LANE)[None, :, None] * LANE + tl.arange(0, LANE)[None, None, :]
    for start in range(0, D, COLUMNS):
        spot = row * (M * D) + start + columns
        flat_spot = row * D + start + columns
        read_gradient = tl.load(read_gradient_ptr + flat_spot, mask=mask, other=0.0).to(tl.float32)
        totals = ()
        for i in tl.static_range(M):
            # The product before the loads: what comes first decides which layout Triton moves into the other's.
            if PROJECT:
                phi_row = start + tl.arange(0, COLUMNS) + (0 if PER_STREAM else i * D)
                phi_spot = part_ptr + phi_row[None, :] * SIDE + field[:, None]
                phi = tl.load(phi_spot)
                back = dot(highs[i * OWN], phi, tl.zeros([TOKENS, COLUMNS], tl.float32), EXACT)
                if not EXACT:
                    back = dot(lows[i * OWN], phi, back, EXACT)
                    back = dot(highs[i * OWN], tl.load(phi_spot + FP), back, EXACT)
            total = tl.load(out_gradient_ptr + spot + i * D, mask=mask, other=0.0).to(tl.float32)
            if KIND == SUM:
                total += read_gradient
            else:
                total += tl.load(pre_ptr + row * M + i, mask=mask, other=0.0) * read_gradient
            if PROJECT:
                norm = row * M + i if PER_STREAM else row
                x = tl.load(out_ptr + spot + i * D, mask=mask, other=0.0).to(tl.float32)
                total -= tl.load(slope_ptr + norm, mask=mask, other=0.0) * x
                if CENTRED:
                    total -= tl.load(level_ptr + norm, mask=mask, other=0.0)
                total += tl.reshape(back, [TOKENS, COLUMNS // LANE, LANE])
            totals += (total,)
        if WRITE:
            update = tl.load(update_ptr + flat_spot, mask=mask, other=0.0).to(tl.float32)
            update_gradient = tl.zeros([TOKENS, COLUMNS // LANE, LANE], tl.float32)
            new_given = ()
            for i in tl.static_range(M):
                new_given += (given[i] + tl.sum(totals[i] * update, 2),)
                update_gradient += tl.load(post_ptr + row * M + i, mask=mask, other=0.0) * totals[i]
            given = new_given
            tl.store(update_gradient_ptr + flat_spot, narrow(update_gradient, kind), mask=mask)
            new_shared = ()
            for j in tl.static_range(M):
                held = tl.load(stream_ptr + spot + j * D, mask=mask, other=0.0).to(tl.float32)
                gradient = tl.zeros([TOKENS, COLUMNS // LANE, LANE], tl.float32)
                for i in tl.static_range(M):
                    new_shared += (shared[j * M + i] + tl.sum(totals[i] * held, 2),)
                    gradient += tl.load(mix_ptr + (row * M + i) * M + j, mask=mask, other=0.0) * totals[i]
                tl.store(stream_gradient_ptr + spot + j * D, narrow(gradient, kind), mask=mask)
            shared = new_shared
        else:
            for i in tl.static_range(M):
                tl.store(stream_gradient_ptr + spot + i * D, narrow(totals[i], kind), mask=mask)
    inside = token < num_tokens
    for i in tl.static_range(M if WRITE else 0):
        tl.store(post_gradient_ptr + token * M + i, tl.sum(given[i], 1), mask=inside)
        for j in tl.static_range(M):
            tl.store(mix_gradient_ptr + (token * M + i) * M + j, tl.sum(shared[j * M + i], 1), mask=inside)
