"""The optimiser against torch's own class, its groups, its guards and its average."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from scaling.config.training import OptimizerConfig
from scaling.distributed import World
from scaling.optim import Optimizer, is_decayed

SHAPES = {"embedding.weight": (7, 4), "norm.weight": (4,), "residual.query": (3, 4), "layer.weight": (4, 4)}
CONNECTIONS = {"residual.query"}


def parameters() -> dict[str, nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return {name: nn.Parameter(torch.randn(shape, generator=generator)) for name, shape in SHAPES.items()}


def set_gradients(named: dict[str, nn.Parameter], step: int) -> None:
    generator = torch.Generator().manual_seed(100 + step)
    for parameter in named.values():
        parameter.grad = 3 * torch.randn(parameter.shape, generator=generator).to(parameter.dtype)


@pytest.mark.parametrize(
    ("options", "decayed"),
    [
        ({}, {"embedding.weight", "layer.weight"}),
        ({"decay_connections": True}, {"embedding.weight", "layer.weight", "residual.query"}),
        ({"decay": "all"}, set(SHAPES)),
    ],
)
def test_decay_groups(options: dict[str, object], decayed: set[str]) -> None:
    config = OptimizerConfig(**options)  # type: ignore[arg-type]
    assert {name for name, p in parameters().items() if is_decayed(name, p, config, CONNECTIONS)} == decayed


def test_updates_are_those_of_adamw() -> None:
    config = OptimizerConfig(lr=1e-2, weight_decay=0.1, eps=1e-6)
    own, other = parameters(), parameters()
    optimizer = Optimizer(own, config, CONNECTIONS, World())
    groups = [
        {"params": [other["embedding.weight"], other["layer.weight"]], "weight_decay": 0.1},
        {"params": [other["norm.weight"], other["residual.query"]], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1.0, betas=(0.9, 0.95), eps=1e-6)
    for step in range(5):
        lr = 1e-2 / (step + 1)
        set_gradients(own, step)
        set_gradients(other, step)
        expected = nn.utils.clip_grad_norm_(list(other.values()), 1.0)
        for group in reference.param_groups:
            group["lr"] = lr
        reference.step()
        torch.testing.assert_close(optimizer.update(lr), expected)
    for name in SHAPES:
        torch.testing.assert_close(own[name], other[name])
    assert optimizer.updates == 5
    assert all(parameter.grad is None for parameter in own.values())


def test_a_gradient_that_is_not_finite_changes_nothing_where_skipped() -> None:
    own = parameters()
    optimizer = Optimizer(own, OptimizerConfig(skip_nonfinite=True), CONNECTIONS, World())
    set_gradients(own, 0)
    optimizer.update(1e-2)
    before = {name: parameter.detach().clone() for name, parameter in own.items()}
    moments = [optimizer.moment(shard, "exp_avg").clone() for shard in optimizer.shards]
    set_gradients(own, 1)
    own["layer.weight"].grad[0, 0] = torch.inf  # type: ignore[index]
    assert not optimizer.update(1e-2).isfinite()
    assert all(torch.equal(before[name], parameter) for name, parameter in own.items())
    assert all(
        torch.equal(old, optimizer.moment(s, "exp_avg")) for old, s in zip(moments, optimizer.shards, strict=True)
    )
    assert optimizer.updates == 1


def test_moving_average() -> None:
    own = parameters()
    optimizer = Optimizer(own, OptimizerConfig(ema_decay=0.9), CONNECTIONS, World())
    expected = {name: parameter.detach().clone() for name, parameter in own.items()}
    for step in range(3):
        set_gradients(own, step)
        optimizer.update(1e-1)
        expected = {name: 0.9 * expected[name] + 0.1 * own[name].detach() for name in own}
    after = {name: parameter.detach().clone() for name, parameter in own.items()}
    with optimizer.averaged():
        for name in own:
            torch.testing.assert_close(own[name].detach(), expected[name])
    assert all(torch.equal(after[name], own[name]) for name in own)


def test_average_of_bf16_weights_is_kept_in_fp32() -> None:
    own = {name: nn.Parameter(p.detach().bfloat16()) for name, p in parameters().items()}
    optimizer = Optimizer(own, OptimizerConfig(ema_decay=0.999), CONNECTIONS, World())
    start = {name: average.clone() for name, average in optimizer.ema.items()}
    set_gradients(own, 0)
    optimizer.update(1e-1)
    assert all(average.dtype == torch.float32 for average in optimizer.ema.values())
    assert not torch.equal(start["layer.weight"], optimizer.ema["layer.weight"])
