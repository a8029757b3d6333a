"""Backward kernel of multi-stream routing (msar): gradients of streams become those of their source and of the kernels.

The transpose of :func:`scaling.kernels.stream_expand.expand`: ``dv_t = sum over j, tau of c_(j,tau) dX_(j,t+tau)`` and
``dc_(j,tau) = sum_t dX_(j,t+tau) v_t``, within a document.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Streams, load_rows, num_spans, tile, whole_spans
from scaling.kernels.tile import narrow

# As in :mod:`scaling.kernels.stream_expand`; AHEAD divides TOGETHER: tokens asked for beforehand.
_FOLD = {"TOGETHER": 8, "AHEAD": 4, "COLUMNS": 64, "num_warps": 1, "RESIDENT": 8}


@triton.jit
def _load_gradients(ptr, line, COUNT: tl.constexpr, M: tl.constexpr, D: tl.constexpr):
    """Load the gradients of the streams of ``COUNT`` tokens from one on, as they are in memory."""
    rows = ()
    for step in tl.static_range(COUNT):
        for stream in tl.static_range(M):
            rows = rows + (tl.load(ptr + stream * line + step * D),)
    return rows


@triton.jit
def _load_results(ptr, token, COUNT: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr):
    """Load what is added to the results that ``COUNT`` tokens from ``token`` of the span on will finish."""
    rows = ()
    for step in tl.static_range(COUNT):
        rows = rows + (tl.load(ptr + (step - (MOST - 1)) * D, mask=token + step >= MOST - 1, other=0.0),)
    return rows


@triton.jit
def _fold_tokens(
    values,  # of COUNT tokens
    gradients,  # of their streams
    earlier,  # values of the tokens before, the newest first
    results,  # their gradients so far
    taps,
    tap_gradients,
    age,  # of the one token if MASKED
    MASKED: tl.constexpr, COUNT: tl.constexpr, TAPS: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr,
    K: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Add what ``COUNT`` tokens give: to those of its document if ``MASKED``, else to all; return what is whole."""
    finished = ()
    for step in tl.static_range(COUNT):
        earlier = (values[step].to(tl.float32),) + earlier
        results = (tl.zeros(values[0].shape, tl.float32),) + results
        given = ()
        for stream in tl.static_range(M):
            given = given + (gradients[step * M + stream].to(tl.float32),)
        more = ()
        for tau in tl.static_range(MOST):
            result = results[tau]
            for stream in tl.static_range(M):
                if tau < TAPS[stream]:
                    share = given[stream] * taps[FIRST[stream] + tau]
                    if MASKED:
                        share = tl.where(age >= tau, share, 0.0)
                    result += share
            more = more + (result,)
        results = more
        more = ()
        for tap in tl.static_range(K):
            total = tap_gradients[tap]
            for stream in tl.static_range(M):
                for tau in tl.static_range(MOST):
                    if FIRST[stream] + tau == tap:
                        if tau < TAPS[stream]:
                            value = earlier[tau]
                            if MASKED:
                                value = tl.where(age >= tau, value, 0.0)
                            total += given[stream] * value
            more = more + (total,)
        tap_gradients = more
        finished = finished + (results[MOST - 1],)
        earlier = earlier[: MOST - 1]
        results = results[: MOST - 1]
    return earlier, results, tap_gradients, finished


@triton.jit
def _store_results(
    ptr, token, finished, before, ADD: tl.constexpr, COUNT: tl.constexpr, MOST: tl.constexpr, D: tl.constexpr
):
    """Store the results that ``COUNT`` tokens from ``token`` of the span on finished."""
    for step in tl.static_range(COUNT):
        result = finished[step]
        if ADD:
            result += before[step].to(tl.float32)
        out = narrow(result, ptr.dtype.scalar.element_ty)
        tl.store(ptr + (step - (MOST - 1)) * D, out, mask=token + step >= MOST - 1)


