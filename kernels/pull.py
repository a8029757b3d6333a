"""Forward kernel of depth routing at one site: newest source, the group's sources, and what is older in one softmax.

:func:`pull` runs at every site. A program of one or two warps handles one token: it takes the newest source from the
sublayer's output, writes it into its bank row, and folds the group's sources and the partial result of the older ones
(:mod:`scaling.kernels.pull_group`) into one online softmax; the sublayer's input norm comes at the end.

Shape legend: N rows of the bank, S sites, T tokens, D width, H heads, C = D / H. ``row_stride`` counts elements.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import head_tile, load_tile, store_tile, token_offsets


@triton.jit(do_not_specialize=["first_row", "last_row", "write_row", "site", "num_tokens"])
def _pull_kernel(
    source_ptr,  # (T, D) newest source
    bank_ptr,  # (N, T, D)
    partial_ptr,  # (T, D) mix of the older sources, may be the row that is overwritten
    query_ptr,  # (S, D)
    factor_ptr,  # (N, T) float32 RMS factors of the rows, or (N, T, H) if PER_HEAD
    lse_ptr,  # (S, T, H) float32; holds the partial's on entry
    partial_lse_ptr,  # (T, H) float32
    output_ptr,  # (T, D)
    gain_ptr,  # (D,)
    normed_ptr,  # (T, D) RMSNorm of the output with the gain
    output_factor_ptr,  # (T,) float32 RMS factor of the output
    first_row,
    last_row,
    write_row,
    site,
    num_tokens,
    row_stride,
    eps,
    output_eps,
    WRITE: tl.constexpr,
    PARTIAL: tl.constexpr,
    NORM: tl.constexpr,
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
    FACTORS: tl.constexpr = H if PER_HEAD else 1
    site = site.to(tl.int64)
    query_row = query_ptr + site * D
    lse_row = lse_ptr + (site * num_tokens + token) * H

    # These loads are issued before the loop and used after it, so that they are in flight together with its first rows.
    query = load_tile(query_row, main, main_mask, MASKED).to(tl.float32)
    newest = load_tile(source_ptr + token * D, main, main_mask, MASKED)
    if REST > 0:
        query_rest = load_tile(query_row, rest, rest_mask, REST_MASKED).to(tl.float32)
        newest_rest = load_tile(source_ptr + token * D, rest, rest_mask, REST_MASKED)
    if PARTIAL:
        older = load_tile(partial_ptr + token * D, main, main_mask, MASKED)
        older_lse = tl.load(partial_lse_ptr + token * H + head, mask=head_mask, other=0.0)
        if REST > 0:
            older_rest = load_tile(partial_ptr + token * D, rest, rest_mask, REST_MASKED)

    top = tl.full([HP], float("-inf"), tl.float32)
    total = tl.zeros([HP], tl.float32)
    mixed = tl.zeros([HP, MAIN], tl.float32)
    if REST > 0:
        mixed_rest = tl.zeros([HP, REST], tl.float32)
    row_ptr = bank_ptr + first_row.to(tl.int64) * row_stride + token * D
    row_factor_ptr = factor_ptr + (first_row.to(tl.int64) * num_tokens + token) * FACTORS
    for _ in tl.range(first_row, last_row, num_stages=STAGES):
        value = load_tile(row_ptr, main, main_mask, MASKED).to(tl.float32)
        score = tl.sum(value * query, 1)
        if REST > 0:
            value_rest = load_tile(row_ptr, rest, rest_mask, REST_MASKED).to(tl.float32)
            score += tl.sum(value_rest * query_rest, 1)
        if PER_HEAD:
            score *= tl.load(row_factor_ptr + head, mask=head_mask, other=0.0)
        else:
            score *= tl.load(row_factor_ptr)
        new_top = tl.maximum(top, score)
        keep = tl.exp(top - new_top)
        share = tl.exp(score - new_top)
        mixed = mixed * keep[:, None] + value * share[:, None]
        if REST > 0:
            mixed_rest = mixed_rest * keep[:, None] + value_rest * share[:, None]
        total = total * keep + share
        top = new_top
        row_ptr += row_stride
        row_factor_ptr += num_tokens * FACTORS

    wide = newest.to(tl.float32)
    square = tl.sum(wide * wide, 1)
    score = tl.sum(wide * query, 1)
    if REST > 0:
        wide_rest = newest_rest.to(tl.float32)
        square += tl.sum(wide_rest * wide_rest, 1)
        score += tl.sum(wide_rest * query_rest, 1)
    if PER_HEAD:
        factor = 1.0 / tl.sqrt_rn(square / C + eps)
    else:
        factor = 1.0 / tl.sqrt_rn(tl.sum(square, 0) / D + eps)
    score *= factor
    new_top = tl.maximum(top, score)
    if PARTIAL:
        new_top = tl.maximum(new_top, older_lse)
    keep = tl.exp(top - new_top)
    share = tl.exp(score - new_top)
    total = total * keep + share
    mixed = mixed * keep[:, None] + wide * share[:, None]
    if REST > 0:
        mixed_rest = mixed_rest * keep[:, None] + wide_rest * share[:, None]
    if PARTIAL:
        older_share = tl.exp(older_lse - new_top)
        total += older_share
        mixed += older.to(tl.float32) * older_share[:, None]
        if REST > 0:
            mixed_rest += older_rest.to(tl.float32) * older_share[:, None]
        # The partial result may live in the row that the newest source is about to overwrite.
        tl.debug_barrier()
    top = new_top
    if WRITE:
        write_row = write_row.to(tl.int64)
        store_tile(bank_ptr + write_row * row_stride + token * D, main, newest, main_mask, MASKED)
        if REST > 0:
            store_tile(bank_ptr + write_row * row_stride + token * D, rest, newest_rest, rest_mask, REST_MASKED)
        write_factor_ptr = factor_ptr + (write_row * num_tokens + token) * FACTORS
        if PER_HEAD:
            tl.store(write_factor_ptr + head, factor, mask=head_mask)
        else:
            tl.store(write_factor_ptr, factor)

    mixed = mixed / total[:, None]
    store_tile(output_ptr + token * D, main, mixed, main_mask, MASKED)
    if REST > 0:
        mixed_rest = mixed_rest / total[:, None]
        store_tile(output_ptr + token * D, rest, mixed_rest, rest_mask, REST_MASKED)
    tl.store(lse_row + head, top + tl.log(total), mask=head_mask)
    if NORM:
        square = tl.sum(mixed * mixed, 1)
        if REST > 0:
            square += tl.sum(mixed_rest * mixed_rest, 1)
        output_factor = 1.0 / tl.sqrt_rn(tl.sum(square, 0) / D + output_eps)
        tl.store(output_factor_ptr + token, output_factor)
        gain = load_tile(gain_ptr, main, main_mask, MASKED).to(tl.float32)
        store_tile(normed_ptr + token * D, main, mixed * output_factor * gain, main_mask, MASKED)
        if REST > 0:
            gain_rest = load_tile(gain_ptr, rest, rest_mask, REST_MASKED).to(tl.float32)
            store_tile(normed_ptr + token * D, rest, mixed_rest * output_factor * gain_rest, rest_mask, REST_MASKED)


def pull(
    *,
    source_TD: Tensor,
    bank_NTD: Tensor,
    factor_NT: Tensor,
    query_SD: Tensor,
    lse_STH: Tensor,
    output_TD: Tensor,
    gain_D: Tensor | None,
    normed_TD: Tensor,
    output_factor_T: Tensor,
    partial_TD: Tensor | None,
    partial_lse_TH: Tensor | None,
    rows: range,
    write_row: int | None,
    site: int,
    eps: float,
    output_eps: float,
) -> None:
    """Route one site over its newest source, bank ``rows``, and the partial result of older ones if given.

    Writes the source and its RMS factor into ``write_row`` (unless None), the mix into ``output_TD`` and the site's
    row of ``lse_STH``; with a gain also ``RMSNorm(mix) * gain`` into ``normed_TD`` and its factor. Factors of shape
    (N, T, H) mean that keys are normed head by head.
    """
    num_tokens, width = source_TD.shape
    tile = head_tile(width, lse_STH.shape[-1])
    warps, stages = _pull_tuning(width)
    _pull_kernel[(num_tokens,)](
        source_TD,
        bank_NTD,
        partial_TD if partial_TD is not None else source_TD,
        query_SD,
        factor_NT,
        lse_STH,
        partial_lse_TH if partial_lse_TH is not None else lse_STH,
        output_TD,
        normed_TD if gain_D is None else gain_D,
        normed_TD,
        output_factor_T,
        rows.start,
        rows.stop,
        -1 if write_row is None else write_row,
        site,
        num_tokens,
        bank_NTD.stride(0),
        eps,
        output_eps,
        WRITE=write_row is not None,
        PARTIAL=partial_TD is not None,
        NORM=gain_D is not None,
        PER_HEAD=factor_NT.dim() == 3,
        **tile.token_sides,
        STAGES=stages,
        num_warps=warps,
    )


def _pull_tuning(width: int) -> tuple[int, int]:
    """Warps and pipeline stages of :func:`pull` that measured best on an H200 (NOTES.md)."""
    return (1 if width <= 1024 else 2 if width <= 4096 else 4), 4
