"""What the kernels of multi-stream routing (msar) share, and the first of them: a source becomes its streams.

Stream j of source i is a causal depthwise convolution, ``X_t = sum_tau c_(j,tau) v_(t-tau)``, never across a document's
or sequence's start. Per stream a softmax over depth mixes the sources, and a gate of the mixes' joint projection adds
the streams. Sources are kept for the backward pass, their streams never: :func:`expand` makes them in a buffer that
lives during the forward pass, and once more during the backward pass.

- :func:`expand` here: one source's streams, and their logits for the sites that will read them, on tensor cores;
- :mod:`scaling.kernels.stream_mix`: mixes of the finished sources for the sites of a phase, and a site's output;
- :mod:`scaling.kernels.stream_contract`, :mod:`scaling.kernels.stream_gather`, :mod:`scaling.kernels.stream_fold`: the
  gradients of a site, of the finished sources' streams, and of what the streams were made of;
- :mod:`scaling.kernels.stream_ledger` and :mod:`scaling.kernels.stream_bank`: storage, order and operators.

Shape legend: F finished sources, S sites, L sites of a phase, T tokens (batch and sequence flattened), D width, M
streams, P pairs of site and source, Q owners of kernels, K taps of all streams, G splits of the tokens.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling.errors import KernelError
from scaling.kernels.tile import dot, is_exact, narrow

MAX_SOURCES = 128  # of a site: their logits share a tile
_TOKENS = 32


@triton.jit(do_not_specialize=["owner", "source_row", "first_site", "num_sites", "num_tokens", "num_pairs"])
def _expand_kernel(
    source_ptr,  # (T, D)
    tap_ptr,  # (Q, K, D) float32
    key_ptr,  # (S, M, D) float32
    age_ptr,  # (T,) int32
    table_ptr,  # (2, M) int32 first tap and number of taps
    base_ptr,  # (S,) int32 first pair of each site
    stream_ptr,  # (M, T, D) out
    score_ptr,  # (T, P, M) float32 out
    owner,
    source_row,
    first_site,
    num_sites,
    num_tokens,
    num_pairs,
    owner_stride,
    eps,
    SCORE: tl.constexpr,
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
    age = tl.load(age_ptr + token, mask=token_mask, other=-1)
    first_tap = tl.load(table_ptr + stream)
    taps = tl.load(table_ptr + M + stream)
    column = tl.arange(0, COLUMNS)
    place = token.to(tl.int64)[:, None] * D + column[None, :]
    taps_ptr = tap_ptr + tl.cast(owner, tl.int64) * owner_stride + first_tap * D + column
    out_ptr = stream_ptr + stream.to(tl.int64) * num_tokens * D
    kind: tl.constexpr = stream_ptr.dtype.element_ty
    if SCORE:
        site = tl.arange(0, SITES)
        site_mask = site < num_sites
        key_row_ptr = key_ptr + ((first_site + site).to(tl.int64) * M + stream)[None, :] * D + column[:, None]
        square = tl.zeros([TOKENS], tl.float32)
        score = tl.zeros([TOKENS, SITES], tl.float32)
    for start in range(0, D, COLUMNS):
        x = tl.zeros([TOKENS, COLUMNS], tl.float32)
        for tau in range(0, taps):
            value = tl.load(source_ptr + place + (start - tau * D), mask=(age >= tau)[:, None], other=0.0)
            x += value.to(tl.float32) * tl.load(taps_ptr + start + tau * D)[None, :]
        rounded = narrow(x, kind)
        tl.store(out_ptr + place + start, rounded, mask=token_mask[:, None])
        if SCORE:
            x = rounded.to(tl.float32)
            square += tl.sum(x * x, 1)
            key = tl.load(key_row_ptr + start, mask=site_mask[None, :], other=0.0)
            if EXACT:
                score = dot(x, key, score, EXACT)
            else:  # the key in two parts, so that only the stream is rounded, as it is in PyTorch
                high = narrow(key, kind)
                score = dot(rounded, high, score, EXACT)
                score = dot(rounded, narrow(key - high.to(tl.float32), kind), score, EXACT)
    if SCORE:
        score *= (1.0 / tl.sqrt_rn(square / D + eps))[:, None]
        base = tl.load(base_ptr + first_site + site, mask=site_mask, other=0)
        pair = (token.to(tl.int64) * num_pairs)[:, None] + (base + source_row)[None, :]
        tl.store(score_ptr + pair * M + stream, score, mask=token_mask[:, None] & site_mask[None, :])


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Streams:
    """How sources become streams: kernels, where each stream's are, and how far back a token may look."""

    tap_QKD: Tensor
    table_2M: Tensor
    age_T: Tensor
    eps: float

    @property
    def num_streams(self) -> int:
        """Streams of a source."""
        return self.table_2M.shape[1]


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


def expand(
    streams: Streams,
    source_TD: Tensor,
    stream_MTD: Tensor,
    *,
    owner: int,
    key_SMD: Tensor,
    base_S: Tensor,
    score_TPM: Tensor,
    source_row: int = 0,
    sites: range | None = None,
) -> None:
    """Write one source's streams and, if ``sites`` are given, its logits there, where it is number ``source_row``."""
    num_streams, num_tokens, width = stream_MTD.shape
    readers = range(0) if sites is None else sites
    _expand_kernel[(triton.cdiv(num_tokens, _TOKENS), num_streams)](
        source_TD,
        streams.tap_QKD,
        key_SMD,
        streams.age_T,
        streams.table_2M,
        base_S,
        stream_MTD,
        score_TPM,
        owner,
        source_row,
        readers.start,
        len(readers),
        num_tokens,
        score_TPM.shape[1],
        streams.tap_QKD.stride(0),
        streams.eps,
        SCORE=sites is not None,
        M=num_streams,
        D=width,
        SITES=max(16, triton.next_power_of_2(len(readers))),
        TOKENS=_TOKENS,
        COLUMNS=chunk(width, 64),
        EXACT=is_exact(stream_MTD.dtype),
        num_warps=4,
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
