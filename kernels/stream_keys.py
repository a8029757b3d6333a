"""Backward kernel of multi-stream routing (msar): gradients of what sites dot streams with, as sums over tokens.

A site's key gets ``sum r dz X`` over sources and tokens, its gates' projections ``sum dpi_k o = sum dpi_k p X``. Both
are products of numbers by token, which :mod:`scaling.kernels.stream_turn` and :mod:`scaling.kernels.stream_gather` have
left, with streams: one read of the streams serves all sites of a phase.

Shape legend: as in :mod:`scaling.kernels.streams`; W scalars of a token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import tile
from scaling.kernels.tile import dot, is_exact, narrow

_KEYS = {"TOKENS": 16, "COLUMNS": 256, "num_warps": 4, "STAGES": 4}


@triton.jit(do_not_specialize=["num_rows", "span"])
def _keys_kernel(
    stream_ptr,  # (F, M, T, D)
    coefficient_ptr,  # (F, M, 2, L, T) float32: r dz, p
    scalar_ptr,  # (L, W, T) float32, dpi first
    result_ptr,  # (G, L, C, M, D) float32 out: of the key, and of the gates' projections
    num_rows,
    num_tokens,
    span,  # tiles of a split
    SITES: tl.constexpr,
    GATES: tl.constexpr,
    LINES: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    stream = tl.program_id(2)
    split = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    line = tl.arange(0, LINES)
    site = line // (1 + GATES)
    gate = line % (1 + GATES)  # 0: the key
    is_line = line < SITES * (1 + GATES)
    is_gate = (is_line & (gate > 0))[:, None]
    kind: tl.constexpr = stream_ptr.dtype.element_ty
    result = tl.zeros([LINES, COLUMNS], tl.float32)
    local = tl.arange(0, TOKENS)
    # within a row's numbers 32 bits do: wider places of a tile would cost its registers
    place = local[:, None] * D + column[None, :]
    factor_place = (((gate > 0) * SITES + site) * num_tokens)[:, None] + local[None, :]
    turned_place = ((site * (2 * M) + gate - 1) * num_tokens)[:, None] + local[None, :]
    first = split * span * TOKENS
    last = tl.minimum(first + span * TOKENS, num_tokens)
    for index in range(0, num_rows):
        row = tl.cast(index, tl.int64) * M + stream
        x_ptr = stream_ptr + row * num_tokens * D
        factor_ptr = coefficient_ptr + row * num_tokens * (2 * SITES)
        for start in tl.range(first, last, TOKENS, num_stages=STAGES):
            mask = local < last - start
            x = tl.load(x_ptr + start * D + place, mask=mask[:, None], other=0.0)
            factor = tl.load(factor_ptr + start + factor_place, mask=is_line[:, None] & mask[None, :], other=0.0)
            if GATES > 0:
                factor *= tl.load(scalar_ptr + start + turned_place, mask=is_gate & mask[None, :], other=1.0)
            if EXACT:
                result = dot(factor, x, result, EXACT)
            else:  # the factor in two parts, so that only the stream is rounded, as it is in PyTorch
                high = narrow(factor, kind)
                result = dot(high, x, result, EXACT)
                result = dot(narrow(factor - high.to(tl.float32), kind), x, result, EXACT)
    place = (((split * SITES + site) * (1 + GATES) + gate)[:, None] * M + stream) * D + column[None, :]
    tl.store(result_ptr + place, result, mask=is_line[:, None] & (column < D)[None, :])


def keys(
    stream_FMTD: Tensor,
    coefficient_FM2LT: Tensor,
    scalar_LWT: Tensor,
    *,
    num_rows: int,
    splits: int,
    gated: bool,
) -> Tensor:
    """Return what streams give to the gradients of keys and, behind each, of the projections, ``(G, L, C, M, D)``.

    C is 1, or with ``gated`` 1 + M.
    """
    _, num_streams, num_tokens, width = stream_FMTD.shape
    sites, gates = coefficient_FM2LT.shape[3], num_streams if gated else 0
    sides = tile(_KEYS, width)
    result = torch.empty(
        (splits, sites, 1 + gates, num_streams, width), dtype=torch.float32, device=stream_FMTD.device
    )  # fmt: skip
    _keys_kernel[(width // sides["COLUMNS"], splits, num_streams)](
        stream_FMTD,
        coefficient_FM2LT,
        scalar_LWT,
        result,
        num_rows,
        num_tokens,
        triton.cdiv(triton.cdiv(num_tokens, sides["TOKENS"]), splits),
        SITES=sites,
        GATES=gates,
        LINES=max(16, triton.next_power_of_2(sites * (1 + gates))),
        M=num_streams,
        D=width,
        EXACT=is_exact(stream_FMTD.dtype),
        **sides,
    )
    return result
