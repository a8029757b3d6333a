"""Backward kernels of depth routing: every gradient is gathered by its owner, nothing is scattered or added atomically.

Backward reaches the producer of source i only after all sites that read it, so all their output gradients ``G_s`` are
known when ``dv_i`` is needed (reference.route_gradients has the sums):

- :func:`receive` turns the gradient that arrives at a site into ``G_s`` in its bank row and ``delta_s = <G_s, o_s>``;
- :func:`gather` finishes one source with the sites inside its group, one token a program.

What sites outside the group contribute, and the queries' gradients, are in :mod:`scaling.kernels.gather_group`.

Shape legend: N rows, S sites, T tokens, D width, H heads, C = D / H, M sites of a group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import head_tile, load_tile, narrow, store_tile, token_offsets


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
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = H * C
    head, head_mask, main, main_mask, rest, rest_mask = token_offsets(H, HP, C, MAIN, REST)
    MASKED: tl.constexpr = HP != H
    REST_MASKED: tl.constexpr = (HP != H) or (MAIN + REST != C)
    value = load_tile(value_ptr + token * D, main, main_mask, MASKED).to(tl.float32)
    if REST > 0:
        value_rest = load_tile(value_ptr + token * D, rest, rest_mask, REST_MASKED).to(tl.float32)
    if HAS_FACTOR:
        if PER_HEAD:
            factor = tl.load(value_factor_ptr + token * H + head, mask=head_mask, other=0.0)
        else:
            factor = tl.load(value_factor_ptr + token)
    else:
        square = tl.sum(value * value, 1)
        if REST > 0:
            square += tl.sum(value_rest * value_rest, 1)
        if PER_HEAD:
            factor = 1.0 / tl.sqrt_rn(square / C + eps)
        else:
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
    if PER_HEAD:
        along_value = (factor * factor / C * radial)[:, None]
    else:
        along_value = factor * factor / D * tl.sum(radial, 0)
    store_tile(result_ptr + token * D, main, result - along_value * value, main_mask, MASKED)
    if REST > 0:
        store_tile(result_ptr + token * D, rest, result_rest - along_value * value_rest, rest_mask, REST_MASKED)


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
    per_head: bool = False,
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
        PER_HEAD=per_head,
        **tile.token_sides,
        STAGES=stages,
        num_warps=warps,
    )


def _receive_tuning(num_tokens: int, width: int) -> tuple[int, int, int]:
    """Tokens a program, warps and pipeline stages of :func:`receive` that measured best on an H200 (NOTES.md)."""
    return max(1, triton.cdiv(num_tokens, 1024)), (2 if width <= 512 else 4 if width <= 1024 else 8), 3


def _gather_tuning(width: int) -> tuple[int, int]:
    """Warps and pipeline stages of :func:`gather` that measured best on an H200 (NOTES.md)."""
    return (1 if width <= 512 or width == 2048 else 2 if width <= 2048 else 4), 3
