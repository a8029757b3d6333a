"""Kernels of hyper-connections (hc, mhc) that stream over the width, one warp a token: write, read, weigh.

:func:`write` comes first in a step's forward pass, :func:`read` last; :func:`weigh` comes first in the backward pass
(:mod:`scaling.kernels.hyper_forward`, :mod:`scaling.kernels.hyper_backward`). A lane holds 8 neighbouring columns, 16
bytes in 16 bits; its products are added up within the lane, and lanes are reduced once a token.

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.hyper import HC, Rule, largest_part
from scaling.kernels.tile import narrow

_STAGES = 2  # of the loops' loads; 32 programs an SM hold the rest of what must be in flight
_CHUNK = 256  # columns of an iteration, 8 a lane


@triton.jit
def _by_lane(value, LANE: tl.constexpr):
    """Sums of ``LANE`` neighbours, which one lane holds."""
    return tl.sum(tl.reshape(value, [value.shape[0] // LANE, LANE]), 1)


@triton.jit
def _more_moments(mean, spread, x, chunks, LANE: tl.constexpr):
    """A lane's mean and sum of squares about it, with one more chunk (Chan, Golub and LeVeque 1979, formulae 2.1).

    Sums of x^2 less the mean's would lose the digits in which x does not differ from its mean.
    """
    value = tl.reshape(x, [x.shape[0] // LANE, LANE])
    own = tl.sum(value, 1) / LANE
    apart = value - own[:, None]
    share = 1.0 / (chunks + 1.0)
    step = own - mean
    between = step * step * (LANE * share * chunks)
    return mean + step * share, spread + tl.sum(apart * apart, 1) + between


@triton.jit
def _copies(value, COUNT: tl.constexpr):
    """A tuple of the same value."""
    copies = ()
    for _ in tl.static_range(COUNT):
        copies += (value,)
    return copies


@triton.jit
def _fetch(stream_row, column, M: tl.constexpr, D: tl.constexpr):
    """The columns of every stream, for the last time in a pass."""
    values = ()
    for j in tl.static_range(M):
        values += (tl.load(stream_row + j * D + column, eviction_policy="evict_first").to(tl.float32),)
    return values


@triton.jit
def _write_kernel(
    stream_ptr,  # (T, M, D)
    update_ptr,  # (T, D)
    post_ptr,  # (T, M)
    mix_ptr,  # (T, M, M)
    out_ptr,  # (T, M, D)
    factor_ptr,  # (2, T, norms)
    eps,
    WRITE: tl.constexpr,
    KIND: tl.constexpr,
    PROJECT: tl.constexpr,
    CENTRED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    LANE: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    kind: tl.constexpr = stream_ptr.dtype.element_ty
    PER_STREAM: tl.constexpr = KIND == HC
    stream_row = stream_ptr + token * (M * D)
    out_row = out_ptr + token * (M * D)
    posts = ()
    shares = ()
    if WRITE:
        for i in tl.static_range(M):
            posts += (tl.load(post_ptr + token * M + i),)
            for j in tl.static_range(M):
                shares += (tl.load(mix_ptr + (token * M + i) * M + j),)
    SUMS: tl.constexpr = M if PER_STREAM else 1
    LANES: tl.constexpr = CHUNK // LANE
    zero = tl.zeros([LANES], tl.float32)
    firsts = _copies(zero, SUMS)
    seconds = _copies(zero, SUMS)
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        column = start + tl.arange(0, CHUNK)
        values = _fetch(stream_row, column, M, D)
        if WRITE:
            update = tl.load(update_ptr + token * D + column, eviction_policy="evict_first").to(tl.float32)
        new_firsts = ()
        new_seconds = ()
        square = zero
        for i in tl.static_range(M):
            x = values[i]
            if WRITE:
                x = posts[i] * update
                for j in tl.static_range(M):
                    x += shares[i * M + j] * values[j]
                rounded = narrow(x, kind)
                tl.store(out_row + i * D + column, rounded)
                x = rounded.to(tl.float32)
            if PROJECT:
                if CENTRED:
                    new_first, new_second = _more_moments(firsts[i], seconds[i], x, start // CHUNK, LANE)
                    new_firsts += (new_first,)
                    new_seconds += (new_second,)
                elif PER_STREAM:
                    new_seconds += (seconds[i] + _by_lane(x * x, LANE),)
                else:
                    square += _by_lane(x * x, LANE)
        if PROJECT:
            if CENTRED:
                firsts = new_firsts
            if PER_STREAM:
                seconds = new_seconds
            else:
                seconds = (seconds[0] + square,)
    if PROJECT:
        mean_ptr = factor_ptr + tl.num_programs(0).to(tl.int64) * SUMS
        for i in tl.static_range(SUMS):
            total = tl.sum(seconds[i], 0)
            if PER_STREAM:
                mean = 0.0
                if CENTRED:
                    mean = tl.sum(firsts[i], 0) / LANES
                    apart = firsts[i] - mean
                    total += tl.sum(apart * apart, 0) * (D // LANES)
                tl.store(mean_ptr + token * SUMS + i, mean)
                variance = total / D
            else:
                variance = total / (M * D)
            tl.store(factor_ptr + token * SUMS + i, tl.div_rn(1.0, tl.sqrt_rn(variance + eps)))


@triton.jit
def _read_kernel(
    stream_ptr,  # (T, M, D)
    pre_ptr,  # (T, M)
    read_ptr,  # (T, D)
    SUM_UP: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    pres = ()
    for j in tl.static_range(M):
        if SUM_UP:
            pres += (1.0,)
        else:
            pres += (tl.load(pre_ptr + token * M + j),)
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        column = start + tl.arange(0, CHUNK)
        total = tl.zeros([CHUNK], tl.float32)
        for j in tl.static_range(M):
            total += pres[j] * tl.load(stream_ptr + (token * M + j) * D + column).to(tl.float32)
        tl.store(read_ptr + token * D + column, narrow(total, read_ptr.dtype.element_ty))


@triton.jit
def _weigh_kernel(
    stream_ptr,  # (T, M, D)
    gradient_ptr,  # (T, D)
    weight_ptr,  # (T, M)
    M: tl.constexpr,
    D: tl.constexpr,
    CHUNK: tl.constexpr,
    LANE: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    sums = _copies(tl.zeros([CHUNK // LANE], tl.float32), M)
    for start in tl.range(0, D, CHUNK, num_stages=STAGES):
        column = start + tl.arange(0, CHUNK)
        gradient = tl.load(gradient_ptr + token * D + column).to(tl.float32)
        new_sums = ()
        for j in tl.static_range(M):
            value = tl.load(stream_ptr + (token * M + j) * D + column).to(tl.float32)
            new_sums += (sums[j] + _by_lane(value * gradient, LANE),)
        sums = new_sums
    for j in tl.static_range(M):
        tl.store(weight_ptr + token * M + j, tl.sum(sums[j], 0))


def _sides(width: int) -> dict[str, int]:
    chunk = largest_part(width, _CHUNK)
    return {"CHUNK": chunk, "STAGES": _STAGES if chunk < width else 1, "num_warps": 1}


def write(
    rule: Rule,
    *,
    stream_TMD: Tensor,
    update_TD: Tensor | None,
    post_TM: Tensor,
    mix_TMM: Tensor,
    out_TMD: Tensor,
    factor: Tensor,
) -> None:
    """Write ``mix X + post f`` and, where the rule projects, the factors and means of its norms.

    Without an update the streams stay as they are and are only measured.
    """
    num_tokens, streams, width = stream_TMD.shape
    constants = rule.constants(streams)
    _write_kernel[(num_tokens,)](
        stream_TMD,
        stream_TMD if update_TD is None else update_TD,
        post_TM,
        mix_TMM,
        out_TMD,
        factor,
        rule.eps,
        WRITE=update_TD is not None,
        **{name: constants[name] for name in ("KIND", "PROJECT", "CENTRED", "M")},
        D=width,
        LANE=8,
        **_sides(width),
    )


def read(*, stream_TMD: Tensor, pre_TM: Tensor | None, read_TD: Tensor) -> None:
    """Write ``pre X``, or the streams' sum."""
    num_tokens, streams, width = stream_TMD.shape
    _read_kernel[(num_tokens,)](
        stream_TMD,
        stream_TMD if pre_TM is None else pre_TM,
        read_TD,
        SUM_UP=pre_TM is None,
        M=streams,
        D=width,
        **_sides(width),
    )


def weigh(*, stream_TMD: Tensor, gradient_TD: Tensor, weight_TM: Tensor) -> None:
    """Write each stream's inner product with the gradient of what was read."""
    num_tokens, streams, width = stream_TMD.shape
    _weigh_kernel[(num_tokens,)](stream_TMD, gradient_TD, weight_TM, M=streams, D=width, LANE=8, **_sides(width))
