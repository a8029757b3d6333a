"""What the multi-stream kernels of one site share (msar): all rows of a token, whole, in one program's registers.

Under :mod:`scaling.kernels.stream_mix` and :mod:`scaling.kernels.stream_turn`. Sums over the width decide what a site
does with its rows, so that a program that holds them reads memory once. Rows are vectors, one a stream, so that all
lanes lie along the width; the sums that are needed at a time go through shared memory together. A width that is two
powers of two (1280) is cut into them, any other is padded to one.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

_MOST_WARPS = 16
_SUMS = tl.constexpr(8)  # that go through shared memory together


def row_sides(width: int, num_streams: int, *, tokens: int, per_warp: int) -> dict[str, Any]:
    """Constants of a kernel whose program holds some tokens' rows, about ``per_warp`` values of a row in each warp.

    >>> row_sides(1280, 4, tokens=1, per_warp=256)
    {'TOKENS': 1, 'M': 4, 'D': 1280, 'STARTS': (0, 1024), 'WIDTHS': (1024, 256), 'num_warps': 4}
    >>> row_sides(336, 3, tokens=1, per_warp=256)["WIDTHS"]
    (512,)
    """
    main = 1 << (width.bit_length() - 1)
    rest = width - main
    if rest & (rest - 1):
        main, rest = 2 * main, 0
    return {
        "TOKENS": tokens,
        "M": num_streams,
        "D": width,
        "STARTS": (0, main) if rest else (0,),
        "WIDTHS": (main, rest) if rest else (main,),
        "num_warps": min(_MOST_WARPS, max(1, main // per_warp)),
    }


@triton.jit
def read_row(pointer, START: tl.constexpr, WIDTH: tl.constexpr, D: tl.constexpr):
    """A part of a row in float32; without a mask where there is no padding, which keeps loads 16 bytes wide."""
    column = START + tl.arange(0, WIDTH)
    if START + WIDTH > D:
        return tl.load(pointer + column, mask=column < D, other=0.0).to(tl.float32)
    else:
        return tl.load(pointer + column).to(tl.float32)


@triton.jit
def write_row(pointer, value, mask, START: tl.constexpr, D: tl.constexpr):
    """Store a part of a row, if ``mask``."""
    column = START + tl.arange(0, value.shape[0])
    tl.store(pointer + column, value, mask=mask & (column < D))


@triton.jit
def sums(rows):
    """The sum of every row of a tuple of rows of one width, as a tuple of scalars."""
    found = ()
    for first in tl.static_range(0, len(rows), _SUMS):
        group = ()
        for index in tl.static_range(_SUMS):
            if first + index < len(rows):
                group = group + (rows[first + index],)
            else:
                group = group + (tl.zeros_like(rows[0]),)
        evens = tl.join(tl.join(group[0], group[4]), tl.join(group[2], group[6]))
        odds = tl.join(tl.join(group[1], group[5]), tl.join(group[3], group[7]))
        even, odd = tl.split(tl.sum(tl.join(evens, odds), 0))
        a, c = tl.split(even)
        b, d = tl.split(odd)
        found = found + _interleaved(tl.split(a), tl.split(b), tl.split(c), tl.split(d))
    return found


@triton.jit
def _interleaved(a, b, c, d):
    return (a[0], b[0], c[0], d[0], a[1], b[1], c[1], d[1])


@triton.jit
def added(some, others, COUNT: tl.constexpr):
    """The first sums of two tuples, added."""
    result = ()
    for index in tl.static_range(COUNT):
        result = result + (some[index] + others[index],)
    return result


@triton.jit
def repeated(value, COUNT: tl.constexpr):
    """A tuple of one value."""
    result = ()
    for _ in tl.static_range(COUNT):
        result = result + (value,)
    return result
