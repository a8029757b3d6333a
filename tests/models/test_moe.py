"""The mixture of experts: each token's own experts, weights, biases and loads."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from scaling.config.model import ModelConfig, MoEConfig
from scaling.config.residual import Baseline
from scaling.models.transformer import Transformer


def make(**options: int | float) -> Any:
    moe = MoEConfig(**{"num_experts": 5, "top_k": 2, "d_expert": 6, "num_shared_experts": 2, **options})  # type: ignore[arg-type]
    config = ModelConfig(num_layers=2, d_model=8, num_heads=2, num_kv_heads=1, d_ffn=12, vocab_size=16, moe=moe)
    model = Transformer(config).double()
    model.init_weights(0)
    mlp = next(iter(model.mixtures()))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in mlp.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    return mlp


def swiglu(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T


@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_each_token_gets_its_experts(top_k: int) -> None:
    mlp = make(top_k=top_k)
    h = torch.randn(3, 4, 8, dtype=torch.float64)
    mlp.bias_E += torch.tensor([0.3, -0.2, 0.0, 0.1, -0.4])
    out = mlp(h)
    for b in range(3):
        for t in range(4):
            x = h[b, t] / torch.sqrt((h[b, t] ** 2).mean() + 1e-6) * mlp.norm.weight
            scores = torch.sigmoid(mlp.router.weight @ x)
            chosen = sorted(range(5), key=lambda e: -float(scores[e].detach() + mlp.bias_E[e]))[:top_k]
            total = sum(scores[e] for e in chosen)
            experts = mlp.experts
            expected = sum(
                scores[e] / total * swiglu(x, experts.gate_EFD[e], experts.up_EFD[e], experts.down_EDF[e])
                for e in chosen
            )
            assert mlp.shared is not None
            shared = mlp.shared
            expected = expected + swiglu(x, shared.gate.weight, shared.up.weight, shared.down.weight)
            torch.testing.assert_close(out[b, t], expected)


def test_bias_moves_against_the_load_and_steers_choices_only() -> None:
    mlp = make()
    h = torch.randn(8, 16, 8, dtype=torch.float64)
    mlp(h)
    load = mlp.load_E
    assert load is not None
    assert int(load.sum()) == 8 * 16 * 2  # no token is dropped
    mlp.update_bias(load)
    assert mlp.load_E is None
    expected = 1e-3 * torch.sign(load.double().mean() - load)
    torch.testing.assert_close(mlp.bias_E, expected, rtol=1e-6, atol=0)
    for _ in range(400):
        mlp(h)
        assert mlp.load_E is not None
        mlp.update_bias(mlp.load_E)
    mlp(h)
    assert mlp.load_E is not None
    assert float(mlp.load_E.max()) < float(load.max())


def test_no_load_is_kept_in_evaluation() -> None:
    mlp = make().eval()
    mlp(torch.randn(1, 4, 8, dtype=torch.float64))
    assert mlp.load_E is None


def test_statistics_of_the_load_sum_over_processes() -> None:
    moe = MoEConfig(num_experts=4, top_k=1, d_expert=8)
    config = ModelConfig(
        num_layers=3, d_model=16, num_heads=2, num_kv_heads=2, d_ffn=16, vocab_size=32, residual=Baseline(), moe=moe
    )
    model = Transformer(config)
    model.init_weights(0)
    model.after_step()
    assert model.statistics() == {}
    model(torch.randint(0, 32, (2, 16)))
    loads = [mlp.load_E.clone() for mlp in model.mixtures() if mlp.load_E is not None]
    assert len(loads) == 2  # the first layer is dense
    even = torch.full((4,), 100)

    def add_another_process(load_LE: Tensor) -> None:
        load_LE += even

    model.after_step(add_another_process)
    told = model.statistics()
    shares = torch.stack([load + even for load in loads]).double()
    shares = shares / shares.sum(-1, keepdim=True)
    assert told["moe/load_max"] == pytest.approx(float(4 * shares.max()))
    assert told["moe/load_min"] == pytest.approx(float(4 * shares.min()))
    entropy = float(-(shares * shares.log()).sum(-1).mean())
    assert told["moe/load_entropy"] == pytest.approx(entropy / math.log(4))
    assert told["moe/dropped"] == 0.0
    for mlp, load in zip(model.mixtures(), loads, strict=True):
        assert mlp.load_E is None
        expected = 1e-3 * torch.sign((load + even).double().mean() - (load + even))
        torch.testing.assert_close(mlp.bias_E.double(), expected, rtol=1e-6, atol=0)


def test_biases_start_at_zero_again() -> None:
    config = ModelConfig(
        num_layers=2, d_model=16, num_heads=2, num_kv_heads=2, d_ffn=16, vocab_size=32, moe=MoEConfig(num_experts=8)
    )
    model = Transformer(config)
    for mlp in model.mixtures():
        mlp.bias_E.fill_(3.0)
    model.init_weights(0)
    assert all(not mlp.bias_E.any() for mlp in model.mixtures())


@pytest.mark.parametrize("tokens", [1, 24])
def test_grouped_product_equals_the_loop(tokens: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a GPU computes in one grouped product: the loop's result and gradients, experts without tokens included."""
    generator = torch.Generator().manual_seed(0)
    experts = make(num_experts=5, d_expert=16).experts.bfloat16()
    experts.gate_EFD, experts.up_EFD, experts.down_EDF = (
        torch.nn.Parameter(torch.randn(shape, generator=generator, dtype=torch.bfloat16))
        for shape in ((5, 16, 32), (5, 16, 32), (5, 32, 16))
    )
    x_nD = torch.randn(tokens, 32, generator=generator, dtype=torch.bfloat16, requires_grad=True)
    counts_E = torch.bincount(torch.randint(1, 4, (tokens,), generator=generator), minlength=5)
    cotangent = torch.randn(tokens, 32, generator=generator, dtype=torch.bfloat16)
    results = []
    for grouped in (False, True):
        monkeypatch.setattr("scaling.models.moe._has_grouped_product", lambda x, grouped=grouped: grouped)
        out = experts(x_nD, counts_E)
        results.append((out, *torch.autograd.grad(out, [x_nD, *experts.parameters()], cotangent)))
    for loop, grouped_product in zip(*results, strict=True):
        scale = loop.abs().max()
        assert ((loop - grouped_product).abs().max() / scale) < 4 * torch.finfo(torch.bfloat16).eps
