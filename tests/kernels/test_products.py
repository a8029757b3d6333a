"""Linear maps of one input with summed input gradients: the same function as separate maps, under every wrapper."""

from __future__ import annotations

import re
import shutil
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._inductor.utils import run_and_get_code

from scaling.kernels.decoder import feed_forward, separate
from scaling.kernels.products import products


def gradients(run: object, x: Tensor, weights: list[Tensor]) -> list[Tensor]:
    assert callable(run)
    leaves = [value.detach().clone().requires_grad_() for value in (x, *weights)]
    outputs = run(*leaves)
    generator = torch.Generator().manual_seed(1)
    incoming = [torch.randn(y.shape, generator=generator, dtype=torch.float64).to(y) for y in outputs]
    return [*(y.detach() for y in outputs), *torch.autograd.grad(outputs, leaves, incoming)]


@given(
    axes=st.lists(st.integers(1, 4), max_size=3),
    width=st.integers(1, 5),
    sides=st.lists(st.integers(1, 6), min_size=1, max_size=4),
)
def test_equal_to_separate_maps_in_float64(axes: list[int], width: int, sides: list[int]) -> None:
    """Outputs and every gradient, any number of maps and leading axes."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(*axes, width, generator=generator, dtype=torch.float64)
    weights = [torch.randn(side, width, generator=generator, dtype=torch.float64) for side in sides]
    eps = torch.finfo(torch.float64).eps
    for found, expected in zip(gradients(products, x, weights), gradients(separate, x, weights), strict=True):
        torch.testing.assert_close(found, expected, rtol=64 * eps, atol=64 * eps)


def test_an_unused_output_costs_nothing() -> None:
    """Its weight gets no gradient, as from a map of its own; the input gets those of the others."""
    x, *weights = (torch.randn(2, 3, dtype=torch.float64, requires_grad=True) for _ in range(4))
    first, _, last = products(x, *weights)
    found = torch.autograd.grad((first.sum() + 2 * last.sum()), (x, *weights), allow_unused=True)
    assert found[2] is None
    expected = (weights[0].sum(0) + 2 * weights[2].sum(0)).expand(2, 3)
    torch.testing.assert_close(found[0], expected, rtol=1e-14, atol=1e-14)
    assert found[1] is not None and found[3] is not None


def test_autocast_leaves_float64_alone() -> None:
    """As it does with a linear map."""
    x, weight = (torch.randn(2, 3, dtype=torch.float64) for _ in range(2))
    with torch.autocast("cpu", torch.bfloat16):
        (found,), expected = products(x, weight), torch.nn.functional.linear(x, weight)
    assert found.dtype == torch.float64
    assert torch.equal(found, expected)


def test_roundings_in_sixteen_bits(device: torch.device) -> None:
    """In bfloat16 the input's gradient has the roundings of three products and two sums at most."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 64, generator=generator).to(device, torch.bfloat16)
    weights = [torch.randn(side, 64, generator=generator).to(device, torch.bfloat16) for side in (64, 32, 32)]
    leaf = x.clone().requires_grad_()
    outputs = products(leaf, *weights)
    incoming = [torch.randn(y.shape, generator=generator).to(y) for y in outputs]
    (found,) = torch.autograd.grad(outputs, leaf, incoming)
    parts = torch.stack([g.double() @ weight.double() for g, weight in zip(incoming, weights, strict=True)])
    error = (found.double() - parts.sum(0)).abs()
    largest = parts.abs().sum(0)
    assert bool((error <= 5 * torch.finfo(torch.bfloat16).eps / 2 * largest).all())


def test_compiles_without_a_break_and_follows_autocast(device: torch.device) -> None:
    """One graph; under autocast outputs have its dtype and gradients the weights'."""
    x = torch.randn(2, 3, 16, device=device, requires_grad=True)
    weights = [torch.randn(side, 16, device=device, requires_grad=True) for side in (16, 8)]

    def run(x: Tensor, *weights: Tensor) -> Tensor:
        return torch.stack([y.float().square().sum() for y in products(x, *weights)]).sum()

    plain = torch.autograd.grad(run(x, *weights), (x, *weights))
    compiled = torch.compile(run, fullgraph=True, backend="aot_eager")
    for found, expected in zip(torch.autograd.grad(compiled(x, *weights), (x, *weights)), plain, strict=True):
        torch.testing.assert_close(found, expected)
    with torch.autocast(device.type, torch.bfloat16):
        outputs = products(x, *weights)
    assert [y.dtype for y in outputs] == [torch.bfloat16] * 2
    narrow = torch.autograd.grad([y.float().square().sum() for y in outputs], (x, *weights))
    assert [g.dtype for g in narrow] == [torch.float32] * 3
    for found, expected in zip(narrow, plain, strict=True):
        torch.testing.assert_close(found, expected, rtol=0.1, atol=0.1 * float(expected.abs().max()))


@pytest.mark.slow
def test_no_gradient_is_written_twice(device: torch.device) -> None:
    """The compiler's code hands the same buffers to the sum of input gradients and to the weights' products."""
    if device.type == "cpu" and shutil.which("g++") is None:
        pytest.skip("torch.compile needs g++ on a CPU")
    kind: dict[str, Any] = {"device": device, "dtype": torch.bfloat16, "requires_grad": True}
    weights = [torch.randn(size, **kind) for size in ((160, 64), (160, 64), (64, 160))]
    compiled = torch.compile(lambda x, *weights: feed_forward(products, x, *weights), fullgraph=True)

    def step() -> None:
        compiled(torch.randn(2, 8, 64, **kind), *weights).float().sum().backward()

    with torch._functorch.config.patch(enable_autograd_cache=False):  # it does not see operators' backward change
        _, (_, backward) = run_and_get_code(step)
    (summed,) = re.findall(r"isoloss\.input_gradient\.default\(\[(.*?)\], \[primals", backward)
    multiplied = re.findall(r"mm\(reinterpret_tensor\((buf\d+), \(160, 16\), \(1, 160\)", backward)
    assert len(multiplied) == 2 and set(re.findall(r"buf\d+", summed)) == set(multiplied)
