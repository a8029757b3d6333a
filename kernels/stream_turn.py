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

from scaling.kernels.stream_rows import read_row, read_rows, row_sides, write_rows
from scaling.kernels.tile import narrow


@triton.jit(do_not_specialize=["site", "pair", "num_tokens", "num_pairs"])
def _turn_kernel(
    mix_ptr,  # (M, T, D) mixes of the finished sources in, Go out
    newest_ptr,  # (M, T, D) streams of the running sum
    gradient_ptr,  # (T, D) G
    key_ptr,  # (M, D) float32 of the site
    score_ptr,  # (T, P, M) float32
    lse_ptr,  # (T, S, M) float32
    phi_ptr,  # (M, M * D) float32 of the site, gates first
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
    M: tl.constexpr,
    ROWS: tl.constexpr,
    D: tl.constexpr,
    STARTS: tl.constexpr,
    WIDTHS: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    line = tl.cast(num_tokens, tl.int64)
    plane = line * D
    stream = tl.arange(0, ROWS)
    some = stream < M
    gradients = ()
    mixed = ()
    values = ()
    for part in tl.static_range(len(WIDTHS)):
        gradients = gradients + (read_row(gradient_ptr + token * D, STARTS[part], WIDTHS[part], D)[None, :],)
        mixed = mixed + (read_rows(mix_ptr + token * D, plane, STARTS[part], WIDTHS[part], M, ROWS, D),)
        if NEWEST:
            values = values + (read_rows(newest_ptr + token * D, plane, STARTS[part], WIDTHS[part], M, ROWS, D),)
    if NEWEST:
        lse = tl.load(lse_ptr + (token * num_sites + site) * M + stream, mask=some, other=0.0)
        score = tl.load(score_ptr + (token * num_pairs + pair) * M + stream, mask=some, other=0.0)
        share = tl.exp(score - lse)
        whole = ()
        for part in tl.static_range(len(WIDTHS)):
            whole = whole + (mixed[part] + share[:, None] * values[part],)
        mixed = whole
    gate = tl.full([ROWS], 1.0 / M, tl.float32)
    turned = tl.zeros([ROWS], tl.float32)
    kappa = 0.0
    if GATED:
        scale = tl.load(scale_ptr)
        factor = tl.load(kept_ptr + token * (M + 1) + M)
        projected = tl.load(kept_ptr + token * (M + 1) + stream, mask=some, other=0.0)
        gate = tl.sigmoid(scale * projected * factor + tl.load(bias_ptr + stream, mask=some, other=0.0))
        along = tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(len(WIDTHS)):
            along += tl.sum(mixed[part] * gradients[part], 1)
        logit_gradient = gate * (1.0 - gate) * along
        tl.store(logit_gradient_ptr + token * M + stream, logit_gradient, mask=some)
        turned = scale * factor * logit_gradient
        tl.store(scalar_ptr + stream * line + token, turned, mask=some)
        kappa = tl.sum(scale * logit_gradient * projected, 0) * factor * factor * factor / (M * D)
    mix_gradients = ()
    delta = tl.zeros([ROWS], tl.float32)
    for part in tl.static_range(len(WIDTHS)):
        mix_gradient = gate[:, None] * gradients[part]
        if GATED:
            mix_gradient -= kappa * mixed[part]
            for k in tl.static_range(M):
                phi = read_rows(phi_ptr + k * M * D, D, STARTS[part], WIDTHS[part], M, ROWS, D)
                mix_gradient += tl.sum(tl.where(stream == k, turned, 0.0), 0) * phi
        delta += tl.sum(mix_gradient * mixed[part], 1)
        mix_gradients = mix_gradients + (mix_gradient,)
    tl.store(scalar_ptr + (M + stream) * line + token, delta, mask=some)
    if NEWEST:
        along = tl.zeros([ROWS], tl.float32)
        square = tl.zeros([ROWS], tl.float32)
        for part in tl.static_range(len(WIDTHS)):
            along += tl.sum(mix_gradients[part] * values[part], 1)
            square += tl.sum(values[part] * values[part], 1)
        factor = 1.0 / tl.sqrt_rn(square / D + eps)
        coefficient = factor * share * (along - delta)
        radial = factor * coefficient * score / D
        tl.store(coefficient_ptr + 2 * stream * line + token, coefficient, mask=some)
        tl.store(coefficient_ptr + (2 * stream + 1) * line + token, share, mask=some)
    kind: tl.constexpr = mix_ptr.dtype.element_ty
    # in place, behind the barriers of the sums, which every warp enters with its rows read
    for part in tl.static_range(len(WIDTHS)):
        write_rows(mix_ptr + token * D, narrow(mix_gradients[part], kind), plane, STARTS[part], M, ROWS, D)
        if NEWEST:
            key = read_rows(key_ptr, D, STARTS[part], WIDTHS[part], M, ROWS, D)
            stream_gradient = share[:, None] * mix_gradients[part] + coefficient[:, None] * key
            stream_gradient = narrow(stream_gradient - radial[:, None] * values[part], kind)
            write_rows(stream_gradient_ptr + token * D, stream_gradient, plane, STARTS[part], M, ROWS, D)


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
    _turn_kernel[(num_tokens,)](
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
        **row_sides(width, num_streams),
    )
