"""What the multi-stream kernels of one site share (msar): all rows of a token, whole, in one program's registers.

Under :mod:`scaling.kernels.stream_mix` and :mod:`scaling.kernels.stream_turn`. Sums over the width decide what a site
does with its rows, so that a program that holds them reads memory once. A tile is (streams, columns), with all lanes
along the columns, so that sums over streams need no other lane. A width that is two powers of two (1280) is cut into
them, any other is padded to one.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

# Values of a row, over all streams, that a lane holds at once; warps at most.
_PER_WARP = 1024
_MOST_WARPS = 16


def row_sides(width: int, num_streams: int) -> dict[str, Any]:
    """Constants of a kernel whose program holds a token's rows: where parts of the width start, their widths, warps.

    >>> row_sides(1280, 4)
    {'M': 4, 'ROWS': 4, 'D': 1280, 'STARTS': (0, 1024), 'WIDTHS': (1024, 256), 'num_warps': 4}
    >>> row_sides(336, 3)["WIDTHS"]
    (512,)
    """
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    if rest & (rest - 1):
        main, rest = 2 * main, 0
    rows = triton.next_power_of_2(num_streams)
    return {
        "M": num_streams,
        "ROWS": rows,
        "D": width,
        "STARTS": (0, main) if rest else (0,),
        "WIDTHS": (main, rest) if rest else (main,),
        "num_warps": min(_MOST_WARPS, max(1, main * rows // _PER_WARP)),
    }


@triton.jit
def row_places(stride, START: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr):
    """Where a part of all rows is, ``(ROWS, WIDTH)``, and which of it there is."""
    row = tl.arange(0, ROWS)
    column = START + tl.arange(0, WIDTH)
    return row[:, None] * stride + column[None, :], (row < M)[:, None] & (column < D)[None, :]


@triton.jit
def read_rows(
    pointer, stride, START: tl.constexpr, WIDTH: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):
    """A part of all rows in float32; without a mask where there is no padding, which keeps loads 16 bytes wide."""
    place, mask = row_places(stride, START, WIDTH, M, ROWS, D)
    if M < ROWS or START + WIDTH > D:
        return tl.load(pointer + place, mask=mask, other=0.0).to(tl.float32)
    else:
        return tl.load(pointer + place).to(tl.float32)


@triton.jit
def read_row(pointer, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """A part of one row in float32."""
    column = START + tl.arange(0, WIDTH)
    if START + WIDTH > D:
        return tl.load(pointer + column, mask=column < D, other=0.0).to(tl.float32)
    else:
        return tl.load(pointer + column).to(tl.float32)


@triton.jit
def write_rows(
    pointer, value, stride, START: tl.constexpr, M: tl.constexpr, ROWS: tl.constexpr, D: tl.constexpr
):  # fmt: skip
    """Store a part of all rows."""
    place, mask = row_places(stride, START, value.shape[1], M, ROWS, D)
    if M < ROWS or START + value.shape[1] > D:
        tl.store(pointer + place, value, mask=mask)
    else:
        tl.store(pointer + place, value)
