"""Backward kernel of depth routing: a source gathers its own gradient, nothing is scattered or added atomically.

Backward reaches the producer of source i only after all sites that read it, so all their output gradients ``G_s``
(:mod:`scaling.kernels.receive`) are known when ``dv_i`` is needed (reference.route_gradients has the sums):
:func:`gather` finishes one source with the sites inside its group. What sites outside the group contribute is in
:mod:`scaling.kernels.gather_group`, the queries' gradients are in :mod:`scaling.kernels.query_gradient`.

Shape legend: N rows, S sites, T tokens, D width, H heads, C = D / H, M sites of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import (
    HeadTile,
    head_tile,
    load_parts,
    narrow,
    store_parts,
    sum_product,
    token_offsets,
    zero_parts,
)


@triton.jit(do_not_specialize=["first_site", "num_sites", "num_tokens"])
def _gather_kernel(
    value_ptr,  # (T, D) the source
    gradient_ptr,  # (sites, T, D) G of the sites, consecutive rows
    query_ptr,  # (S, D)
    value_factor_ptr,  # (T,) float32, or (T, H) if PER_HEAD
    lse_ptr,  # (S, T, H) float32
    delta_ptr,  # (S, T, H) float32
    partial_ptr,  # (T, D) what later sites contributed
    partial_radial_ptr,  # (T, H) float32
    coefficient_ptr,  # (sites, T, H) out: dz * r, for the gradient of the queries
    result_ptr,  # (T, D)
    first_site,
    num_sites,
    num_tokens,
    row_stride,
    eps,
    PARTIAL: tl.constexpr,
    RADIAL: tl.constexpr,
    HAS_FACTOR: tl.constexpr,
    PER_HEAD: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    C: tl.constexpr,
    PARTS: tl.constexpr,
    SIDE: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
):
    D: tl.constexpr = H * C
    MASKED: tl.constexpr = HP * PARTS * SIDE != D
    head, head_mask, query_spot, query_mask = token_offsets(H, HP, C, SIDE)
    first = tl.program_id(0).to(tl.int64) * TOKENS
    token = tl.arange(0, TOKENS)
    if TOKENS > 1:  # past the last token a program repeats it: the same values go to the same places
        token = tl.minimum(token, (num_tokens - 1 - first).to(tl.int32))
    pair = token[:, None] * H + head[None, :]
    pair_mask = head_mask[None, :]
    spot = token[:, None, None] * D + query_spot[None, :, :]
    mask = query_mask[None, :, :]
    value = load_parts(value_ptr + first * D, spot, mask, PARTS, SIDE, MASKED)
    if HAS_FACTOR:
        if PER_HEAD:
            factor = tl.load(value_factor_ptr + first * H + pair, mask=pair_mask, other=0.0)
        else:
            factor = tl.load(value_factor_ptr + first + token)[:, None]
    else:
        square = sum_product(value, value, PARTS)
        if PER_HEAD:
            factor = 1.0 / tl.sqrt_rn(square / C + eps)
        else:
            factor = 1.0 / tl.sqrt_rn(tl.sum(square, 1) / D + eps)[:, None]
    # The partial result is added after the loop, so that its load is in flight together with the first rows.
    result = zero_parts(value[0], PARTS)
    if PARTIAL:
        partial = load_parts(partial_ptr + first * D, spot, mask, PARTS, SIDE, MASKED)
    if RADIAL:
        radial = tl.load(partial_radial_ptr + first * H + pair, mask=pair_mask, other=0.0)
    else:
        radial = tl.zeros([TOKENS, HP], tl.float32)
    row_ptr = gradient_ptr + first * D
    query_row_ptr = query_ptr + tl.cast(first_site, tl.int64) * D
    score_ptr = (tl.cast(first_site, tl.int64) * num_tokens + first) * H
    coefficient_row_ptr = coefficient_ptr + first * H
    for _ in tl.range(0, num_sites, num_stages=STAGES):
        gradient = load_parts(row_ptr, spot, mask, PARTS, SIDE, MASKED)
        flat_query = load_parts(query_row_ptr, query_spot, query_mask, PARTS, SIDE, MASKED)
        query = ()
        for part in tl.static_range(PARTS):
            query += (flat_query[part][None, :, :],)
        score = sum_product(value, query, PARTS) * factor
        along = sum_product(value, gradient, PARTS)
        lse = tl.load(lse_ptr + score_ptr + pair, mask=pair_mask, other=0.0)
        delta = tl.load(delta_ptr + score_ptr + pair, mask=pair_mask, other=0.0)
        weight = tl.exp(score - lse)
        score_gradient = weight * (along - delta)
        coefficient = score_gradient * factor
        radial += score_gradient * score
        more = ()
        for part in tl.static_range(PARTS):
            given = weight[:, :, None] * gradient[part].to(tl.float32)
            more += (result[part] + given + coefficient[:, :, None] * query[part].to(tl.float32),)
        result = more
        tl.store(coefficient_row_ptr + pair, narrow(coefficient, coefficient_ptr.dtype.element_ty), mask=pair_mask)
        row_ptr += row_stride
        query_row_ptr += D
        score_ptr += num_tokens.to(tl.int64) * H
        coefficient_row_ptr += num_tokens.to(tl.int64) * H
    radial = tl.where(pair_mask, radial, 0.0)
    if PER_HEAD:
        along_value = (factor * factor / C * radial)[:, :, None]
    else:
        along_value = (factor * factor / D * tl.sum(radial, 1)[:, None])[:, :, None]
    total = ()
    for part in tl.static_range(PARTS):
        whole = result[part] - along_value * value[part].to(tl.float32)
        if PARTIAL:
            whole += partial[part].to(tl.float32)
        total += (whole,)
    store_parts(result_ptr + first * D, spot, total, mask, PARTS, SIDE, MASKED)


def gather(
    *,
    value_TD: Tensor,
    value_factor_T: Tensor | None,
    gradient_MTD: Tensor,
    query_SD: Tensor,
    lse_STH: Tensor,
    delta_STH: Tensor,
    partial_TD: Tensor | None,
    partial_radial_TH: Tensor | None,
    coefficient_MTH: Tensor,
    result_TD: Tensor,
    sites: range,
    eps: float,
    per_head: bool = False,
) -> None:
    """Write one source's gradient: ``partial_TD`` plus what ``sites`` contribute, with the radial term taken off.

    ``partial_radial_TH`` is the radial sum of the contributions in ``partial_TD``, if they still lack that term.
    """
    num_tokens, width = value_TD.shape
    tile = head_tile(width, lse_STH.shape[-1])
    tokens, warps, stages = _gather_tuning(tile)
    _gather_kernel[(triton.cdiv(num_tokens, tokens),)](
        value_TD,
        gradient_MTD,
        query_SD,
        lse_STH if value_factor_T is None else value_factor_T,
        lse_STH,
        delta_STH,
        value_TD if partial_TD is None else partial_TD,
        lse_STH if partial_radial_TH is None else partial_radial_TH,
        coefficient_MTH,
        result_TD,
        sites.start,
        len(sites),
        num_tokens,
        gradient_MTD.stride(0),
        eps,
        PARTIAL=partial_TD is not None,
        RADIAL=partial_radial_TH is not None,
        HAS_FACTOR=value_factor_T is not None,
        PER_HEAD=per_head,
        **tile.token_sides,
        TOKENS=tokens,
        STAGES=stages,
        num_warps=warps,
    )


def _gather_tuning(tile: HeadTile) -> tuple[int, int, int]:
    """Tokens a program, warps and pipeline stages of :func:`gather` that measured best on an H200 (NOTES.md).

    With one head there are many sites a source, and tokens share what is read of the queries.
    """
    width = tile.heads * tile.head_width
    if tile.heads == 1 and width <= 512:
        return 1, 1, 3
    if tile.heads == 1:
        return (2 if width < 2048 else 1), (2 if width <= 2048 else 4), 4
    if tile.parts > 1:
        return 2, 2, 3
    return 1, (1 if width <= 512 or width == 2048 else 2 if width <= 2048 else 4), 3
