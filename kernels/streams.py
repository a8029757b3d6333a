"""What the kernels of multi-stream routing (msar) share: how sources become streams, phases of sites, spans of tokens.

Stream j of source i is a causal depthwise convolution, ``X_t = sum_tau c_(j,tau) v_(t-tau)``, never across a document's
or sequence's start. Per stream a softmax over depth mixes the sources, and a gate of the mixes' joint projection adds
the streams. Sources are kept for the backward pass, their streams never: they are made in a buffer that lives during
the forward pass, and once more during the backward pass.

- :mod:`scaling.kernels.stream_expand`: one source's streams, and their logits for sites that will read them;
- :mod:`scaling.kernels.stream_mix`: mixes of the finished sources for the sites of a phase, and a site's output;
- :mod:`scaling.kernels.stream_turn`, :mod:`scaling.kernels.stream_gather`, :mod:`scaling.kernels.stream_keys`,
  :mod:`scaling.kernels.stream_fold`: the gradients of a site, of the finished sources' streams, of what they are dotted
  with, and of what they were made of;
- :mod:`scaling.kernels.stream_ledger`, :mod:`scaling.kernels.stream_operators` and :mod:`scaling.kernels.stream_bank`:
  storage and order, operators, and what models call.

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

MAX_SOURCES = 256  # of a site: their logits share a tile


@triton.jit
def load_rows(ptr, COUNT: tl.constexpr, D: tl.constexpr):
    """Load the rows of ``COUNT`` tokens from one on, as they are in memory."""
    rows = ()
    for step in tl.static_range(COUNT):
        rows = rows + (tl.load(ptr + step * D),)
    return rows


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


def ages(document_BT: Tensor | None, batch: int, time: int, device: torch.device) -> Tensor:
    """How many tokens before each belong to its sequence and document, flattened, int32."""
    position_BT = torch.arange(time, device=device).expand(batch, time)
    if document_BT is None:
        return position_BT.reshape(-1).to(torch.int32)
    begins_BT = torch.ones_like(document_BT, dtype=torch.bool)
    begins_BT[:, 1:] = document_BT[:, 1:] != document_BT[:, :-1]
    start_BT = torch.where(begins_BT, position_BT, 0).cummax(1).values
    return (position_BT - start_BT).reshape(-1).to(torch.int32)
