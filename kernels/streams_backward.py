"""Backward kernels of multi-stream routing (msar): streams are expanded again, and nothing multi-stream is stored.

With h = sum_j a_j o_j the site's output, G its gradient, and a = sigmoid(g rho pi + b) with pi = sum_j phi_j^T o_j and
rho = (mean o^2 + eps)^(-1/2), the gradient of a stream's mix is

    Go_j = a_j G + sum_k dpi_k phi_(j,k) - kappa o_j,   kappa = drho rho^3 / (M D)

and from there on as in single-stream routing: dz = p (<Go, X> - <Go, o>), dX = p Go + r dz u - (r^2 / D) dz z X; a
source's gradient is the transposed convolution of dX. Three steps:

- :func:`contract` expands and mixes once and forms all inner products that the scalars need;
- :func:`settle` turns them into scalars a token: a, dpi, kappa, and by source and stream ``r dz`` and ``r^2 dz z / D``;
- :func:`spread` forms dX and convolves it back, for the newest source of a site when it is a running sum, and for all
  finished sources when backward leaves a block; the gradients of kernels, keys and projections fall off on the way.

A transposed convolution needs dX of later tokens. A program takes its tokens from last to first and keeps dX of the
latest in a small ring of its own, which stays in cache; it forms dX of what lies beyond its last token once more.

Shape legend: as in :mod:`scaling.kernels.streams`; L sites of a block, W scalars of a site, G splits of the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import TOKENS, Site, Streams, column_ranges, expand, stream_weights, tile_sides
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


@triton.jit(
    do_not_specialize=["num_sources", "last_row", "first_owner", "first_site", "num_sites", "num_tokens", "span"]
)
def _spread_kernel(
    bank_ptr,  # (N, T, D)
    gradient_ptr,  # (L, T, D) G of the sites
    later_ptr,  # (L, T, D) running sums that the sites but the first read besides the sources
    tap_ptr,  # (Q, K, D) float32
    key_ptr,  # (S, M, D) float32
    phi_ptr,  # (S, M * D, M) float32
    segment_ptr,
    base_ptr,
    table_ptr,
    score_ptr,  # (P, M, T) float32
    lse_ptr,  # (S, M, T) float32
    scalar_ptr,  # (L, W, T)
    ring_ptr,  # (programs, M, sources, RING, COLUMNS) float32
    result_ptr,  # LAST: (T, D); else (N, T, D) float32, added to
    tap_gradient_ptr,  # (G, Q, K, D) float32, added to
    key_gradient_ptr,  # (G, L, M, D) float32 out
    phi_gradient_ptr,  # (G, L, M, M, D) float32 out, streams first
    num_sources,
    last_row,
    first_owner,
    owner_step,
    first_site,
    num_sites,
    later_from,  # first of the sites that reads a running sum
    later_owner,
    max_sources,
    num_tokens,
    span,
    row_stride,
    owner_stride,
    split_stride,
    LAST: tl.constexpr,
    SHARED: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    D: tl.constexpr,
    RING: tl.constexpr,
    REACH: tl.constexpr,
    TARGETS: tl.constexpr,
    SOURCES: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    split = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    row = tl.arange(0, SOURCES)
    row_mask = row < num_sources
    held = tl.where(row == num_sources - 1, last_row, row).to(tl.int64)[:, None, None]
    owner = (first_owner + row * owner_step).to(tl.int64)[:, None, None]
    if LAST:  # the target is the newest source alone
        target = num_sources - 1 + tl.arange(0, TARGETS)
        target_row = last_row + tl.arange(0, TARGETS)
    else:
        target = tl.arange(0, TARGETS)
        target_row = target
    target_mask = target < num_sources
    target_owner = (first_owner + target * owner_step).to(tl.int64)
    gate = tl.arange(0, MP)
    always = tl.full([1, 1, 1], 1, tl.int1)
    first_token = split * span
    last_token = tl.minimum(first_token + span, num_tokens)
    # A program's own tokens in tiles from its first, and the tiles beyond its last that its convolutions reach.
    own_tiles = tl.cdiv(last_token - first_token, TOKENS)
    program = split * tl.num_programs(1) + tl.program_id(1)
    ring_row_ptr = ring_ptr + tl.cast(program, tl.int64) * (M * TARGETS * RING * COLUMNS)
    ring_row_ptr += tl.arange(0, TARGETS)[:, None, None] * (RING * COLUMNS)
    ring_row_ptr += tl.arange(0, COLUMNS)[None, None, :]
    for turn in tl.range(0, own_tiles + REACH, num_stages=1):
        index = own_tiles + REACH - 1 - turn
        token = first_token + index * TOKENS + tl.arange(0, TOKENS)
        token_mask = token < num_tokens
        own = token_mask & (token < last_token)
        place = token[:, None].to(tl.int64) * D + column[None, :]
        segment = tl.load(segment_ptr + token, mask=token_mask, other=-1)
        result = tl.zeros([TARGETS, TOKENS, COLUMNS], tl.float32)
        value_place = target_row.to(tl.int64)[:, None, None] * row_stride + place[None, :, :]
        own_mask = target_mask[:, None, None] & own[None, :, None]
        value = tl.load(bank_ptr + value_place, mask=own_mask, other=0.0).to(tl.float32)
        for stream in tl.range(0, M, num_stages=1):
            first_tap = tl.load(table_ptr + stream)
            taps = tl.load(table_ptr + M + stream)
            x = expand(
                bank_ptr + held * row_stride + column[None, None, :],
                tap_ptr + owner * owner_stride + first_tap * D + column[None, None, :],
                row_mask[:, None, None], segment_ptr, token, token_mask, taps, D, SOURCES, TOKENS, COLUMNS,
            )  # fmt: skip
            if LAST:
                of_target = tl.sum(tl.where((row == num_sources - 1)[:, None, None], x, 0.0), 0)[None, :, :]
            else:
                of_target = x
            stream_gradient = tl.zeros([TARGETS, TOKENS, COLUMNS], tl.float32)
            for local in tl.range(0, num_sites, num_stages=1):
                site = first_site + local
                site_score_ptr = score_ptr + tl.load(base_ptr + site).to(tl.int64) * M * num_tokens
                site_lse_ptr = lse_ptr + tl.cast(site, tl.int64) * M * num_tokens
                site_scalar_ptr = scalar_ptr + tl.cast(local, tl.int64) * (
                    (2 * M + 1 + 2 * max_sources * M) * num_tokens
                )
                pair_ptr = site_scalar_ptr + (2 * M + 1 + stream) * num_tokens
                weight = stream_weights(
                    site_score_ptr, site_lse_ptr, row, row_mask, stream, token, token_mask, num_tokens, M
                )
                mixed = tl.sum(x * weight[:, :, None], 0)
                key_row_ptr = key_ptr + (tl.cast(site, tl.int64) * M + stream) * D + column
                key = tl.load(key_row_ptr)
                pair_mask = target_mask[:, None] & token_mask[None, :]
                pair_place = target.to(tl.int64)[:, None] * (M * num_tokens) + token[None, :]
                coefficient = tl.load(pair_ptr + pair_place, mask=pair_mask, other=0.0)
                radial = tl.load(
                    pair_ptr + tl.cast(max_sources, tl.int64) * (M * num_tokens) + pair_place, mask=pair_mask, other=0.0
                )
                if not LAST:
                    own_coefficient = tl.where(own[None, :], coefficient, 0.0)
                    key_gradient = tl.sum(tl.sum(of_target * own_coefficient[:, :, None], 0), 0)
                    if local >= later_from:
                        later = expand(
                            later_ptr + tl.cast(local, tl.int64) * row_stride + column[None, None, :],
                            tap_ptr + tl.cast(later_owner, tl.int64) * owner_stride + first_tap * D
                            + column[None, None, :],
                            always, segment_ptr, token, token_mask, taps, D, 1, TOKENS, COLUMNS,
                        )  # fmt: skip
                        later = tl.reshape(later, [TOKENS, COLUMNS])
                        later_pair = (tl.cast(num_sources, tl.int64) * M + stream) * num_tokens + token
                        later_score = tl.load(site_score_ptr + later_pair, mask=token_mask, other=float("-inf"))
                        later_lse = tl.load(site_lse_ptr + stream * num_tokens + token, mask=token_mask, other=0.0)
                        mixed += later * tl.exp(later_score - later_lse)[:, None]
                        later_coefficient = tl.load(
                            pair_ptr + tl.cast(num_sources, tl.int64) * (M * num_tokens) + token, mask=own, other=0.0
                        )
                        key_gradient += tl.sum(later * later_coefficient[:, None], 0)
                gradient = tl.load(
                    gradient_ptr + tl.cast(local, tl.int64) * row_stride + place, mask=token_mask[:, None], other=0.0
                ).to(tl.float32)
                if GATED:
                    gate_weight = tl.load(site_scalar_ptr + stream * num_tokens + token, mask=token_mask, other=0.0)
                    kappa = tl.load(site_scalar_ptr + 2 * M * num_tokens + token, mask=token_mask, other=0.0)
                    mix_gradient = gate_weight[:, None] * gradient - kappa[:, None] * mixed
                    turned = tl.load(
                        site_scalar_ptr + (M + gate)[None, :] * num_tokens + token[:, None],
                        mask=token_mask[:, None] & (gate < M)[None, :], other=0.0,
                    )  # fmt: skip
                    phi_place = (tl.cast(site, tl.int64) * M * D + stream * D + column)[None, :] * M + gate[:, None]
                    phi = tl.load(phi_ptr + phi_place, mask=(gate < M)[:, None], other=0.0)
                    mix_gradient += tl.sum(turned[:, :, None] * phi[None, :, :], 1)
                    if not LAST:
                        own_turned = tl.where(own[:, None], turned, 0.0)
                        phi_gradient = tl.sum(own_turned[:, :, None] * mixed[:, None, :], 0)
                        phi_out_ptr = (
                            phi_gradient_ptr
                            + (tl.cast(split * num_sites + local, tl.int64) * M + stream) * M * D
                            + gate[:, None] * D
                            + column[None, :]
                        )
                        phi_mask = (gate < M)[:, None] & (column < D)[None, :]
                        if turn > 0:
                            phi_gradient += tl.load(phi_out_ptr, mask=phi_mask, other=0.0)
                        tl.store(phi_out_ptr, phi_gradient, mask=phi_mask)
                else:
                    mix_gradient = gradient / M
                if not LAST:
                    key_out_ptr = (
                        key_gradient_ptr + (tl.cast(split * num_sites + local, tl.int64) * M + stream) * D + column
                    )
                    if turn > 0:
                        key_gradient += tl.load(key_out_ptr)
                    tl.store(key_out_ptr, key_gradient)
                    target_weight = weight
                else:
                    target_weight = tl.sum(tl.where((row == num_sources - 1)[:, None], weight, 0.0), 0)[None, :]
                stream_gradient += target_weight[:, :, None] * mix_gradient[None, :, :]
                stream_gradient += coefficient[:, :, None] * key[None, None, :] - radial[:, :, None] * of_target
            stream_ring_ptr = ring_row_ptr + stream * (TARGETS * RING * COLUMNS)
            tl.debug_barrier()  # all have read what is about to be overwritten
            tl.store(stream_ring_ptr + (token % RING)[None, :, None] * COLUMNS, stream_gradient)
            tl.debug_barrier()
            if index < own_tiles:
                for tau in tl.range(0, taps, num_stages=1):
                    later_token = token + tau
                    inside = own & (later_token < num_tokens)
                    same = tl.load(segment_ptr + later_token, mask=inside, other=-2) == segment
                    reached = tl.load(
                        stream_ring_ptr + (later_token % RING)[None, :, None] * COLUMNS,
                        mask=target_mask[:, None, None] & (inside & same)[None, :, None], other=0.0,
                    )  # fmt: skip
                    tap_place = target_owner[:, None, None] * owner_stride + (first_tap + tau) * D
                    tap = tl.load(
                        tap_ptr + tap_place + column[None, None, :], mask=target_mask[:, None, None], other=0.0
                    )
                    result += reached * tap
                    tap_gradient = tl.sum(reached * value, 1)
                    tap_out_ptr = tap_gradient_ptr + tl.cast(split, tl.int64) * split_stride + (first_tap + tau) * D
                    if SHARED:
                        shared = tl.sum(tap_gradient, 0)
                        shared_ptr = tap_out_ptr + tl.cast(first_owner, tl.int64) * owner_stride + column
                        tl.store(shared_ptr, tl.load(shared_ptr) + shared)
                    else:
                        own_ptr = tap_out_ptr + target_owner[:, None] * owner_stride + column[None, :]
                        before = tl.load(own_ptr, mask=target_mask[:, None], other=0.0)
                        tl.store(own_ptr, before + tap_gradient, mask=target_mask[:, None])
        if index < own_tiles:
            if LAST:
                out_ptr = result_ptr + tl.arange(0, TARGETS)[:, None, None] + place[None, :, :]
                tl.store(out_ptr, narrow(result, result_ptr.dtype.element_ty), mask=own_mask)
            else:
                result += tl.load(result_ptr + value_place, mask=own_mask, other=0.0)
                tl.store(result_ptr + value_place, result, mask=own_mask)


def _sides(site: Site, width: int) -> dict[str, int]:
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
    sides = _sides(site, width)
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


def spread(
    streams: Streams,
    site: Site,
    *,
    sites: range,
    gradient_LTD: Tensor,
    later_LTD: Tensor,
    later_from: int,
    later_owner: int,
    key_SMD: Tensor,
    phi_SVM: Tensor | None,
    base_S: Tensor,
    score_PMT: Tensor,
    lse_SMT: Tensor,
    scalar_LWT: Tensor,
    max_sources: int,
    max_taps: int,
    result: Tensor,
    tap_gradient_GQKD: Tensor,
    last: bool,
) -> tuple[Tensor, Tensor]:
    """Gradients of the newest source alone (``last``, written to ``result``) or of all (added to it, float32).

    Returns the gradients of the sites' keys ``(G, L, M, D)`` and projections ``(G, L, M, M, D)``; not if ``last``.
    ``later_LTD`` has the running sums that the sites from number ``later_from`` on read besides the sources.
    """
    num_streams, num_tokens = streams.num_streams, streams.segment_T.shape[0]
    width = streams.bank_NTD.shape[-1]
    sides = _sides(site, width)
    splits = tap_gradient_GQKD.shape[0]
    targets = 1 if last else sides["SOURCES"]
    reach = triton.cdiv(max_taps - 1, TOKENS)
    ring = triton.next_power_of_2((1 + reach) * TOKENS)
    chunks = width // sides["COLUMNS"]
    scratch = lse_SMT.new_empty((splits * chunks, num_streams, targets, ring, sides["COLUMNS"]))
    key_gradient = lse_SMT.new_empty((splits, len(sites), num_streams, width))
    phi_gradient = lse_SMT.new_empty(
        (splits, len(sites), num_streams, num_streams, width) if phi_SVM is not None else (0,)
    )
    _spread_kernel[(splits, chunks)](
        streams.bank_NTD,
        gradient_LTD,
        later_LTD,
        streams.tap_QKD,
        key_SMD,
        key_SMD if phi_SVM is None else phi_SVM,
        streams.segment_T,
        base_S,
        streams.table_2M,
        score_PMT,
        lse_SMT,
        scalar_LWT,
        scratch,
        result,
        tap_gradient_GQKD,
        key_gradient,
        phi_gradient,
        site.num_sources,
        site.last_row,
        site.first_owner,
        site.owner_step,
        sites.start,
        len(sites),
        later_from,
        later_owner,
        max_sources,
        num_tokens,
        split_tokens(num_tokens, splits),
        streams.bank_NTD.stride(0),
        streams.tap_QKD.stride(0),
        tap_gradient_GQKD.stride(0),
        LAST=last,
        SHARED=site.owner_step == 0,
        GATED=phi_SVM is not None,
        M=num_streams,
        MP=triton.next_power_of_2(num_streams),
        D=width,
        RING=ring,
        REACH=reach,
        TARGETS=targets,
        **sides,
    )
    return key_gradient, phi_gradient


def num_splits(num_tokens: int, width: int) -> int:
    """Splits of the tokens in :func:`spread`, none empty: about four programs for each of an H200's multiprocessors."""
    wanted = max(1, min(528 // max(1, width // 32), triton.cdiv(num_tokens, 64)))
    return triton.cdiv(num_tokens, split_tokens(num_tokens, wanted))


def split_tokens(num_tokens: int, splits: int) -> int:
    """Tokens of a split: whole tiles."""
    return triton.cdiv(triton.cdiv(num_tokens, splits), TOKENS) * TOKENS
