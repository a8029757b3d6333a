"""Hyper-connections as an operator: one step writes a sublayer's output into the streams and reads for the next.

Last of the hyper-connection modules. The operators are functions of their arguments: no storage is filled in place, so
that recomputation and several backward passes need no rules. Kept for the backward pass are what a step takes and
makes: streams, the sublayer's output, and K + 1 numbers a token; coefficients are computed again.

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaling.errors import KernelError
from scaling.kernels.hyper import KINDS, Rule
from scaling.kernels.hyper_backward import step_gradients
from scaling.kernels.hyper_forward import step
from scaling.kernels.hyper_logits import SUMS, TOKENS
from scaling.kernels.hyper_phi import phi_gradient

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_STREAMS = 8  # beyond, a token's tile no longer fits the registers


class HyperStreams:
    """The streams of one forward pass, and the coefficients that the last read decided.

    Parameters
    ----------
    embedding_BTD
        Every stream at first.
    streams
        M.

    Raises
    ------
    KernelError
        If a size or dtype is not supported.
    """

    def __init__(self, embedding_BTD: Tensor, streams: int) -> None:
        width = embedding_BTD.shape[-1]
        if width % 16 or embedding_BTD.dtype not in _DTYPES or not 1 <= streams <= _MAX_STREAMS:
            raise KernelError(
                f"hyper-connections: {streams} streams of width {width} in {embedding_BTD.dtype}; allowed are 1 to "
                f"{_MAX_STREAMS} streams, multiples of 16, float32, bfloat16 and float16; choose others, or set "
                "ISOLOSS_KERNELS=reference"
            )
        self._shape = embedding_BTD.shape
        self._stream_TMD = embedding_BTD.flatten(0, -2).unsqueeze(1).expand(-1, streams, -1).contiguous()
        empty = embedding_BTD.new_empty(0, dtype=torch.float32)
        self._post_TM, self._mix_TMM = empty, empty

    def step(
        self,
        rule: Rule,
        update_BTD: Tensor | None,
        *,
        phi: Tensor | None = None,
        scale_K: Tensor | None = None,
        bias_K: Tensor | None = None,
        shift_F: Tensor | None = None,
        offset_F: Tensor | None = None,
    ) -> Tensor:
        """Write the last sublayer's output, none before the first, and return what the next reads.

        Parameters
        ----------
        rule
            How coefficients follow from projections.
        update_BTD
            Output of the last sublayer.
        phi
            Weights of the projections, ``(M * D, K)``; for ``hc`` ``(D, M + 2)``, gains of the norm multiplied in.
        scale_K, bias_K
            Of the coefficients' logits; for ``hc`` stream by stream.
        shift_F, offset_F
            For ``hc`` with LayerNorm: sums over the width of ``phi``, and the projections of the norm's bias.
        """
        empty = self._stream_TMD.new_empty(0, dtype=torch.float32)
        weights = [
            empty if weight is None else weight.float().contiguous()
            for weight in (phi, shift_F, offset_F, scale_K, bias_K)
        ]
        if phi is not None and shift_F is None:
            weights[1] = weights[2] = empty.new_zeros(phi.shape[-1])
        update_TD = None if update_BTD is None else update_BTD.flatten(0, -2)
        read_TD: Tensor
        out_TMD, read_TD, self._post_TM, self._mix_TMM, _, _ = torch.ops.isoloss.hyper_step(
            self._stream_TMD, update_TD, self._post_TM, self._mix_TMM, *weights, *_encode(rule)
        )
        if update_TD is not None:
            self._stream_TMD = out_TMD
        return read_TD.view(self._shape)


def _encode(rule: Rule) -> tuple[list[int], list[float]]:
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
