"""Forward kernel of hyper-connections (hc, mhc): write one sublayer's output into the streams, read for the next.

One launch a sublayer: ``X' = mix X + post f`` is formed, stored and projected in one pass over the width; the
projections give the coefficients of read, write and mixing (Sinkhorn iterations included) in registers; a second pass
over the program's own X', from cache, gives ``h = pre X'``. A token's streams are read once and written once.

The coefficients are functions of ``l = scale * act(projected) + bias``, K = M^2 + 2M numbers a token:

- ``mhc``: projections of all streams together through one RMSNorm; ``pre = sigmoid(l)``, ``post = c sigmoid(l)``,
  ``mix = Sinkhorn(exp(l))``, in this order (arXiv 2512.24880, equations 5-9);
- ``hc``: projections of each stream through its own norm, ``l`` itself, for each stream its part of the read, its row
  of the mixing and its write weight (arXiv 2409.19606); static where nothing is projected;
- ``read``: ``pre = sigmoid(l)`` alone, M numbers; ``sum``: ``pre = 1``: what the head reads.

:mod:`scaling.kernels.hyper_backward` has the gradients, :mod:`scaling.kernels.hyper_step` the operator.

Shape legend: T tokens, M streams, D width, K coefficients, F projections of a stream (hc: M + 2) or of all (K).
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.tile import dot, is_exact, narrow

Kind = Literal["mhc", "hc", "read", "sum"]
KINDS: Final[tuple[Kind, ...]] = ("mhc", "hc", "read", "sum")
_MHC = tl.constexpr(0)
_HC = tl.constexpr(1)
_READ = tl.constexpr(2)
_SUM = tl.constexpr(3)
_SOFTMAX_EPS = tl.constexpr(1e-6)  # keeps a row softmax's zeros from dividing zero by zero, as in TileKernels


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Rule:
    """How coefficients follow from projections."""

    kind: Kind
    projects: bool = True
    tanh: bool = False  # hc
    centred: bool = False  # hc: LayerNorm instead of RMSNorm
    iterations: int = 0  # mhc, as are the next four
    rows_first: bool = False
    softmax_start: bool = False
    transposed: bool = False
    post_scale: float = 2.0
    eps: float = 1e-6

    def coefficients(self, streams: int) -> int:
        """K: numbers a token."""
        return {"mhc": streams * (streams + 2), "hc": streams * (streams + 2), "read": streams, "sum": 0}[self.kind]

    def factors(self, streams: int) -> int:
        """Norms a token."""
        return streams if self.kind == "hc" else 1

    @property
    def steps(self) -> int:
        """Divisions by sums that the Sinkhorn iterations make."""
        return 2 * self.iterations - self.softmax_start if self.kind == "mhc" else 0

    def constants(self, streams: int) -> dict[str, int | bool | float]:
        """What both kernels are compiled for."""
        per_stream = self.kind == "hc"
        fields = streams + 2 if per_stream else self.coefficients(streams)
        return {
            "KIND": KINDS.index(self.kind),
            "PROJECT": self.projects and self.kind != "sum",
            "TANH": self.tanh,
            "CENTRED": self.centred,
            "ITERATIONS": self.iterations,
            "ROWS_FIRST": self.rows_first,
            "SOFTMAX_START": int(self.softmax_start),
            "TRANSPOSED": self.transposed,
            "M": streams,
            "MP": triton.next_power_of_2(streams),
            "K": self.coefficients(streams),
            "F": fields,
            "FP": max(16, triton.next_power_of_2(fields)),
        }


@triton.jit
def dot_split(a, b, accumulator, EXACT: tl.constexpr):
    """``accumulator + a @ b`` of float32 tiles, each in two bfloat16 parts: 16 bits of both survive."""
    if EXACT:
        return dot(a, b, accumulator, EXACT)
    else:
        a_high = narrow(a, tl.bfloat16)
        b_high = narrow(b, tl.bfloat16)
        accumulator = dot(a_high, b_high, accumulator, EXACT)
        accumulator = dot(a_high, narrow(b - b_high.to(tl.float32), tl.bfloat16), accumulator, EXACT)
        return dot(narrow(a - a_high.to(tl.float32), tl.bfloat16), b_high, accumulator, EXACT)


@triton.jit
def activate(projected, TANH: tl.constexpr):
    """``act`` of the coefficients' formula."""
    if TANH:
        return 2.0 * tl.sigmoid(2.0 * projected) - 1.0
    else:
        return projected


