"""Backward kernel of multi-stream routing (msar) for one site: from its gradient to those of its streams.

With h = sum_j a_j o_j the site's output, G its gradient, and a = sigmoid(g rho pi + b) with pi = sum_j phi_j^T o_j and
rho = (mean o^2 + eps)^(-1/2), the gradient of a stream's mix is

    Go_j = a_j G + sum_k dpi_k phi_(j,k) - kappa o_j,   kappa = drho rho^3 / (M D)

and from there on as in single-stream routing: dz = p (<Go, X> - <Go, o>), dX = p Go + r dz u - (r^2 / D) dz z X.

:func:`turn` makes Go of the mixes, in place, the dX of the running sum's streams, and what
:mod:`scaling.kernels.stream_gather` and :mod:`scaling.kernels.stream_keys` need of the site: dpi, <Go, o>, and for the
running sum r dz and p. A program holds all rows of a token; nothing is read twice.

Shape legend: as in :mod:`scaling.kernels.streams`; W = 2 M scalars of a token: dpi, <Go, o>.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from scaling.kernels.stream_rows import added, read_row, repeated, row_sides, sums, write_row
from scaling.kernels.tile import narrow

_TURN = {"tokens": 1, "per_warp": 256}


@triton.jit(do_not_specialize=["site", "pair", "num_tokens", "num_pairs"])
def _turn_kernel(
    mix_ptr,  # (M, T, D) mixes of the finished sources in, Go out
    newest_ptr,  # (M, T, D) streams of the running sum
    gradient_ptr,  # (T, D) G
    key_ptr,  # (M, D) float32 of the site
    score_ptr,  # (T, P, M) float32
    lse_ptr,  # (T, S, M) float32
    phi_ptr,  # (M, M * D) of the site, gates first, in the streams' dtype
    scale_ptr,
    bias_ptr,
    kept_ptr,  # (T, M + 1) float32
    stream_gradient_ptr,  # (M, T, D) out: dX
    logit_gradient_ptr,  # (T, M) float32 out: of the gates
    scalar_ptr,  # (W, T) float32 out
    coefficient_ptr,  # (M, 2, T) float32 out: r dz and p of the running sum
    site,
    pair,
    num_tokens,
    num_pairs,
    num_sites,
    eps,
    NEWEST: tl.constexpr,
    GATED: tl.constexpr,
    TOKENS: tl.constexpr,
    M: tl.constexpr,
    D: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    PARTS: tl.constexpr = len(WIDTHS)
    SUMS: tl.constexpr = 2 if NEWEST else 1
    kind: tl.constexpr = mix_ptr.dtype.element_ty
    first = tl.program_id(0).to(tl.int64) * TOKENS
    line = tl.cast(num_tokens, tl.int64)
    plane = line * D
    gradients = ()
    mixed = ()  # by token, stream and part of the width, as all rows here
    values = ()
    scores = ()  # by token and stream
    shares = ()
    for index in tl.static_range(TOKENS):
        token = tl.minimum(first + index, line - 1)
        for part in tl.static_range(PARTS):
            gradients = gradients + (read_row(gradient_ptr + token * D, STARTS[part], WIDTHS[part], D),)
        for stream in tl.static_range(M):
            place = stream * plane + token * D
            for part in tl.static_range(PARTS):
                mixed = mixed + (read_row(mix_ptr + place, STARTS[part], WIDTHS[part], D),)
                if NEWEST:
                    values = values + (read_row(newest_ptr + place, STARTS[part], WIDTHS[part], D),)
            if NEWEST:
                lse = tl.load(lse_ptr + (token * num_sites + site) * M + stream)
                scores = scores + (tl.load(score_ptr + (token * num_pairs + pair) * M + stream),)
                shares = shares + (tl.exp(scores[index * M + stream] - lse),)
    if NEWEST:
        whole = ()
        for row in tl.static_range(TOKENS * M):
            for part in tl.static_range(PARTS):
                whole = whole + (mixed[row * PARTS + part] + shares[row] * values[row * PARTS + part],)
        mixed = whole
    alongs = repeated(0.0, 2 * TOKENS * M)  # <G, o> and <X, X>
    for part in tl.static_range(PARTS):
        rows = ()
        for row in tl.static_range(TOKENS * M):
            rows = rows + (mixed[row * PARTS + part] * gradients[row // M * PARTS + part],)
            if NEWEST:
                rows = rows + (values[row * PARTS + part] * values[row * PARTS + part],)
            else:
                rows = rows + (tl.zeros_like(mixed[part]),)
        alongs = added(alongs, sums(rows), 2 * TOKENS * M)
    gates = repeated(1.0 / M, TOKENS * M)
    turned = ()
    kappas = ()
    if GATED:
        gates = ()
        scale = tl.load(scale_ptr)
        for index in tl.static_range(TOKENS):
            token = tl.minimum(first + index, line - 1)
            factor = tl.load(kept_ptr + token * (M + 1) + M)
            kappa = 0.0
            for stream in tl.static_range(M):
                projected = tl.load(kept_ptr + token * (M + 1) + stream)
                gate = tl.sigmoid(scale * projected * factor + tl.load(bias_ptr + stream))
                logit_gradient = gate * (1.0 - gate) * alongs[2 * (index * M + stream)]
                alive = first + index < line
                tl.store(logit_gradient_ptr + token * M + stream, logit_gradient, mask=alive)
                tl.store(scalar_ptr + stream * line + token, scale * factor * logit_gradient, mask=alive)
                kappa += scale * logit_gradient * projected
                gates = gates + (gate,)
                turned = turned + (scale * factor * logit_gradient,)
            kappas = kappas + (kappa * factor * factor * factor / (M * D),)
    mix_gradients = ()  # by part, stream and token
    totals = repeated(0.0, SUMS * TOKENS * M)  # <Go, o> and <Go, X> by stream and token
    for part in tl.static_range(PARTS):
        rows = ()
        for stream in tl.static_range(M):
            turning = ()
            for index in tl.static_range(TOKENS):
                mix_gradient = gates[index * M + stream] * gradients[index * PARTS + part]
                if GATED:
                    mix_gradient -= kappas[index] * mixed[(index * M + stream) * PARTS + part]
                turning = turning + (mix_gradient,)
            if GATED:
                for gate in tl.static_range(M):
                    phi = read_row(phi_ptr + (gate * M + stream) * D, STARTS[part], WIDTHS[part], D)
                    more = ()
                    for index in tl.static_range(TOKENS):
                        more = more + (turning[index] + turned[index * M + gate] * phi,)
                    turning = more
            for index in tl.static_range(TOKENS):
                rows = rows + (turning[index] * mixed[(index * M + stream) * PARTS + part],)
                if NEWEST:
                    rows = rows + (turning[index] * values[(index * M + stream) * PARTS + part],)
            mix_gradients = mix_gradients + turning
        totals = added(totals, sums(rows), SUMS * TOKENS * M)
    tl.debug_barrier()  # Go takes the place of the mixes, which every warp has read now
    for stream in tl.static_range(M):
        for index in tl.static_range(TOKENS):
            token = first + index
            alive = token < line
            delta = totals[SUMS * (stream * TOKENS + index)]
            tl.store(scalar_ptr + (M + stream) * line + token, delta, mask=alive)
            place = stream * plane + token * D
            if NEWEST:
                share = shares[index * M + stream]
                factor = 1.0 / tl.sqrt_rn(alongs[2 * (index * M + stream) + 1] / D + eps)
                coefficient = factor * share * (totals[SUMS * (stream * TOKENS + index) + 1] - delta)
                radial = factor * coefficient * scores[index * M + stream] / D
                tl.store(coefficient_ptr + 2 * stream * line + token, coefficient, mask=alive)
                tl.store(coefficient_ptr + (2 * stream + 1) * line + token, share, mask=alive)
            for part in tl.static_range(PARTS):
                mix_gradient = mix_gradients[(part * M + stream) * TOKENS + index]
                write_row(mix_ptr + place, narrow(mix_gradient, kind), alive, STARTS[part], D)
                if NEWEST:
                    value = values[(index * M + stream) * PARTS + part]
                    key = read_row(key_ptr + stream * D, STARTS[part], WIDTHS[part], D)
                    stream_gradient = narrow(share * mix_gradient + coefficient * key - radial * value, kind)
                    write_row(stream_gradient_ptr + place, stream_gradient, alive, STARTS[part], D)


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
    scale: Tensor,
    bias_M: Tensor,
    kept: Tensor,
    stream_gradient_MTD: Tensor | None,
    logit_gradient: Tensor,
    scalar_WT: Tensor,
    coefficient_M2T: Tensor,
    eps: float,
) -> None:
    """Mixes become Go; write the running sum's dX, the gradients of the gates' logits ``(T, M)``, and the scalars."""
    num_streams, num_tokens, width = mix_MTD.shape
    _turn_kernel[(triton.cdiv(num_tokens, _TURN["tokens"]),)](
        mix_MTD,
        mix_MTD if newest_MTD is None else newest_MTD,
        gradient_TD,
        key_MD,
        score_TPM,
        lse_TSM,
        lse_TSM if phi_KV is None else phi_KV,
        scale,
        bias_M,
        kept,
        mix_MTD if stream_gradient_MTD is None else stream_gradient_MTD,
        logit_gradient,
        scalar_WT,
        coefficient_M2T,
        site,
        pair,
        num_tokens,
        score_TPM.shape[1],
        lse_TSM.shape[1],
        eps,
        NEWEST=newest_MTD is not None,
        GATED=phi_KV is not None,
        **row_sides(width, num_streams, **_TURN),
    )
