"""Backward kernel of hyper-connections (hc, mhc) over the width: gradients of X, f, post and mix.

Third in a step's backward pass (:mod:`scaling.kernels.hyper_backward`), when the gradients of coefficients and
projections are known. A program forms the gradient of X' of some tokens, column chunk by column chunk: what came in,
what the read gives, and what comes through the projections, a product on tensor cores. A thread holds 8 columns of one
token in every stream, so that sums over streams are its own, and those over columns are made within it until the end.

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import HC, SUM, Rule, largest_part
from scaling.kernels.tile import dot, is_exact, narrow

_TOKENS, _COLUMNS, _WARPS = 16, 64, 2  # of a program that spreads: a row of 8 columns a thread


@triton.jit
def _by_token(pointer, inside):
    """One number a token, as a factor of a ``(tokens, lanes, columns of a lane)`` tile."""
    return tl.load(pointer, mask=inside, other=0.0)[:, None, None]


@triton.jit
def _fetch(pointer, spot, mask, COUNT: tl.constexpr, D: tl.constexpr):
    """The first ``COUNT`` streams' tiles, their loads in flight together."""
    tiles = ()
    for i in tl.static_range(COUNT):
        tiles += (tl.load(pointer + spot + i * D, mask=mask, other=0.0),)
    return tiles


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
    inside = token < num_tokens
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
                mask=inside[:, None] & (field < F)[None, :], other=0.0,
            )  # fmt: skip
            high = outer
            if not EXACT:
                high = narrow(outer, narrow_kind)
                lows += (narrow(outer - high.to(tl.float32), narrow_kind),)
            highs += (high,)
    given = ()
    shared = ()
    zero = tl.zeros([TOKENS, COLUMNS // LANE], tl.float32)
    for _ in tl.static_range(M if WRITE else 0):
        given += (zero,)
        for _ in tl.static_range(M):
            shared += (zero,)
    row = token[:, None, None]
    mask = inside[:, None, None]
    columns = tl.arange(0, COLUMNS // LANE)[None, :, None] * LANE + tl.arange(0, LANE)[None, None, :]
    for start in tl.range(0, D, COLUMNS):
        spot = row * (M * D) + start + columns
        flat_spot = row * D + start + columns
        out_gradients = _fetch(out_gradient_ptr, spot, mask, M, D)
        if not PER_STREAM:
            outs = _fetch(out_ptr, spot, mask, M if PROJECT else 0, D)
        backs = ()
        for i in tl.static_range(M if PROJECT else 0):
            phi_row = start + tl.arange(0, COLUMNS) + i * (0 if PER_STREAM else D)
            phi_spot = part_ptr + phi_row[None, :] * SIDE + field[:, None]
            phi = tl.load(phi_spot)
            back = dot(highs[i * OWN], phi, tl.zeros([TOKENS, COLUMNS], tl.float32), EXACT)
            if not EXACT:
                back = dot(lows[i * OWN], phi, back, EXACT)
                back = dot(highs[i * OWN], tl.load(phi_spot + FP), back, EXACT)
            backs += (tl.reshape(back, [TOKENS, COLUMNS // LANE, LANE]),)
        if PER_STREAM:  # fewer registers while the products run, and so three programs an SM
            outs = _fetch(out_ptr, spot, mask, M if PROJECT else 0, D)
        # This load comes after the products: so Triton moves them into its layout, and not everything else into theirs.
        read_gradient = tl.load(read_gradient_ptr + flat_spot, mask=mask, other=0.0).to(tl.float32)
        helds = _fetch(stream_ptr, spot, mask, M if WRITE else 0, D)
        if WRITE:
            update = tl.load(update_ptr + flat_spot, mask=mask, other=0.0)
        totals = ()
        for i in tl.static_range(M):
            total = out_gradients[i].to(tl.float32)
            if KIND == SUM:
                total += read_gradient
            else:
                total += _by_token(pre_ptr + token * M + i, inside) * read_gradient
            if PROJECT:
                norm = token * M + i if PER_STREAM else token
                total -= _by_token(slope_ptr + norm, inside) * outs[i].to(tl.float32)
                if CENTRED:
                    total -= _by_token(level_ptr + norm, inside)
                total += backs[i]
            totals += (total,)
        if WRITE:
            update = update.to(tl.float32)
            update_gradient = tl.zeros([TOKENS, COLUMNS // LANE, LANE], tl.float32)
            new_given = ()
            for i in tl.static_range(M):
                new_given += (given[i] + tl.sum(totals[i] * update, 2),)
                update_gradient += _by_token(post_ptr + token * M + i, inside) * totals[i]
            given = new_given
            update_kind: tl.constexpr = update_gradient_ptr.dtype.element_ty
            tl.store(update_gradient_ptr + flat_spot, narrow(update_gradient, update_kind), mask=mask)
            new_shared = ()
            for j in tl.static_range(M):
                held = helds[j].to(tl.float32)
                gradient = tl.zeros([TOKENS, COLUMNS // LANE, LANE], tl.float32)
                for i in tl.static_range(M):
                    new_shared += (shared[j * M + i] + tl.sum(totals[i] * held, 2),)
                    gradient += _by_token(mix_ptr + (token * M + i) * M + j, inside) * totals[i]
                tl.store(stream_gradient_ptr + spot + j * D, narrow(gradient, kind), mask=mask)
            shared = new_shared
        else:
            for i in tl.static_range(M):
                tl.store(stream_gradient_ptr + spot + i * D, narrow(totals[i], kind), mask=mask)
    for i in tl.static_range(M if WRITE else 0):
        tl.store(post_gradient_ptr + token * M + i, tl.sum(given[i], 1), mask=inside)
        for j in tl.static_range(M):
            tl.store(mix_gradient_ptr + (token * M + i) * M + j, tl.sum(shared[j * M + i], 1), mask=inside)


def spread(
    rule: Rule,
    *,
    stream_TMD: Tensor,
    update_TD: Tensor | None,
    post_TM: Tensor,
    mix_TMM: Tensor,
    part: Tensor,
    out_TMD: Tensor,
    pre_TM: Tensor,
    outer_TK: Tensor,
    slope: Tensor,
    level: Tensor,
    out_gradient_TMD: Tensor,
    read_gradient_TD: Tensor,
    stream_gradient_TMD: Tensor,
    update_gradient_TD: Tensor,
    post_gradient_TM: Tensor,
    mix_gradient_TMM: Tensor,
) -> None:
    """Write the gradients of X, f, post and mix: the pass over the width."""
    num_tokens, streams, width = out_TMD.shape
    constants = rule.constants(streams)
    exact = is_exact(read_gradient_TD.dtype if update_TD is None else update_TD.dtype)
    columns = largest_part(width, _COLUMNS if streams <= 4 else _COLUMNS // 2)
    _spread_kernel[(triton.cdiv(num_tokens, _TOKENS),)](
        stream_TMD,
        read_gradient_TD if update_TD is None else update_TD,
        post_TM,
        mix_TMM,
        part,
        out_TMD,
        pre_TM,
        outer_TK,
        slope,
        level,
        out_gradient_TMD,
        read_gradient_TD,
        stream_gradient_TMD,
        update_gradient_TD,
        post_gradient_TM,
        mix_gradient_TMM,
        num_tokens,
        WRITE=update_TD is not None,
        **{name: constants[name] for name in ("KIND", "PROJECT", "CENTRED", "M", "K", "F", "FP")},
        D=width,
        TOKENS=_TOKENS,
        COLUMNS=columns,
        LANE=min(8, _TOKENS * columns // (32 * _WARPS)),
        EXACT=exact,
        num_warps=_WARPS,
        num_stages=2,
    )
