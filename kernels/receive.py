"""First backward kernel of a site of depth routing: the gradient that arrives becomes ``G`` in its bank row.

:func:`receive` takes the sublayer's norm off the gradient, where the site has one, and leaves ``delta = <G, o>`` for
:mod:`scaling.kernels.gather` and :mod:`scaling.kernels.gather_group`. A program of one warp, or two, walks a span of
tokens and sums the gain's gradient over them: with few warps the sums over the width need no barrier.

Shape legend: T tokens, D width, H heads, C = D / H, P programs. A tile is (heads, columns of a head); a row is
``PARTS`` of them for each group of heads.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import narrow

_TILE = 256  # values of a token in a tile: eight for each lane of a warp, loads of 16 bytes in 16 bits
_MAX_TILES = 16  # of a row: loops over them are unrolled
_MULTIPROCESSORS = 132  # of an H200
_ROWS = 1024  # programs whose parts are summed at a time, their loads in flight together


@triton.jit
def _load_row(ptr, mask, GROUPS: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr, SIDE: tl.constexpr):
    """The tiles of a row, as they are in memory; ``STEP``: from one group of heads to the next."""
    row = ()
    for group in tl.static_range(GROUPS):
        for part in tl.static_range(PARTS):
            row += (tl.load(ptr + (group * STEP + part * SIDE), mask=mask, other=0.0),)
    return row


@triton.jit(do_not_specialize=["num_tokens", "span"])
def _receive_kernel(
    incoming_ptr,  # (T, D) gradient of the site's output, or of its normalised output if NORM
    output_ptr,  # (T, D)
    output_factor_ptr,  # (T,) float32
    gain_ptr,  # (D,)
    gradient_ptr,  # (T, D) bank row that takes G
    delta_ptr,  # (T, H) float32
    gain_gradient_ptr,  # (P, D) float32
    num_tokens,
    span,
    NORM: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    HEADS: tl.constexpr,
    SIDE: tl.constexpr,
    GROUPS: tl.constexpr,
    PARTS: tl.constexpr,
    STAGES: tl.constexpr,
):
    D: tl.constexpr = H * C
    STEP: tl.constexpr = HEADS * C
    kind: tl.constexpr = gradient_ptr.dtype.element_ty
    head = tl.arange(0, HEADS)
    column = tl.arange(0, SIDE)
    spot = head[:, None] * C + column[None, :]
    mask = (head < H)[:, None] & (column < C)[None, :]
    if NORM:
        gain = _load_row(gain_ptr + spot, mask, GROUPS, PARTS, STEP, SIDE)
        gain_gradient = ()
        for _ in tl.static_range(GROUPS * PARTS):
            gain_gradient += (tl.zeros([HEADS, SIDE], tl.float32),)
    first = tl.program_id(0) * span
    for token in tl.range(first, tl.minimum(first + span, num_tokens), num_stages=STAGES):
        base = tl.cast(token, tl.int64) * D
        incoming = _load_row(incoming_ptr + base + spot, mask, GROUPS, PARTS, STEP, SIDE)
        output = _load_row(output_ptr + base + spot, mask, GROUPS, PARTS, STEP, SIDE)
        if NORM:
            factor = tl.load(output_factor_ptr + token)
            radial = tl.zeros([HEADS, SIDE], tl.float32)
            units = ()
            gained = ()
            more = ()
            for tile in tl.static_range(GROUPS * PARTS):
                units += (output[tile].to(tl.float32) * factor,)
                more += (gain_gradient[tile] + incoming[tile].to(tl.float32) * units[tile],)
                gained += (incoming[tile].to(tl.float32) * gain[tile].to(tl.float32),)
                radial += gained[tile] * units[tile]
            gain_gradient = more
            along = tl.sum(tl.sum(radial, 1), 0) / D
            incoming = ()
            for tile in tl.static_range(GROUPS * PARTS):
                incoming += (factor * (gained[tile] - units[tile] * along),)
        for group in tl.static_range(GROUPS):
            delta = tl.zeros([HEADS, SIDE], tl.float32)
            for part in tl.static_range(PARTS):
                rounded = narrow(incoming[group * PARTS + part].to(tl.float32), kind)
                tl.store(gradient_ptr + base + spot + (group * STEP + part * SIDE), rounded, mask=mask)
                delta += rounded.to(tl.float32) * output[group * PARTS + part].to(tl.float32)
            number = tl.cast(token, tl.int64) * H + group * HEADS + head
            tl.store(delta_ptr + number, tl.sum(delta, 1), mask=head < H)
    if NORM:
        line_ptr = gain_gradient_ptr + tl.program_id(0).to(tl.int64) * D + spot
        for group in tl.static_range(GROUPS):
            for part in tl.static_range(PARTS):
                tl.store(line_ptr + (group * STEP + part * SIDE), gain_gradient[group * PARTS + part], mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _sum_rows_kernel(
    partial_ptr,  # (P, D) float32
    sum_ptr,  # (D,)
    num_rows,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """Sum the programs' parts and convert: one launch where ``sum`` and ``to`` are two."""
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, ROWS)[:, None]
    total = tl.zeros([ROWS, COLUMNS], tl.float32)
    for start in tl.range(0, num_rows, ROWS):
        spot = (start + row) * D + column[None, :]
        total += tl.load(partial_ptr + spot, mask=start + row < num_rows, other=0.0)
    tl.store(sum_ptr + column, narrow(tl.sum(total, 0), sum_ptr.dtype.element_ty))


