"""Backward kernel of multi-stream routing (msar) for a phase: gradients of the finished sources' streams.

After :mod:`scaling.kernels.stream_turn` has run for all sites of the phase, whose Go are in memory:

    dz = p (<Go, X> - <Go, o>),   dX = sum over sites of p Go + r dz u - (r^2 / D) dz z X

:func:`gather` forms both sums on tensor cores, one stream of a few tokens a program. One side of a product is the
tokens' sources, the other their sites: what one token's sources give with another's sites is computed and not used,
which costs less than each token padded to 16. The width is walked twice, first for ``<Go, X>``, then for dX: streams
and Go are read twice, whatever the number of sources and sites.

Shape legend: as in :mod:`scaling.kernels.streams`; W scalars of a token; R rows (token, source) and N lines (token,
site), both padded; E parts of a chunk of the width, one a warp; C columns of a part.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import Phase
from scaling.kernels.tile import dot, is_exact, narrow

MAX_SITES = 8  # of a phase: as many sums as fit the registers of a program that keeps one a site (stream_mix)
# Of a program: lines at most, columns of a chunk, warps, and chunks less one that are in flight.
_GATHER = {"LINES": 16, "COLUMNS": 128, "num_warps": 2, "STAGES": 3}
_EXACT_GATHER = {"LINES": 16, "COLUMNS": 64, "num_warps": 4, "STAGES": 2}  # without tensor cores


@triton.jit
def _places(offset, mask, start, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr):
    """Where a chunk of some rows is, ``(E, rows, C)``, and which of it there is."""
    column = start + tl.arange(0, E)[:, None, None] * C + tl.arange(0, C)[None, None, :]
    keep = mask[None, :, None]
    if D % (E * C) > 0:
        keep = keep & (column < D)
    return offset[None, :, None] + column, keep


@triton.jit
def _read(pointer, offset, mask, start, D: tl.constexpr, E: tl.constexpr, C: tl.constexpr):
    """A chunk of some rows."""
    place, keep = _places(offset, mask, start, D, E, C)
    return tl.load(pointer + place, mask=keep, other=0.0)


@triton.jit
def _repeat(factor, KIND: tl.constexpr, E: tl.constexpr):
    """Factors in ``KIND``, the same for every part of a chunk."""
    return tl.broadcast_to(narrow(factor, KIND)[None, :, :], [E, factor.shape[0], factor.shape[1]])


@triton.jit(
    do_not_specialize=[
        "first_row", "num_rows", "first_site", "first_base", "first_pairs", "num_tokens", "num_pairs"
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
    coefficient_ptr,  # (F, M, 2, L, T) float32 out: r dz, p
    first_row,
    num_rows,
    first_site,
    first_base,
    first_pairs,
    num_tokens,
    num_pairs,
    num_sites,
    eps,
    SITES: tl.constexpr,
    SOURCES: tl.constexpr,
    TOKENS: tl.constexpr,  # of a program
    R: tl.constexpr,
    N: tl.constexpr,
    PLACES: tl.constexpr,  # of a site's key, padded
    M: tl.constexpr,
    D: tl.constexpr,
    E: tl.constexpr,
    C: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    stream = tl.program_id(0) % M  # a token's numbers lie together for all streams
    first_token = (tl.program_id(0) // M).to(tl.int64) * TOKENS
    plane = tl.cast(num_tokens, tl.int64) * D
    kind: tl.constexpr = stream_gradient_ptr.dtype.element_ty
    row = tl.arange(0, R)
    source = row % SOURCES
    row_token = first_token + row // SOURCES
    row_mask = (row < TOKENS * SOURCES) & (row_token < num_tokens)
    place = (source * M + stream) * plane + row_token * D
    x_ptr = stream_ptr + tl.cast(first_row, tl.int64) * (M * plane)
    line = tl.arange(0, N)
    site = line % SITES
    line_token = first_token + line // SITES
    line_mask = (line < TOKENS * SITES) & (line_token < num_tokens)
    line_place = (site * M + stream) * plane + line_token * D
    along = tl.zeros([E, R, N], tl.float32)
    square = tl.zeros([E, R, R], tl.float32)
    for start in tl.range(0, D, E * C, num_stages=STAGES):
        x = _read(x_ptr, place, row_mask, start, D, E, C)
        mix_gradient = _read(mix_gradient_ptr, line_place, line_mask, start, D, E, C)
        along = dot(x, tl.permute(mix_gradient, (0, 2, 1)), along, EXACT)
        square = dot(x, tl.permute(x, (0, 2, 1)), square, EXACT)
    valid = row_mask[:, None] & line_mask[None, :] & (row_token[:, None] == line_token[None, :])
    first = tl.where(site > 0, first_pairs + (site - 1) * (num_rows + 1), 0) + first_base + first_row
    pair = (line_token * num_pairs + first)[None, :] + source[:, None]
    score = tl.load(score_ptr + pair * M + stream, mask=valid, other=0.0)
    lses_ptr = lse_ptr + (line_token * num_sites + first_site + site) * M + stream
    lse = tl.load(lses_ptr, mask=line_mask, other=0.0)
    deltas_ptr = scalar_ptr + (site * (2 * M) + M + stream) * tl.cast(num_tokens, tl.int64) + line_token
    delta = tl.load(deltas_ptr, mask=line_mask, other=0.0)
    same = row[:, None] == row[None, :]
    factor = (1.0 / tl.sqrt_rn(tl.sum(tl.where(same, tl.sum(square, 0), 0.0), 1) / D + eps))[:, None]
    share = tl.where(valid, tl.exp(score - lse[None, :]), 0.0)
    coefficient = tl.where(valid, factor * share * (tl.sum(along, 0) - delta[None, :]), 0.0)
    radial = tl.sum(coefficient * factor * score, 1) / D
    spot = ((first_row + source[:, None]).to(tl.int64) * M + stream) * (2 * SITES) + site[None, :]
    tl.store(coefficient_ptr + spot * num_tokens + line_token[None, :], coefficient, mask=valid)
    tl.store(coefficient_ptr + (spot + SITES) * num_tokens + line_token[None, :], share, mask=valid)
    # a row's coefficients by site, of which each is the only one
    place_of_key = tl.arange(0, PLACES)
    chosen = narrow((site[:, None] == place_of_key[None, :]).to(tl.float32), kind)
    coefficient = dot(narrow(coefficient, kind), chosen, tl.zeros([R, PLACES], tl.float32), EXACT)
    share = _repeat(share, kind, E)
    coefficient = _repeat(coefficient, kind, E)
    radial = _repeat(tl.where(same, -radial[:, None], 0.0), kind, E)
    key_mask = place_of_key < SITES
    key_place = ((first_site + place_of_key).to(tl.int64) * M + stream) * D
    for start in tl.range(0, D, E * C, num_stages=STAGES):
        x = _read(x_ptr, place, row_mask, start, D, E, C)
        mix_gradient = _read(mix_gradient_ptr, line_place, line_mask, start, D, E, C)
        key = _read(key_ptr, key_place, key_mask, start, D, E, C)
        total = dot(share, mix_gradient, tl.zeros([E, R, C], tl.float32), EXACT)
        total = dot(coefficient, key, total, EXACT)
        total = narrow(dot(radial, x, total, EXACT), kind)
        offset, keep = _places(place, row_mask, start, D, E, C)
        tl.store(stream_gradient_ptr + offset, total, mask=keep)


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
    coefficient_FM2LT: Tensor,
    eps: float,
) -> None:
    """Write the gradients of the streams of some finished sources, and ``r dz`` and ``p`` of every site."""
    _, num_streams, num_tokens, width = stream_FMTD.shape
    sides = _gather_sides(len(rows), len(phase.sites), width, stream_FMTD.dtype)
    _gather_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]) * num_streams,)](
        mix_gradient_LMTD,
        stream_FMTD,
        key_SMD,
        score_TPM,
        lse_TSM,
        scalar_LWT,
        stream_gradient,
        coefficient_FM2LT,
        rows.start,
        phase.num_rows,
        phase.sites.start,
        phase.first_base,
        phase.first_pairs,
        num_tokens,
        score_TPM.shape[1],
        lse_TSM.shape[1],
        eps,
        SITES=len(phase.sites),
        SOURCES=len(rows),
        M=num_streams,
        D=width,
        EXACT=is_exact(stream_FMTD.dtype),
        **sides,
    )


def _gather_sides(sources: int, sites: int, width: int, dtype: torch.dtype) -> dict[str, int]:
    """Sides of a program's tiles: as many tokens as leave the least of them padding."""

    def padded(count: int) -> int:
        return max(16, int(triton.next_power_of_2(count)))

    def padding(tokens: int) -> float:
        return (padded(tokens * sources) + padded(tokens * sites)) / tokens

    sides = _EXACT_GATHER if is_exact(dtype) else _GATHER
    tokens = min(range(1, max(1, min(16 // sources, sides["LINES"] // sites)) + 1), key=padding)
    columns = min(sides["COLUMNS"], padded(width))
    parts = min(sides["num_warps"], columns // 16)
    return {
        "TOKENS": tokens,
        "R": padded(tokens * sources),
        "N": padded(tokens * sites),
        "PLACES": padded(sites),
        "E": parts,
        "C": columns // parts,
        "STAGES": sides["STAGES"],
        "num_warps": parts,
    }
