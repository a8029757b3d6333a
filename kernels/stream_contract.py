"""Backward kernels of multi-stream routing (msar) for one site: from its gradient to those of its streams' mixes.

With h = sum_j a_j o_j the site's output, G its gradient, and a = sigmoid(g rho pi + b) with pi = sum_j phi_j^T o_j and
rho = (mean o^2 + eps)^(-1/2), the gradient of a stream's mix is

    Go_j = a_j G + sum_k dpi_k phi_(j,k) - kappa o_j,   kappa = drho rho^3 / (M D)

and from there on as in single-stream routing: dz = p (<Go, X> - <Go, o>), dX = p Go + r dz u - (r^2 / D) dz z X.

- :func:`contract` makes all scalars of a token: a, dpi, kappa, <Go, o>, and for the running sum r dz and r^2 dz z / D;
- :func:`turn` turns the mixes into Go and the running sum's streams into their dX, in place, and sums over tokens what
  the projections' weights and the keys get.

Shape legend: as in :mod:`scaling.kernels.streams`; W = 5 M + 1 scalars of a token: a, dpi, kappa, <Go, o>, r dz,
r^2 dz z / D.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.streams import tile
from scaling.kernels.tile import dot, is_exact, narrow

_CONTRACT = {"TOKENS": 2, "COLUMNS": 128, "num_warps": 1, "STAGES": 2}
_TURN = {"TOKENS": 16, "COLUMNS": 64, "num_warps": 2, "STAGES": 3}


def num_scalars(num_streams: int) -> int:
    """W."""
    return 5 * num_streams + 1


@triton.jit(do_not_specialize=["site", "pair", "num_tokens", "num_pairs"])
def _contract_kernel(
    mix_ptr,  # (M, T, D) mixes of the finished sources
    newest_ptr,  # (M, T, D) streams of the running sum
    gradient_ptr,  # (T, D) G
    score_ptr,  # (T, P, M) float32
    lse_ptr,  # (T, S, M) float32
    phi_ptr,  # (M, M * D) float32 of the site, gates first
    scale_ptr,
    bias_ptr,
    kept_ptr,  # (T, M + 1) float32
    logit_gradient_ptr,  # (T, M) out
    scalar_ptr,  # (W, T) out
    site,
    pair,
    num_tokens,
    num_pairs,
    num_sites,
    eps,
    NEWEST: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    mask = token < num_tokens
    column = tl.arange(0, COLUMNS)
    line = tl.cast(num_tokens, tl.int64)
    plane = line * D
    place = token[:, None] * D + column[None, :]
    scalars_ptr = scalar_ptr + token
    newer = ()
    for stream in tl.static_range(M):
        share = tl.zeros([TOKENS], tl.float32)
        if NEWEST:
            lse = tl.load(lse_ptr + (token * num_sites + site) * M + stream, mask=mask, other=0.0)
            score = tl.load(score_ptr + (token * num_pairs + pair) * M + stream, mask=mask, other=0.0)
            share = tl.exp(score - lse)
        newer = newer + (share,)
    gates = ()
    turned = ()
    kappa = tl.zeros([TOKENS], tl.float32)
    if GATED:
        scale = tl.load(scale_ptr)
        factor = tl.load(kept_ptr + token * (M + 1) + M, mask=mask, other=0.0)
        sums = ()
        for _ in tl.static_range(M):
            sums = sums + (tl.zeros([TOKENS, COLUMNS], tl.float32),)
        for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
            gradient = tl.load(gradient_ptr + place + start, mask=mask[:, None], other=0.0).to(tl.float32)
            more = ()
            for stream in tl.static_range(M):
                spot = stream * plane + place + start
                mixed = tl.load(mix_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
                if NEWEST:
                    value = tl.load(newest_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
                    mixed += newer[stream][:, None] * value
                more = more + (sums[stream] + mixed * gradient,)
            sums = more
        for stream in tl.static_range(M):
            projected = tl.load(kept_ptr + token * (M + 1) + stream, mask=mask, other=0.0)
            gate = tl.sigmoid(scale * projected * factor + tl.load(bias_ptr + stream))
            logit_gradient = gate * (1.0 - gate) * tl.sum(sums[stream], 1)
            tl.store(logit_gradient_ptr + token * M + stream, logit_gradient, mask=mask)
            kappa += scale * logit_gradient * projected
            gates = gates + (gate,)
            turned = turned + (scale * factor * logit_gradient,)
            tl.store(scalars_ptr + (M + stream) * line, turned[stream], mask=mask)
        kappa *= factor * factor * factor / (M * D)
        tl.store(scalars_ptr + 2 * M * line, kappa, mask=mask)
    else:
        for _ in tl.static_range(M):
            gates = gates + (tl.full([TOKENS], 1.0 / M, tl.float32),)
    deltas = ()  # <Go, o>, <Go, X> and <X, X> of each stream
    alongs = ()
    squares = ()
    for _ in tl.static_range(M):
        deltas = deltas + (tl.zeros([TOKENS, COLUMNS], tl.float32),)
        alongs = alongs + (tl.zeros([TOKENS, COLUMNS], tl.float32),)
        squares = squares + (tl.zeros([TOKENS, COLUMNS], tl.float32),)
    for start in tl.range(0, D, COLUMNS, num_stages=STAGES):
        gradient = tl.load(gradient_ptr + place + start, mask=mask[:, None], other=0.0).to(tl.float32)
        more_deltas = ()
        more_alongs = ()
        more_squares = ()
        for stream in tl.static_range(M):
            spot = stream * plane + place + start
            mixed = tl.load(mix_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
            if NEWEST:
                value = tl.load(newest_ptr + spot, mask=mask[:, None], other=0.0).to(tl.float32)
                mixed += newer[stream][:, None] * value
            mix_gradient = gates[stream][:, None] * gradient
            if GATED:
                mix_gradient -= kappa[:, None] * mixed
                for k in tl.static_range(M):
                    phi = tl.load(phi_ptr + (k * M + stream) * D + start + column)
                    mix_gradient += turned[k][:, None] * phi[None, :]
            more_deltas = more_deltas + (deltas[stream] + mix_gradient * mixed,)
            if NEWEST:
                more_alongs = more_alongs + (alongs[stream] + mix_gradient * value,)
                more_squares = more_squares + (squares[stream] + value * value,)
        deltas = more_deltas
        if NEWEST:
            alongs = more_alongs
            squares = more_squares
    for stream in tl.static_range(M):
        tl.store(scalars_ptr + stream * line, gates[stream], mask=mask)
        total = tl.sum(deltas[stream], 1)
        tl.store(scalars_ptr + (2 * M + 1 + stream) * line, total, mask=mask)
        if NEWEST:
            logit_gradient = newer[stream] * (tl.sum(alongs[stream], 1) - total)
            rms_factor = 1.0 / tl.sqrt_rn(tl.sum(squares[stream], 1) / D + eps)
            score = tl.load(score_ptr + (token * num_pairs + pair) * M + stream, mask=mask, other=0.0)
            tl.store(scalars_ptr + (3 * M + 1 + stream) * line, rms_factor * logit_gradient, mask=mask)
            radial = rms_factor * rms_factor * logit_gradient * score / D
            tl.store(scalars_ptr + (4 * M + 1 + stream) * line, radial, mask=mask)


@triton.jit(do_not_specialize=["site", "pair", "num_tokens", "num_pairs", "span"])
def _turn_kernel(
    mix_ptr,  # (M, T, D) mixes in, Go out
    newest_ptr,  # (M, T, D) streams in, dX out
    gradient_ptr,  # (T, D) G
    key_ptr,  # (M, D) float32 of the site
    score_ptr,
    lse_ptr,
    phi_ptr,  # (M, M * D) float32 of the site, gates first
    scalar_ptr,  # (W, T)
    phi_gradient_ptr,  # (G, M, M, D) float32 out, gates first
    key_gradient_ptr,  # (G, M, D) float32 out
    site,
    pair,
    num_tokens,
    num_pairs,
    num_sites,
    span,
    NEWEST: tl.constexpr,
    GATED: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    TOKENS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
    EXACT: tl.constexpr,
):
    GATES: tl.constexpr = 16
    stream = tl.program_id(2)
    split = tl.program_id(1).to(tl.int64)
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    gate = tl.arange(0, GATES)
    kind: tl.constexpr = mix_ptr.dtype.element_ty
    line = tl.cast(num_tokens, tl.int64)
    plane = stream * line * D
    if GATED:
        phi = ()
        for k in tl.static_range(M):
            phi = phi + (tl.load(phi_ptr + (k * M + stream) * D + column)[None, :],)
        phi_gradient = tl.zeros([GATES, COLUMNS], tl.float32)
    if NEWEST:
        key = tl.load(key_ptr + stream * D + column)[None, :]
        key_gradient = tl.zeros([COLUMNS], tl.float32)
    first = split * span
    last = tl.minimum(first + span, num_tokens)
    for start in tl.range(first, last, TOKENS, num_stages=STAGES):
        token = start + tl.arange(0, TOKENS)
        mask = token < last
        scalars_ptr = scalar_ptr + token
        place = token[:, None] * D + column[None, :]
        mixed = tl.load(mix_ptr + plane + place, mask=mask[:, None], other=0.0).to(tl.float32)
        if NEWEST:
            value = tl.load(newest_ptr + plane + place, mask=mask[:, None], other=0.0).to(tl.float32)
            lse = tl.load(lse_ptr + (token * num_sites + site) * M + stream, mask=mask, other=0.0)
            score = tl.load(score_ptr + (token * num_pairs + pair) * M + stream, mask=mask, other=0.0)
            share = tl.exp(score - lse)[:, None]
            mixed += share * value
        gradient = tl.load(gradient_ptr + place, mask=mask[:, None], other=0.0).to(tl.float32)
        mix_gradient = tl.load(scalars_ptr + stream * line, mask=mask, other=0.0)[:, None] * gradient
        if GATED:
            mix_gradient -= tl.load(scalars_ptr + 2 * M * line, mask=mask, other=0.0)[:, None] * mixed
            for k in tl.static_range(M):
                mix_gradient += tl.load(scalars_ptr + (M + k) * line, mask=mask, other=0.0)[:, None] * phi[k]
            turned = tl.load(
                scalars_ptr[None, :] + (M + gate)[:, None] * line, mask=mask[None, :] & (gate < M)[:, None], other=0.0
            )
            if EXACT:
                phi_gradient = dot(turned, mixed, phi_gradient, EXACT)
            else:
                narrowed = narrow(mixed, kind)
                high = narrow(turned, kind)
                phi_gradient = dot(high, narrowed, phi_gradient, EXACT)
                phi_gradient = dot(narrow(turned - high.to(tl.float32), kind), narrowed, phi_gradient, EXACT)
        tl.store(mix_ptr + plane + place, narrow(mix_gradient, kind), mask=mask[:, None])
        if NEWEST:
            coefficient = tl.load(scalars_ptr + (3 * M + 1 + stream) * line, mask=mask, other=0.0)[:, None]
            radial = tl.load(scalars_ptr + (4 * M + 1 + stream) * line, mask=mask, other=0.0)[:, None]
            key_gradient += tl.sum(coefficient * value, 0)
            stream_gradient = share * mix_gradient + coefficient * key - radial * value
            tl.store(newest_ptr + plane + place, narrow(stream_gradient, kind), mask=mask[:, None])
    if GATED:
        out_ptr = phi_gradient_ptr + ((split * M + gate[:, None]) * M + stream) * D + column[None, :]
        tl.store(out_ptr, phi_gradient, mask=(gate < M)[:, None] & (column < D)[None, :])
    if NEWEST:
        tl.store(key_gradient_ptr + (split * M + stream) * D + column, key_gradient)


def contract(
    mix_MTD: Tensor,
    newest_MTD: Tensor | None,
    gradient_TD: Tensor,
    *,
    site: int,
    pair: int,
    score_TPM: Tensor,
    lse_TSM: Tensor,
    phi_KV: Tensor | None,
    scale: Tensor,
    bias_M: Tensor,
    kept: Tensor,
    scalar_WT: Tensor,
    eps: float,
) -> Tensor:
    """Write the scalars of a site's tokens; return the gradients of the gates' logits ``(T, M)``."""
    num_streams, num_tokens, width = mix_MTD.shape
    logit_gradient_TM = scalar_WT.new_empty((num_tokens, num_streams))
    sides = tile(_CONTRACT, width)
    _contract_kernel[(triton.cdiv(num_tokens, sides["TOKENS"]),)](
        mix_MTD,
        mix_MTD if newest_MTD is None else newest_MTD,
        gradient_TD,
        score_TPM,
        lse_TSM,
        lse_TSM if phi_KV is None else phi_KV,
        scale,
        bias_M,
        kept,
        logit_gradient_TM,
        scalar_WT,
        site,
        pair,
        num_tokens,
        score_TPM.shape[1],
        lse_TSM.shape[1],
        eps,
        NEWEST=newest_MTD is not None,
        GATED=phi_KV is not None,
        M=num_streams,
        D=width,
        **sides,
    )
    return logit_gradient_TM


def turn(
    mix_MTD: Tensor,
    newest_MTD: Tensor | None,
    gradient_TD: Tensor,
    *,
    site: int,
    pair: int,
    key_MD: Tensor,
    score_TPM: Tensor,
    lse_TSM: Tensor,
    phi_KV: Tensor | None,
    scalar_WT: Tensor,
    splits: int,
) -> tuple[Tensor, Tensor]:
    """Mixes become Go and the running sum's streams their dX; return the gradients of projections and keys.

    They are ``(G, M, M, D)``, gates first, and ``(G, M, D)``, empty where there are none.
    """
    num_streams, num_tokens, width = mix_MTD.shape
    sides = tile(_TURN, width)
    gated, newest = phi_KV is not None, newest_MTD is not None
    phi_gradient = scalar_WT.new_empty((splits, num_streams, num_streams, width) if gated else (0,))
    key_gradient = scalar_WT.new_empty((splits, num_streams, width) if newest else (0,))
    _turn_kernel[(width // sides["COLUMNS"], splits, num_streams)](
        mix_MTD,
        mix_MTD if newest_MTD is None else newest_MTD,
        gradient_TD,
        key_MD,
        score_TPM,
        lse_TSM,
        lse_TSM if phi_KV is None else phi_KV,
        scalar_WT,
        phi_gradient,
        key_gradient,
        site,
        pair,
        num_tokens,
        score_TPM.shape[1],
        lse_TSM.shape[1],
        triton.cdiv(num_tokens, splits),
        NEWEST=newest,
        GATED=gated,
        M=num_streams,
        D=width,
        EXACT=is_exact(mix_MTD.dtype),
        **sides,
    )
    return phi_gradient, key_gradient
