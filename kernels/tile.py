"""What every routing kernel shares: how a head's width is cut into powers of two, loads under a mask, dot products.

Triton's tiles have power-of-two sides, but C = D / H need not be one (160 at width 1280 with 8 heads). Padding 160 to
256 leaves 37% of the lanes idle, so a head is cut in two parts: the largest power of two in C, and a padded rest
(128 + 32 for 160). ``REST == 0`` says that there is none.
"""

from __future__ import annotations

import dataclasses
import os

import torch
import triton
import triton.language as tl

# Triton's interpreter keeps bfloat16 as raw 16-bit integers, which its dot product would multiply as integers.
INTERPRETED = os.environ.get("TRITON_INTERPRET", "0") == "1"
_UPCAST = tl.constexpr(INTERPRETED)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadTile:
    """Sides of one token's tile: ``heads`` (padded to a power of two) by ``main`` plus ``rest`` columns."""

    heads: int
    head_width: int
    main: int
    rest: int
    padded_heads: int

    @property
    def token_sides(self) -> dict[str, int]:
        """Arguments of a kernel whose program holds all heads of a token."""
        return {**self.head_sides, "HP": self.padded_heads}

    @property
    def head_sides(self) -> dict[str, int]:
        """Arguments of a kernel whose program holds one head."""
        return {"H": self.heads, "C": self.head_width, "MAIN": self.main, "REST": self.rest}


def head_tile(width: int, heads: int) -> HeadTile:
    """Cut a width of ``heads`` slices into tile sides.

    >>> head_tile(1280, 8)
    HeadTile(heads=8, head_width=160, main=128, rest=32, padded_heads=8)
    >>> head_tile(1024, 8).rest
    0
    """
    head_width = width // heads
    main = 1 << (head_width.bit_length() - 1)
    remainder = head_width - main
    rest = max(16, triton.next_power_of_2(remainder)) if remainder else 0
    return HeadTile(
        heads=heads,
        head_width=head_width,
        main=main,
        rest=rest,
        padded_heads=triton.next_power_of_2(heads),
    )


def head_fold(head_width: int) -> int:
    """Parts into which a wide head is cut where heads need not be whole: the fewest equal parts of at most 256.

    >>> head_fold(160), head_fold(1280), head_fold(2048)
    (1, 5, 8)
    """
    return next(fold for fold in range(1, head_width + 1) if head_width % fold == 0 and head_width // fold <= 256)


def is_exact(dtype: torch.dtype) -> bool:
    """Say whether dot products must use IEEE float32: TF32's 3e-4 would drown the 3e-6 that float32 promises."""
    return dtype == torch.float32


@triton.jit
def narrow(value, KIND: tl.constexpr):
    """Convert float32 to ``KIND``, to nearest: the interpreter's own conversion to bfloat16 cuts the low bits off."""
    if _UPCAST:
        if KIND == tl.bfloat16:
            bits = value.to(tl.uint32, bitcast=True)
            value = (bits + 0x7FFF + ((bits >> 16) & 1)).to(tl.float32, bitcast=True)
    return value.to(KIND)


@triton.jit
def token_offsets(H: tl.constexpr, HP: tl.constexpr, C: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Offsets and masks within a token: heads, ``(HP, MAIN)`` first columns, ``(HP, REST)`` others (unused if none)."""
    head = tl.arange(0, HP)
    head_mask = head < H
    column = tl.arange(0, MAIN)
    main = head[:, None] * C + column[None, :]
    main_mask = head_mask[:, None] & (column[None, :] < C)
    SIDE: tl.constexpr = REST if REST > 0 else 1
    rest_column = MAIN + tl.arange(0, SIDE)
    rest = head[:, None] * C + rest_column[None, :]
    rest_mask = head_mask[:, None] & (rest_column[None, :] < C)
    return head, head_mask, main, main_mask, rest, rest_mask


@triton.jit
def head_offsets(head, C: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Offsets of one head within a token: ``(MAIN,)`` first columns, ``(REST,)`` others and their mask."""
    SIDE: tl.constexpr = REST if REST > 0 else 1
    rest_column = MAIN + tl.arange(0, SIDE)
    return head * C + tl.arange(0, MAIN), head * C + rest_column, (rest_column < C)[None, :]


@triton.jit
def load_tile(pointer, offsets, mask, MASKED: tl.constexpr):
    """Load with zeros outside ``mask``; without a mask where the tile is whole, which keeps loads 16 bytes wide."""
    if MASKED:
        return tl.load(pointer + offsets, mask=mask, other=0.0)
    else:
        return tl.load(pointer + offsets)


@triton.jit
def store_tile(pointer, offsets, value, mask, MASKED: tl.constexpr):
    """Store under ``mask``, or whole; counterpart of :func:`load_tile`."""
    if MASKED:
        tl.store(pointer + offsets, narrow(value.to(tl.float32), pointer.dtype.element_ty), mask=mask)
    else:
        tl.store(pointer + offsets, narrow(value.to(tl.float32), pointer.dtype.element_ty))


@triton.jit
def dot(a, b, accumulator, EXACT: tl.constexpr):
    """``accumulator + a @ b`` in float32, on tensor cores for 16-bit operands, in IEEE float32 if ``EXACT``."""
    if _UPCAST:
        return accumulator + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif EXACT:
        return tl.dot(a, b, accumulator, input_precision="ieee")
    else:
        return tl.dot(a, b, accumulator)
