"""Backward kernel of depth routing on tensor cores: many sites for many sources in one read.

:func:`gather_group` adds, for a group of sources at once, what all later sites outside the group contribute to their
gradients: for one token and head, four small matrix products, so that one read of each ``G_s`` serves the group. What
it leaves of every pair is for :mod:`scaling.kernels.query_gradient`; :mod:`scaling.kernels.gather` does the rest of the
backward pass.

Shape legend: N rows, S sites, T tokens, D width, H heads, C = D / H, K sources of a group, M sites outside it.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import dot, head_mask, head_offsets, head_tile, is_exact, narrow

_TOKENS = 16  # of a program of gather_group
_MAX_WHOLE_SITES = 64  # sites of one tensor-core tile; more are taken in several launches that add up


@triton.jit(do_not_specialize=["first_site", "num_sites", "num_sources", "num_tokens"])
def _gather_group_kernel(
    value_ptr,  # (K, T, D) the sources, consecutive rows
    gradient_ptr,  # (sites, T, D) consecutive rows
    query_ptr,  # (S, D)
    factor_ptr,  # (K, T) float32, or (K, T, H) if PER_HEAD
    lse_ptr,  # (S, T, H) float32
    delta_ptr,  # (S, T, H) float32
    result_ptr,  # (K, T, D)
    radial_ptr,  # (K, T, H) float32
    coefficient_ptr,  # (T, H, sites, K)
    first_site,
    num_sites,
    num_sources,
    num_tokens,
    row_stride,
    result_stride,
    ADD: tl.constexpr,
    PER_HEAD: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    SOURCES: tl.constexpr,
    SITES: tl.constexpr,  # of a piece
    PIECES: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    D: tl.constexpr = H * C
    # The heads of a token run side by side: its row is read in one piece, and so are the sectors of lse and delta.
    head = tl.program_id(0) % H
    first_token = tl.program_id(0) // H * TOKENS
    last_token = tl.minimum(first_token + TOKENS, num_tokens)
    source = tl.arange(0, SOURCES)
    source_mask = source < num_sources
    FACTORS: tl.constexpr = H if PER_HEAD else 1
    main, rest, rest_mask = head_offsets(head, C, MAIN, REST)
    sources_mask = head_mask(source_mask[:, None], C, MAIN)
    source_offset = source.to(tl.int64)[:, None] * row_stride
    result_offset = source.to(tl.int64)[:, None] * result_stride
    site = ()
    query = ()
    query_rest = ()
    for piece in tl.static_range(PIECES):
        site += (piece * SITES + tl.arange(0, SITES),)
        line = site[piece][:, None]
        query_row_ptr = query_ptr + (first_site + line) * D
        lines_mask = head_mask(line < num_sites, C, MAIN)
        query += (tl.load(query_row_ptr + main[None, :], mask=lines_mask, other=0.0),)
        if REST > 0:
            query_rest += (tl.load(query_row_ptr + rest[None, :], mask=(line < num_sites) & rest_mask, other=0.0),)
    for token in tl.range(first_token, last_token, num_stages=STAGES):
        wide = tl.cast(token, tl.int64)
        base = wide * D
        value = tl.load(value_ptr + base + source_offset + main[None, :], mask=sources_mask, other=0.0)
        gradient = ()
        for piece in tl.static_range(PIECES):
            line = site[piece][:, None]
            line_ptr = gradient_ptr + base + line.to(tl.int64) * row_stride
            lines_mask = head_mask(line < num_sites, C, MAIN)
            gradient += (tl.load(line_ptr + main[None, :], mask=lines_mask, other=0.0),)
        factor_row_ptr = factor_ptr + (source.to(tl.int64) * num_tokens + token) * FACTORS
        if PER_HEAD:
            factor_row_ptr += head
        factor = tl.load(factor_row_ptr, mask=source_mask, other=0.0)
        if REST > 0:
            value_rest = tl.load(
                value_ptr + base + source_offset + rest[None, :], mask=source_mask[:, None] & rest_mask, other=0.0
            )
        gradient_rest = ()
        weight = ()
        coefficient = ()
        for piece in tl.static_range(PIECES):
            site_mask = site[piece] < num_sites
            place = ((first_site + site[piece]).to(tl.int64) * num_tokens + token) * H + head
            lse = tl.load(lse_ptr + place, mask=site_mask, other=float("inf"))
            delta = tl.load(delta_ptr + place, mask=site_mask, other=0.0)
            # Sites along the rows, which tensor cores take 16 at a time; sources along the columns: 8 need no padding.
            score = dot(query[piece], tl.trans(value), tl.zeros([SITES, SOURCES], tl.float32), EXACT)
            along = dot(gradient[piece], tl.trans(value), tl.zeros([SITES, SOURCES], tl.float32), EXACT)
            if REST > 0:
                line = site[piece][:, None]
                line_ptr = gradient_ptr + base + line.to(tl.int64) * row_stride
                gradient_rest += (tl.load(line_ptr + rest[None, :], mask=(line < num_sites) & rest_mask, other=0.0),)
                score = dot(query_rest[piece], tl.trans(value_rest), score, EXACT)
                along = dot(gradient_rest[piece], tl.trans(value_rest), along, EXACT)
            score *= factor[None, :]
            share = tl.exp(score - lse[:, None])
            score_gradient = share * (along - delta[:, None])
            if piece == 0:
                radial = tl.sum(score_gradient * score, 0)
            else:
                radial += tl.sum(score_gradient * score, 0)
            weight += (narrow(share, value.dtype),)
            coefficient += (narrow(score_gradient * factor[None, :], value.dtype),)
        # Turned here, where they are small: turning the gradients instead would keep their loads from being pipelined.
        result = tl.zeros([SOURCES, MAIN], tl.float32)
        for piece in tl.static_range(PIECES):
            result = dot(tl.trans(weight[piece]), gradient[piece], result, EXACT)
            result = dot(tl.trans(coefficient[piece]), query[piece], result, EXACT)
        kind = result_ptr.dtype.element_ty
        result_row_ptr = result_ptr + base + result_offset + main[None, :]
        radial_row_ptr = radial_ptr + (source.to(tl.int64) * num_tokens + token) * H + head
        if ADD:
            result += tl.load(result_row_ptr, mask=sources_mask, other=0.0).to(tl.float32)
            radial += tl.load(radial_row_ptr, mask=source_mask, other=0.0)
        tl.store(result_row_ptr, narrow(result, kind), mask=sources_mask)
        tl.store(radial_row_ptr, radial, mask=source_mask)
        if REST > 0:
            result_rest = tl.zeros([SOURCES, REST], tl.float32)
            for piece in tl.static_range(PIECES):
                result_rest = dot(tl.trans(weight[piece]), gradient_rest[piece], result_rest, EXACT)
                result_rest = dot(tl.trans(coefficient[piece]), query_rest[piece], result_rest, EXACT)
            rest_row_ptr = result_ptr + base + result_offset + rest[None, :]
            if ADD:
                result_rest += tl.load(rest_row_ptr, mask=source_mask[:, None] & rest_mask, other=0.0).to(tl.float32)
            tl.store(rest_row_ptr, narrow(result_rest, kind), mask=source_mask[:, None] & rest_mask)
        for piece in tl.static_range(PIECES):
            line = site[piece][:, None]
            pair = ((wide * H + head) * num_sites + line) * num_sources + source[None, :]
            tl.store(
                coefficient_ptr + pair,
                coefficient[piece].to(coefficient_ptr.dtype.element_ty),
                mask=(line < num_sites) & source_mask[None, :],
            )


def gather_group(
    *,
    value_KTD: Tensor,
    factor_KT: Tensor,
    gradient_MTD: Tensor,
    query_SD: Tensor,
    lse_STH: Tensor,
    delta_STH: Tensor,
    result_KTD: Tensor,
    radial_KTH: Tensor,
    coefficient_THMK: Tensor,
    sites: range,
    add: bool,
) -> None:
    """Write (or add, if ``add``) the contribution of ``sites`` to the gradients of K consecutive sources.

    The radial sum goes to ``radial_KTH``, per head; ``coefficient_THMK`` takes ``dz * r`` of every pair.
    """
    num_sources, num_tokens, width = value_KTD.shape
    assert 0 < num_sources <= 16 and 0 < len(sites) <= _MAX_WHOLE_SITES
    tile = head_tile(width, lse_STH.shape[-1])
    side, pieces, warps, stages = _gather_group_tuning(tile.head_width, len(sites))
    _gather_group_kernel[(triton.cdiv(num_tokens, _TOKENS) * tile.heads,)](
        value_KTD,
        gradient_MTD,
        query_SD,
        factor_KT,
        lse_STH,
        delta_STH,
        result_KTD,
        radial_KTH,
        coefficient_THMK,
        sites.start,
        len(sites),
        num_sources,
        num_tokens,
        value_KTD.stride(0),
        result_KTD.stride(0),
        ADD=add,
        PER_HEAD=factor_KT.dim() == 3,
        **tile.head_sides,
        SOURCES=8 if num_sources <= 8 else 16,
        SITES=side,
        PIECES=pieces,
        TOKENS=_TOKENS,
        STAGES=stages,
        EXACT=is_exact(value_KTD.dtype),
        num_warps=warps,
    )


def _gather_group_tuning(head_width: int, sites: int) -> tuple[int, int, int, int]:
    """Sites of a piece, pieces, warps and pipeline stages that measured best on an H200 (NOTES.md).

    >>> _gather_group_tuning(128, 8)[:2], _gather_group_tuning(128, 24)[:2], _gather_group_tuning(160, 24)[:2]
    ((16, 1), (32, 1), (16, 2))
    >>> _gather_group_tuning(128, 40)[:2], _gather_group_tuning(128, 49)[:2]
    ((16, 3), (64, 1))
    """
    if 32 < sites <= 48:
        return 16, 3, 2, 3
    if 16 < sites <= 32 and head_width > 128:
        return 16, 2, 2, (3 if head_width <= 160 else 2)
    padded = max(16, triton.next_power_of_2(sites))
    elements = padded * head_width
    if elements <= 2560:
        return padded, 1, 1, 3
    if head_width <= 128:
        return padded, 1, 1, 2
    return padded, 1, 2, (3 if elements <= 5120 else 2)
