"""Forward kernels of multi-stream routing (msar): expand, mix over depth, gate and add the streams of a site.

Between :mod:`scaling.kernels.streams`, which expands and scores, and :mod:`scaling.kernels.stream_bank`. The gates need
the mixes' projections over the whole width before any stream can be added, so sources are expanded twice:

- :func:`measure` mixes and projects on the gates' weights; :func:`gate` turns the projections into gates;
- :func:`blend` mixes again and adds the gated streams.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Site, Streams, column_ranges, expand, stream_weights, tile_sides
from scaling.kernels.tile import narrow


@triton.jit(do_not_specialize=["num_sources", "last_row", "first_owner", "num_tokens"])
def _measure_kernel(
    bank_ptr,  # (N, T, D)
    tap_ptr,  # (Q, K, D) float32
    phi_ptr,  # (M * D, M) float32, of the site
    segment_ptr,
    table_ptr,
    score_ptr,  # (N, M, T) float32, of the site
    lse_ptr,  # (M, T) float32, of the site
    stat_ptr,  # (R, M + 1, T) float32: projections of the range's columns, and its sum of squares
    num_sources,
    last_row,  # where the newest source is
    first_owner,
    owner_step,
    num_tokens,
    row_stride,
    owner_stride,
    M: tl.constexpr,
    MP: tl.constexpr,
    D: tl.constexpr,
    RANGE: tl.constexpr,
    SOURCES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < num_tokens
    row = tl.arange(0, SOURCES)
    row_mask = row < num_sources
    held = tl.where(row == num_sources - 1, last_row, row).to(tl.int64)[:, None, None]
    owner = (first_owner + row * owner_step).to(tl.int64)[:, None, None]
    gate = tl.arange(0, MP)
    gate_mask = gate < M
    first_column = tl.program_id(1) * RANGE
    square = tl.zeros([TOKENS], tl.float32)
    projected = tl.zeros([TOKENS, MP], tl.float32)
    for stream in range(0, M):
        first_tap = tl.load(table_ptr + stream)
        taps = tl.load(table_ptr + M + stream)
        weight = stream_weights(score_ptr, lse_ptr, row, row_mask, stream, token, token_mask, num_tokens, M)
        for start in range(0, RANGE, COLUMNS):
            column = first_column + start + tl.arange(0, COLUMNS)
            x = expand(
                bank_ptr + held * row_stride + column[None, None, :],
                tap_ptr + owner * owner_stride + first_tap * D + column[None, None, :],
                row_mask[:, None, None], segment_ptr, token, token_mask, taps, D, SOURCES, TOKENS, COLUMNS,
            )  # fmt: skip
            mixed = tl.sum(x * weight[:, :, None], 0)
            square += tl.sum(mixed * mixed, 1)
            phi = tl.load(
                phi_ptr + (stream * D + column)[None, :] * M + gate[:, None], mask=gate_mask[:, None], other=0.0
            )
            projected += tl.sum(mixed[:, None, :] * phi[None, :, :], 2)
    stat_row_ptr = stat_ptr + tl.program_id(1).to(tl.int64) * (M + 1) * num_tokens + token
    tl.store(stat_row_ptr + M * num_tokens, square, mask=token_mask)
    tl.store(
        stat_row_ptr[:, None] + gate[None, :] * num_tokens, projected, mask=token_mask[:, None] & gate_mask[None, :]
    )


@triton.jit(do_not_specialize=["num_tokens", "num_ranges"])
def _gate_kernel(
    stat_ptr,  # (R, M + 1, T)
    scale_ptr,  # () the site's gate scale
    bias_ptr,  # (M,)
    gate_ptr,  # (M, T) out
    kept_ptr,  # (M + 1, T) out: projections, and the RMS factor of the mixes together
    num_tokens,
    num_ranges,
    eps,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    scale = tl.load(scale_ptr)
    square = tl.zeros([TOKENS], tl.float32)
    for part in range(0, num_ranges):
        square += tl.load(stat_ptr + (part * (M + 1) + M) * num_tokens + token, mask=mask, other=0.0)
    factor = 1.0 / tl.sqrt_rn(square / (M * D) + eps)
    tl.store(kept_ptr + M * num_tokens + token, factor, mask=mask)
    for stream in range(0, M):
        projected = tl.zeros([TOKENS], tl.float32)
        for part in range(0, num_ranges):
            projected += tl.load(stat_ptr + (part * (M + 1) + stream) * num_tokens + token, mask=mask, other=0.0)
        tl.store(kept_ptr + stream * num_tokens + token, projected, mask=mask)
        logit = scale * projected * factor + tl.load(bias_ptr + stream)
        tl.store(gate_ptr + stream * num_tokens + token, tl.sigmoid(logit), mask=mask)


@triton.jit(do_not_specialize=["num_sources", "last_row", "first_owner", "num_tokens"])
def _blend_kernel(
    bank_ptr,  # (N, T, D)
    tap_ptr,  # (Q, K, D) float32
    segment_ptr,
    table_ptr,
    score_ptr,  # (N, M, T) float32, of the site
    lse_ptr,  # (M, T) float32, of the site
    gate_ptr,  # (M, T) float32
    output_ptr,  # (T, D)
    num_sources,
    last_row,
    first_owner,
    owner_step,
    num_tokens,
    row_stride,
    owner_stride,
    GATED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    SOURCES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < num_tokens
    row = tl.arange(0, SOURCES)
    row_mask = row < num_sources
    held = tl.where(row == num_sources - 1, last_row, row).to(tl.int64)[:, None, None]
    owner = (first_owner + row * owner_step).to(tl.int64)[:, None, None]
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    output = tl.zeros([TOKENS, COLUMNS], tl.float32)
    for stream in range(0, M):
        first_tap = tl.load(table_ptr + stream)
        taps = tl.load(table_ptr + M + stream)
        weight = stream_weights(score_ptr, lse_ptr, row, row_mask, stream, token, token_mask, num_tokens, M)
        if GATED:
            weight *= tl.load(gate_ptr + stream * num_tokens + token, mask=token_mask, other=0.0)[None, :]
        else:
            weight *= 1.0 / M
        x = expand(
            bank_ptr + held * row_stride + column[None, None, :],
            tap_ptr + owner * owner_stride + first_tap * D + column[None, None, :],
            row_mask[:, None, None], segment_ptr, token, token_mask, taps, D, SOURCES, TOKENS, COLUMNS,
        )  # fmt: skip
        output += tl.sum(x * weight[:, :, None], 0)
    place = token[:, None].to(tl.int64) * D + column[None, :]
    tl.store(output_ptr + place, narrow(output, output_ptr.dtype.element_ty), mask=token_mask[:, None])


def measure(streams: Streams, site: Site, *, phi_VM: Tensor, score_NMT: Tensor, lse_MT: Tensor) -> Tensor:
    """Return the mixes' projections and sums of squares, ``(R, M + 1, T)``, by range of the width."""
    num_streams, num_tokens = streams.num_streams, streams.segment_T.shape[0]
    width = streams.bank_NTD.shape[-1]
    sides = tile_sides(site.num_sources, width)
    ranges = column_ranges(num_tokens, width, sides["COLUMNS"])
    stat = lse_MT.new_empty((ranges, num_streams + 1, num_tokens))
    _measure_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]), ranges)](
        streams.bank_NTD,
        streams.tap_QKD,
        phi_VM,
        streams.segment_T,
        streams.table_2M,
        score_NMT,
        lse_MT,
        stat,
        site.num_sources,
        site.last_row,
        site.first_owner,
        site.owner_step,
        num_tokens,
        streams.bank_NTD.stride(0),
        streams.tap_QKD.stride(0),
        M=num_streams,
        MP=triton.next_power_of_2(num_streams),
        D=width,
        RANGE=width // ranges,
        **sides,
    )
    return stat


