"""What the kernels of multi-stream routing (msar) share: sources are expanded into streams on the fly, never stored.

Stream j of source i is a causal depthwise convolution, ``X_t = sum_tau c_(j,tau) v_(t-tau)``; a program loads its
tokens once more for every tap, from cache after the first, and never across a document's or sequence's start. Per
stream a softmax over depth mixes the sources, and a gate of the mixes' joint projection adds the streams:

- :func:`score` here gives one source's logits for the sites that will read it, all streams, on tensor cores;
- :mod:`scaling.kernels.stream_mix` expands all sources of a site, mixes them and adds the gated streams;
- :mod:`scaling.kernels.stream_contract` and :mod:`scaling.kernels.stream_spread` have the gradients;
- :mod:`scaling.kernels.stream_bank` the operators.

Shape legend: N sources of a site, S sites, T tokens (batch and sequence flattened), D width, M streams, P pairs of site
and source, Q owners of kernels, K taps of all streams, R ranges of the width. Tiles: sources x tokens x columns.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling.errors import KernelError
from scaling.kernels.tile import dot, is_exact, narrow

MAX_SOURCES = 128  # of a site: all of them share a tile
TOKENS = 16  # of that tile


@triton.jit
def expand(
    value_ptr,  # tile of pointers to token 0 of each source, (sources, 1, columns)
    tap_ptr,  # tile of pointers to the first tap of each source, (sources, 1, columns)
    mask,  # (sources, 1, 1)
    segment_ptr,
    token,
    token_mask,
    taps,
    D: tl.constexpr,
    SOURCES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """One stream of several sources, ``(sources, tokens, columns)`` in float32."""
    segment = tl.load(segment_ptr + token, mask=token_mask, other=-1)
    stream = tl.zeros([SOURCES, TOKENS, COLUMNS], tl.float32)
    for tau in range(0, taps):
        earlier = token - tau
        inside = token_mask & (earlier >= 0)
        inside = inside & (tl.load(segment_ptr + earlier, mask=inside, other=-2) == segment)
        value = tl.load(
            value_ptr + earlier[None, :, None].to(tl.int64) * D, mask=mask & inside[None, :, None], other=0.0
        )
        tap = tl.load(tap_ptr + tau * D, mask=mask, other=0.0)
        stream += value.to(tl.float32) * tap.to(tl.float32)
    return stream


@triton.jit
def stream_weights(score_ptr, lse_ptr, row, row_mask, stream, token, token_mask, num_tokens, M: tl.constexpr):
    """Weights of the sources of a site in one stream, ``(sources, tokens)``; pointers are at the site's first pair."""
    mask = row_mask[:, None] & token_mask[None, :]
    pair = (row.to(tl.int64) * M + stream)[:, None] * num_tokens + token[None, :]
    score = tl.load(score_ptr + pair, mask=mask, other=float("-inf"))
    lse = tl.load(lse_ptr + stream * num_tokens + token, mask=token_mask, other=0.0)
    return tl.exp(score - lse[None, :])


