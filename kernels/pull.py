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

from scaling.kernels.tile import head_tile, load_parts, store_parts, sum_product, token_offsets, weigh_parts, zero_parts


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
    PARTS: tl.constexpr,
    SIDE: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    D: tl.constexpr = H * C
    MASKED: tl.constexpr = HP * PARTS * SIDE != D
    FACTORS: tl.constexpr = H if PER_HEAD else 1
    head, head_mask, spot, mask = token_offsets(H, HP, C, SIDE)
    site = site.to(tl.int64)
    lse_row = lse_ptr + (site * num_tokens + token) * H

    # These loads are issued before the loop and used after it, so that they are in flight together with its first rows.
    query = load_parts(query_ptr + site * D, spot, mask, PARTS, SIDE, MASKED)
    newest = load_parts(source_ptr + token * D, spot, mask, PARTS, SIDE, MASKED)
    if PARTIAL:
        older = load_parts(partial_ptr + token * D, spot, mask, PARTS, SIDE, MASKED)
        older_lse = tl.load(partial_lse_ptr + token * H + head, mask=head_mask, other=0.0)

    top = tl.full([HP], float("-inf"), tl.float32)
    total = tl.zeros([HP], tl.float32)
    mixed = zero_parts(newest[0], PARTS)
    row_ptr = bank_ptr + first_row.to(tl.int64) * row_stride + token * D
    row_factor_ptr = factor_ptr + (first_row.to(tl.int64) * num_tokens + token) * FACTORS
    for _ in tl.range(first_row, last_row, num_stages=STAGES):
        value = load_parts(row_ptr, spot, mask, PARTS, SIDE, MASKED)
        score = sum_product(value, query, PARTS)
        if PER_HEAD:
            score *= tl.load(row_factor_ptr + head, mask=head_mask, other=0.0)
        else:
            score *= tl.load(row_factor_ptr)
        new_top = tl.maximum(top, score)
        keep = tl.exp(top - new_top)
        share = tl.exp(score - new_top)
        mixed = weigh_parts(keep, mixed, share, value, PARTS)
        total = total * keep + share
        top = new_top
        row_ptr += row_stride
        row_factor_ptr += num_tokens * FACTORS

    square = sum_product(newest, newest, PARTS)
    if PER_HEAD:
        factor = 1.0 / tl.sqrt_rn(square / C + eps)
    else:
        factor = 1.0 / tl.sqrt_rn(tl.sum(square, 0) / D + eps)
    score = sum_product(newest, query, PARTS) * factor
    new_top = tl.maximum(top, score)
    if PARTIAL:
        new_top = tl.maximum(new_top, older_lse)
    keep = tl.exp(top - new_top)
    share = tl.exp(score - new_top)
    total = total * keep + share
    mixed = weigh_parts(keep, mixed, share, newest, PARTS)
    if PARTIAL:
        older_share = tl.exp(older_lse - new_top)
        total += older_share
        mixed = weigh_parts(tl.full([HP], 1.0, tl.float32), mixed, older_share, older, PARTS)
        # The partial result may live in the row that the newest source is about to overwrite.
        tl.debug_barrier()
    top = new_top
    if WRITE:
        write_row = write_row.to(tl.int64)
        store_parts(bank_ptr + write_row * row_stride + token * D, spot, newest, mask, PARTS, SIDE, MASKED)
        write_factor_ptr = factor_ptr + (write_row * num_tokens + token) * FACTORS
        if PER_HEAD:
            tl.store(write_factor_ptr + head, factor, mask=head_mask)
        else:
            tl.store(write_factor_ptr, factor)

    output = ()
    for part in tl.static_range(PARTS):
        output += (mixed[part] / total[:, None],)
    store_parts(output_ptr + token * D, spot, output, mask, PARTS, SIDE, MASKED)
    tl.store(lse_row + head, top + tl.log(total), mask=head_mask)
    if NORM:
        output_factor = 1.0 / tl.sqrt_rn(tl.sum(sum_product(output, output, PARTS), 0) / D + output_eps)
        tl.store(output_factor_ptr + token, output_factor)
        gain = load_parts(gain_ptr, spot, mask, PARTS, SIDE, MASKED)
        normed = ()
        for part in tl.static_range(PARTS):
            normed += (output[part] * output_factor * gain[part].to(tl.float32),)
        store_parts(normed_ptr + token * D, spot, normed, mask, PARTS, SIDE, MASKED)


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
    return (1 if width <= 1280 else 4), 4
