"""Backward kernel of multi-stream routing (msar): gradients of streams become those of their source and of the kernels.

The transpose of :func:`scaling.kernels.streams.expand`: ``dv_t = sum over j, tau of c_(j,tau) dX_(j,t+tau)`` and
``dc_(j,tau) = sum_t dX_(j,t+tau) v_t``, within a document.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Streams, tile
from scaling.kernels.tile import narrow

_FOLD = {"TOKENS": 16, "COLUMNS": 64, "num_warps": 1}


@triton.jit(do_not_specialize=["owner", "num_tokens", "span"])
def _fold_kernel(
    source_ptr,  # (T, D)
    stream_gradient_ptr,  # (M, T, D) dX
    tap_ptr,  # (Q, K, D) float32
    age_ptr,  # (T,) int32
    result_ptr,  # (T, D) out; added to if ADD
    tap_gradient_ptr,  # (G, K, D) float32 out
    owner,
    num_tokens,
    span,
    owner_stride,
    ADD: tl.constexpr,
    TAPS: tl.constexpr,  # of each stream
    FIRST: tl.constexpr,  # the first of each stream
    MOST: tl.constexpr,
    K: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    split = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    plane = tl.cast(num_tokens, tl.int64) * D
    first = split * span
    last = tl.minimum(first + span, num_tokens)
    taps_ptr = tap_ptr + tl.cast(owner, tl.int64) * owner_stride + column
    out_ptr = tap_gradient_ptr + split * K * D + column
    for start in range(first, last, TOKENS):
        token = start + tl.arange(0, TOKENS)
        mask = token < last
        place = token[:, None] * D + column[None, :]
        value = tl.load(source_ptr + place, mask=mask[:, None], other=0.0).to(tl.float32)
        result = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for tau in tl.static_range(MOST):
            later = token + tau
            inside = mask & (later < num_tokens)
            inside = inside & (tl.load(age_ptr + later, mask=inside, other=-1) >= tau)
            for stream in tl.static_range(M):
                if tau < TAPS[stream]:
                    reached_ptr = stream_gradient_ptr + stream * plane + place + tau * D
                    reached = tl.load(reached_ptr, mask=inside[:, None], other=0.0).to(tl.float32)
                    tap = tl.load(taps_ptr + (FIRST[stream] + tau) * D)
                    result += reached * tap[None, :]
                    tap_gradient = tl.sum(reached * value, 0)
                    spot_ptr = out_ptr + (FIRST[stream] + tau) * D
                    if start > first:
                        tap_gradient += tl.load(spot_ptr)
                    tl.store(spot_ptr, tap_gradient)
        tl.debug_barrier()  # the next tokens add to what other lanes have stored
        if ADD:
            result += tl.load(result_ptr + place, mask=mask[:, None], other=0.0)
        tl.store(result_ptr + place, narrow(result, result_ptr.dtype.element_ty), mask=mask[:, None])


def fold(
    streams: Streams, source_TD: Tensor, stream_gradient_MTD: Tensor, *, owner: int, result_TD: Tensor, add: bool,
    splits: int,
) -> Tensor:  # fmt: skip
    """Write, or add to float32, the gradient of a source; return those of its kernels' taps by split, ``(G, K, D)``."""
    _, num_tokens, width = stream_gradient_MTD.shape
    sides = tile(_FOLD, width)
    taps = streams.tap_QKD.shape[1]
    tap_gradient = streams.tap_QKD.new_empty((splits, taps, width))
    _fold_kernel[(width // sides["COLUMNS"], splits)](
        source_TD,
        stream_gradient_MTD,
        streams.tap_QKD,
        streams.age_T,
        result_TD,
        tap_gradient,
        owner,
        num_tokens,
        triton.cdiv(num_tokens, splits),
        streams.tap_QKD.stride(0),
        ADD=add,
        K=taps,
        D=width,
        **sides,
        **streams.constants,
    )
    return tap_gradient
