"""Forward kernels of multi-stream routing (msar) for one source: its streams, and their logits.

:func:`expand` walks spans of tokens with the last ones in registers; :func:`score` dots a finished source's streams
with the keys of all sites to come. What :mod:`scaling.kernels.stream_fold` undoes.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Streams, load_rows, num_spans, tile, whole_spans
from scaling.kernels.tile import dot, is_exact, narrow

# Sides of tiles and warps; columns at most; RESIDENT: programs that fit a multiprocessor, by their registers.
_EXPAND = {"TOGETHER": 4, "COLUMNS": 128, "num_warps": 1, "RESIDENT": 8}
_SCORE = {"TOKENS": 64, "COLUMNS": 64, "num_warps": 4, "STAGES": 3}


@triton.jit
def _sum(row, update):
    """The sum as it is kept: streams are made of that, in backward as well."""
    return narrow(row.to(tl.float32) + update.to(tl.float32), row.dtype)


@triton.jit
def _load_tokens(source_ptr, update_ptr, UPDATE: tl.constexpr, COUNT: tl.constexpr, D: tl.constexpr):
    """The rows of ``COUNT`` tokens, and what is to be added to them: later, or their loads would be waited for here."""
    updates = ()
    if UPDATE:
        updates = load_rows(update_ptr, COUNT, D)
    return load_rows(source_ptr, COUNT, D), updates


@triton.jit
def _expand_tokens(
    rows,  # of COUNT tokens
    updates,  # to add to them, if UPDATE
    ring,  # the values of the tokens before, the newest first
    taps,
    age_ptr,
    sum_ptr,
    out_ptr,
    line,
    UPDATE: tl.constexpr,
    MASKED: tl.constexpr,
    COUNT: tl.constexpr,
    TAPS: tl.constexpr,
    FIRST: tl.constexpr,
    MOST: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
):
    """Write the streams of ``COUNT`` tokens, which look at no other document if ``MASKED``, else as far as they can."""
    for step in tl.static_range(COUNT):
        row = rows[step]
        if UPDATE:
            row = _sum(row, updates[step])
            tl.store(sum_ptr + step * D, row)
        window = (row.to(tl.float32),) + ring
        if MASKED:
            age = tl.load(age_ptr + step)
        streams = ()
        for _ in tl.static_range(M):
            streams = streams + (tl.zeros(rows[0].shape, tl.float32),)
        for tau in tl.static_range(MOST):
            value = window[tau]
            if MASKED and tau > 0:
                value = tl.where(age >= tau, value, 0.0)
            more = ()
            for stream in tl.static_range(M):
                if tau < TAPS[stream]:
                    more = more + (streams[stream] + value * taps[FIRST[stream] + tau],)
                else:
                    more = more + (streams[stream],)
            streams = more
        for stream in tl.static_range(M):
            tl.store(out_ptr + stream * line + step * D, narrow(streams[stream], out_ptr.dtype.scalar.element_ty))
        ring = window[: MOST - 1]
    return ring


@triton.jit(do_not_specialize=["owner", "num_tokens", "span"])
def _expand_kernel(
    source_ptr,  # (T, D)
    update_ptr,  # (T, D) to add to the source, if UPDATE
    tap_ptr,  # (Q, K, D) float32
    age_ptr,  # (T,) int32
    sum_ptr,  # (T, D) out: of source and update
    stream_ptr,  # (M, T, D) out
    owner,
    num_tokens,
    span,
    owner_stride,
    UPDATE: tl.constexpr,
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
    first = tl.program_id(1) * span
    length = tl.minimum(span, num_tokens - first)
    line = tl.cast(num_tokens, tl.int64) * D
    corner = tl.cast(first, tl.int64) * D + column
    source_ptr += corner
    update_ptr += corner
    sum_ptr += corner
    stream_ptr += corner
    age_ptr += first
    tap_ptr += tl.cast(owner, tl.int64) * owner_stride + column
    taps = load_rows(tap_ptr, K, D)
    ring = ()  # the values of the last tokens, the newest first
    for tau in tl.static_range(1, MOST):
        row = tl.load(source_ptr - tau * D, mask=first >= tau, other=0.0)
        if UPDATE:
            row = _sum(row, tl.load(update_ptr - tau * D, mask=first >= tau, other=0.0))
        ring = ring + (row.to(tl.float32),)
    whole = length // TOGETHER * TOGETHER
    if whole > 0:
        rows, updates = _load_tokens(source_ptr, update_ptr, UPDATE, TOGETHER, D)
        age = tl.load(age_ptr + TOGETHER - 1)
        for start in range(0, whole, TOGETHER):
            values = rows
            due = updates
            newest = age
            # Memory answers while this group is computed; the last group asks for itself, so that loads need no mask.
            following = tl.minimum(start + TOGETHER, whole - TOGETHER)
            offset = tl.cast(following, tl.int64) * D
            rows, updates = _load_tokens(source_ptr + offset, update_ptr + offset, UPDATE, TOGETHER, D)
            age = tl.load(age_ptr + following + TOGETHER - 1)
            offset = tl.cast(start, tl.int64) * D
            due_ptr = age_ptr + start
            if MOST == 1 or newest >= MOST + TOGETHER - 2:  # no document begins near: within it, ages grow by one
                ring = _expand_tokens(
                    values, due, ring, taps, due_ptr, sum_ptr + offset, stream_ptr + offset, line,
                    UPDATE, False, TOGETHER, TAPS, FIRST, MOST, M, D,
                )  # fmt: skip
            else:
                ring = _expand_tokens(
                    values, due, ring, taps, due_ptr, sum_ptr + offset, stream_ptr + offset, line,
                    UPDATE, True, TOGETHER, TAPS, FIRST, MOST, M, D,
                )  # fmt: skip
    for token in range(whole, length):
        offset = tl.cast(token, tl.int64) * D
        values, due = _load_tokens(source_ptr + offset, update_ptr + offset, UPDATE, 1, D)
        ring = _expand_tokens(
            values, due, ring, taps, age_ptr + token, sum_ptr + offset, stream_ptr + offset, line,
            UPDATE, True, 1, TAPS, FIRST, MOST, M, D,
        )  # fmt: skip


@triton.jit(do_not_specialize=["source_row", "first_site", "num_sites", "num_tokens", "num_pairs"])
def _score_kernel(
    stream_ptr,  # (M, T, D)
    key_ptr,  # (S, M, D) float32
    base_ptr,  # (S,) int32 first pair of each site
    score_ptr,  # (T, P, M) float32 out
    source_row,
    first_site,
    num_sites,
    num_tokens,
    num_pairs,
    eps,
    M: tl.constexpr,
    D: tl.constexpr,
    SITES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    stream = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < num_tokens
    column = tl.arange(0, COLUMNS)
    site = tl.arange(0, SITES)
    site_mask = site < num_sites
    x_ptr = stream_ptr + (stream * tl.cast(num_tokens, tl.int64) + token)[:, None] * D + column[None, :]
    keys_ptr = key_ptr + ((first_site + site).to(tl.int64) * M + stream)[None, :] * D + column[:, None]
    square = tl.zeros([TOKENS], tl.float32)
    score = tl.zeros([TOKENS, SITES], tl.float32)
    for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
        x = tl.load(x_ptr + start, mask=token_mask[:, None], other=0.0)
        wide = x.to(tl.float32)
        square += tl.sum(wide * wide, 1)
        key = tl.load(keys_ptr + start, mask=site_mask[None, :], other=0.0)
        if EXACT:
            score = dot(x, key, score, EXACT)
        else:  # the key in two parts, so that only the stream is rounded, as it is in PyTorch
            kind: tl.constexpr = stream_ptr.dtype.element_ty
            high = narrow(key, kind)
            score = dot(x, high, score, EXACT)
            score = dot(x, narrow(key - high.to(tl.float32), kind), score, EXACT)
    score *= (1.0 / tl.sqrt_rn(square / D + eps))[:, None]
    base = tl.load(base_ptr + first_site + site, mask=site_mask, other=0)
    pair = (token.to(tl.int64) * num_pairs)[:, None] + (base + source_row)[None, :]
    tl.store(score_ptr + pair * M + stream, score, mask=token_mask[:, None] & site_mask[None, :])


def expand(
    streams: Streams,
    source_TD: Tensor,
    stream_MTD: Tensor,
    *,
    owner: int,
    update_TD: Tensor | None = None,
    sum_TD: Tensor | None = None,
) -> None:
    """Write one source's streams; with ``update_TD`` the source is the sum of both, which ``sum_TD`` gets."""
    assert (update_TD is None) == (sum_TD is None)
    _, num_tokens, width = stream_MTD.shape
    sides = tile(_EXPAND, width)
    programs = width // sides["COLUMNS"]
    span, spans = whole_spans(num_tokens, num_spans(num_tokens, programs, sides.pop("RESIDENT")), sides["TOGETHER"])
    _expand_kernel[(programs, spans)](
        source_TD,
        source_TD if update_TD is None else update_TD,
        streams.tap_QKD,
        streams.age_T,
        source_TD if sum_TD is None else sum_TD,
        stream_MTD,
        owner,
        num_tokens,
        span,
        streams.tap_QKD.stride(0),
        UPDATE=update_TD is not None,
        D=width,
        **sides,
        **streams.constants,
    )


def score(
    stream_MTD: Tensor,
    *,
    key_SMD: Tensor,
    base_S: Tensor,
    score_TPM: Tensor,
    source_row: int,
    sites: range,
    eps: float,
) -> None:
    """Write the logits of one source for ``sites``, of each of which it is number ``source_row``."""
    num_streams, num_tokens, width = stream_MTD.shape
    sides = tile(_SCORE, width)
    _score_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]), num_streams)](
        stream_MTD,
        key_SMD,
        base_S,
        score_TPM,
        source_row,
        sites.start,
        len(sites),
        num_tokens,
        score_TPM.shape[1],
        eps,
        M=num_streams,
        D=width,
        SITES=max(16, triton.next_power_of_2(len(sites))),
        EXACT=is_exact(stream_MTD.dtype),
        **sides,
    )
