"""What the kernels of hyper-connections (hc, mhc) share: how coefficients follow from projections of the streams.

The coefficients are functions of ``l = scale * act(projected) + bias``, K = M^2 + 2M numbers a token:

- ``mhc``: projections of all streams together through one RMSNorm; ``pre = sigmoid(l)``, ``post = c sigmoid(l)``,
  ``mix = Sinkhorn(exp(l))``, in this order (arXiv 2512.24880, equations 5-9);
- ``hc``: projections of each stream through its own norm, ``l`` itself, for each stream its part of the read, its row
  of the mixing and its write weight (arXiv 2409.19606); static where nothing is projected;
- ``read``: ``pre = sigmoid(l)`` alone, M numbers; ``sum``: ``pre = 1``: what the head reads.

:mod:`scaling.kernels.hyper_forward` and :mod:`scaling.kernels.hyper_backward` put the kernels in order,
:mod:`scaling.kernels.hyper_step` the operator, :mod:`scaling.kernels.hyper_streams` what calls it.

Shape legend: T tokens, M streams, D width, K coefficients, F projections of a stream (hc: M + 2) or of all (K).
"""

from __future__ import annotations

import dataclasses
from typing import Final, Literal

import triton
import triton.language as tl

from scaling.kernels.tile import dot, narrow

Kind = Literal["mhc", "hc", "read", "sum"]
KINDS: Final[tuple[Kind, ...]] = ("mhc", "hc", "read", "sum")
MHC = tl.constexpr(0)
HC = tl.constexpr(1)
READ = tl.constexpr(2)
SUM = tl.constexpr(3)
SOFTMAX_EPS = tl.constexpr(1e-6)  # keeps a row softmax's zeros from dividing zero by zero, as in TileKernels


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

    def padded_fields(self, streams: int) -> int:
        """Side of a tensor-core tile that holds F."""
        fields = streams + 2 if self.kind == "hc" else self.coefficients(streams)
        return max(16, int(triton.next_power_of_2(fields)))

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
            "FP": self.padded_fields(streams),
        }


@triton.jit
def dot_split(a, b, accumulator, EXACT: tl.constexpr):
    """``accumulator + a @ b`` with 16 bits of both: float32 ``b``, and ``a`` unless bfloat16, in two bfloat16 parts."""
    if EXACT:
        return dot(a, b, accumulator, EXACT)
    else:
        b_high = narrow(b, tl.bfloat16)
        b_low = narrow(b - b_high.to(tl.float32), tl.bfloat16)
        if a.dtype == tl.bfloat16:
            accumulator = dot(a, b_high, accumulator, EXACT)
            return dot(a, b_low, accumulator, EXACT)
        else:
            wide = a.to(tl.float32)
            a_high = narrow(wide, tl.bfloat16)
            accumulator = dot(a_high, b_high, accumulator, EXACT)
            accumulator = dot(a_high, b_low, accumulator, EXACT)
            return dot(narrow(wide - a_high.to(tl.float32), tl.bfloat16), b_high, accumulator, EXACT)


@triton.jit
def activate(projected, TANH: tl.constexpr):
    """``act`` of the coefficients' formula."""
    if TANH:  # not 2 sigmoid(2 x) - 1, which carries the errors of exp and of the division fourfold
        falling = tl.exp(-2.0 * tl.abs(projected))
        size = tl.div_rn(1.0 - falling, 1.0 + falling)
        return tl.where(projected < 0.0, -size, size)
    else:
        return projected


@triton.jit
def tanh_slope(projected):
    """Derivative of tanh, whose difference ``1 - tanh^2`` would lose all digits where tanh is close to 1."""
    falling = tl.exp(-2.0 * tl.abs(projected))
    return tl.div_rn(4.0 * falling, (1.0 + falling) * (1.0 + falling))


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
def normalise(matrix, sum_ptr, sum_mask, valid, ROWS: tl.constexpr, KEEP: tl.constexpr):
    """Divide by the sums of rows, or of columns, and keep them if the backward pass is to undo it."""
    if ROWS:
        total = tl.where(sum_mask, tl.sum(matrix, 2), 1.0)
        if KEEP:
            tl.store(sum_ptr, total, mask=sum_mask)
        return tl.where(valid, matrix / total[:, :, None], 0.0)
    else:
        total = tl.where(sum_mask, tl.sum(matrix, 1), 1.0)
        if KEEP:
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
        return tl.where(valid, start / tl.where(total == 0.0, 1.0, total)[:, :, None] + SOFTMAX_EPS, 0.0)
    else:
        top = tl.max(tl.max(value, 2), 1)
        return tl.exp(value - tl.where(top == float("-inf"), 0.0, top)[:, None, None])


@triton.jit
def sinkhorn(
    matrix, sum_ptr, sum_mask, valid, step_stride,
    ITERATIONS: tl.constexpr, ROWS_FIRST: tl.constexpr, SOFTMAX_START: tl.constexpr, KEEP: tl.constexpr,
):  # fmt: skip
    """Iterate from the start; if ``KEEP``, ``sum_ptr`` (tokens, M) takes the divisions' sums, ``step_stride`` apart."""
    if SOFTMAX_START:
        matrix = normalise(matrix, sum_ptr, sum_mask, valid, False, KEEP)
        sum_ptr += step_stride
    for _ in range(ITERATIONS - SOFTMAX_START):
        matrix = normalise(matrix, sum_ptr, sum_mask, valid, ROWS_FIRST, KEEP)
        sum_ptr += step_stride
        matrix = normalise(matrix, sum_ptr, sum_mask, valid, not ROWS_FIRST, KEEP)
        sum_ptr += step_stride
    return matrix


def largest_part(width: int, most: int) -> int:
    """Largest power of two that divides the width, at most ``most``.

    >>> largest_part(1280, 1024), largest_part(48, 256), largest_part(1024, 128)
    (256, 16, 128)
    """
    return min(width & -width, most)