def receive(
    *,
    incoming_TD: Tensor,
    output_TD: Tensor,
    output_factor_T: Tensor,
    gradient_TD: Tensor,
    delta_TH: Tensor,
    gain_D: Tensor | None,
) -> Tensor | None:
    """Write ``G`` and ``delta`` of one site; with a gain, ``incoming_TD`` is the gradient of ``RMSNorm(o) * gain``.

    Returns the gain's gradient in its dtype, or None without one.
    """
    num_tokens, width = incoming_TD.shape
    sides = receive_sides(width, delta_TH.shape[-1])
    # of narrow rows twice as many are in flight: 0.039 -> 0.033 ms at d512; wider ones get slower by it
    span = triton.cdiv(num_tokens, _MULTIPROCESSORS * (8 if width <= 512 else 4))
    programs = triton.cdiv(num_tokens, span)
    partial_PD = None if gain_D is None else delta_TH.new_empty((programs, width))
    _receive_kernel[(programs,)](
        incoming_TD,
        output_TD,
        output_factor_T,
        incoming_TD if gain_D is None else gain_D,
        gradient_TD,
        delta_TH,
        delta_TH if partial_PD is None else partial_PD,
        num_tokens,
        span,
        NORM=gain_D is not None,
        **sides,
    )
    if gain_D is None or partial_PD is None:
        return None
    gain_gradient_D = torch.empty_like(gain_D)
    columns = 16  # few, so that many programs share the rows; every width is a multiple
    _sum_rows_kernel[(width // columns,)](
        partial_PD, gain_gradient_D, programs, D=width, ROWS=_ROWS, COLUMNS=columns, num_warps=8
    )
    return gain_gradient_D


def receive_sides(width: int, heads: int) -> dict[str, Any]:
    """Constants of :func:`receive`: tiles without padding, unless a row would be too many of them.

    >>> sides = receive_sides(1280, 8)
    >>> sides["HEADS"], sides["SIDE"], sides["GROUPS"], sides["PARTS"]
    (8, 32, 1, 5)
    >>> sides = receive_sides(1024, 8)
    >>> sides["HEADS"], sides["SIDE"], sides["GROUPS"], sides["PARTS"]
    (2, 128, 4, 1)
    """
    head_width = width // heads
    side = min(_TILE, head_width & -head_width)
    together = min(heads & -heads, _TILE // side)
    groups, parts = heads // together, head_width // side
    if groups * parts > _MAX_TILES:
        together, side = triton.next_power_of_2(heads), triton.next_power_of_2(head_width)
        groups = parts = 1
    return {
        "H": heads, "C": head_width, "HEADS": together, "SIDE": side, "GROUPS": groups, "PARTS": parts,
        "STAGES": 4 if width < 2048 else 3, "num_warps": 1 if width < 2048 else 2,
    }  # fmt: skip
