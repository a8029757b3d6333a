"""Linear maps of one input, whose input gradients are added up inside the matrix products.

For sublayers whose input a routing kernel has normed: no compiled norm is there to take the sum of the maps' input
gradients, so that it would be a kernel of its own, four tensors of the width for three maps. Here every product after
the first adds to what is there (beta = 1), two tensors, read by kernels that wait for arithmetic.

Shape legend: B any leading axes, R all of them as one, D width of the input, F width of an output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def products(x_BD: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Return ``x @ weight.T`` for every weight ``(F, D)``, as :func:`torch.nn.functional.linear` does.

    Under autocast in its dtype, float64 as it is. The input's gradient is rounded once a product, and not again for
    their sum.
    """
    kind = x_BD.device.type
    if torch.is_autocast_enabled(kind):
        dtype = torch.get_autocast_dtype(kind)
        x_BD, *rest = (value if value.dtype == torch.float64 else value.to(dtype) for value in (x_BD, *weights))
        weights = tuple(rest)
    return tuple(torch.ops.isoloss.products(x_BD, list(weights)))


@torch.library.custom_op("isoloss::products", mutates_args=(), schema="(Tensor x, Tensor[] weights) -> Tensor[]")
def _products(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [F.linear(x, weight) for weight in weights]


@_products.register_fake
def _products_fake(x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    return [x.new_empty((*x.shape[:-1], weight.shape[0])) for weight in weights]


@torch.library.custom_op(
    "isoloss::input_gradient", mutates_args=(), schema="(Tensor[] gradients, Tensor[] weights) -> Tensor"
)
def _input_gradient(gradients: list[Tensor], weights: list[Tensor]) -> Tensor:
    total_RD = gradients[0] @ weights[0]
    for gradient_RF, weight_FD in zip(gradients[1:], weights[1:], strict=True):
        total_RD.addmm_(gradient_RF, weight_FD)
    return total_RD


@_input_gradient.register_fake
def _input_gradient_fake(gradients: list[Tensor], weights: list[Tensor]) -> Tensor:
    return gradients[0].new_empty((gradients[0].shape[0], weights[0].shape[1]))


def _setup(ctx: Any, inputs: tuple[Tensor, list[Tensor]], output: list[Tensor]) -> None:
    x_BD, weights = inputs
    ctx.save_for_backward(x_BD, *weights)
    ctx.set_materialize_grads(False)  # the weight of an output that nobody uses has no gradient


def _backward(ctx: Any, gradients: list[Tensor | None]) -> tuple[Tensor | None, list[Tensor | None]]:
    x_BD, *weights = ctx.saved_tensors
    x_RD = x_BD.reshape(-1, x_BD.shape[-1])
    rows = [None if gradient is None else gradient.reshape(-1, gradient.shape[-1]) for gradient in gradients]
    # The weights' first: a gradient that an operator it does not know meets first, the compiler writes twice.
    weight_gradients = [None if gradient_RF is None else gradient_RF.t() @ x_RD for gradient_RF in rows]
    pairs = [(row, weight) for row, weight in zip(rows, weights, strict=True) if row is not None]
    if not pairs:
        return None, weight_gradients
    input_gradient_RD = torch.ops.isoloss.input_gradient([row for row, _ in pairs], [weight for _, weight in pairs])
    return input_gradient_RD.view(x_BD.shape), weight_gradients


_products.register_autograd(_backward, setup_context=_setup)