@triton.jit(do_not_specialize=["source_row", "owner", "first_site", "num_sites", "num_tokens"])
def _score_kernel(
    bank_ptr,  # (N, T, D)
    tap_ptr,  # (Q, K, D) float32
    key_ptr,  # (S, M, D) float32
    segment_ptr,  # (T,) int32
    base_ptr,  # (S,) int32 first pair of each site
    table_ptr,  # (2, M) int32 first tap and number of taps
    score_ptr,  # (P, M, T) float32
    bank_row,
    source_row,
    owner,
    first_site,
    num_sites,
    num_tokens,
    row_stride,
    owner_stride,
    eps,
    M: tl.constexpr,
    D: tl.constexpr,
    SITES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    stream = tl.program_id(1)
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < num_tokens
    site = tl.arange(0, SITES)
    site_mask = site < num_sites
    first_tap = tl.load(table_ptr + stream)
    taps = tl.load(table_ptr + M + stream)
    column = tl.arange(0, COLUMNS)
    value_ptr = bank_ptr + tl.cast(bank_row, tl.int64) * row_stride + column[None, None, :]
    taps_ptr = tap_ptr + tl.cast(owner, tl.int64) * owner_stride + first_tap * D + column[None, None, :]
    key_row_ptr = key_ptr + ((first_site + site).to(tl.int64) * M + stream)[None, :] * D + column[:, None]
    always = tl.full([1, 1, 1], 1, tl.int1)
    square = tl.zeros([TOKENS], tl.float32)
    score = tl.zeros([TOKENS, SITES], tl.float32)
    for start in range(0, D, COLUMNS):
        x = expand(
            value_ptr + start, taps_ptr + start, always, segment_ptr, token, token_mask, taps, D, 1, TOKENS, COLUMNS
        )
        x = tl.reshape(x, [TOKENS, COLUMNS])
        square += tl.sum(x * x, 1)
        key = tl.load(key_row_ptr + start, mask=site_mask[None, :], other=0.0)
        if EXACT:
            score = dot(x, key, score, EXACT)
        else:  # the key in two parts, so that only the stream is rounded, as it is in PyTorch
            kind: tl.constexpr = bank_ptr.dtype.element_ty
            x = narrow(x, kind)
            high = narrow(key, kind)
            score = dot(x, high, score, EXACT)
            score = dot(x, narrow(key - high.to(tl.float32), kind), score, EXACT)
    score *= 1.0 / tl.sqrt_rn(square / D + eps)[:, None]
    base = tl.load(base_ptr + first_site + site, mask=site_mask, other=0)
    pair = ((base + source_row).to(tl.int64) * M + stream) * num_tokens
    tl.store(score_ptr + pair[None, :] + token[:, None], score, mask=token_mask[:, None] & site_mask[None, :])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """What every kernel of a pass needs: the bank, how sources are expanded, and the tokens' segments."""

    bank_NTD: Tensor
    tap_QKD: Tensor
    segment_T: Tensor
    table_2M: Tensor
    eps: float

    @property
    def num_streams(self) -> int:
        """Streams of a source."""
        return self.table_2M.shape[1]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Site:
    """The sources that a site reads: bank rows 0, 1, ..., the newest of them perhaps elsewhere, and their kernels."""

    num_sources: int
    last_row: int
    first_owner: int
    owner_step: int  # 0: one kernel for all


def tile_sides(num_sources: int, width: int) -> dict[str, int]:
    """Sides of a tile of several sources, and warps for it.

    >>> tile_sides(9, 2048)
    {'SOURCES': 16, 'TOKENS': 16, 'COLUMNS': 16, 'num_warps': 4}
    """
    if num_sources > MAX_SOURCES:
        raise KernelError(
            f"streams: {num_sources} sources; up to {MAX_SOURCES} fit a tile; choose larger blocks, or set "
            "ISOLOSS_KERNELS=reference"
        )
    sources = triton.next_power_of_2(num_sources)
    columns = 32 if sources <= 8 and width % 32 == 0 else 16
    return {
        "SOURCES": sources,
        "TOKENS": TOKENS,
        "COLUMNS": columns,
        "num_warps": max(1, min(16, sources * TOKENS * columns // 1024)),
    }


def column_ranges(num_tokens: int, width: int, columns: int) -> int:
    """Ranges into which the width is cut where a sum over it is wanted: as many programs as keep a GPU busy."""
    wanted = max(1, 1056 // max(1, triton.cdiv(num_tokens, TOKENS)))  # eight for each of an H200's 132 multiprocessors
    parts = width // columns
    return next(count for count in range(min(wanted, parts), 0, -1) if parts % count == 0)


def score(
    streams: Streams,
    *,
    key_SMD: Tensor,
    base_S: Tensor,
    score_PMT: Tensor,
    bank_row: int,
    source_row: int,
    owner: int,
    sites: range,
) -> None:
    """Write the logits of one source, in ``bank_row``, for ``sites``, of each of which it is number ``source_row``."""
    num_streams, num_tokens = streams.num_streams, streams.segment_T.shape[0]
    width = streams.bank_NTD.shape[-1]
    _score_kernel[(triton.cdiv(num_tokens, 32), num_streams)](
        streams.bank_NTD,
        streams.tap_QKD,
        key_SMD,
        streams.segment_T,
        base_S,
        streams.table_2M,
        score_PMT,
        bank_row,
        source_row,
        owner,
        sites.start,
        len(sites),
        num_tokens,
        streams.bank_NTD.stride(0),
        streams.tap_QKD.stride(0),
        streams.eps,
        M=num_streams,
        D=width,
        SITES=max(16, triton.next_power_of_2(len(sites))),
        TOKENS=32,
        COLUMNS=32 if width % 32 == 0 else 16,
        EXACT=is_exact(streams.bank_NTD.dtype),
        num_warps=4,
    )


def segments(document_BT: Tensor | None, batch: int, time: int, device: torch.device) -> Tensor:
    """A number for each token that two tokens share only within one sequence and document, flattened, int32."""
    sequence_B1 = torch.arange(batch, device=device).unsqueeze(1)
    if document_BT is None:
        return sequence_B1.expand(batch, time).reshape(-1).to(torch.int32)
    return (sequence_B1 * (document_BT.max() + 1) + document_BT).reshape(-1).to(torch.int32)