@triton.jit
def logits(projected_ptr, scale_ptr, bias_ptr, place, index, mask, PROJECT: tl.constexpr, TANH: tl.constexpr):
    """``l`` of some coefficients; ``place`` is where their projections are, ``index`` which coefficients they are."""
    bias = tl.load(bias_ptr + index, mask=mask, other=0.0)
    if PROJECT:
        projected = tl.load(projected_ptr + place, mask=mask, other=0.0)
        return tl.load(scale_ptr + index, mask=mask, other=0.0) * activate(projected, TANH) + bias
    else:
        return bias


@triton.jit
def normalise(matrix, sum_ptr, sum_mask, valid, ROWS: tl.constexpr):
    """Divide by the sums of rows, or of columns, and keep them."""
    if ROWS:
        total = tl.where(sum_mask, tl.sum(matrix, 2), 1.0)
        tl.store(sum_ptr, total, mask=sum_mask)
        return tl.where(valid, matrix / total[:, :, None], 0.0)
    else:
        total = tl.where(sum_mask, tl.sum(matrix, 1), 1.0)
        tl.store(sum_ptr, total, mask=sum_mask)
        return tl.where(valid, matrix / total[:, None, :], 0.0)


@triton.jit
def sinkhorn_start(value, valid, SOFTMAX_START: tl.constexpr):
    """The matrix that the iterations start from, ``(tokens, M, M)``: exp, or a row softmax plus a little."""
    value = tl.where(valid, value, float("-inf"))
    if SOFTMAX_START:
        top = tl.max(value, 2)
        start = tl.exp(value - tl.where(top == float("-inf"), 0.0, top)[:, :, None])
        total = tl.sum(start, 2)
        return tl.where(valid, start / tl.where(total == 0.0, 1.0, total)[:, :, None] + _SOFTMAX_EPS, 0.0)
    else:
        top = tl.max(tl.max(value, 2), 1)
        return tl.exp(value - tl.where(top == float("-inf"), 0.0, top)[:, None, None])


@triton.jit
def sinkhorn(
    matrix, sum_ptr, sum_mask, valid, step_stride,
    ITERATIONS: tl.constexpr, ROWS_FIRST: tl.constexpr, SOFTMAX_START: tl.constexpr,
):  # fmt: skip
    """Iterate from the start; ``sum_ptr`` (tokens, M) takes every division's sums, ``step_stride`` apart."""
    if SOFTMAX_START:
        matrix = normalise(matrix, sum_ptr, sum_mask, valid, False)
        sum_ptr += step_stride
    for _ in range(ITERATIONS - SOFTMAX_START):
        matrix = normalise(matrix, sum_ptr, sum_mask, valid, ROWS_FIRST)
        sum_ptr += step_stride
        matrix = normalise(matrix, sum_ptr, sum_mask, valid, not ROWS_FIRST)
        sum_ptr += step_stride
    return matrix


