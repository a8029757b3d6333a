"""Backward kernel of multi-stream routing (msar), second part: gradients of sources, kernels, keys and projections.

:func:`spread` forms dX (:mod:`scaling.kernels.stream_contract`) and convolves it back: for the newest source of a site
where that is a running sum, and for all finished sources when backward leaves a block. Nothing multi-stream is stored.
A transposed convolution needs dX of later tokens: a program takes its tokens from last to first and keeps dX of the
latest in a small ring of its own, which stays in cache; it forms dX of what lies beyond its last token once more.

Shape legend: as in :mod:`scaling.kernels.streams`; L sites of a block, W scalars of a site, G splits of the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.stream_contract import backward_sides
from scaling.kernels.streams import TOKENS, Site, Streams, expand, stream_weights
from scaling.kernels.tile import narrow


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
    ring_ptr,  # (programs, M, sources, RING, COLUMNS) in the sources' dtype, to which PyTorch rounds dX too
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
            rounded = narrow(stream_gradient, ring_ptr.dtype.element_ty)
            tl.store(stream_ring_ptr + (token % RING)[None, :, None] * COLUMNS, rounded)
            tl.debug_barrier()
            if index < own_tiles:
                for tau in tl.range(0, taps, num_stages=1):
                    later_token = token + tau
                    inside = own & (later_token < num_tokens)
                    same = tl.load(segment_ptr + later_token, mask=inside, other=-2) == segment
                    reached = tl.load(
                        stream_ring_ptr + (later_token % RING)[None, :, None] * COLUMNS,
                        mask=target_mask[:, None, None] & (inside & same)[None, :, None], other=0.0,
                    ).to(tl.float32)  # fmt: skip
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
    sides = backward_sides(site, width)
    splits = tap_gradient_GQKD.shape[0]
    targets = 1 if last else sides["SOURCES"]
    reach = triton.cdiv(max_taps - 1, TOKENS)
    ring = triton.next_power_of_2((1 + reach) * TOKENS)
    chunks = width // sides["COLUMNS"]
    scratch = streams.bank_NTD.new_empty((splits * chunks, num_streams, targets, ring, sides["COLUMNS"]))
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
    """Splits of the tokens in :func:`spread`, none empty.

    Two to four programs for each of an H200's 132 multiprocessors, which hold one at a time: more only takes memory.
    """
    wanted = max(1, min(264 // max(1, width // 32), triton.cdiv(num_tokens, 64)))
    return int(triton.cdiv(num_tokens, split_tokens(num_tokens, wanted)))


def split_tokens(num_tokens: int, splits: int) -> int:
    """Tokens of a split: whole tiles."""
    return int(triton.cdiv(triton.cdiv(num_tokens, splits), TOKENS) * TOKENS)
