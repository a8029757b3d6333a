"""What the kernels of multi-stream routing (msar) share, and the first of them: a source becomes its streams.

Stream j of source i is a causal depthwise convolution, ``X_t = sum_tau c_(j,tau) v_(t-tau)``, never across a document's
or sequence's start. Per stream a softmax over depth mixes the sources, and a gate of the mixes' joint projection adds
the streams. Sources are kept for the backward pass, their streams never: :func:`expand` makes them in a buffer that
lives during the forward pass, and once more during the backward pass.

- here :func:`expand`, one source's streams, and :func:`score`, their logits for sites that will read them;
- :mod:`scaling.kernels.stream_mix`: mixes of the finished sources for the sites of a phase, and a site's output;
- :mod:`scaling.kernels.stream_contract`, :mod:`scaling.kernels.stream_gather`, :mod:`scaling.kernels.stream_fold`: the
  gradients of a site, of the finished sources' streams, and of what the streams were made of;
- :mod:`scaling.kernels.stream_ledger` and :mod:`scaling.kernels.stream_bank`: storage, order and operators.

Shape legend: F finished sources, S sites, L sites of a phase, T tokens (batch and sequence flattened), D width, M
streams, P pairs of site and source, Q owners of kernels, K taps of all streams, G splits of the tokens.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling.errors import KernelError
from scaling.kernels.tile import dot, is_exact, narrow

MAX_SOURCES = 128  # of a site: their logits share a tile
# Sides of tiles and warps; columns at most; RESIDENT: programs that fit a multiprocessor, by their registers.
_EXPAND = {"TOGETHER": 8, "COLUMNS": 64, "num_warps": 1, "RESIDENT": 16}
_SCORE = {"TOKENS": 64, "COLUMNS": 64, "num_warps": 4, "STAGES": 3}


@triton.jit
def load_rows(ptr, COUNT: tl.constexpr, D: tl.constexpr):
    """Load the rows of ``COUNT`` tokens from one on, as they are in memory."""
    rows = ()
    for step in tl.static_range(COUNT):
        rows = rows + (tl.load(ptr + step * D),)
    return rows


@triton.jit
def _expand_tokens(
    rows,  # of COUNT tokens
    ring,  # the values of the tokens before, the newest first
    taps,
    age_ptr,
    out_ptr,
    line,
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
        window = (rows[step].to(tl.float32),) + ring
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
    tap_ptr,  # (Q, K, D) float32
    age_ptr,  # (T,) int32
    stream_ptr,  # (M, T, D) out
    owner,
    num_tokens,
    span,
    owner_stride,
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
    source_ptr += tl.cast(first, tl.int64) * D + column
    stream_ptr += tl.cast(first, tl.int64) * D + column
    age_ptr += first
    tap_ptr += tl.cast(owner, tl.int64) * owner_stride + column
    taps = load_rows(tap_ptr, K, D)
    ring = ()  # the values of the last tokens, the newest first
    for tau in tl.static_range(1, MOST):
        ring = ring + (tl.load(source_ptr - tau * D, mask=first >= tau, other=0.0).to(tl.float32),)
    whole = length // TOGETHER * TOGETHER
    if whole > 0:
        rows = load_rows(source_ptr, TOGETHER, D)
        age = tl.load(age_ptr + TOGETHER - 1)
        for start in range(0, whole, TOGETHER):
            values = rows
            newest = age
            # Memory answers while this group is computed; the last group asks for itself, so that loads need no mask.
            following = tl.minimum(start + TOGETHER, whole - TOGETHER)
            rows = load_rows(source_ptr + tl.cast(following, tl.int64) * D, TOGETHER, D)
            age = tl.load(age_ptr + following + TOGETHER - 1)
            out_ptr = stream_ptr + tl.cast(start, tl.int64) * D
            due_ptr = age_ptr + start
            if newest >= MOST + TOGETHER - 2:  # no document begins near: within it, ages grow by one
                ring = _expand_tokens(
                    values, ring, taps, due_ptr, out_ptr, line, False, TOGETHER, TAPS, FIRST, MOST, M, D
                )
            else:
                ring = _expand_tokens(
                    values, ring, taps, due_ptr, out_ptr, line, True, TOGETHER, TAPS, FIRST, MOST, M, D
                )
    for token in range(whole, length):
        offset = tl.cast(token, tl.int64) * D
        ring = _expand_tokens(
            load_rows(source_ptr + offset, 1, D), ring, taps, age_ptr + token, stream_ptr + offset, line,
            True, 1, TAPS, FIRST, MOST, M, D,
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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """How sources become streams: kernels, which of their taps are each stream's, and how far back a token may look."""

    tap_QKD: Tensor
    taps: tuple[int, ...]  # of each stream
    first: tuple[int, ...]  # the first of each stream
    age_T: Tensor
    eps: float

    @property
    def num_streams(self) -> int:
        """Streams of a source."""
        return len(self.taps)

    @property
    def constants(self) -> dict[str, Any]:
        """What kernels are compiled for, so that the loops over taps are unrolled and their loads overlap."""
        return {
            "TAPS": self.taps,
            "FIRST": self.first,
            "MOST": max(self.taps),
            "K": self.tap_QKD.shape[1],
            "M": self.num_streams,
        }


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """Sites that read the same finished sources, and where their logits are."""

    sites: range
    num_rows: int  # finished sources
    first_base: int  # first pair of the first site
    first_pairs: int  # pairs of the first site; every other has one more than there are finished sources


