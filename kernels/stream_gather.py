"""Backward kernels of multi-stream routing (msar) for a phase: gradients of the finished sources' streams, and of keys.

After :mod:`scaling.kernels.stream_contract` has run for all sites of the phase, whose Go are in memory:

    dz = p (<Go, X> - <Go, o>),   dX = sum over sites of p Go + r dz u - (r^2 / D) dz z X

- :func:`gather` reads each stream once from memory, and a token's Go again from cache for every source;
- :func:`keys` sums ``r dz X`` over sources and tokens.

Shape legend: as in :mod:`scaling.kernels.streams`; W scalars of a token.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Phase, tile
from scaling.kernels.tile import dot, is_exact, narrow

MAX_SITES = 8  # of a phase: as many sums as fit the registers of a program that keeps one a site
_GATHER = {"ROWS": 2, "COLUMNS": 256, "num_warps": 1, "STAGES": 1}
_KEYS = {"TOKENS": 32, "COLUMNS": 128, "num_warps": 4}


@triton.jit(
    do_not_specialize=[
        "first_row", "last_row", "num_rows", "first_site", "first_base", "first_pairs", "num_tokens", "num_pairs"
    ]
)  # fmt: skip
def _gather_kernel(
    mix_gradient_ptr,  # (L, M, T, D) Go
    stream_ptr,  # (F, M, T, D)
    key_ptr,  # (S, M, D) in the streams' dtype
    score_ptr,  # (T, P, M) float32
    lse_ptr,  # (T, S, M) float32
    scalar_ptr,  # (L, W, T) float32
    stream_gradient_ptr,  # (rows, M, T, D) out
    coefficient_ptr,  # (F, M, L, T) float32 out: r dz
    first_row,
    last_row,
    num_rows,
    first_site,
    first_base,
    first_pairs,
    num_tokens,
    num_pairs,
    num_sites,
    eps,
    SITES: tl.constexpr,
    ROWS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.arange(0, COLUMNS)
    plane = tl.cast(num_tokens, tl.int64) * D
    place = stream * plane + token * D + column
    pairs_ptr = score_ptr + (token * num_pairs + first_base) * M + stream
    lses_ptr = lse_ptr + (token * num_sites + first_site) * M + stream
    keys_ptr = key_ptr + (tl.cast(first_site, tl.int64) * M + stream) * D + column
    kind: tl.constexpr = stream_gradient_ptr.dtype.element_ty
    for begin in range(first_row, last_row, ROWS):
        rows_ptr = ()
        squares = ()
        alongs = ()
        for step in tl.static_range(ROWS):  # rows share what is read of Go; one beyond the last repeats it unwritten
            index = tl.minimum(begin + step, last_row - 1)
            rows_ptr = rows_ptr + (stream_ptr + tl.cast(index, tl.int64) * (M * plane) + place,)
            squares = squares + (tl.zeros([COLUMNS], tl.float32),)
            for _ in tl.static_range(SITES):
                alongs = alongs + (tl.zeros([COLUMNS], tl.float32),)
        for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
            xs = ()
            more_squares = ()
            for step in tl.static_range(ROWS):
                x = tl.load(rows_ptr[step] + start).to(tl.float32)
                xs = xs + (x,)
                more_squares = more_squares + (squares[step] + x * x,)
            squares = more_squares
            gradients = ()
            for local in tl.static_range(SITES):
                spot_ptr = mix_gradient_ptr + local * (M * plane) + place + start
                gradients = gradients + (tl.load(spot_ptr).to(tl.float32),)
            more = ()
            for step in tl.static_range(ROWS):
                for local in tl.static_range(SITES):
                    more = more + (alongs[step * SITES + local] + xs[step] * gradients[local],)
            alongs = more
        shares = ()
        coefficients = ()
        radials = ()
        for step in tl.static_range(ROWS):
            index = tl.minimum(begin + step, last_row - 1)
            factor = 1.0 / tl.sqrt_rn(tl.sum(squares[step], 0) / D + eps)
            radial = 0.0
            for local in tl.static_range(SITES):
                first = 0
                if local > 0:
                    first = first_pairs + (local - 1) * (num_rows + 1)
                score = tl.load(pairs_ptr + (first + index) * M)
                share = tl.exp(score - tl.load(lses_ptr + local * M))
                line = local * (5 * M + 1) + 2 * M + 1 + stream
                delta = tl.load(scalar_ptr + line * tl.cast(num_tokens, tl.int64) + token)
                coefficient = factor * share * (tl.sum(alongs[step * SITES + local], 0) - delta)
                radial += coefficient * factor * score
                spot = ((tl.cast(index, tl.int64) * M + stream) * SITES + local) * num_tokens + token
                tl.store(coefficient_ptr + spot, coefficient)
                shares = shares + (share,)
                coefficients = coefficients + (coefficient,)
            radials = radials + (radial / D,)
        for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
            totals = ()
            for step in tl.static_range(ROWS):
                totals = totals + (-radials[step] * tl.load(rows_ptr[step] + start).to(tl.float32),)
            for local in tl.static_range(SITES):
                mix_gradient = tl.load(mix_gradient_ptr + local * (M * plane) + place + start).to(tl.float32)
                key = tl.load(keys_ptr + local * (M * D) + start).to(tl.float32)
                more_totals = ()
                for step in tl.static_range(ROWS):
                    total = totals[step] + shares[step * SITES + local] * mix_gradient
                    more_totals = more_totals + (total + coefficients[step * SITES + local] * key,)
                totals = more_totals
            for step in tl.static_range(ROWS):
                out_ptr = stream_gradient_ptr + tl.cast(begin + step - first_row, tl.int64) * (M * plane) + place
                tl.store(out_ptr + start, narrow(totals[step], kind), mask=(begin + step < last_row) & (column < D))


@triton.jit(do_not_specialize=["num_rows", "num_tokens", "span"])
def _keys_kernel(
    stream_ptr,  # (F, M, T, D)
    coefficient_ptr,  # (F, M, L, T) float32
    result_ptr,  # (G, L, M, D) float32 out
    num_rows,
    num_tokens,
    span,
    SITES: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    EXACT: tl.constexpr,
):
    stream = tl.program_id(2)
    split = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    site = tl.arange(0, 16)
    kind: tl.constexpr = stream_ptr.dtype.element_ty
    result = tl.zeros([16, COLUMNS], tl.float32)
    first = split * span
    last = tl.minimum(first + span, num_tokens)
    for index in range(0, num_rows):
        line = tl.cast(index, tl.int64) * M + stream
        for start in range(first, last, TOKENS):
            token = start + tl.arange(0, TOKENS)
            mask = token < last
            x = tl.load(
                stream_ptr + (line * num_tokens + token)[:, None] * D + column[None, :], mask=mask[:, None], other=0.0
            )
            coefficient = tl.load(
                coefficient_ptr + (line * SITES + site[:, None]) * num_tokens + token[None, :],
                mask=(site < SITES)[:, None] & mask[None, :], other=0.0,
            )  # fmt: skip
            if EXACT:
                result = dot(coefficient, x, result, EXACT)
            else:
                high = narrow(coefficient, kind)
                result = dot(high, x, result, EXACT)
                result = dot(narrow(coefficient - high.to(tl.float32), kind), x, result, EXACT)
    out_ptr = result_ptr + ((split * SITES + site)[:, None] * M + stream) * D + column[None, :]
    tl.store(out_ptr, result, mask=(site < SITES)[:, None] & (column < D)[None, :])


def gather(
    mix_gradient_LMTD: Tensor,
    stream_FMTD: Tensor,
    phase: Phase,
    *,
    rows: range,
    key_SMD: Tensor,
    score_TPM: Tensor,
    lse_TSM: Tensor,
    scalar_LWT: Tensor,
    stream_gradient: Tensor,
    coefficient_FMLT: Tensor,
    eps: float,
) -> None:
    """Write the gradients of the streams of some finished sources, and ``r dz`` of every site."""
    _, num_streams, num_tokens, width = stream_FMTD.shape
    _gather_kernel[(num_tokens, num_streams)](
        mix_gradient_LMTD,
        stream_FMTD,
        key_SMD,
        score_TPM,
        lse_TSM,
        scalar_LWT,
        stream_gradient,
        coefficient_FMLT,
        rows.start,
        rows.stop,
        phase.num_rows,
        phase.sites.start,
        phase.first_base,
        phase.first_pairs,
        num_tokens,
        score_TPM.shape[1],
        lse_TSM.shape[1],
        eps,
        SITES=len(phase.sites),
        M=num_streams,
        D=width,
        **tile(_GATHER, width),
    )


def keys(stream_FMTD: Tensor, coefficient_FMLT: Tensor, *, num_rows: int, splits: int) -> Tensor:
    """Return what the finished sources give to the gradients of the sites' keys, ``(G, L, M, D)``."""
    _, num_streams, num_tokens, width = stream_FMTD.shape
    sites = coefficient_FMLT.shape[2]
    sides = tile(_KEYS, width)
    result = coefficient_FMLT.new_empty((splits, sites, num_streams, width))
    _keys_kernel[(width // sides["COLUMNS"], splits, num_streams)](
        stream_FMTD,
        coefficient_FMLT,
        result,
        num_rows,
        num_tokens,
        triton.cdiv(num_tokens, splits),
        SITES=sites,
        M=num_streams,
        D=width,
        EXACT=is_exact(stream_FMTD.dtype),
        **sides,
    )
    return result
