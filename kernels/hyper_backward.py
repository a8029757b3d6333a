"""Backward pass of hyper-connections (hc, mhc) for all that belongs to tokens.

:func:`step_gradients` takes the gradients of a step's results (:mod:`scaling.kernels.hyper`). Three passes (U is one
tensor of the width): ``<dh, X'_i>`` (:mod:`scaling.kernels.hyper_tokens`, (M + 1) U), gradients of the coefficients
(:mod:`scaling.kernels.hyper_logits`, numbers by token), and the gradient of X' with all that follows from it
(:mod:`scaling.kernels.hyper_spread`, (4 M + 3) U). :mod:`scaling.kernels.hyper_phi` has the projections' weights, M U.

Shape legend: as in :mod:`scaling.kernels.hyper`; P programs.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scaling.kernels.hyper import Rule
from scaling.kernels.hyper_logits import logit_gradients
from scaling.kernels.hyper_phi import split
from scaling.kernels.hyper_spread import spread
from scaling.kernels.hyper_tokens import weigh
from scaling.kernels.tile import is_exact


def step_gradients(
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
    projected_TK: Tensor,
    factor: Tensor,
    out_gradient_TMD: Tensor,
    read_gradient_TD: Tensor,
    new_post_gradient_TM: Tensor,
    new_mix_gradient_TMM: Tensor,
    stream_gradient_TMD: Tensor,
    update_gradient_TD: Tensor,
    post_gradient_TM: Tensor,
    mix_gradient_TMM: Tensor,
    outer_TK: Tensor,
    sums_PSK: Tensor,
) -> None:
    """Write the gradients of what a step took, those of its projections, and sums over tokens for its weights."""
    num_tokens, streams, _ = out_TMD.shape
    projects = rule.projects and rule.kind != "sum"
    exact = is_exact(read_gradient_TD.dtype if update_TD is None else update_TD.dtype)
    pre_TM = slope = level = part = read_gradient_TD
    if rule.kind != "sum":
        weight_TM = bias_K.new_empty((num_tokens, streams))
        weigh(stream_TMD=out_TMD, gradient_TD=read_gradient_TD, weight_TM=weight_TM)
        pre_TM = torch.empty_like(weight_TM)
        slope, level = bias_K.new_empty((2, num_tokens, rule.factors(streams)))
        logit_gradients(
            rule,
            width=out_TMD.shape[2],
            shift_F=shift_F,
            offset_F=offset_F,
            scale_K=scale_K,
            bias_K=bias_K,
            projected_TK=projected_TK,
            factor=factor,
            weight_TM=weight_TM,
            new_post_gradient_TM=new_post_gradient_TM,
            new_mix_gradient_TMM=new_mix_gradient_TMM,
            pre_TM=pre_TM,
            outer_TK=outer_TK,
            slope=slope,
            level=level,
            sums_PSK=sums_PSK,
        )
    if projects:
        part = split(rule, phi=phi, streams=streams, dtype=torch.float32 if exact else torch.bfloat16)
    spread(
        rule,
        stream_TMD=stream_TMD,
        update_TD=update_TD,
        post_TM=post_TM,
        mix_TMM=mix_TMM,
        part=part,
        out_TMD=out_TMD,
        pre_TM=pre_TM,
        outer_TK=outer_TK,
        slope=slope,
        level=level,
        out_gradient_TMD=out_gradient_TMD,
        read_gradient_TD=read_gradient_TD,
        stream_gradient_TMD=stream_gradient_TMD,
        update_gradient_TD=update_gradient_TD,
        post_gradient_TM=post_gradient_TM,
        mix_gradient_TMM=mix_gradient_TMM,
    )
