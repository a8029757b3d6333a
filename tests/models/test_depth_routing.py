"""Attention over depth (``attnres``, ``mhar``): the definition, and the identities that hold exactly."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scaling.config.residual import AttnRes, Baseline, Mhar, ResidualConfig
from scaling.models.residual.routing import depth_logits, mix, routing_weights

Build = Callable[..., Any]  # tests reach into the parts of a model by name
BLOCKS: tuple[dict[str, Any], ...] = ({"block_sublayers": 2}, {"num_blocks": 2}, {"num_blocks": 1})
TINY_EPS = 1e-30  # stands for eps -> 0, where the mean of sources and their sum are the same after the norm


def route_by_definition(sources: list[Tensor], query: Tensor, gain: Tensor, heads: int, eps: float) -> Tensor:
    """One site written out: norm every source over the full width, slice, softmax over sources, mix."""
    out = torch.zeros_like(sources[0])
    width = query.shape[0] // heads
    for head in range(heads):
        part = slice(head * width, (head + 1) * width)
        logits = []
        for source in sources:
            normed = source / torch.sqrt((source * source).mean(-1, keepdim=True) + eps) * gain
            logits.append((normed[..., part] * query[part]).sum(-1))
        weights = torch.stack(logits).softmax(0)
        for weight, source in zip(weights, sources, strict=True):
            out[..., part] += weight[..., None] * source[..., part]
    return out


@settings(max_examples=30)
@given(
    heads=st.sampled_from([1, 2, 3, 8]), width=st.integers(1, 5), num_sources=st.integers(1, 7), seed=st.integers(0, 99)
)
def test_a_site_is_its_definition(heads: int, width: int, num_sources: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    d = heads * width
    sources, query, gain = [draw(2, 3, d) for _ in range(num_sources)], draw(d), draw(d)
    keys_SHC = (query * gain).view(1, heads, width)
    weights = routing_weights([depth_logits(source, keys_SHC, eps=1e-6)[0] for source in sources])
    torch.testing.assert_close(
        mix(weights, sources), route_by_definition(sources, query, gain, heads, 1e-6), rtol=1e-11, atol=1e-12
    )


def test_gradients_of_the_mixture_and_the_logits() -> None:
    generator = torch.Generator().manual_seed(0)
    sources = [torch.randn(2, 2, 6, generator=generator, dtype=torch.float64).requires_grad_() for _ in range(3)]
    keys = torch.randn(4, 3, 2, generator=generator, dtype=torch.float64).requires_grad_()

    def site(keys: Tensor, *sources: Tensor) -> Tensor:
        logits = [depth_logits(source, keys, eps=1e-6)[i] for i, source in enumerate(sources)]
        return mix(routing_weights(logits), list(sources))

    assert torch.autograd.gradcheck(site, (keys, *sources))


@pytest.mark.parametrize("blocks", [{}, {"block_sublayers": 2}, {"num_blocks": 1}], ids=str)
def test_one_head_is_attnres_bit_for_bit(
    build: Build, perturb: Callable[..., Any], tokens_BT: Tensor, blocks: dict[str, Any]
) -> None:
    single, multi = perturb(build(AttnRes(**blocks))), perturb(build(Mhar(heads=1, **blocks)))
    a, b = single(tokens_BT), multi(tokens_BT)
    assert torch.equal(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    for (name, p), q in zip(single.named_parameters(), multi.parameters(), strict=True):
        assert p.grad is not None and q.grad is not None
        assert torch.equal(p.grad, q.grad), name


@pytest.mark.parametrize(
    "options",
    [AttnRes(), Mhar(heads=8), Mhar(heads=3)] + [cls(**kind) for cls in (AttnRes, Mhar) for kind in BLOCKS],
    ids=repr,
)
def test_zero_queries_give_the_prenorm_function(build: Build, tokens_BT: Tensor, options: ResidualConfig) -> None:
    expected = build(Baseline(), norm_eps=TINY_EPS)
    model = build(options, norm_eps=TINY_EPS)
    target = torch.randn(*tokens_BT.shape, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(2))
    a, b = expected(tokens_BT), model(tokens_BT)
    assert float((a - b).detach().norm() / a.detach().norm()) < 1e-10
    (a * target).sum().backward()
    (b * target).sum().backward()
    gradients = dict(model.named_parameters())
    for name, parameter in expected.named_parameters():
        p, q = parameter.grad, gradients[name].grad
        assert p is not None and q is not None
        assert float((p - q).norm()) <= 1e-9 * float(p.norm()), name


@pytest.mark.parametrize("options", [AttnRes(), Mhar(heads=4)], ids=lambda o: o.method)
def test_a_site_with_one_source_returns_it_and_leaves_its_query_alone(
    build: Build, perturb: Callable[..., Any], tokens_BT: Tensor, options: ResidualConfig
) -> None:
    model = perturb(build(options))
    embedding_BTD = model.embedding(tokens_BT)
    assert model.residual.start(embedding_BTD, None).read(0) is embedding_BTD
    model(tokens_BT).square().sum().backward()
    for parameter in model.residual.parameters():
        assert parameter.grad is not None
        assert torch.equal(parameter.grad[0], torch.zeros_like(parameter.grad[0]))
        assert bool((parameter.grad[1:] != 0).any(dim=-1).all())


def test_scaling_a_source_leaves_its_logits() -> None:
    source = torch.randn(1, 4, 6, dtype=torch.float64)
    keys = torch.randn(2, 3, 2, dtype=torch.float64)
    for a, b in zip(depth_logits(source, keys, eps=0.0), depth_logits(1e3 * source, keys, eps=0.0), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("method", [AttnRes, Mhar])
def test_blocks_of_one_sublayer_are_full_routing(
    build: Build,
    perturb: Callable[..., Any],
    tokens_BT: Tensor,
    method: Callable[..., Any],
) -> None:
    full, by_one, by_count = (
        perturb(build(method(**kind)))(tokens_BT) for kind in ({}, {"block_sublayers": 1}, {"num_blocks": 6})
    )
    assert torch.equal(full, by_one)
    assert torch.equal(full, by_count)


@pytest.mark.parametrize("block_sublayers", [1, 2, 3, 4, 6])
def test_block_sources_are_sums_of_outputs(
    build: Build, perturb: Callable[..., Any], tokens_BT: Tensor, block_sublayers: int
) -> None:
    model = perturb(build(Mhar(heads=4, block_sublayers=block_sublayers)))
    state = model.residual.start(model.embedding(tokens_BT), None)
    outs: list[Tensor] = []
    sources = [model.embedding(tokens_BT)]
    query, gain = model.residual.query_SD, model.residual.gain_SD
    for site in range(7):
        begun = len(outs) % block_sublayers
        visible = list(sources)
        if begun and site < 6:
            visible.append(torch.stack(outs[-begun:]).sum(0))
        expected = route_by_definition(visible, query[site], gain[site], 4, model.config.norm_eps)
        torch.testing.assert_close(state.read(site), expected, rtol=1e-10, atol=1e-12)
        if site < 6:
            generator = torch.Generator().manual_seed(site)
            outs.append(torch.randn(2, 9, 24, dtype=torch.float64, generator=generator))
            state.write(site, outs[-1])
            if len(outs) % block_sublayers == 0 or len(outs) == 6:
                done = (len(outs) - 1) // block_sublayers * block_sublayers
                sources.append(torch.stack(outs[done:]).sum(0))