def check_sources(num_sources: int) -> None:
    """Refuse more sources than a tile of logits has places.

    Raises
    ------
    KernelError
        If there are too many.
    """
    if num_sources > MAX_SOURCES:
        raise KernelError(
            f"streams: {num_sources} sources; up to {MAX_SOURCES} fit a tile; choose larger blocks, or set "
            "ISOLOSS_KERNELS=reference"
        )


def chunk(width: int, most: int = 256) -> int:
    """Columns that a program takes at a time: the largest power of two that divides the width.

    >>> chunk(1024), chunk(1280), chunk(48)
    (256, 256, 16)
    """
    return min(most, width & -width)


def num_spans(num_tokens: int, programs: int, resident: int) -> int:
    """Spans of tokens that one program walks, none empty, where a span has so many programs.

    As many as an H200's 132 multiprocessors hold at once, so that none waits for others; a span is at least eight times
    as long as the longest kernel of the defaults.
    """
    wanted = max(1, min(132 * resident // programs, triton.cdiv(num_tokens, 96)))
    return int(triton.cdiv(num_tokens, triton.cdiv(num_tokens, wanted)))


def whole_spans(num_tokens: int, spans: int, together: int) -> tuple[int, int]:
    """Tokens of a span, whole groups of ``together``, and how many spans that takes.

    >>> whole_spans(16384, 66, 12), whole_spans(5, 4, 8)
    ((252, 66), (8, 1))
    """
    span = triton.cdiv(triton.cdiv(num_tokens, spans), together) * together
    return span, triton.cdiv(num_tokens, span)


def tile(sides: dict[str, int], width: int) -> dict[str, int]:
    """Sides of a tile, whose columns divide the width."""
    return {**sides, "COLUMNS": chunk(width, sides["COLUMNS"])}


def expand(streams: Streams, source_TD: Tensor, stream_MTD: Tensor, *, owner: int) -> None:
    """Write one source's streams."""
    _, num_tokens, width = stream_MTD.shape
    sides = tile(_EXPAND, width)
    programs = width // sides["COLUMNS"]
    span, spans = whole_spans(num_tokens, num_spans(num_tokens, programs, sides.pop("RESIDENT")), sides["TOGETHER"])
    _expand_kernel[(programs, spans)](
        source_TD,
        streams.tap_QKD,
        streams.age_T,
        stream_MTD,
        owner,
        num_tokens,
        span,
        streams.tap_QKD.stride(0),
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


def ages(document_BT: Tensor | None, batch: int, time: int, device: torch.device) -> Tensor:
    """How many tokens before each belong to its sequence and document, flattened, int32."""
    position_BT = torch.arange(time, device=device).expand(batch, time)
    if document_BT is None:
        return position_BT.reshape(-1).to(torch.int32)
    begins_BT = torch.ones_like(document_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    start_BT = torch.where(begins_BT, position_BT, 0).cummax(1).values
    return (position_BT - start_BT).reshape(-1).to(torch.int32)
