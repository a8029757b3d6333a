"""Backward kernel of depth routing that gives the queries' gradients: products over tokens, on tensor cores.

After :mod:`scaling.kernels.gather` and :mod:`scaling.kernels.gather_group`, which leave ``dz r`` of every pair of site
and source: :func:`query_gradient` is the product with the sources that gives ``du_s``, summed over tokens in a fixed
order, so that it is the same to the bit from run to run.

Shape legend: S sites, T tokens, D width, H heads, C = D / H, K sources of a group, P splits of the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import dot, head_fold, head_mask, head_offsets, head_tile, is_exact


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


def _query_gradient_tuning(head_width: int, sites: int) -> tuple[int, int, int, int]:
    """Sites and pairs of a tile, warps and stages of :func:`query_gradient` that measured best (NOTES.md)."""
    if 16 < sites <= 32 and head_width & (head_width - 1):
        return 32, 128, 2, 2
    side = 8 if sites <= 8 else 16 if sites <= 16 else 32 if sites <= 32 else 64
    return side, (128 if head_width <= (128 if side == 8 else 64) or side == 64 else 64), 8, 2
