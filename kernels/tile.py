"""What every routing kernel shares: how a head's width is cut into powers of two, loads under a mask, dot products.

Triton's tiles have power-of-two sides, but C = D / H need not be one (160 at width 1280 with 8 heads). Padding 160 to
256 leaves 37% of the lanes idle. Kernels on tensor cores, whose program holds one head, cut it in two: the largest
power of two in C, and a padded rest (128 + 32 for 160; ``REST == 0`` says that there is none). Kernels whose program
holds a token cut every head in equal parts (5 times 32), tiles of one layout, so that sums need no change of layout.
"""

from __future__ import annotations

import dataclasses

import torch
import triton
import triton.language as tl

from scaling.kernels.interpreter import interpreted

# Triton's interpreter keeps bfloat16 as raw 16-bit integers, which its dot product would multiply as integers.
INTERPRETED = interpreted()
_UPCAST = tl.constexpr(INTERPRETED)
_MAX_PARTS = 8  # of a head: loops over them are unrolled
_CORE = 16  # a tensor core sums over so many values at least: a narrower head is padded


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HeadTile:
    """Sides of tiles: ``main`` plus ``rest`` columns of a head; ``padded_heads`` by ``side`` columns of a token."""

    heads: int
    head_width: int
    main: int
    rest: int
    padded_heads: int
    parts: int
    side: int

    @property
    def token_sides(self) -> dict[str, int]:
        """Arguments of a kernel whose program holds all heads of a token."""
        return {"H": self.heads, "HP": self.padded_heads, "C": self.head_width, "PARTS": self.parts, "SIDE": self.side}

    @property
    def head_sides(self) -> dict[str, int]:
        """Arguments of a kernel whose program holds one head."""
        return {"H": self.heads, "C": self.head_width, "MAIN": self.main, "REST": self.rest}


def head_tile(width: int, heads: int) -> HeadTile:
    """Cut a width of ``heads`` slices into tile sides.

    >>> head_tile(1280, 8)
    HeadTile(heads=8, head_width=160, main=128, rest=32, padded_heads=8, parts=5, side=32)
    >>> head_tile(1024, 8).rest, head_tile(1024, 8).side, head_tile(102, 6).side
    (0, 128, 32)
    >>> head_tile(96, 8).main, head_tile(96, 8).rest
    (16, 0)
    """
    head_width = width // heads
    main = max(_CORE, 1 << (head_width.bit_length() - 1))
    remainder = max(0, head_width - main)
    rest = max(_CORE, triton.next_power_of_2(remainder)) if remainder else 0
    side = head_width & -head_width
    if head_width > _MAX_PARTS * side:
        side = triton.next_power_of_2(head_width)
    return HeadTile(
        heads=heads,
        head_width=head_width,
        main=main,
        rest=rest,
        padded_heads=triton.next_power_of_2(heads),
        parts=-(-head_width // side),
        side=side,
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
def token_offsets(H: tl.constexpr, HP: tl.constexpr, C: tl.constexpr, SIDE: tl.constexpr):
    """Within a token: heads and their mask; offsets of their first parts ``(HP, SIDE)`` and the mask of all parts."""
    head = tl.arange(0, HP)
    column = tl.arange(0, SIDE)
    return head, head < H, head[:, None] * C + column[None, :], (head < H)[:, None] & (column < C)[None, :]


@triton.jit
def head_offsets(head, C: tl.constexpr, MAIN: tl.constexpr, REST: tl.constexpr):
    """Offsets of one head within a token: ``(MAIN,)`` first columns, ``(REST,)`` others and their mask."""
    SIDE: tl.constexpr = REST if REST > 0 else 1
    rest_column = MAIN + tl.arange(0, SIDE)
    return head * C + tl.arange(0, MAIN), head * C + rest_column, (rest_column < C)[None, :]


@triton.jit
def head_mask(mask, C: tl.constexpr, MAIN: tl.constexpr):
    """The mask of rows ``(R, 1)``, and of the columns where a head is narrower than its tile."""
    if MAIN > C:
        return mask & (tl.arange(0, MAIN) < C)[None, :]
    else:
        return mask


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
def load_parts(pointer, offsets, mask, PARTS: tl.constexpr, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """The parts of every head, as they are in memory."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (load_tile(pointer + part * SIDE, offsets, mask, MASKED),)
    return parts


@triton.jit
def store_parts(pointer, offsets, parts, mask, PARTS: tl.constexpr, SIDE: tl.constexpr, MASKED: tl.constexpr):
    """Counterpart of :func:`load_parts`."""
    for part in tl.static_range(PARTS):
        store_tile(pointer + part * SIDE, offsets, parts[part], mask, MASKED)


@triton.jit
def zero_parts(like, PARTS: tl.constexpr):
    """Zeros in float32, shaped as ``like``."""
    parts = ()
    for _ in tl.static_range(PARTS):
        parts += (tl.zeros(like.shape, tl.float32),)
    return parts


@triton.jit
def sum_product(a, b, PARTS: tl.constexpr):
    """Sum over the last axis of all parts of ``a * b``, in float32."""
    total = a[0].to(tl.float32) * b[0].to(tl.float32)
    for part in tl.static_range(1, PARTS):
        total += a[part].to(tl.float32) * b[part].to(tl.float32)
    return tl.sum(total, len(total.shape) - 1)


@triton.jit
def weigh_parts(a, x, b, y, PARTS: tl.constexpr):
    """``a * x + b * y`` part by part in float32, for factors ``a`` and ``b`` without the last axis."""
    parts = ()
    for part in tl.static_range(PARTS):
        parts += (tl.expand_dims(a, -1) * x[part].to(tl.float32) + tl.expand_dims(b, -1) * y[part].to(tl.float32),)
    return parts


@triton.jit
def dot(a, b, accumulator, EXACT: tl.constexpr):
    """``accumulator + a @ b`` in float32, on tensor cores for 16-bit operands, in IEEE float32 if ``EXACT``.

    A float64 accumulator takes float64 products: a chain of float32 additions as long as a width loses two bits.
    """
    tl.static_assert(
        a.shape[-1] >= 16, "a tensor core sums over 16 values at least, which the interpreter does not ask"
    )
    if accumulator.dtype == tl.float64:
        return accumulator + tl.dot(a.to(tl.float64), b.to(tl.float64), out_dtype=tl.float64)
    elif _UPCAST:
        return accumulator + tl.dot(a.to(tl.float32), b.to(tl.float32), input_precision="ieee")
    elif EXACT:
        return tl.dot(a, b, accumulator, input_precision="ieee")
    else:
        return tl.dot(a, b, accumulator)
