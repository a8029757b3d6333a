"""Depth routing in plain PyTorch: the truth that every Triton operator beside it is tested against.

First module of ``kernels``: it computes in the dtype it is given, so that float64 in gives the oracle of the tests,
and bfloat16 in gives the reference whose error a kernel must not exceed. Forward functions are differentiable by
autograd; :func:`route_gradients` spells the backward pass out, because the kernels gather along its sums.

Shape legend: N sources, S sites, T tokens (batch and sequence flattened, except where a convolution needs B and T
apart), D width, H routing heads, C = D / H, K streams, R residual streams.

References
----------
Attention Residuals: Kimi Team, arXiv 2603.15031, section 3. Heads over the width: arXiv 2607.27230, section 3.
Hyper-connections: arXiv 2409.19606; manifold-constrained: arXiv 2512.24880, equations 5-9.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_factor(x_TD: Tensor, eps: float) -> Tensor:
    """Return ``(mean(x^2) + eps)^(-1/2)`` over the last axis, keeping it: the factor of RMSNorm over the full width."""
    return torch.rsqrt(x_TD.square().mean(-1, keepdim=True) + eps)


def route(source_NTD: Tensor, query_D: Tensor, heads: int, eps: float) -> Tensor:
    """Mix the sources of one site by a softmax over depth, per head slice of the width.

    ``z[i,t,h] = <u[h], RMS(v[i,t])[h]>``, ``p = softmax over i``, ``o[t,h] = sum_i p[i,t,h] v[i,t,h]``. The RMS is over
    the full width and the values are not normalised. ``heads=1`` is Attention Residuals, more heads are MHAR.

    Parameters
    ----------
    source_NTD
        The sources visible to the site, oldest first.
    query_D
        ``u = w * g``, the product of the site's query and of its key norm's gain: the function depends on it alone.
    heads
        Number of slices of the width with a softmax of their own.
    eps
        The key norm's epsilon.

    Returns
    -------
    Tensor
        ``(T, D)``, in the sources' dtype.
    """
    output_TD, _ = route_with_lse(source_NTD, query_D, heads, eps)
    return output_TD


def route_with_lse(
    source_NTD: Tensor, query_D: Tensor, heads: int, eps: float, *, per_head: bool = False
) -> tuple[Tensor, Tensor]:
    """Return :func:`route` and the log-sum-exp ``(T, H)`` of its scores, from which every weight can be recomputed.

    With ``per_head`` the keys are normed slice by slice.
    """
    N, T, D = source_NTD.shape
    C = D // heads
    parts = source_NTD.unflatten(-1, (heads if per_head else 1, -1))
    key_NTD = (parts * rms_factor(parts, eps)).flatten(-2)
    score_NTH = (key_NTD * query_D.to(source_NTD.dtype)).view(N, T, heads, C).sum(-1)
    weight_NTH = score_NTH.softmax(0)
    output_TD = (weight_NTH.unsqueeze(-1) * source_NTD.view(N, T, heads, C)).sum(0).reshape(T, D)
    return output_TD, score_NTH.logsumexp(0)


def merge(first_TD: Tensor, first_lse_TH: Tensor, second_TD: Tensor, second_lse_TH: Tensor) -> tuple[Tensor, Tensor]:
    """Join the mixes of two disjoint sets of sources into the mix of their union (online softmax)."""
    heads = first_lse_TH.shape[-1]
    lse_TH = torch.logaddexp(first_lse_TH, second_lse_TH)
    share_TH1 = (first_lse_TH - lse_TH).exp().unsqueeze(-1)
    other_TH1 = (second_lse_TH - lse_TH).exp().unsqueeze(-1)
    joined = first_TD.unflatten(-1, (heads, -1)) * share_TH1 + second_TD.unflatten(-1, (heads, -1)) * other_TH1
    return joined.flatten(-2), lse_TH


def route_grouped(source_NTD: Tensor, query_SD: Tensor, heads: int, eps: float, group: int) -> Tensor:
    """Route site ``s`` over sources ``0..s`` for all sites, in the two phases of the grouped schedule.

    Queries do not depend on tokens, so the sites of a group share one pass over everything older than the group;
    each site then merges its own part. The result does not depend on ``group``.
    """
    outputs = []
    for start in range(0, query_SD.shape[0], group):
        for site in range(start, min(start + group, query_SD.shape[0])):
            output_TD, lse_TH = route_with_lse(source_NTD[start : site + 1], query_SD[site], heads, eps)
            if start:
                older_TD, older_lse_TH = route_with_lse(source_NTD[:start], query_SD[site], heads, eps)
                output_TD, _ = merge(older_TD, older_lse_TH, output_TD, lse_TH)
            outputs.append(output_TD)
    return torch.stack(outputs)


def route_gradients(
    source_NTD: Tensor, query_SD: Tensor, gradient_STD: Tensor, heads: int, eps: float
) -> tuple[Tensor, Tensor]:
    """Return the gradients of all sources and queries when site ``s`` reads sources ``0..s``, written as a gather.

    With ``G_s`` the gradient of site s's output, per head ``delta_s = <G_s, o_s>``, ``dz = p (<G_s, v_i> - delta_s)``::

        dv_i = sum_(s>=i) [p G_s + r_i dz u_s] - (r_i^2 / D) (sum_(s>=i) sum_h dz z) v_i
        du_s = sum_(t, i<=s) dz r_i v_i

    The last term of ``dv_i`` is the radial part of RMSNorm's gradient; it couples the heads.
    """
    N, T, D = source_NTD.shape
    C = D // heads
    factor_NT1 = rms_factor(source_NTD, eps)
    query_SD = query_SD.to(source_NTD.dtype)
    slices_NTHC = source_NTD.view(N, T, heads, C)
    source_gradient = torch.zeros_like(source_NTD)
    query_gradient = torch.zeros_like(query_SD)
    radial_NT1 = torch.zeros_like(factor_NT1)
    for site in range(query_SD.shape[0]):
        seen_NTHC = slices_NTHC[: site + 1]
        query_HC = query_SD[site].view(heads, C)
        score_NTH = (seen_NTHC * query_HC).sum(-1) * factor_NT1[: site + 1]
        weight_NTH = score_NTH.softmax(0)
        gradient_THC = gradient_STD[site].view(T, heads, C)
        output_THC = (weight_NTH.unsqueeze(-1) * seen_NTHC).sum(0)
        delta_TH = (gradient_THC * output_THC).sum(-1)
        score_gradient_NTH = weight_NTH * ((gradient_THC * seen_NTHC).sum(-1) - delta_TH)
        scaled_NTH = score_gradient_NTH * factor_NT1[: site + 1]
        direct = weight_NTH.unsqueeze(-1) * gradient_THC + scaled_NTH.unsqueeze(-1) * query_HC
        source_gradient[: site + 1] += direct.reshape(site + 1, T, D)
        radial_NT1[: site + 1] += (score_gradient_NTH * score_NTH).sum(-1, keepdim=True)
        query_gradient[site] = (scaled_NTH.unsqueeze(-1) * seen_NTHC).sum((0, 1)).reshape(D)
    source_gradient -= factor_NT1.square() / D * radial_NT1 * source_NTD
    return source_gradient, query_gradient


def expand_streams(source_NBTD: Tensor, taps: list[Tensor]) -> Tensor:
    """Expand each source into streams by causal depthwise convolutions: ``X_t = sum_j taps[j] * v_(t-j)``.

    Parameters
    ----------
    source_NBTD
        Single-stream sources.
    taps
        One ``(D, kernel)`` tensor for each stream after the first; ``taps[:, 0]`` weighs the present token. Stream 0
        is the source itself.

    Returns
    -------
    Tensor
        ``(K, N, B, T, D)`` with ``K = len(taps) + 1``.
    """
    N, B, T, D = source_NBTD.shape
    signal = source_NBTD.reshape(N * B, T, D).transpose(1, 2)
    streams = [source_NBTD]
    for kernel_DJ in taps:
        width = kernel_DJ.shape[1]
        padded = F.pad(signal, (width - 1, 0))
        filtered = F.conv1d(padded, kernel_DJ.to(signal.dtype).flip(1).unsqueeze(1), groups=D)
        streams.append(filtered.transpose(1, 2).reshape(N, B, T, D))
    return torch.stack(streams)


def route_streams(
    source_NBTD: Tensor,
    query_KD: Tensor,
    taps: list[Tensor],
    mixer: Tensor,
    scale: Tensor,
    bias_K: Tensor,
    eps: float,
) -> Tensor:
    """Multi-stream Attention Residuals of one site: route each stream over depth, then gate and add the streams.

    ``o_k = sum_i softmax_i(<u_k, RMS(X_ik)>) X_ik`` and ``h = sum_k sigmoid(scale * (RMS(vec o) mixer) + bias)_k o_k``.

    Parameters
    ----------
    mixer
        ``(K * D, K)``; the row index runs over streams first.
    """
    N, B, T, D = source_NBTD.shape
    stream_KNBTD = expand_streams(source_NBTD, taps)
    K = stream_KNBTD.shape[0]
    routed = [route(stream_KNBTD[k].reshape(N, B * T, D), query_KD[k], 1, eps) for k in range(K)]
    routed_TKD = torch.stack(routed, dim=1)
    flat = routed_TKD.flatten(1)
    logits_TK = (flat * rms_factor(flat, eps)) @ mixer.to(flat.dtype)
    gate_TK = torch.sigmoid(scale.to(flat.dtype) * logits_TK + bias_K.to(flat.dtype))
    return (gate_TK.unsqueeze(-1) * routed_TKD).sum(1).view(B, T, D)


def sinkhorn(logits_TRR: Tensor, rounds: int) -> Tensor:
    """Bring ``exp(logits)`` towards a doubly stochastic matrix: ``rounds`` times columns, then rows, divided by sums.

    References
    ----------
    arXiv 2512.24880, equation 9 (``M <- T_row(T_col(M))``).
    """
    matrix = (logits_TRR - logits_TRR.amax((-2, -1), keepdim=True)).exp()
    for _ in range(rounds):
        matrix = matrix / matrix.sum(-2, keepdim=True)
        matrix = matrix / matrix.sum(-1, keepdim=True)
    return matrix


def hyper_weights(
    stream_TRD: Tensor, phi: Tensor, scale_3: Tensor, bias: Tensor, eps: float, rounds: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return mHC's read ``(T, R)``, write ``(T, R)`` and mix ``(T, R, R)`` weights from the residual streams.

    Parameters
    ----------
    phi
        ``(R * D, R * R + 2 * R)``: columns for read, write, and mix (row major).
    scale_3
        The three scalars multiplying the projections.
    bias
        ``(R * R + 2 * R,)``, added after scaling.
    """
    T, R, _ = stream_TRD.shape
    flat = stream_TRD.flatten(1)
    projected = (flat @ phi.to(flat.dtype)) * rms_factor(flat, eps)
    scale = torch.cat([scale_3[0].expand(R), scale_3[1].expand(R), scale_3[2].expand(R * R)]).to(flat.dtype)
    read, write, mix = (projected * scale + bias.to(flat.dtype)).split([R, R, R * R], dim=-1)
    return torch.sigmoid(read), 2.0 * torch.sigmoid(write), sinkhorn(mix.view(T, R, R), rounds)


def hyper_read(stream_TRD: Tensor, read_TR: Tensor) -> Tensor:
    """Weighted sum of the residual streams: the sublayer's input before its norm."""
    return (read_TR.unsqueeze(-1) * stream_TRD).sum(1)


def hyper_write(stream_TRD: Tensor, mix_TRR: Tensor, write_TR: Tensor, output_TD: Tensor) -> Tensor:
    """Mix the residual streams and add the sublayer's output to each: ``X' = mix X + write f``."""
    return mix_TRR @ stream_TRD + write_TR.unsqueeze(-1) * output_TD.unsqueeze(1)