@triton.jit
def _fold_group(
    rows,  # of the first AHEAD tokens
    gradient_rows,  # of their streams
    earlier,
    results,
    taps,
    tap_gradients,
    source_ptr,
    gradient_ptr,
    before_ptr,
    result_ptr,
    line,
    start,
    following,
    ADD: tl.constexpr, TAPS: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr, TOGETHER: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Take a group of tokens of one document, ask for the first rows of the ``following``, store what is whole."""
    for part in tl.static_range(0, TOGETHER, AHEAD):
        values = rows
        gradients = gradient_rows
        token = start + part
        upcoming = token + AHEAD
        if part == TOGETHER - AHEAD:
            upcoming = following
        offset = tl.cast(upcoming, tl.int64) * D
        rows = load_rows(source_ptr + offset, AHEAD, D)
        gradient_rows = _load_gradients(gradient_ptr + offset, line, AHEAD, M, D)
        offset = tl.cast(token, tl.int64) * D
        before = ()
        if ADD:
            before = _load_results(before_ptr + offset, token, AHEAD, MOST, D)
        earlier, results, tap_gradients, finished = _fold_tokens(
            values, gradients, earlier, results, taps, tap_gradients, 0, False, AHEAD, TAPS, FIRST, MOST, K, M
        )
        _store_results(result_ptr + offset, token, finished, before, ADD, AHEAD, MOST, D)
    return rows, gradient_rows, earlier, results, tap_gradients


@triton.jit
def _fold_token(
    earlier,
    results,
    taps,
    tap_gradients,
    source_ptr,
    gradient_ptr,
    age_ptr,
    before_ptr,
    result_ptr,
    line,
    token,
    ADD: tl.constexpr, TAPS: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, K: tl.constexpr, M: tl.constexpr,
    D: tl.constexpr,
):  # fmt: skip
    """Take a token that may be near its document's start: rare, so that a loop of these keeps the code short."""
    offset = tl.cast(token, tl.int64) * D
    before = ()
    if ADD:
        before = _load_results(before_ptr + offset, token, 1, MOST, D)
    rows, gradients = load_rows(source_ptr + offset, 1, D), _load_gradients(gradient_ptr + offset, line, 1, M, D)
    age = tl.load(age_ptr + token)
    earlier, results, tap_gradients, finished = _fold_tokens(
        rows, gradients, earlier, results, taps, tap_gradients, age, True, 1, TAPS, FIRST, MOST, K, M
    )
    _store_results(result_ptr + offset, token, finished, before, ADD, 1, MOST, D)
    return earlier, results, tap_gradients


@triton.jit
def _fold_beyond(
    gradients,  # of the streams of MOST - 1 tokens beyond a span
    results,  # (MOST - 1,) gradients so far of the last tokens of the span, the newest first
    taps,
    ages,
    TAPS: tl.constexpr, FIRST: tl.constexpr, MOST: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """Add what tokens beyond a span give to those within; return the results, the oldest first."""
    finished = ()
    for beyond in tl.static_range(MOST - 1):
        more = ()
        for tau in tl.static_range(beyond + 1, MOST):
            result = results[tau - beyond - 1]
            for stream in tl.static_range(M):
                if tau < TAPS[stream]:
                    share = gradients[beyond * M + stream].to(tl.float32) * taps[FIRST[stream] + tau]
                    result += tl.where(ages[beyond] >= tau, share, 0.0)
            more = more + (result,)
        finished = finished + (more[MOST - 2 - beyond],)
        results = more[: MOST - 2 - beyond]
    return finished


@triton.jit(do_not_specialize=["owner", "num_tokens", "span"])
def _fold_kernel(
    source_ptr,  # (T, D)
    stream_gradient_ptr,  # (M, T, D) dX
    tap_ptr,  # (Q, K, D) float32
    age_ptr,  # (T,) int32
    before_ptr,  # (T, D) to add to the result, if ADD
    result_ptr,  # (T, D) out
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
    AHEAD: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    split = tl.program_id(1)
    first = split * span
    length = tl.minimum(span, num_tokens - first)
    line = tl.cast(num_tokens, tl.int64) * D
    source_ptr += tl.cast(first, tl.int64) * D + column
    stream_gradient_ptr += tl.cast(first, tl.int64) * D + column
    before_ptr += tl.cast(first, tl.int64) * D + column
    result_ptr += tl.cast(first, tl.int64) * D + column
    age_ptr += first
    taps = load_rows(tap_ptr + tl.cast(owner, tl.int64) * owner_stride + column, K, D)
    zero = tl.zeros([COLUMNS], tl.float32)
    tap_gradients = ()
    for _ in tl.static_range(K):
        tap_gradients = tap_gradients + (zero,)
    earlier = ()  # values of the last tokens, the newest first
    results = ()  # their gradients so far
    for tau in tl.static_range(1, MOST):
        earlier = earlier + (tl.load(source_ptr - tau * D, mask=first >= tau, other=0.0).to(tl.float32),)
        results = results + (zero,)
    whole = length // TOGETHER * TOGETHER
    if whole > 0:
        rows = load_rows(source_ptr, AHEAD, D)
        gradient_rows = _load_gradients(stream_gradient_ptr, line, AHEAD, M, D)
        age = tl.load(age_ptr + TOGETHER - 1)
        for start in range(0, whole, TOGETHER):
            newest = age
            # Memory answers while tokens are computed; the last group asks for itself, so that loads need no mask.
            following = tl.minimum(start + TOGETHER, whole - TOGETHER)
            age = tl.load(age_ptr + following + TOGETHER - 1)
            if MOST == 1 or newest >= MOST + TOGETHER - 2:  # no document begins near: ages grow by one within it
                rows, gradient_rows, earlier, results, tap_gradients = _fold_group(
                    rows, gradient_rows, earlier, results, taps, tap_gradients,
                    source_ptr, stream_gradient_ptr, before_ptr, result_ptr, line, start, following,
                    ADD, TAPS, FIRST, MOST, K, M, D, TOGETHER, AHEAD,
                )  # fmt: skip
            else:
                for token in range(start, start + TOGETHER):
                    earlier, results, tap_gradients = _fold_token(
                        earlier, results, taps, tap_gradients,
                        source_ptr, stream_gradient_ptr, age_ptr, before_ptr, result_ptr, line, token,
                        ADD, TAPS, FIRST, MOST, K, M, D,
                    )  # fmt: skip
                offset = tl.cast(following, tl.int64) * D
                rows = load_rows(source_ptr + offset, AHEAD, D)
                gradient_rows = _load_gradients(stream_gradient_ptr + offset, line, AHEAD, M, D)
    for token in range(whole, length):
        earlier, results, tap_gradients = _fold_token(
            earlier, results, taps, tap_gradients,
            source_ptr, stream_gradient_ptr, age_ptr, before_ptr, result_ptr, line, token,
            ADD, TAPS, FIRST, MOST, K, M, D,
        )  # fmt: skip
    for tap in tl.static_range(K):
        tl.store(tap_gradient_ptr + (tl.cast(split, tl.int64) * K + tap) * D + column, tap_gradients[tap])
    # The gradients of the last tokens are whole when the longest kernel has passed them. Tokens beyond the span give
    # their kernels' gradients elsewhere. Their loads are in flight together, ahead of the stores.
    ages = ()
    gradients = ()
    before = ()
    offset = tl.cast(length, tl.int64) * D
    for beyond in tl.static_range(MOST - 1):
        inside = first + length + beyond < num_tokens
        ages = ages + (tl.load(age_ptr + length + beyond, mask=inside, other=0),)
        for stream in tl.static_range(M):
            row_ptr = stream_gradient_ptr + stream * line + offset + beyond * D
            gradients = gradients + (tl.load(row_ptr, mask=inside, other=0.0),)
    if ADD:
        before = _load_results(before_ptr + offset, length, MOST - 1, MOST, D)
    finished = _fold_beyond(gradients, results, taps, ages, TAPS, FIRST, MOST, M)
    _store_results(result_ptr + offset, length, finished, before, ADD, MOST - 1, MOST, D)


def fold(
    streams: Streams,
    source_TD: Tensor,
    stream_gradient_MTD: Tensor,
    *,
    owner: int,
    result_TD: Tensor,
    before_TD: Tensor | None = None,
) -> Tensor:
    """Write the gradient of a source, added to ``before_TD`` if given, which may be the result; return taps' gradients.

    Those of its kernels' taps are by span, ``(G, K, D)``.
    """
    _, num_tokens, width = stream_gradient_MTD.shape
    sides = tile(_FOLD, width)
    programs = width // sides["COLUMNS"]
    span, spans = whole_spans(num_tokens, num_spans(num_tokens, programs, sides.pop("RESIDENT")), sides["TOGETHER"])
    tap_gradient = streams.tap_QKD.new_empty((spans, *streams.tap_QKD.shape[1:]))
    _fold_kernel[(programs, spans)](
        source_TD,
        stream_gradient_MTD,
        streams.tap_QKD,
        streams.age_T,
        result_TD if before_TD is None else before_TD,
        result_TD,
        tap_gradient,
        owner,
        num_tokens,
        span,
        streams.tap_QKD.stride(0),
        ADD=before_TD is not None,
        D=width,
        **sides,
        **streams.constants,
    )
    return tap_gradient
