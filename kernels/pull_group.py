"""Forward kernel of depth routing for a group of sites: one read of all older rows serves every site of the group.

Queries do not depend on tokens, so the sites of a group can be routed over the rows that exist when the group begins:
for one token and head, the scores of up to 16 queries and the mix are two small matrix products on tensor cores.
:mod:`scaling.kernels.pull` merges each site's partial result with what came later.

Shape legend: N rows of the bank, S sites, T tokens, D width, H heads, C = D / H, Q sites of the group.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import dot, head_mask, head_offsets, head_tile, is_exact, narrow

MAX_GROUP_QUERIES = 16  # columns of the larger of two tiles; the smaller has 8
_MAX_WHOLE_ROWS = 64  # up to here one tile holds all older sources of a token and head; beyond, tiles of this many


@triton.jit(do_not_specialize=["num_rows", "first_site", "num_sites", "num_tokens"])
def _pull_group_kernel(
    bank_ptr,  # (N, T, D)
    query_ptr,  # (S, D)
    factor_ptr,  # (N, T) float32, or (N, T, H) if PER_HEAD
    partial_ptr,  # (num_sites, T, D), one row per site of the group
    lse_ptr,  # (num_sites, T, H) float32
    num_rows,
    first_site,
    num_sites,
    num_tokens,
    row_stride,
    partial_stride,
    PER_HEAD: tl.constexpr,
    H: tl.constexpr,
    C: tl.constexpr,
    MAIN: tl.constexpr,
    REST: tl.constexpr,
    QUERIES: tl.constexpr,
    ROWS: tl.constexpr,
    WHOLE: tl.constexpr,
    TOKENS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    D: tl.constexpr = H * C
    head = tl.program_id(0) % H  # the heads of a token run side by side, so that its row is read in one piece
    first_token = tl.program_id(0) // H * TOKENS
    last_token = tl.minimum(first_token + TOKENS, num_tokens)
    query_index = tl.arange(0, QUERIES)
    query_mask = (query_index < num_sites)[:, None]
    row = tl.arange(0, ROWS)
    FACTORS: tl.constexpr = H if PER_HEAD else 1
    main, rest, rest_mask = head_offsets(head, C, MAIN, REST)
    query_row_ptr = query_ptr + (first_site + query_index[:, None]) * D
    queries_mask = head_mask(query_mask, C, MAIN)
    query = tl.load(query_row_ptr + main[None, :], mask=queries_mask, other=0.0)
    if REST > 0:
        query_rest = tl.load(query_row_ptr + rest[None, :], mask=query_mask & rest_mask, other=0.0)
    row_offset = row.to(tl.int64)[:, None] * row_stride
    factor_offset = row.to(tl.int64) * num_tokens * FACTORS
    if PER_HEAD:
        factor_offset += head
    partial_offset = query_index.to(tl.int64)[:, None] * partial_stride
    for token in tl.range(first_token, last_token, num_stages=STAGES):
        base = tl.cast(token, tl.int64) * D
        if WHOLE:
            row_mask = row < num_rows
            rows_mask = head_mask(row_mask[:, None], C, MAIN)
            value = tl.load(bank_ptr + base + row_offset + main[None, :], mask=rows_mask, other=0.0)
            factor = tl.load(factor_ptr + factor_offset + token * FACTORS, mask=row_mask, other=0.0)
            # Rows along the rows, which tensor cores take 16 at a time, queries along the columns: 8 need no padding.
            score = dot(value, tl.trans(query), tl.zeros([ROWS, QUERIES], tl.float32), EXACT)
            if REST > 0:
                value_rest = tl.load(
                    bank_ptr + base + row_offset + rest[None, :], mask=row_mask[:, None] & rest_mask, other=0.0
                )
                score = dot(value_rest, tl.trans(query_rest), score, EXACT)
            score = tl.where(row_mask[:, None], score * factor[:, None], float("-inf"))
            top = tl.max(score, 0)
            weight = tl.exp(score - top[None, :])
            total = tl.sum(weight, 0)
            weight = tl.trans(narrow(weight / total[None, :], value.dtype))
            mixed = dot(weight, value, tl.zeros([QUERIES, MAIN], tl.float32), EXACT)
            if REST > 0:
                mixed_rest = dot(weight, value_rest, tl.zeros([QUERIES, REST], tl.float32), EXACT)
        else:
            top = tl.full([QUERIES], float("-inf"), tl.float32)
            total = tl.zeros([QUERIES], tl.float32)
            mixed = tl.zeros([QUERIES, MAIN], tl.float32)
            if REST > 0:
                mixed_rest = tl.zeros([QUERIES, REST], tl.float32)
            for start in tl.range(0, num_rows, ROWS):
                row_mask = (start + row) < num_rows
                block_ptr = bank_ptr + base + tl.cast(start, tl.int64) * row_stride
                rows_mask = head_mask(row_mask[:, None], C, MAIN)
                value = tl.load(block_ptr + row_offset + main[None, :], mask=rows_mask, other=0.0)
                start_factor_ptr = factor_ptr + (tl.cast(start, tl.int64) * num_tokens + token) * FACTORS
                factor = tl.load(start_factor_ptr + factor_offset, mask=row_mask, other=0.0)
                score = dot(value, tl.trans(query), tl.zeros([ROWS, QUERIES], tl.float32), EXACT)
                if REST > 0:
                    value_rest = tl.load(
                        block_ptr + row_offset + rest[None, :], mask=row_mask[:, None] & rest_mask, other=0.0
                    )
                    score = dot(value_rest, tl.trans(query_rest), score, EXACT)
                score = tl.where(row_mask[:, None], score * factor[:, None], float("-inf"))
                new_top = tl.maximum(top, tl.max(score, 0))
                keep = tl.exp(top - new_top)
                weight = tl.exp(score - new_top[None, :])
                total = total * keep + tl.sum(weight, 0)
                weight = tl.trans(narrow(weight, value.dtype))
                mixed = dot(weight, value, mixed * keep[:, None], EXACT)
                if REST > 0:
                    mixed_rest = dot(weight, value_rest, mixed_rest * keep[:, None], EXACT)
                top = new_top
            mixed = mixed / total[:, None]
            if REST > 0:
                mixed_rest = mixed_rest / total[:, None]
        kind = partial_ptr.dtype.element_ty
        tl.store(partial_ptr + base + partial_offset + main[None, :], narrow(mixed, kind), mask=queries_mask)
        if REST > 0:
            tl.store(
                partial_ptr + base + partial_offset + rest[None, :],
                narrow(mixed_rest, kind),
                mask=query_mask & rest_mask,
            )
        lse_offset = (query_index.to(tl.int64) * num_tokens + token) * H + head
        tl.store(lse_ptr + lse_offset, top + tl.log(total), mask=query_index < num_sites)


def pull_group(
    *,
    bank_NTD: Tensor,
    factor_NT: Tensor,
    query_SD: Tensor,
    partial_QTD: Tensor,
    lse_QTH: Tensor,
    num_rows: int,
    sites: range,
    group: int,
) -> None:
    """Route ``sites`` over the first ``num_rows`` rows of the bank in one read.

    ``group``, at most :data:`MAX_GROUP_QUERIES`, is how many sites share rows here, also where only some are asked for:
    it decides the tile, so that a site alone gives what it gives among the others, to the bit.
    """
    assert 0 < len(sites) <= group <= MAX_GROUP_QUERIES and num_rows > 0
    _, num_tokens, width = bank_NTD.shape
    tile = head_tile(width, lse_QTH.shape[-1])
    whole = num_rows <= _MAX_WHOLE_ROWS
    rows = max(16, triton.next_power_of_2(num_rows)) if whole else _MAX_WHOLE_ROWS
    tokens, warps, stages = _group_tuning(tile.head_width, rows)
    _pull_group_kernel[(triton.cdiv(num_tokens, tokens) * tile.heads,)](
        bank_NTD,
        query_SD,
        factor_NT,
        partial_QTD,
        lse_QTH,
        num_rows,
        sites.start,
        len(sites),
        num_tokens,
        bank_NTD.stride(0),
        partial_QTD.stride(0),
        PER_HEAD=factor_NT.dim() == 3,
        **tile.head_sides,
        QUERIES=8 if group <= 8 else MAX_GROUP_QUERIES,
        ROWS=rows,
        WHOLE=whole,
        TOKENS=tokens,
        STAGES=stages,
        EXACT=is_exact(bank_NTD.dtype),
        num_warps=warps,
    )


def _group_tuning(head_width: int, rows: int) -> tuple[int, int, int]:
    """Tokens a program, warps and pipeline stages of :func:`pull_group` that measured best on an H200 (NOTES.md)."""
    elements = rows * head_width
    if elements <= 4096:
        return 16, 1, 3
    return (16, 1, 2) if head_width <= 160 else (16, 2, 3)
