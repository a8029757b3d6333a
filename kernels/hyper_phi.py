"""Products of hyper-connections (hc, mhc) with the projections' weights: parts, projections, the weights' gradient.

Between writing and coefficients (:mod:`scaling.kernels.hyper_forward`), and last of the backward pass. Tensor cores
take 16 bits: :func:`split` cuts the weights into a high and a low part side by side, so that 16-bit streams, exact as
they are, take one product, and what comes out has 16 bits of the weights. Sums are made in a fixed order, so that they
repeat to the bit.

Shape legend: as in :mod:`scaling.kernels.hyper`; R rows that are projected (tokens, for hc pairs of token and stream),
S splits of a row (streams, for hc 1), P splits of the tokens.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import Rule, dot_split, largest_part
from scaling.kernels.tile import dot, narrow

_ROWS = 64  # of a projecting program; each reads its split's weights once, from the L2


@triton.jit(do_not_specialize=["num_rows"])
def _split_kernel(
    phi_ptr,  # (M * D, F), or (D, F) for hc
    part_ptr,  # (M * D, 2 * FP), high and low; if WHOLE (M * D, FP)
    num_rows,
    WHOLE: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    ROWS: tl.constexpr,
):
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)[:, None]
    field = tl.arange(0, FP)[None, :]
    mask = row < num_rows
    phi = tl.load(phi_ptr + row * F + field, mask=mask & (field < F), other=0.0)
    if WHOLE:
        tl.store(part_ptr + row * FP + field, phi, mask=mask)
    else:
        kind: tl.constexpr = part_ptr.dtype.element_ty
        high = narrow(phi, kind)
        tl.store(part_ptr + row * (2 * FP) + field, high, mask=mask)
        tl.store(part_ptr + row * (2 * FP) + FP + field, narrow(phi - high.to(tl.float32), kind), mask=mask)


@triton.jit(do_not_specialize=["num_rows"])
def _project_kernel(
    stream_ptr,  # (R, S * D)
    part_ptr,  # (S * D, SIDE)
    partial_ptr,  # (S, R, F) what each split adds to the projections
    num_rows,
    SPLITS: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    SIDE: tl.constexpr = FP if EXACT else 2 * FP
    program = tl.num_programs(0) - 1 - tl.program_id(0)  # backwards: the last rows written are still in the L2
    split = program % SPLITS
    row = (program // SPLITS).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    mask = (row < num_rows)[:, None]
    side = tl.arange(0, SIDE)
    column = tl.arange(0, COLUMNS)
    stream_row = stream_ptr + row[:, None] * (SPLITS * D) + split * D + column[None, :]
    part_row = part_ptr + (split * D + column)[:, None] * SIDE + side[None, :]
    result = tl.zeros([ROWS, SIDE], tl.float64 if EXACT else tl.float32)
    for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
        x = tl.load(stream_row + start, mask=mask, other=0.0)
        part = tl.load(part_row + start * SIDE)
        if x.dtype != part.dtype:  # float32 streams beside 16-bit sublayers
            high = narrow(x, part.dtype)
            result = dot(high, part, result, EXACT)
            x = narrow(x - high.to(tl.float32), part.dtype)
        result = dot(x, part, result, EXACT)
    if not EXACT:
        result = tl.sum(tl.reshape(result, [ROWS, 2, FP]), 1)
    field = tl.arange(0, FP)[None, :]
    place = (split.to(tl.int64) * num_rows + row)[:, None] * F + field
    tl.store(partial_ptr + place, result.to(tl.float32), mask=mask & (field < F))


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
    result = tl.zeros([COLUMNS, FP], tl.float64 if EXACT else tl.float32)
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
        result = dot_split(value, outer, result, EXACT)
    if PER_STREAM:
        row = split.to(tl.int64) * D + column
    else:
        row = (split.to(tl.int64) * M + tl.program_id(2)) * D + column
    place = row[:, None] * F + field[None, :]
    tl.store(result_ptr + place, result.to(tl.float32), mask=(field < F)[None, :] & (column < D)[:, None])


def split(rule: Rule, *, phi: Tensor, streams: int, dtype: torch.dtype) -> Tensor:
    """Return the weights as the products take them, in parts of ``dtype`` unless that is float32."""
    whole = dtype == torch.float32
    rows, fields = phi.shape
    padded = rule.padded_fields(streams)
    part = phi.new_empty((rows, padded if whole else 2 * padded), dtype=dtype)
    _split_kernel[(triton.cdiv(rows, 32),)](phi, part, rows, WHOLE=whole, F=fields, FP=padded, ROWS=32, num_warps=2)
    return part


def project(rule: Rule, *, stream_TMD: Tensor, part: Tensor, exact: bool) -> Tensor:
    """Return what the streams' projections consist of, ``(S, T, K)``: their sum over S, before the norm."""
    num_tokens, streams, width = stream_TMD.shape
    per_stream = rule.kind == "hc"
    splits, rows = (1, num_tokens * streams) if per_stream else (streams, num_tokens)
    constants = rule.constants(streams)
    partial = part.new_empty((splits, num_tokens, rule.coefficients(streams)), dtype=torch.float32)
    wide = stream_TMD.dtype == torch.float32
    _project_kernel[(triton.cdiv(rows, _ROWS) * splits,)](
        stream_TMD,
        part,
        partial,
        rows,
        SPLITS=splits,
        F=constants["F"],
        FP=constants["FP"],
        D=width,
        ROWS=_ROWS,
        COLUMNS=largest_part(width, 32 if wide else 64),
        STAGES=2 if wide else 4,
        EXACT=exact,
        num_warps=4,
    )
    return partial


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
