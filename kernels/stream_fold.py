"""Backward kernel of multi-stream routing (msar): gradients of streams become those of their source and of the kernels.

The transpose of :func:`scaling.kernels.streams.expand`: ``dv_t = sum over j, tau of c_(j,tau) dX_(j,t+tau)`` and
``dc_(j,tau) = sum_t dX_(j,t+tau) v_t``, within a document.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Streams, num_spans, tile
from scaling.kernels.tile import narrow

_FOLD = {"TOGETHER": 4, "COLUMNS": 64, "num_warps": 1}


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
    TOGETHER: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1).to(tl.int64)
    first = split * span
    last = tl.minimum(first + span, num_tokens)
    line = tl.cast(num_tokens, tl.int64) * D
    always = column < D
    taps = ()
    tap_gradients = ()
    for tap in tl.static_range(K):
        taps = taps + (tl.load(tap_ptr + tl.cast(owner, tl.int64) * owner_stride + tap * D + column),)
        tap_gradients = tap_gradients + (tl.zeros([COLUMNS], tl.float32),)
    earlier = ()  # values of the last tokens, the newest first
    results = ()  # their gradients so far
    for tau in tl.static_range(1, MOST):
        inside = (first - tau >= 0) & always
        earlier = earlier + (tl.load(source_ptr + (first - tau) * D + column, mask=inside, other=0.0).to(tl.float32),)
        results = results + (tl.zeros([COLUMNS], tl.float32),)
    # A token's gradient is whole when the longest kernel has passed it: that many tokens beyond the last are read.
    for start in range(first, last + MOST - 1, TOGETHER):
        values = ()
        gradients = ()
        for step in tl.static_range(TOGETHER):  # their loads are in flight together
            token = start + step
            inside = (token < last) & always
            values = values + (tl.load(source_ptr + token * D + column, mask=inside, other=0.0),)
            inside = (token < num_tokens) & always
            for stream in tl.static_range(M):
                reached_ptr = stream_gradient_ptr + stream * line + token * D + column
                gradients = gradients + (tl.load(reached_ptr, mask=inside, other=0.0),)
        for step in tl.static_range(TOGETHER):
            token = start + step
            age = tl.load(age_ptr + token, mask=token < num_tokens, other=0)
            earlier = (values[step].to(tl.float32),) + earlier
            results = (tl.zeros([COLUMNS], tl.float32),) + results
            own = tl.where(token < last, 1.0, 0.0)  # tokens beyond the last give their kernels' gradient elsewhere
            more_results = ()
            for tau in tl.static_range(MOST):
                given = tl.zeros([COLUMNS], tl.float32)
                for stream in tl.static_range(M):
                    if tau < TAPS[stream]:
                        given += gradients[step * M + stream].to(tl.float32) * taps[FIRST[stream] + tau]
                if tau > 0:
                    given = tl.where(age >= tau, given, 0.0)
                more_results = more_results + (results[tau] + given,)
            results = more_results
            summed = ()
            for tap in tl.static_range(K):
                total = tap_gradients[tap]
                for stream in tl.static_range(M):
                    for tau in tl.static_range(MOST):
                        if FIRST[stream] + tau == tap:
                            if tau < TAPS[stream]:
                                value = earlier[tau]
                                if tau > 0:
                                    value = tl.where(age >= tau, value, 0.0)
                                total += gradients[step * M + stream].to(tl.float32) * own * value
                summed = summed + (total,)
            tap_gradients = summed
            finished = token - (MOST - 1)
            mask = (finished >= first) & (finished < last) & always
            out_ptr = result_ptr + finished * D + column
            result = results[MOST - 1]
            if ADD:
                result += tl.load(out_ptr, mask=mask, other=0.0)
            tl.store(out_ptr, narrow(result, result_ptr.dtype.element_ty), mask=mask)
            earlier = earlier[: MOST - 1]
            results = results[: MOST - 1]
    for tap in tl.static_range(K):
        tl.store(tap_gradient_ptr + (split * K + tap) * D + column, tap_gradients[tap])


def fold(
    streams: Streams, source_TD: Tensor, stream_gradient_MTD: Tensor, *, owner: int, result_TD: Tensor, add: bool
) -> Tensor:
    """Write, or add to float32, the gradient of a source; return those of its kernels' taps by span, ``(G, K, D)``."""
    _, num_tokens, width = stream_gradient_MTD.shape
    sides = tile(_FOLD, width)
    spans = num_spans(num_tokens, width // sides["COLUMNS"])
    tap_gradient = streams.tap_QKD.new_empty((spans, *streams.tap_QKD.shape[1:]))
    _fold_kernel[(width // sides["COLUMNS"], spans)](
        source_TD,
        stream_gradient_MTD,
        streams.tap_QKD,
        streams.age_T,
        result_TD,
        tap_gradient,
        owner,
        num_tokens,
        triton.cdiv(num_tokens, spans),
        streams.tap_QKD.stride(0),
        ADD=add,
        D=width,
        **sides,
        **streams.constants,
    )
    return tap_gradient