@triton.jit(do_not_specialize=["num_tokens"])
def _step_kernel(
    stream_ptr,  # (T, M, D)
    update_ptr,  # (T, D) output f of the last sublayer
    post_ptr,  # (T, M)
    mix_ptr,  # (T, M, M)
    phi_ptr,  # (M * D, K), or (D, F) for hc
    shift_ptr,  # (F,) hc: what centring takes off a projection, by unit of the mean
    offset_ptr,  # (F,) hc: what the norm's bias adds
    scale_ptr,  # (K,)
    bias_ptr,  # (K,)
    out_ptr,  # (T, M, D) the new streams
    read_ptr,  # (T, D)
    new_post_ptr,  # (T, M)
    new_mix_ptr,  # (T, M, M)
    projected_ptr,  # (T, K)
    factor_ptr,  # (2, T, norms) RMS factors and means
    sum_ptr,  # (steps, T, M) scratch
    num_tokens,
    eps,
    post_scale,
    WRITE: tl.constexpr,
    KIND: tl.constexpr,
    PROJECT: tl.constexpr,
    TANH: tl.constexpr,
    CENTRED: tl.constexpr,
    ITERATIONS: tl.constexpr,
    ROWS_FIRST: tl.constexpr,
    SOFTMAX_START: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    M: tl.constexpr,
    MP: tl.constexpr,
    K: tl.constexpr,
    F: tl.constexpr,
    FP: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    token_mask = token < num_tokens
    stream = tl.arange(0, MP)
    pair_mask = token_mask[:, None] & (stream < M)[None, :]
    place = token[:, None] * M + stream[None, :]
    mask = pair_mask[:, :, None]
    field = tl.arange(0, FP)
    if WRITE:
        post = tl.load(post_ptr + place, mask=pair_mask, other=0.0)
    if PROJECT:
        if KIND == _HC:
            first = tl.zeros([TOKENS, MP], tl.float32)
            second = tl.zeros([TOKENS, MP], tl.float32)
            projected = tl.zeros([TOKENS * MP, FP], tl.float32)
        else:
            first = tl.zeros([TOKENS], tl.float32)
            second = tl.zeros([TOKENS], tl.float32)
            projected = tl.zeros([TOKENS, FP], tl.float32)
    kind: tl.constexpr = out_ptr.dtype.element_ty
    if WRITE or PROJECT:
        for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
            column = start + tl.arange(0, COLUMNS)
            if WRITE:
                update = tl.load(update_ptr + token[:, None] * D + column[None, :], mask=token_mask[:, None], other=0.0)
                x = post[:, :, None] * update.to(tl.float32)[:, None, :]
                for other in tl.static_range(M):
                    value = tl.load(
                        stream_ptr + (token * M + other)[:, None] * D + column[None, :],
                        mask=token_mask[:, None], other=0.0,
                    ).to(tl.float32)  # fmt: skip
                    share = tl.load(mix_ptr + place * M + other, mask=pair_mask, other=0.0)
                    x += share[:, :, None] * value[:, None, :]
                rounded = narrow(x, kind)
                tl.store(out_ptr + place[:, :, None] * D + column[None, None, :], rounded, mask=mask)
                x = rounded.to(tl.float32)
            else:
                x = tl.load(stream_ptr + place[:, :, None] * D + column[None, None, :], mask=mask, other=0.0)
                x = x.to(tl.float32)
            if PROJECT:
                if KIND == _HC:
                    first += tl.sum(x, 2)
                    second += tl.sum(x * x, 2)
                    phi_row = column
                    rows = tl.reshape(x, [TOKENS * MP, COLUMNS])
                    phi_mask = (field < F)[None, :] & (column < D)[:, None]
                else:
                    second += tl.sum(tl.sum(x * x, 2), 1)
                    side = tl.arange(0, MP * COLUMNS)
                    phi_row = side // COLUMNS * D + start + side % COLUMNS
                    rows = tl.reshape(x, [TOKENS, MP * COLUMNS])
                    phi_mask = (field < F)[None, :] & (side // COLUMNS < M)[:, None]
                phi = tl.load(phi_ptr + phi_row[:, None] * F + field[None, :], mask=phi_mask, other=0.0)
                projected = dot_split(rows, phi, projected, EXACT)
    if PROJECT:
        if KIND == _HC:
            mean = tl.zeros([TOKENS, MP], tl.float32)
            if CENTRED:
                mean = first / D
            factor = 1.0 / tl.sqrt_rn(tl.maximum(second / D - mean * mean, 0.0) + eps)
            tl.store(factor_ptr + place, factor, mask=pair_mask)
            tl.store(factor_ptr + num_tokens.to(tl.int64) * M + place, mean, mask=pair_mask)
            shift = tl.load(shift_ptr + field, mask=field < F, other=0.0)
            offset = tl.load(offset_ptr + field, mask=field < F, other=0.0)
            flat_factor = tl.reshape(factor, [TOKENS * MP])[:, None]
            flat_mean = tl.reshape(mean, [TOKENS * MP])[:, None]
            projected = (projected - flat_mean * shift[None, :]) * flat_factor + offset[None, :]
            flat = tl.arange(0, TOKENS * MP)
            row = (tl.program_id(0).to(tl.int64) * TOKENS + flat // MP) * M + flat % MP
            flat_mask = (flat % MP < M) & (tl.program_id(0) * TOKENS + flat // MP < num_tokens)
            tl.store(
                projected_ptr + row[:, None] * F + field[None, :], projected,
                mask=flat_mask[:, None] & (field < F)[None, :],
            )  # fmt: skip
        else:
            factor = 1.0 / tl.sqrt_rn(second / (M * D) + eps)
            tl.store(factor_ptr + token, factor, mask=token_mask)
            tl.store(
                projected_ptr + token[:, None] * F + field[None, :], projected * factor[:, None],
                mask=token_mask[:, None] & (field < F)[None, :],
            )  # fmt: skip
    tl.debug_barrier()  # projections and streams are read back in other layouts
    row = tl.arange(0, MP)[None, :, None]
    other = tl.arange(0, MP)[None, None, :]
    valid = mask & (other < M)
    square = place[:, :, None] * M + other
    pre = tl.full([TOKENS, MP], 1.0, tl.float32)
    base = token[:, None] * K
    index = stream[None, :] + tl.zeros([TOKENS, MP], tl.int32)
    if KIND == _HC:
        pre = logits(projected_ptr, scale_ptr, bias_ptr, base + index * F, index * F, pair_mask, PROJECT, TANH)
        last = index * F + M + 1
        new_post = logits(projected_ptr, scale_ptr, bias_ptr, base + last, last, pair_mask, PROJECT, TANH)
        tl.store(new_post_ptr + place, new_post, mask=pair_mask)
        entry = other * F + 1 + row  # stream `other` gives this share to stream `row`
        entry = entry + tl.zeros([TOKENS, MP, MP], tl.int32)
        new_mix = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, TANH)
        tl.store(new_mix_ptr + square, new_mix, mask=valid)
    elif KIND != _SUM:
        pre = tl.sigmoid(logits(projected_ptr, scale_ptr, bias_ptr, base + index, index, pair_mask, PROJECT, False))
        if KIND == _MHC:
            new_post = tl.sigmoid(
                logits(projected_ptr, scale_ptr, bias_ptr, base + M + index, M + index, pair_mask, PROJECT, False)
            )
            tl.store(new_post_ptr + place, post_scale * new_post, mask=pair_mask)
            entry = 2 * M + row * M + other + tl.zeros([TOKENS, MP, MP], tl.int32)
            value = logits(projected_ptr, scale_ptr, bias_ptr, base[:, :, None] + entry, entry, valid, PROJECT, False)
            step_stride = num_tokens.to(tl.int64) * M
            new_mix = sinkhorn(
                sinkhorn_start(value, valid, SOFTMAX_START), sum_ptr + place, pair_mask, valid, step_stride,
                ITERATIONS, ROWS_FIRST, SOFTMAX_START,
            )  # fmt: skip
            if TRANSPOSED:
                square = (token[:, None, None] * M + other) * M + row
            tl.store(new_mix_ptr + square, new_mix, mask=valid)
    for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
        column = start + tl.arange(0, COLUMNS)
        where = place[:, :, None] * D + column[None, None, :]
        if WRITE:
            x = tl.load(out_ptr + where, mask=mask, other=0.0)
        else:
            x = tl.load(stream_ptr + where, mask=mask, other=0.0)
        read = tl.sum(x.to(tl.float32) * pre[:, :, None], 1)
        tl.store(read_ptr + token[:, None] * D + column[None, :], narrow(read, kind), mask=token_mask[:, None])


def step(
    rule: Rule,
    *,
    stream_TMD: Tensor,
    update_TD: Tensor | None,
    post_TM: Tensor,
    mix_TMM: Tensor,
    phi: Tensor,
    shift_F: Tensor,
    offset_F: Tensor,
    scale_K: Tensor,
    bias_K: Tensor,
    out_TMD: Tensor,
    read_TD: Tensor,
    new_post_TM: Tensor,
    new_mix_TMM: Tensor,
    projected_TK: Tensor,
    factor: Tensor,
) -> None:
    """Write the update into the streams (none: they stay) and read for the next sublayer, with new coefficients."""
    num_tokens, streams, width = stream_TMD.shape
    sides = tile_sides(streams, width)
    sums = post_TM.new_empty((rule.steps, num_tokens, streams))
    _step_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]),)](
        stream_TMD,
        read_TD if update_TD is None else update_TD,
        post_TM,
        mix_TMM,
        phi,
        shift_F,
        offset_F,
        scale_K,
        bias_K,
        out_TMD,
        read_TD,
        new_post_TM,
        new_mix_TMM,
        projected_TK,
        factor,
        sums,
        num_tokens,
        rule.eps,
        rule.post_scale,
        WRITE=update_TD is not None,
        D=width,
        STAGES=2,
        EXACT=is_exact(read_TD.dtype if update_TD is None else update_TD.dtype),
        **rule.constants(streams),
        **sides,
    )


def tile_sides(streams: int, width: int) -> dict[str, int]:
    """Tokens and columns of a program's tile, and warps."""
    columns = 64 if streams <= 4 and width % 64 == 0 else 32 if streams <= 4 and width % 32 == 0 else 16
    return {"TOKENS": 16, "COLUMNS": columns, "num_warps": 8}
