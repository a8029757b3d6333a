"""Backward kernels of multi-stream routing (msar), first part: every scalar that the gradients need, token by token.

With h = sum_j a_j o_j the site's output, G its gradient, and a = sigmoid(g rho pi + b) with pi = sum_j phi_j^T o_j and
rho = (mean o^2 + eps)^(-1/2), the gradient of a stream's mix is

    Go_j = a_j G + sum_k dpi_k phi_(j,k) - kappa o_j,   kappa = drho rho^3 / (M D)

and from there on as in single-stream routing: dz = p (<Go, X> - <Go, o>), dX = p Go + r dz u - (r^2 / D) dz z X; a
source's gradient is the transposed convolution of dX (:mod:`scaling.kernels.stream_spread`).

- :func:`contract` expands and mixes once and forms all inner products that the scalars need;
- :func:`settle` turns them into scalars a token: a, dpi, kappa, and by source and stream ``r dz`` and ``r^2 dz z / D``.

Shape legend: as in :mod:`scaling.kernels.streams`; W scalars of a site.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Site, Streams, column_ranges, expand, stream_weights, tile_sides
from scaling.kernels.tile import dot, is_exact, narrow


@triton.jit(do_not_specialize=["num_sources", "last_row", "first_owner", "num_tokens"])
def _contract_kernel(
    bank_ptr,  # (N, T, D)
    gradient_ptr,  # (T, D) G of the site
    tap_ptr,  # (Q, K, D) float32
    phi_ptr,  # (M * D, M) float32, of the site
    segment_ptr,
    table_ptr,
    score_ptr,  # (N, M, T) float32, of the site
    lse_ptr,  # (M, T) float32, of the site
    stat_ptr,  # (R, N, M, 3 + M, T) out: <X, G>, <X, o>, <X, X>, <X, phi_k>
    num_sources,
    last_row,
    first_owner,
    owner_step,
    num_tokens,
    row_stride,
    owner_stride,
    GATED: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    D: tl.constexpr,
    RANGE: tl.constexpr,
    SOURCES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < num_tokens
    row = tl.arange(0, SOURCES)
    row_mask = row < num_sources
    held = tl.where(row == num_sources - 1, last_row, row).to(tl.int64)[:, None, None]
    owner = (first_owner + row * owner_step).to(tl.int64)[:, None, None]
    gate = tl.arange(0, MP)
    flat = tl.arange(0, SOURCES * TOKENS)
    first_column = tl.program_id(1) * RANGE
    FIELDS: tl.constexpr = 3 + M
    for stream in range(0, M):
        first_tap = tl.load(table_ptr + stream)
        taps = tl.load(table_ptr + M + stream)
        weight = stream_weights(score_ptr, lse_ptr, row, row_mask, stream, token, token_mask, num_tokens, M)
        along = tl.zeros([SOURCES, TOKENS], tl.float32)
        mutual = tl.zeros([SOURCES, TOKENS], tl.float32)
        square = tl.zeros([SOURCES, TOKENS], tl.float32)
        if GATED:
            projected = tl.zeros([SOURCES * TOKENS, MP], tl.float32)
        for start in range(0, RANGE, COLUMNS):
            column = first_column + start + tl.arange(0, COLUMNS)
            x = expand(
                bank_ptr + held * row_stride + column[None, None, :],
                tap_ptr + owner * owner_stride + first_tap * D + column[None, None, :],
                row_mask[:, None, None], segment_ptr, token, token_mask, taps, D, SOURCES, TOKENS, COLUMNS,
            )  # fmt: skip
            mixed = tl.sum(x * weight[:, :, None], 0)
            place = token[:, None].to(tl.int64) * D + column[None, :]
            gradient = tl.load(gradient_ptr + place, mask=token_mask[:, None], other=0.0).to(tl.float32)
            along += tl.sum(x * gradient[None, :, :], 2)
            mutual += tl.sum(x * mixed[None, :, :], 2)
            square += tl.sum(x * x, 2)
            if GATED:
                phi_offset = (stream * D + column)[:, None] * M + gate[None, :]
                phi = tl.load(phi_ptr + phi_offset, mask=(gate < M)[None, :], other=0.0)
                rows = tl.reshape(x, [SOURCES * TOKENS, COLUMNS])
                if EXACT:
                    projected = dot(rows, phi, projected, EXACT)
                else:  # both in two parts: the gates' gradient is a difference of these
                    kind: tl.constexpr = bank_ptr.dtype.element_ty
                    high = narrow(rows, kind)
                    low = narrow(rows - high.to(tl.float32), kind)
                    phi_high = narrow(phi, kind)
                    projected = dot(high, phi_high, projected, EXACT)
                    projected = dot(high, narrow(phi - phi_high.to(tl.float32), kind), projected, EXACT)
                    projected = dot(low, phi_high, projected, EXACT)
        part = tl.program_id(1).to(tl.int64) * num_sources
        place = ((part + row) * M + stream)[:, None] * FIELDS * num_tokens + token[None, :]
        mask = row_mask[:, None] & token_mask[None, :]
        tl.store(stat_ptr + place, along, mask=mask)
        tl.store(stat_ptr + place + num_tokens, mutual, mask=mask)
        tl.store(stat_ptr + place + 2 * num_tokens, square, mask=mask)
        if GATED:
            flat_row = flat // TOKENS
            flat_token = tl.program_id(0) * TOKENS + flat % TOKENS
            flat_place = ((part + flat_row) * M + stream) * FIELDS + 3
            tl.store(
                stat_ptr + (flat_place[:, None] + gate[None, :]) * num_tokens + flat_token[:, None],
                projected,
                mask=((flat_row < num_sources) & (flat_token < num_tokens))[:, None] & (gate < M)[None, :],
            )


@triton.jit
def _field(stat_ptr, pair, field, num_ranges, range_step, token, mask, num_tokens, FIELDS: tl.constexpr):
    """Sum over ranges of one inner product."""
    place = (pair * FIELDS + field).to(tl.int64) * num_tokens + token
    total = tl.load(stat_ptr + place, mask=mask, other=0.0)
    for part in range(1, num_ranges):
        total += tl.load(stat_ptr + place + tl.cast(part, tl.int64) * range_step, mask=mask, other=0.0)
    return total


@triton.jit(do_not_specialize=["num_sources", "num_tokens", "num_ranges"])
def _settle_kernel(
    stat_ptr,  # (R, N, M, 3 + M, T)
    score_ptr,  # (N, M, T)
    lse_ptr,  # (M, T)
    kept_ptr,  # (M + 1, T) projections pi and factor rho of the forward pass
    scale_ptr,
    bias_ptr,
    logit_gradient_ptr,  # (M, T) out
    scalar_ptr,  # (W, T) out: a, dpi, kappa, then r dz and r^2 dz z / D by source and stream
    num_sources,
    max_sources,
    num_tokens,
    num_ranges,
    eps,
    GATED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
):
    FIELDS: tl.constexpr = 3 + M
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    range_step = tl.cast(num_sources, tl.int64) * M * FIELDS * num_tokens
    kappa = tl.zeros([TOKENS], tl.float32)
    if GATED:
        scale = tl.load(scale_ptr)
        factor = tl.load(kept_ptr + M * num_tokens + token, mask=mask, other=0.0)
        factor_gradient = tl.zeros([TOKENS], tl.float32)
        for stream in range(0, M):
            along = tl.zeros([TOKENS], tl.float32)
            lse = tl.load(lse_ptr + stream * num_tokens + token, mask=mask, other=0.0)
            for row in range(0, num_sources):
                pair = row * M + stream
                score = tl.load(score_ptr + tl.cast(pair, tl.int64) * num_tokens + token, mask=mask, other=0.0)
                value = _field(stat_ptr, pair, 0, num_ranges, range_step, token, mask, num_tokens, FIELDS)
                along += tl.exp(score - lse) * value
            projected = tl.load(kept_ptr + stream * num_tokens + token, mask=mask, other=0.0)
            gate = tl.sigmoid(scale * projected * factor + tl.load(bias_ptr + stream))
            logit_gradient = gate * (1.0 - gate) * along
            tl.store(logit_gradient_ptr + stream * num_tokens + token, logit_gradient, mask=mask)
            tl.store(scalar_ptr + stream * num_tokens + token, gate, mask=mask)
            tl.store(scalar_ptr + (M + stream) * num_tokens + token, scale * factor * logit_gradient, mask=mask)
            factor_gradient += scale * logit_gradient * projected
        kappa = factor_gradient * factor * factor * factor / (M * D)
        tl.store(scalar_ptr + 2 * M * num_tokens + token, kappa, mask=mask)
        tl.debug_barrier()
    for stream in range(0, M):
        lse = tl.load(lse_ptr + stream * num_tokens + token, mask=mask, other=0.0)
        gate = tl.full([TOKENS], 1.0 / M, tl.float32)
        if GATED:
            gate = tl.load(scalar_ptr + stream * num_tokens + token, mask=mask, other=0.0)
        delta = tl.zeros([TOKENS], tl.float32)
        for again in tl.static_range(2):  # first the mean of <Go, X> over the sources, then what deviates from it
            for row in range(0, num_sources):
                pair = row * M + stream
                score = tl.load(score_ptr + tl.cast(pair, tl.int64) * num_tokens + token, mask=mask, other=0.0)
                weight = tl.exp(score - lse)
                along = gate * _field(stat_ptr, pair, 0, num_ranges, range_step, token, mask, num_tokens, FIELDS)
                if GATED:
                    along -= kappa * _field(stat_ptr, pair, 1, num_ranges, range_step, token, mask, num_tokens, FIELDS)
                    for other in range(0, M):
                        projected = _field(
                            stat_ptr, pair, 3 + other, num_ranges, range_step, token, mask, num_tokens, FIELDS
                        )
                        along += projected * tl.load(
                            scalar_ptr + (M + other) * num_tokens + token, mask=mask, other=0.0
                        )
                if again == 0:
                    delta += weight * along
                else:
                    square = _field(stat_ptr, pair, 2, num_ranges, range_step, token, mask, num_tokens, FIELDS)
                    factor = 1.0 / tl.sqrt_rn(square / D + eps)
                    coefficient = weight * (along - delta) * factor
                    place = scalar_ptr + (2 * M + 1 + tl.cast(pair, tl.int64)) * num_tokens + token
                    tl.store(place, coefficient, mask=mask)
                    radial_ptr = place + tl.cast(max_sources, tl.int64) * M * num_tokens
                    tl.store(radial_ptr, coefficient * score * factor / D, mask=mask)


def backward_sides(site: Site, width: int) -> dict[str, int]:
    """Sides of a tile, with twice the forward pass's warps: these kernels hold twice as many tiles in registers."""
    sides = tile_sides(site.num_sources, width)
    return {**sides, "num_warps": min(16, 2 * sides["num_warps"])}


