"""Forward pass of hyper-connections (hc, mhc): write one sublayer's output into the streams, read for the next.

Four passes, each bound by what it must move (U is one tensor of the width): ``X' = mix X + post f`` with the moments
of its norms (:mod:`scaling.kernels.hyper_tokens`, (2 M + 1) U), the projections of X' on tensor cores
(:mod:`scaling.kernels.hyper_phi`, M U), coefficients (:mod:`scaling.kernels.hyper_coefficients`, numbers by token), and
``h = pre X'`` (:mod:`scaling.kernels.hyper_tokens`, (M + 1) U).

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scaling.kernels.hyper import Rule
from scaling.kernels.hyper_coefficients import coefficients
from scaling.kernels.hyper_phi import project, split
from scaling.kernels.hyper_tokens import read, write
from scaling.kernels.tile import is_exact


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
    """Write the new streams, if there is an update, what is read of them, coefficients, and what backward needs."""
    num_tokens, streams, _ = stream_TMD.shape
    projects = rule.projects and rule.kind != "sum"
    if update_TD is not None or projects:
        write(
            rule,
            stream_TMD=stream_TMD,
            update_TD=update_TD,
            post_TM=post_TM,
            mix_TMM=mix_TMM,
            out_TMD=out_TMD,
            factor=factor,
        )
    held_TMD = stream_TMD if update_TD is None else out_TMD
    if rule.kind == "sum":
        read(stream_TMD=held_TMD, pre_TM=None, read_TD=read_TD)
        return
    partial = bias_K
    if projects:
        exact = is_exact(read_TD.dtype if update_TD is None else update_TD.dtype)
        part = split(rule, phi=phi, streams=streams, dtype=part_dtype(held_TMD, exact))
        partial = project(rule, stream_TMD=held_TMD, part=part, exact=exact)
    pre_TM = bias_K.new_empty((num_tokens, streams))
    coefficients(
        rule,
        partial=partial,
        factor=factor,
        shift_F=shift_F,
        offset_F=offset_F,
        scale_K=scale_K,
        bias_K=bias_K,
        projected_TK=projected_TK,
        pre_TM=pre_TM,
        new_post_TM=new_post_TM,
        new_mix_TMM=new_mix_TMM,
    )
    read(stream_TMD=held_TMD, pre_TM=pre_TM, read_TD=read_TD)


def part_dtype(stream_TMD: Tensor, exact: bool) -> torch.dtype:
    """Dtype that the streams meet the projections' weights in."""
    if exact:
        return torch.float32
    return torch.bfloat16 if stream_TMD.dtype == torch.float32 else stream_TMD.dtype
