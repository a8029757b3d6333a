"""Hyper-connections as an operator: one step writes a sublayer's output into the streams and reads for the next.

Before :mod:`scaling.kernels.hyper_streams`, which calls it. The operators are functions of their arguments: no storage
is filled in place, so that recomputation and several backward passes need no rules. Kept for the backward pass are what
a step takes and makes: streams, the sublayer's output, and K + 1 numbers a token; coefficients are computed again.

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaling.kernels.hyper import KINDS, Rule
from scaling.kernels.hyper_backward import step_gradients
from scaling.kernels.hyper_forward import step
from scaling.kernels.hyper_logits import SUMS, TOKENS
from scaling.kernels.hyper_phi import phi_gradient


def encode(rule: Rule) -> tuple[list[int], list[float]]:
    """A rule as an operator takes it."""
    switches = (rule.projects, rule.tanh, rule.centred, rule.rows_first, rule.softmax_start, rule.transposed)
    return [KINDS.index(rule.kind), rule.iterations, *map(int, switches)], [rule.post_scale, rule.eps]


def _decode(numbers: list[int], reals: list[float]) -> Rule:
    kind, iterations, projects, tanh, centred, rows_first, softmax_start, transposed = numbers
    return Rule(
        kind=KINDS[kind],
        projects=bool(projects),
        tanh=bool(tanh),
        centred=bool(centred),
        iterations=iterations,
        rows_first=bool(rows_first),
        softmax_start=bool(softmax_start),
        transposed=bool(transposed),
        post_scale=reals[0],
        eps=reals[1],
    )


@torch.library.custom_op(
    "isoloss::hyper_step",
    mutates_args=(),
    schema="(Tensor stream, Tensor? update, Tensor post, Tensor mix, Tensor phi, Tensor shift, Tensor offset, "
    "Tensor scale, Tensor bias, int[] numbers, float[] reals) -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _step(
    stream: Tensor, update: Tensor | None, post: Tensor, mix: Tensor, phi: Tensor, shift: Tensor, offset: Tensor,
    scale: Tensor, bias: Tensor, numbers: list[int], reals: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = _step_fake(
        stream, update, post, mix, phi, shift, offset, scale, bias, numbers, reals
    )
    out, read, new_post, new_mix, projected, factor = results
    step(
        _decode(numbers, reals),
        stream_TMD=stream,
        update_TD=None if update is None else update.contiguous(),
        post_TM=post,
        mix_TMM=mix,
        phi=phi,
        shift_F=shift,
        offset_F=offset,
        scale_K=scale,
        bias_K=bias,
        out_TMD=out,
        read_TD=read,
        new_post_TM=new_post,
        new_mix_TMM=new_mix,
        projected_TK=projected,
        factor=factor,
    )
    return results


@_step.register_fake
def _step_fake(
    stream: Tensor, update: Tensor | None, post: Tensor, mix: Tensor, phi: Tensor, shift: Tensor, offset: Tensor,
    scale: Tensor, bias: Tensor, numbers: list[int], reals: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rule = _decode(numbers, reals)
    tokens, streams, width = stream.shape
    mixes = rule.kind in ("mhc", "hc")
    projects = rule.projects and rule.kind != "sum"
    wide = torch.float32
    return (
        stream.new_empty((0,) if update is None else stream.shape),
        stream.new_empty((tokens, width)),
        stream.new_empty((tokens, streams) if mixes else (0,), dtype=wide),
        stream.new_empty((tokens, streams, streams) if mixes else (0,), dtype=wide),
        stream.new_empty((tokens, rule.coefficients(streams)) if projects else (0,), dtype=wide),
        stream.new_empty((2, tokens, rule.factors(streams)) if projects else (0,), dtype=wide),
    )


@torch.library.custom_op(
    "isoloss::hyper_step_backward",
    mutates_args=(),
    schema="(Tensor stream, Tensor? update, Tensor post, Tensor mix, Tensor phi, Tensor shift, Tensor offset, "
    "Tensor scale, Tensor bias, Tensor? out, Tensor projected, Tensor factor, Tensor out_gradient, "
    "Tensor read_gradient, Tensor post_gradient, Tensor mix_gradient, int[] numbers, float[] reals) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _step_backward(
    stream: Tensor, update: Tensor | None, post: Tensor, mix: Tensor, phi: Tensor, shift: Tensor, offset: Tensor,
    scale: Tensor, bias: Tensor, out: Tensor | None, projected: Tensor, factor: Tensor, out_gradient: Tensor,
    read_gradient: Tensor, post_gradient: Tensor, mix_gradient: Tensor, numbers: list[int], reals: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor] = _step_backward_fake(
        stream, update, post, mix, phi, shift, offset, scale, bias, out, projected, factor, out_gradient,
        read_gradient, post_gradient, mix_gradient, numbers, reals,
    )  # fmt: skip
    stream_gradient, update_gradient, old_post_gradient, old_mix_gradient, outer, sums = results
    step_gradients(
        _decode(numbers, reals),
        stream_TMD=stream,
        update_TD=None if update is None else update.contiguous(),
        post_TM=post,
        mix_TMM=mix,
        phi=phi,
        shift_F=shift,
        offset_F=offset,
        scale_K=scale,
        bias_K=bias,
        out_TMD=stream if out is None else out,
        projected_TK=projected,
        factor=factor,
        out_gradient_TMD=out_gradient.contiguous(),
        read_gradient_TD=read_gradient.contiguous(),
        new_post_gradient_TM=post_gradient.contiguous(),
        new_mix_gradient_TMM=mix_gradient.contiguous(),
        stream_gradient_TMD=stream_gradient,
        update_gradient_TD=update_gradient,
        post_gradient_TM=old_post_gradient,
        mix_gradient_TMM=old_mix_gradient,
        outer_TK=outer,
        sums_PSK=sums,
    )
    return results


@_step_backward.register_fake
def _step_backward_fake(
    stream: Tensor, update: Tensor | None, post: Tensor, mix: Tensor, phi: Tensor, shift: Tensor, offset: Tensor,
    scale: Tensor, bias: Tensor, out: Tensor | None, projected: Tensor, factor: Tensor, out_gradient: Tensor,
    read_gradient: Tensor, post_gradient: Tensor, mix_gradient: Tensor, numbers: list[int], reals: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    rule, tokens = _decode(numbers, reals), stream.shape[0]
    coefficients = rule.coefficients(stream.shape[1])
    projects = rule.projects and rule.kind != "sum"
    return (
        torch.empty_like(stream),
        stream.new_empty(0) if update is None else update.new_empty(update.shape),
        torch.empty_like(post),
        torch.empty_like(mix),
        post.new_empty((tokens, coefficients) if projects else (0,)),
        post.new_empty(((tokens + TOKENS - 1) // TOKENS, SUMS, coefficients)),
    )


@torch.library.custom_op(
    "isoloss::hyper_phi_gradient",
    mutates_args=(),
    schema="(Tensor out, Tensor outer, Tensor phi, bool exact, int[] numbers, float[] reals) -> Tensor",
)
def _phi_gradient(
    out: Tensor, outer: Tensor, phi: Tensor, exact: bool, numbers: list[int], reals: list[float]
) -> Tensor:
    rule = _decode(numbers, reals)
    return phi_gradient(rule, out_TMD=out, outer_TK=outer.contiguous(), fields=phi.shape[-1], exact=exact)


@_phi_gradient.register_fake
def _phi_gradient_fake(
    out: Tensor, outer: Tensor, phi: Tensor, exact: bool, numbers: list[int], reals: list[float]
) -> Tensor:
    return torch.empty_like(phi)


def _step_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    stream, update, post, mix, phi, shift, offset, scale, bias, numbers, reals = inputs
    out, _, _, _, projected, factor = output
    kept = None if update is None else out
    ctx.save_for_backward(stream, update, post, mix, phi, shift, offset, scale, bias, kept, projected, factor)
    ctx.numbers, ctx.reals = numbers, reals
    ctx.set_materialize_grads(False)  # or each step fills tensors with zeros for what backward alone reads


def _step_backward_formula(
    ctx: Any,
    out_gradient: Tensor | None,
    read_gradient: Tensor | None,
    post_gradient: Tensor | None,
    mix_gradient: Tensor | None,
    *_: Tensor | None,
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: recomputation hands them out a single time
    stream, update, _, _, phi, _, _, _, _, out, _, factor = saved
    rule = _decode(ctx.numbers, ctx.reals)
    tokens, streams, width = stream.shape
    wide = {"dtype": torch.float32, "device": stream.device}
    mixes = rule.kind in ("mhc", "hc")
    # Without an update the streams went on as they were, so that their own gradient comes from elsewhere.
    if update is None or out_gradient is None:
        out_gradient = torch.zeros_like(stream)
    if read_gradient is None:
        read_gradient = stream.new_zeros((tokens, width))
    if post_gradient is None:
        post_gradient = torch.zeros((tokens, streams) if mixes else (0,), **wide)
    if mix_gradient is None:
        mix_gradient = torch.zeros((tokens, streams, streams) if mixes else (0,), **wide)
    results = torch.ops.isoloss.hyper_step_backward(
        *saved, out_gradient, read_gradient, post_gradient, mix_gradient, ctx.numbers, ctx.reals
    )
    stream_gradient, update_gradient, old_post_gradient, old_mix_gradient, outer, sums = results
    phi_grad = shift_grad = offset_grad = scale_grad = bias_grad = None
    if rule.kind != "sum":
        totals = sums.sum(0)
        bias_grad = totals[0]
    if phi.numel():
        scale_grad = totals[1]
        if rule.kind == "hc":
            by_stream = totals.view(SUMS, factor.shape[-1], -1).sum(1)
            offset_grad, shift_grad = by_stream[2], -by_stream[3]
        exact = (stream if update is None else update).dtype == torch.float32
        source = stream if update is None else out
        phi_grad = torch.ops.isoloss.hyper_phi_gradient(source, outer, phi, exact, ctx.numbers, ctx.reals)
    if update is None:
        update_gradient = old_post_gradient = old_mix_gradient = None
    return (
        stream_gradient, update_gradient, old_post_gradient, old_mix_gradient, phi_grad, shift_grad, offset_grad,
        scale_grad, bias_grad, None, None,
    )  # fmt: skip


_step.register_autograd(_step_backward_formula, setup_context=_step_setup)
