"""Backward kernels of depth routing: every gradient is gathered by its owner, nothing is scattered or added atomically.

Backward reaches the producer of source i only after all sites that read it, so all their output gradients ``G_s`` are
known when ``dv_i`` is needed (reference.route_gradients has the sums):

- :func:`receive` turns the gradient that arrives at a site into ``G_s`` in its bank row and ``delta_s = <G_s, o_s>``;
- :func:`gather_group` adds, for a group of sources at once, what later sites outside the group contribute, on tensor
  cores: one read of each ``G_s`` serves the group;
- :func:`gather` finishes one source with the sites inside its group, one warp a token;
- :func:`query_gradient` is the product over tokens that gives ``du_s``, in a fixed order of summation.

Shape legend: N rows, S sites, T tokens, D width, H heads, C = D / H, K sources of a group, P splits of the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import dot, head_fold, head_tile, is_exact, load_tile, narrow, store_tile

_MAX_WHOLE_SITES = 64  # sites of one tensor-core tile; more are taken in several launches that add up


@triton.jit(do_not_specialize=["num_tokens"])
def _receive_kernel(
    incoming_ptr,  # (T, D) gradient of the site's output, or of its normalised output if NORM
    output_ptr,  # (T, D)
    output_factor_ptr,  # (T,) float32
    gain_ptr,  # (D,)
    gradient_ptr,  # (T, D) bank row that takes G
    delta_ptr,  # (T, H) float32
    gain_gradient_ptr,  # (programs, D) float32
    num_tokens,
    TOKENS: tl.constexpr,
    NORM: tl.constexpr,
    H: tl.constexpr,
    HP: tl.constexpr,
    C: tl.constexpr,
    CP: tl.constexpr,
    STAGES: tl.constexpr,
):
    D: tl.constexpr = H * C
    program = tl.program_id(0)
    head = tl.arange(0, HP)
    column = tl.arange(0, CP)
    offsets = head[:, None] * C + column[None, :]
    mask = (head[:, None] < H) & (column[None, :] < C)
    MASKED: tl.constexpr = (HP != H) or (CP != C)
    if NORM:
        gain = load_tile(gain_ptr, offsets, mask, MASKED).to(tl.float32)
        gain_gradient = tl.zeros([HP, CP], tl.float32)
    first = program * TOKENS
    for token in tl.range(first, tl.minimum(first + TOKENS, num_tokens), num_stages=STAGES):
        base = tl.cast(token, tl.int64) * D
        incoming = load_tile(incoming_ptr + base, offsets, mask, MASKED).to(tl.float32)
        output = load_tile(output_ptr + base, offsets, mask, MASKED).to(tl.float32)
        if NORM:
            factor = tl.load(output_factor_ptr + token)
            unit = output * factor
            gain_gradient += incoming * unit
            incoming *= gain
            radial = tl.sum(tl.sum(incoming * unit, 1), 0) / D
            incoming = factor * (incoming - unit * radial)
        rounded = narrow(incoming, gradient_ptr.dtype.element_ty)
        store_tile(gradient_ptr + base, offsets, rounded, mask, MASKED)
        delta = tl.sum(rounded.to(tl.float32) * output, 1)
        tl.store(delta_ptr + tl.cast(token, tl.int64) * H + head, delta, mask=head < H)
    if NORM:
        store_tile(gain_gradient_ptr + program.to(tl.int64) * D, offsets, gain_gradient, mask, MASKED)


@triton.jit(do_not_specialize=["first_site", "num_sites", "num_tokens"])
def _gather_kernel(
    value_ptr,  # (T, D) the source
    gradient_ptr,  # (sites, T, D) G of the sites, consecutive rows
    query_ptr,  # (S, D)
    value_factor_ptr,  # (T,) float32
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
    H: tl.constexpr,
    HP: tl.constexpr,
    C: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = H * C
    head = tl.arange(0, HP)
    head_mask = head < H
    column = tl.arange(0, MAIN)
    main = head[:, None] * C + column[None, :]
    main_mask = head_mask[:, None] & (column[None, :] < C)
    MASKED: tl.constexpr = HP != H
    value = load_tile(value_ptr + token * D, main, main_mask, MASKED).to(tl.float32)
    if REST > 0:
        rest_column = MAIN + tl.arange(0, REST)
        rest = head[:, None] * C + rest_column[None, :]
        rest_mask = head_mask[:, None] & (rest_column[None, :] < C)
        REST_MASKED: tl.constexpr = (HP != H) or (MAIN + REST != C)
        value_rest = load_tile(value_ptr + token * D, rest, rest_mask, REST_MASKED).to(tl.float32)
    if HAS_FACTOR:
        factor = tl.load(value_factor_ptr + token)
    else:
        square = tl.sum(value * value, 1)
        if REST > 0:
            square += tl.sum(value_rest * value_rest, 1)
        factor = 1.0 / tl.sqrt_rn(tl.sum(square, 0) / D + eps)
    # The partial result is added after the loop, so that its load is in flight together with the first rows.
    result = tl.zeros([HP, MAIN], tl.float32)
    if REST > 0:
        result_rest = tl.zeros([HP, REST], tl.float32)
    if PARTIAL:
        partial = load_tile(partial_ptr + token * D, main, main_mask, MASKED)
        if REST > 0:
            partial_rest = load_tile(partial_ptr + token * D, rest, rest_mask, REST_MASKED)
    if RADIAL:
        radial = tl.load(partial_radial_ptr + token * H + head, mask=head_mask, other=0.0)
    else:
        radial = tl.zeros([HP], tl.float32)
    row_ptr = gradient_ptr + token * D
    query_row_ptr = query_ptr + tl.cast(first_site, tl.int64) * D
    score_ptr = (tl.cast(first_site, tl.int64) * num_tokens + token) * H
    coefficient_row_ptr = coefficient_ptr + token * H
    for _ in tl.range(0, num_sites, num_stages=STAGES):
        gradient = load_tile(row_ptr, main, main_mask, MASKED).to(tl.float32)
        query = load_tile(query_row_ptr, main, main_mask, MASKED).to(tl.float32)
        score = tl.sum(value * query, 1)
        along = tl.sum(value * gradient, 1)
        if REST > 0:
            gradient_rest = load_tile(row_ptr, rest, rest_mask, REST_MASKED).to(tl.float32)
            query_rest = load_tile(query_row_ptr, rest, rest_mask, REST_MASKED).to(tl.float32)
            score += tl.sum(value_rest * query_rest, 1)
            along += tl.sum(value_rest * gradient_rest, 1)
        score *= factor
        lse = tl.load(lse_ptr + score_ptr + head, mask=head_mask, other=0.0)
        delta = tl.load(delta_ptr + score_ptr + head, mask=head_mask, other=0.0)
        weight = tl.exp(score - lse)
        score_gradient = weight * (along - delta)
        coefficient = score_gradient * factor
        radial += score_gradient * score
        result += weight[:, None] * gradient + coefficient[:, None] * query
        if REST > 0:
            result_rest += weight[:, None] * gradient_rest + coefficient[:, None] * query_rest
        tl.store(coefficient_row_ptr + head, narrow(coefficient, coefficient_ptr.dtype.element_ty), mask=head_mask)
        row_ptr += row_stride
        query_row_ptr += D
        score_ptr += num_tokens.to(tl.int64) * H
        coefficient_row_ptr += num_tokens.to(tl.int64) * H
    if PARTIAL:
        result += partial.to(tl.float32)
        if REST > 0:
            result_rest += partial_rest.to(tl.float32)
    radial = tl.where(head_mask, radial, 0.0)
    along_value = factor * factor / D * tl.sum(radial, 0)
    store_tile(result_ptr + token * D, main, result - along_value * value, main_mask, MASKED)
    if REST > 0:
        store_tile(result_ptr + token * D, rest, result_rest - along_value * value_rest, rest_mask, REST_MASKED)


@triton.jit(do_not_specialize=["first_site", "num_sites", "num_sources", "num_tokens"])
def _gather_group_kernel(
    value_ptr,  # (K, T, D) the sources, consecutive rows
    gradient_ptr,  # (sites, T, D) consecutive rows
    query_ptr,  # (S, D)
    factor_ptr,  # (K, T) float32
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
    head = tl.program_id(1)
    first_token = tl.program_id(0) * TOKENS
    last_token = tl.minimum(first_token + TOKENS, num_tokens)
    source = tl.arange(0, SOURCES)
    site = tl.arange(0, SITES)
    source_mask = source < num_sources
    site_mask = site < num_sites
    main = head * C + tl.arange(0, MAIN)
    query_row_ptr = query_ptr + (first_site + site[:, None]) * D
    query = tl.load(query_row_ptr + main[None, :], mask=site_mask[:, None], other=0.0)
    if REST > 0:
        rest_column = MAIN + tl.arange(0, REST)
        rest = head * C + rest_column
        rest_mask = (rest_column < C)[None, :]
        query_rest = tl.load(query_row_ptr + rest[None, :], mask=site_mask[:, None] & rest_mask, other=0.0)
    source_offset = source.to(tl.int64)[:, None] * row_stride
    result_offset = source.to(tl.int64)[:, None] * result_stride
    site_offset = site.to(tl.int64)[:, None] * row_stride
    score_offset = (first_site + site).to(tl.int64) * num_tokens
    for token in tl.range(first_token, last_token, num_stages=STAGES):
        wide = tl.cast(token, tl.int64)
        base = wide * D
        value = tl.load(value_ptr + base + source_offset + main[None, :], mask=source_mask[:, None], other=0.0)
        gradient = tl.load(gradient_ptr + base + site_offset + main[None, :], mask=site_mask[:, None], other=0.0)
        factor = tl.load(factor_ptr + source.to(tl.int64) * num_tokens + token, mask=source_mask, other=0.0)
        lse = tl.load(lse_ptr + (score_offset + token) * H + head, mask=site_mask, other=float("inf"))
        delta = tl.load(delta_ptr + (score_offset + token) * H + head, mask=site_mask, other=0.0)
        score = dot(value, tl.trans(query), tl.zeros([SOURCES, SITES], tl.float32), EXACT)
        along = dot(value, tl.trans(gradient), tl.zeros([SOURCES, SITES], tl.float32), EXACT)
        if REST > 0:
            value_rest = tl.load(
                value_ptr + base + source_offset + rest[None, :], mask=source_mask[:, None] & rest_mask, other=0.0
            )
            gradient_rest = tl.load(
                gradient_ptr + base + site_offset + rest[None, :], mask=site_mask[:, None] & rest_mask, other=0.0
            )
            score = dot(value_rest, tl.trans(query_rest), score, EXACT)
            along = dot(value_rest, tl.trans(gradient_rest), along, EXACT)
        score *= factor[:, None]
        weight = tl.exp(score - lse[None, :])
        score_gradient = weight * (along - delta[None, :])
        radial = tl.sum(score_gradient * score, 1)
        coefficient = narrow(score_gradient * factor[:, None], value.dtype)
        weight = narrow(weight, value.dtype)
        result = dot(weight, gradient, tl.zeros([SOURCES, MAIN], tl.float32), EXACT)
        result = dot(coefficient, query, result, EXACT)
        kind = result_ptr.dtype.element_ty
        result_row_ptr = result_ptr + base + result_offset + main[None, :]
        radial_row_ptr = radial_ptr + (source.to(tl.int64) * num_tokens + token) * H + head
        if ADD:
            result += tl.load(result_row_ptr, mask=source_mask[:, None], other=0.0).to(tl.float32)
            radial += tl.load(radial_row_ptr, mask=source_mask, other=0.0)
        tl.store(result_row_ptr, narrow(result, kind), mask=source_mask[:, None])
        tl.store(radial_row_ptr, radial, mask=source_mask)
        if REST > 0:
            result_rest = dot(weight, gradient_rest, tl.zeros([SOURCES, REST], tl.float32), EXACT)
            result_rest = dot(coefficient, query_rest, result_rest, EXACT)
            rest_row_ptr = result_ptr + base + result_offset + rest[None, :]
            if ADD:
                result_rest += tl.load(rest_row_ptr, mask=source_mask[:, None] & rest_mask, other=0.0).to(tl.float32)
            tl.store(rest_row_ptr, narrow(result_rest, kind), mask=source_mask[:, None] & rest_mask)
        pair = ((wide * H + head) * num_sites + site[None, :]) * num_sources + source[:, None]
        tl.store(
            coefficient_ptr + pair,
            coefficient.to(coefficient_ptr.dtype.element_ty),
            mask=source_mask[:, None] & site_mask[None, :],
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
    main = head * C + tl.arange(0, MAIN)
    first_token = split * span
    num_pairs = (tl.minimum(first_token + span, num_tokens) - first_token) * num_sources
    result = tl.zeros([SITES, MAIN], tl.float32)
    if REST > 0:
        rest_column = MAIN + tl.arange(0, REST)
        rest = head * C + rest_column
        rest_mask = (rest_column < C)[None, :]
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
        value = tl.load(value_ptr + row + main[None, :], mask=inside[:, None], other=0.0)
        result = dot(coefficient, value, result, EXACT)
        if REST > 0:
            value_rest = tl.load(value_ptr + row + rest[None, :], mask=inside[:, None] & rest_mask, other=0.0)
            result_rest = dot(coefficient, value_rest, result_rest, EXACT)
    result_row_ptr = result_ptr + tl.cast(split, tl.int64) * split_stride + site.to(tl.int64)[:, None] * D
    result += tl.load(result_row_ptr + main[None, :], mask=site_mask[:, None], other=0.0)
    tl.store(result_row_ptr + main[None, :], result, mask=site_mask[:, None])
    if REST > 0:
        result_rest += tl.load(result_row_ptr + rest[None, :], mask=site_mask[:, None] & rest_mask, other=0.0)
        tl.store(result_row_ptr + rest[None, :], result_rest, mask=site_mask[:, None] & rest_mask)


def receive(
    *,
    incoming_TD: Tensor,
    output_TD: Tensor,
    output_factor_T: Tensor,
    gradient_TD: Tensor,
    delta_TH: Tensor,
    gain_D: Tensor | None,
) -> Tensor | None:
    """Write ``G`` and ``delta`` of one site; with a gain, ``incoming_TD`` is the gradient of ``RMSNorm(o) * gain``.

    Returns the gain's gradient (float32), or None without one.
    """
    num_tokens, width = incoming_TD.shape
    heads = delta_TH.shape[-1]
    tokens, warps, stages = _receive_tuning(num_tokens, width)
    programs = triton.cdiv(num_tokens, tokens)
    partial_PD = None if gain_D is None else delta_TH.new_empty((programs, width))
    tile = head_tile(width, heads)
    _receive_kernel[(programs,)](
        incoming_TD,
        output_TD,
        output_factor_T,
        incoming_TD if gain_D is None else gain_D,
        gradient_TD,
        delta_TH,
        delta_TH if partial_PD is None else partial_PD,
        num_tokens,
        TOKENS=tokens,
        NORM=gain_D is not None,
        H=heads,
        HP=tile.padded_heads,
        C=tile.head_width,
        CP=triton.next_power_of_2(tile.head_width),
        STAGES=stages,
        num_warps=warps,
    )
    return None if partial_PD is None else partial_PD.sum(0)


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
) -> None:
    """Write one source's gradient: ``partial_TD`` plus what ``sites`` contribute, with the radial term taken off.

    ``partial_radial_TH`` is the radial sum of the contributions in ``partial_TD``, if they still lack that term.
    """
    num_tokens, width = value_TD.shape
    tile = head_tile(width, lse_STH.shape[-1])
    warps, stages = _gather_tuning(width)
    _gather_kernel[(num_tokens,)](
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
        H=tile.heads,
        HP=tile.padded_heads,
        C=tile.head_width,
        MAIN=tile.main,
        REST=tile.rest,
        STAGES=stages,
        num_warps=warps,
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
    padded = max(16, triton.next_power_of_2(len(sites)))
    tokens, warps, stages = _gather_group_tuning(tile.head_width, padded)
    _gather_group_kernel[(triton.cdiv(num_tokens, tokens), tile.heads)](
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
        H=tile.heads,
        C=tile.head_width,
        MAIN=tile.main,
        REST=tile.rest,
        SOURCES=16,
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
        H=heads * fold,
        FOLD=fold,
        C=tile.head_width,
        MAIN=tile.main,
        REST=tile.rest,
        SITES=side,
        PAIRS=pairs,
        TRIANGLE=triangle,
        STAGES=stages,
        EXACT=is_exact(value_KTD.dtype),
        num_warps=warps,
    )


def _receive_tuning(num_tokens: int, width: int) -> tuple[int, int, int]:
    """Tokens a program, warps and pipeline stages of :func:`receive` that measured best on an H200 (NOTES.md)."""
    return max(1, triton.cdiv(num_tokens, 1024)), (2 if width <= 512 else 4 if width <= 1024 else 8), 3


def _gather_tuning(width: int) -> tuple[int, int]:
    """Warps and pipeline stages of :func:`gather` that measured best on an H200 (NOTES.md)."""
    return (1 if width <= 512 or width == 2048 else 2 if width <= 2048 else 4), 3


def _gather_group_tuning(head_width: int, sites: int) -> tuple[int, int, int]:
    """Tokens a program, warps and pipeline stages of :func:`gather_group` that measured best on an H200 (NOTES.md)."""
    elements = sites * head_width
    if elements <= 5120:
        return 32, (1 if elements <= 2560 else 2), 3
    if head_width & (head_width - 1):
        return 8, 2, 2
    return 32, 4, (3 if sites <= 32 else 2)


def _query_gradient_tuning(head_width: int, sites: int) -> tuple[int, int, int, int]:
    """Sites and pairs of a tile, warps and stages of :func:`query_gradient` that measured best (NOTES.md)."""
    side = 16 if sites <= 16 else 32 if sites <= 32 else 64
    return side, (128 if head_width <= 64 or side == 64 else 64), 8, 2
