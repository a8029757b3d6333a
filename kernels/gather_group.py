"""Backward kernels of depth routing on tensor cores: many sites for many sources in one read.

:func:`gather_group` adds, for a group of sources at once, what all later sites outside the group contribute to their
gradients: for one token and head, four small matrix products, so that one read of each ``G_s`` serves the group.
:func:`query_gradient` is the product over tokens that gives ``du_s``, summed in a fixed order, so that it is the same
to the bit from run to run. :mod:`scaling.kernels.gather` does the rest of the backward pass.

Shape legend: N rows, S sites, T tokens, D width, H heads, C = D / H, K sources of a group, M sites outside it, P splits
of the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import dot, head_fold, head_mask, head_offsets, head_tile, is_exact, narrow

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
    SITES: tl.constexpr,
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
    site = tl.arange(0, SITES)
    source_mask = source < num_sources
    site_mask = site < num_sites
    FACTORS: tl.constexpr = H if PER_HEAD else 1
    main, rest, rest_mask = head_offsets(head, C, MAIN, REST)
    query_row_ptr = query_ptr + (first_site + site[:, None]) * D
    sources_mask = head_mask(source_mask[:, None], C, MAIN)
    sites_mask = head_mask(site_mask[:, None], C, MAIN)
    query = tl.load(query_row_ptr + main[None, :], mask=sites_mask, other=0.0)
    if REST > 0:
        query_rest = tl.load(query_row_ptr + rest[None, :], mask=site_mask[:, None] & rest_mask, other=0.0)
    source_offset = source.to(tl.int64)[:, None] * row_stride
    result_offset = source.to(tl.int64)[:, None] * result_stride
    site_offset = site.to(tl.int64)[:, None] * row_stride
    score_offset = (first_site + site).to(tl.int64) * num_tokens
    for token in tl.range(first_token, last_token, num_stages=STAGES):
        wide = tl.cast(token, tl.int64)
        base = wide * D
        value = tl.load(value_ptr + base + source_offset + main[None, :], mask=sources_mask, other=0.0)
        gradient = tl.load(gradient_ptr + base + site_offset + main[None, :], mask=sites_mask, other=0.0)
        factor_row_ptr = factor_ptr + (source.to(tl.int64) * num_tokens + token) * FACTORS
        if PER_HEAD:
            factor_row_ptr += head
        factor = tl.load(factor_row_ptr, mask=source_mask, other=0.0)
        lse = tl.load(lse_ptr + (score_offset + token) * H + head, mask=site_mask, other=float("inf"))
        delta = tl.load(delta_ptr + (score_offset + token) * H + head, mask=site_mask, other=0.0)
        # Sites along the rows, which tensor cores take 16 at a time, and sources along the columns: 8 need no padding.
        score = dot(query, tl.trans(value), tl.zeros([SITES, SOURCES], tl.float32), EXACT)
        along = dot(gradient, tl.trans(value), tl.zeros([SITES, SOURCES], tl.float32), EXACT)
        if REST > 0:
            value_rest = tl.load(
                value_ptr + base + source_offset + rest[None, :], mask=source_mask[:, None] & rest_mask, other=0.0
            )
            gradient_rest = tl.load(
                gradient_ptr + base + site_offset + rest[None, :], mask=site_mask[:, None] & rest_mask, other=0.0
            )
            score = dot(query_rest, tl.trans(value_rest), score, EXACT)
            along = dot(gradient_rest, tl.trans(value_rest), along, EXACT)
        score *= factor[None, :]
        weight = tl.exp(score - lse[:, None])
        score_gradient = weight * (along - delta[:, None])
        radial = tl.sum(score_gradient * score, 0)
        coefficient = narrow(score_gradient * factor[None, :], value.dtype)
        # Turned here, where they are small: turning the gradients instead would keep their loads from being pipelined.
        weight = tl.trans(narrow(weight, value.dtype))
        turned = tl.trans(coefficient)
        result = dot(weight, gradient, tl.zeros([SOURCES, MAIN], tl.float32), EXACT)
        result = dot(turned, query, result, EXACT)
        kind = result_ptr.dtype.element_ty
        result_row_ptr = result_ptr + base + result_offset + main[None, :]
        radial_row_ptr = radial_ptr + (source.to(tl.int64) * num_tokens + token) * H + head
        if ADD:
            result += tl.load(result_row_ptr, mask=sources_mask, other=0.0).to(tl.float32)
            radial += tl.load(radial_row_ptr, mask=source_mask, other=0.0)
        tl.store(result_row_ptr, narrow(result, kind), mask=sources_mask)
        tl.store(radial_row_ptr, radial, mask=source_mask)
        if REST > 0:
            result_rest = dot(weight, gradient_rest, tl.zeros([SOURCES, REST], tl.float32), EXACT)
            result_rest = dot(turned, query_rest, result_rest, EXACT)
            rest_row_ptr = result_ptr + base + result_offset + rest[None, :]
            if ADD:
                result_rest += tl.load(rest_row_ptr, mask=source_mask[:, None] & rest_mask, other=0.0).to(tl.float32)
            tl.store(rest_row_ptr, narrow(result_rest, kind), mask=source_mask[:, None] & rest_mask)
        pair = ((wide * H + head) * num_sites + site[:, None]) * num_sources + source[None, :]
        tl.store(
            coefficient_ptr + pair,
            coefficient.to(coefficient_ptr.dtype.element_ty),
            mask=site_mask[:, None] & source_mask[None, :],
        )


@triton.jit(do_not_specialize=["num_sites", "num_sources", "num_tokens", "span"])
def _query_gradient_kernel(
    coefficient_ptr,
    value_ptr,  # (K, T, D) consecutive rows
    result_ptr,  # (P, S, D) float32, first row of the sites
    num_sites,
    num_sources,
    num_tokens,
    span,  # tokens of a split
    row_stride,
    token_step,
    head_step,
    site_step,
    source_step,
    split_stride,
    H: tl.constexpr,
    FOLD: tl.constexpr,
    C: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    SITES: tl.constexpr,
    PAIRS: tl.constexpr,
    TRIANGLE: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    D: tl.constexpr = H * C
    split = tl.program_id(0)
    head = tl.program_id(1)
    site = tl.program_id(2) * SITES + tl.arange(0, SITES)
    site_mask = site < num_sites
    pair = tl.arange(0, PAIRS)
    main, rest, rest_mask = head_offsets(head, C, MAIN, REST)
    first_token = split * span
    num_pairs = (tl.minimum(first_token + span, num_tokens) - first_token) * num_sources
    result = tl.zeros([SITES, MAIN], tl.float32)
    if REST > 0:
        result_rest = tl.zeros([SITES, REST], tl.float32)
    coefficient_row_ptr = coefficient_ptr + tl.cast(head // FOLD, tl.int64) * head_step + site.to(tl.int64) * site_step
    for start in tl.range(0, num_pairs, PAIRS, num_stages=STAGES):
        index = start + pair
        inside = index < num_pairs
        token = (first_token + index // num_sources).to(tl.int64)
        source = (index % num_sources).to(tl.int64)
        wanted = site_mask[:, None] & inside[None, :]
        if TRIANGLE:
            wanted = wanted & (site[:, None] >= source[None, :])
        coefficient = tl.load(
            coefficient_row_ptr[:, None] + (token * token_step + source * source_step)[None, :], mask=wanted, other=0.0
        )
        row = (source * row_stride + token * D)[:, None]
        value = tl.load(value_ptr + row + main[None, :], mask=head_mask(inside[:, None], C, MAIN), other=0.0)
        result = dot(coefficient, value, result, EXACT)
        if REST > 0:
            value_rest = tl.load(value_ptr + row + rest[None, :], mask=inside[:, None] & rest_mask, other=0.0)
            result_rest = dot(coefficient, value_rest, result_rest, EXACT)
    result_row_ptr = result_ptr + tl.cast(split, tl.int64) * split_stride + site.to(tl.int64)[:, None] * D
    sites_mask = head_mask(site_mask[:, None], C, MAIN)
    result += tl.load(result_row_ptr + main[None, :], mask=sites_mask, other=0.0)
    tl.store(result_row_ptr + main[None, :], result, mask=sites_mask)
    if REST > 0:
        result_rest += tl.load(result_row_ptr + rest[None, :], mask=site_mask[:, None] & rest_mask, other=0.0)
        tl.store(result_row_ptr + rest[None, :], result_rest, mask=site_mask[:, None] & rest_mask)


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
    padded = max(16, triton.next_power_of_2(len(sites)))
    tokens, warps, stages = _gather_group_tuning(tile.head_width, padded)
    _gather_group_kernel[(triton.cdiv(num_tokens, tokens) * tile.heads,)](
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
        SITES=padded,
        TOKENS=tokens,
        STAGES=stages,
        EXACT=is_exact(value_KTD.dtype),
        num_warps=warps,
    )


def query_gradient(
    *,
    coefficient: Tensor,
    steps: tuple[int, ...],
    value_KTD: Tensor,
    result_PSD: Tensor,
    sites: range,
    heads: int,
    triangle: bool = False,
) -> None:
    """Add ``sum over tokens and sources of dz r v`` to the rows ``sites`` of every split of ``result_PSD``.

    ``steps`` are the strides of ``coefficient`` along (token, head, site, source); with ``triangle`` only pairs whose
    site is not older than their source count, both counted from their first. Split p owns a fixed span of tokens,
    so that the order of summation never changes.
    """
    num_sources, num_tokens, width = value_KTD.shape
    fold = head_fold(width // heads)
    tile = head_tile(width, heads * fold)
    splits = result_PSD.shape[0]
    side, pairs, warps, stages = _query_gradient_tuning(tile.head_width, len(sites))
    _query_gradient_kernel[(splits, heads * fold, triton.cdiv(len(sites), side))](
        coefficient,
        value_KTD,
        result_PSD[:, sites.start],
        len(sites),
        num_sources,
        num_tokens,
        triton.cdiv(num_tokens, splits),
        value_KTD.stride(0),
        *steps,
        result_PSD.stride(0),
        FOLD=fold,
        **tile.head_sides,
        SITES=side,
        PAIRS=pairs,
        TRIANGLE=triangle,
        STAGES=stages,
        EXACT=is_exact(value_KTD.dtype),
        num_warps=warps,
    )


def _gather_group_tuning(head_width: int, sites: int) -> tuple[int, int, int]:
    """Tokens a program, warps and pipeline stages of :func:`gather_group` that measured best on an H200 (NOTES.md)."""
    elements = sites * head_width
    if elements <= 2560:
        return 16, 1, 3
    if head_width <= 128:
        return 16, 1, 2
    return 16, 2, (3 if elements <= 5120 else 2)


def _query_gradient_tuning(head_width: int, sites: int) -> tuple[int, int, int, int]:
    """Sites and pairs of a tile, warps and stages of :func:`query_gradient` that measured best (NOTES.md)."""
    if 16 < sites <= 32 and head_width & (head_width - 1):
        return 32, 128, 2, 2
    side = 8 if sites <= 8 else 16 if sites <= 16 else 32 if sites <= 32 else 64
    return side, (128 if head_width <= (128 if side == 8 else 64) or side == 64 else 64), 8, 2