def gate(stat: Tensor, *, scale: Tensor, bias_M: Tensor, kept: Tensor, width: int, eps: float) -> Tensor:
    """Return the gates ``(M, T)``; ``kept`` takes the projections and the mixes' RMS factor, for the backward pass."""
    ranges, rows, num_tokens = stat.shape
    gate_MT = stat.new_empty((rows - 1, num_tokens))
    _gate_kernel[(triton.cdiv(num_tokens, 128),)](
        stat, scale, bias_M, gate_MT, kept, num_tokens, ranges, eps, M=rows - 1, D=width, TOKENS=128, num_warps=4
    )
    return gate_MT


def blend(
    streams: Streams, site: Site, *, score_NMT: Tensor, lse_MT: Tensor, gate_MT: Tensor | None, output_TD: Tensor
) -> None:
    """Write the gated sum of the streams' mixes; their mean without gates."""
    num_streams, num_tokens = streams.num_streams, streams.segment_T.shape[0]
    width = streams.bank_NTD.shape[-1]
    sides = tile_sides(site.num_sources, width)
    _blend_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]), width // sides["COLUMNS"])](
        streams.bank_NTD,
        streams.tap_QKD,
        streams.segment_T,
        streams.table_2M,
        score_NMT,
        lse_MT,
        lse_MT if gate_MT is None else gate_MT,
        output_TD,
        site.num_sources,
        site.last_row,
        site.first_owner,
        site.owner_step,
        num_tokens,
        streams.bank_NTD.stride(0),
        streams.tap_QKD.stride(0),
        GATED=gate_MT is not None,
        M=num_streams,
        D=width,
        **sides,
    )