def contract(
    streams: Streams,
    site: Site,
    *,
    gradient_TD: Tensor,
    phi_VM: Tensor | None,
    score_NMT: Tensor,
    lse_MT: Tensor,
) -> Tensor:
    """Return the inner products ``(R, N, M, 3 + M, T)`` of a site's streams, by range of the width."""
    num_streams, num_tokens = streams.num_streams, streams.segment_T.shape[0]
    width = streams.bank_NTD.shape[-1]
    sides = backward_sides(site, width)
    ranges = column_ranges(num_tokens, width, sides["COLUMNS"])
    stat = lse_MT.new_empty((ranges, site.num_sources, num_streams, 3 + num_streams, num_tokens))
    _contract_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]), ranges)](
        streams.bank_NTD,
        gradient_TD,
        streams.tap_QKD,
        lse_MT if phi_VM is None else phi_VM,
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
        GATED=phi_VM is not None,
        M=num_streams,
        MP=max(16, triton.next_power_of_2(num_streams)),
        D=width,
        RANGE=width // ranges,
        EXACT=is_exact(streams.bank_NTD.dtype),
        **sides,
    )
    return stat


def settle(
    stat: Tensor,
    *,
    score_NMT: Tensor,
    lse_MT: Tensor,
    kept: Tensor | None,
    scale: Tensor | None,
    bias_M: Tensor | None,
    scalar_WT: Tensor,
    max_sources: int,
    width: int,
    eps: float,
) -> Tensor:
    """Write the scalars of a site; return the gradient of the gates' logits ``(M, T)``, unwritten without gates."""
    ranges, num_sources, num_streams, _, num_tokens = stat.shape
    logit_gradient_MT = lse_MT.new_empty((num_streams, num_tokens))
    _settle_kernel[(triton.cdiv(num_tokens, 128),)](
        stat,
        score_NMT,
        lse_MT,
        lse_MT if kept is None else kept,
        lse_MT if scale is None else scale,
        lse_MT if bias_M is None else bias_M,
        logit_gradient_MT,
        scalar_WT,
        num_sources,
        max_sources,
        num_tokens,
        ranges,
        eps,
        GATED=kept is not None,
        M=num_streams,
        D=width,
        TOKENS=128,
        num_warps=4,
    )
    return logit_gradient_MT
