"""Backward kernel of hyper-connections (hc, mhc): the projections' weights, a product over tokens.

Beside :mod:`scaling.kernels.hyper_backward`. Sums are made in a fixed order, so that they repeat to the bit.

Shape legend: as in :mod:`scaling.kernels.hyper`; P splits of the tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import Rule, dot_split


@triton.jit(do_not_specialize=["num_tokens", "span"])
def _phi_gradient_kernel(
    out_ptr,  # (T, M, D) X'
    outer_ptr,  # (T, K) rho dp
    result_ptr,  # (P, M * D, K), or (P, D, F) for hc
    num_tokens,
    span,
    PER_STREAM: tl.constexpr,
    M: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    D: tl.constexpr,
    PAIRS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    split = tl.program_id(0)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    field = tl.arange(0, FP)
    result = tl.zeros([COLUMNS, FP], tl.float32)
    first_token = split * span
    tokens = tl.minimum(first_token + span, num_tokens) - first_token
    if PER_STREAM:  # pairs of token and stream share the weights
        count = tokens * M
        first = tl.cast(first_token, tl.int64) * M
        value_step = D
        outer_step = F
        value_row_ptr = out_ptr + column
    else:
        count = tokens
        first = tl.cast(first_token, tl.int64)
        value_step = M * D
        outer_step = K
        value_row_ptr = out_ptr + tl.program_id(2) * D + column
    for start in tl.range(0, count, PAIRS, num_stages=STAGES):
        pair = start + tl.arange(0, PAIRS)
        mask = pair < count
        value = tl.load(value_row_ptr[:, None] + (first + pair)[None, :] * value_step, mask=mask[None, :], other=0.0)
        outer = tl.load(
            outer_ptr + (first + pair)[:, None] * outer_step + field[None, :],
            mask=mask[:, None] & (field < F)[None, :], other=0.0,
        )  # fmt: skip
        result = dot_split(value.to(tl.float32), outer, result, EXACT)
    if PER_STREAM:
        row = split.to(tl.int64) * D + column
    else:
        row = (split.to(tl.int64) * M + tl.program_id(2)) * D + column
    tl.store(result_ptr + row[:, None] * F + field[None, :], result, mask=(field < F)[None, :] & (column < D)[:, None])


def phi_gradient(rule: Rule, *, out_TMD: Tensor, outer_TK: Tensor, fields: int, exact: bool) -> Tensor:
    """Return ``sum over tokens of X' (rho dp)``, in the shape of the projections' weights."""
    num_tokens, streams, width = out_TMD.shape
    per_stream = rule.kind == "hc"
    columns = 64 if width % 64 == 0 else 16
    blocks = width // columns * (1 if per_stream else streams)
    splits = max(1, min(528 // blocks, triton.cdiv(num_tokens, 256)))
    splits = triton.cdiv(num_tokens, triton.cdiv(num_tokens, splits))
    rows = width if per_stream else streams * width
    partial = outer_TK.new_empty((splits, rows, fields))
    _phi_gradient_kernel[(splits, width // columns, 1 if per_stream else streams)](
        out_TMD,
        outer_TK,
        partial,
        num_tokens,
        triton.cdiv(num_tokens, splits),
        PER_STREAM=per_stream,
        M=streams,
        K=outer_TK.shape[1],
        F=fields,
        FP=max(16, triton.next_power_of_2(fields)),
        D=width,
        PAIRS=64,
        COLUMNS=columns,
        STAGES=2,
        EXACT=exact,
        num_warps=4,
    )
    return partial.sum(0)
