"""The backbone: what it computes, how it starts, and what it may not see."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F

from scaling.config.model import ModelConfig
from scaling.config.residual import AttnRes, Baseline, Mhar
from scaling.models.initialisation import Normal, bare_name, draw
from scaling.models.layers import make_context, rotate
from scaling.models.transformer import Transformer

Build = Callable[..., Any]  # tests reach into the parts of a model by name


def plain_decoder(model: Transformer, tokens_BT: Tensor) -> Tensor:
    """The pre-norm decoder written out once more, head by head and without fused operations."""
    weights, config = dict(model.named_parameters()), model.config
    width = config.attention_head_dim

    def norm(x: Tensor, name: str) -> Tensor:
        return x / torch.sqrt((x * x).mean(-1, keepdim=True) + config.norm_eps) * weights[name]

    def rope(x_BTC: Tensor) -> Tensor:
        out = torch.empty_like(x_BTC)
        for t in range(x_BTC.shape[1]):
            for j in range(width // 2):
                angle = t * config.rope_theta ** (-2 * j / width)
                a, b = x_BTC[:, t, j], x_BTC[:, t, j + width // 2]
                out[:, t, j] = a * math.cos(angle) - b * math.sin(angle)
                out[:, t, j + width // 2] = a * math.sin(angle) + b * math.cos(angle)
        return out

    h = weights["embedding.weight"][tokens_BT]
    length = tokens_BT.shape[1]
    future_TT = torch.ones(length, length, dtype=torch.bool).triu(1)
    for i in range(config.num_layers):
        at = f"layers.{i}.attention."
        x = norm(h, at + "norm.weight")
        heads = []
        for head in range(config.num_heads):
            group = head // (config.num_heads // config.num_kv_heads)
            q_rows, k_rows = slice(head * width, (head + 1) * width), slice(group * width, (group + 1) * width)
            q = rope(norm(x @ weights[at + "query.weight"][q_rows].T, at + "query_norm.weight"))
            k = rope(norm(x @ weights[at + "key.weight"][k_rows].T, at + "key_norm.weight"))
            scores = (q @ k.transpose(1, 2) / math.sqrt(width)).masked_fill(future_TT, -math.inf)
            heads.append(scores.softmax(-1) @ (x @ weights[at + "value.weight"][k_rows].T))
        h = h + torch.cat(heads, dim=-1) @ weights[at + "output.weight"].T
        ff = f"layers.{i}.mlp."
        x = norm(h, ff + "norm.weight")
        gate, up = x @ weights[ff + "gate.weight"].T, x @ weights[ff + "up.weight"].T
        h = h + (gate * torch.sigmoid(gate) * up) @ weights[ff + "down.weight"].T
    return norm(h, "norm.weight")


@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (4, 1)], ids=str)
def test_baseline_is_the_decoder_of_its_definition(
    build: Build, perturb: Callable[..., Any], tokens_BT: Tensor, heads: tuple[int, int]
) -> None:
    model = perturb(build(Baseline(), num_heads=heads[0], num_kv_heads=heads[1], head_dim=8))
    torch.testing.assert_close(model(tokens_BT), plain_decoder(model, tokens_BT), rtol=1e-11, atol=1e-12)
    assert model.output_weight_VD is model.embedding.weight


def test_values_depend_on_seed_and_name_only(build: Build) -> None:
    small, large = build(Baseline(), num_layers=2), build(Mhar(heads=4), num_layers=3)
    shared = dict(large.named_parameters())
    for name, parameter in small.named_parameters():
        assert torch.equal(parameter, shared[name]), name
    again, other = build(Baseline(), num_layers=2), build(Baseline(), num_layers=2, seed=1)
    assert torch.equal(again.embedding.weight, small.embedding.weight)
    assert not torch.equal(other.embedding.weight, small.embedding.weight)
    half = build(Baseline(), num_layers=2, dtype=torch.bfloat16)
    assert torch.equal(half.embedding.weight, small.embedding.weight.bfloat16())


def test_wrappers_do_not_change_the_start(build: Build) -> None:
    plain, wrapped = build(Baseline()), build(Baseline(), seed=3)
    wrapped.layers[0].mlp = checkpoint_wrapper(wrapped.layers[0].mlp)
    assert any(name != bare_name(name) for name, _ in wrapped.named_parameters())
    wrapped.init_weights(0)
    expected = dict(plain.named_parameters())
    for name, parameter in wrapped.named_parameters():
        assert torch.equal(parameter, expected[bare_name(name)]), name


def test_normal_values_have_the_stated_spread_and_are_pinned() -> None:
    values = draw(Normal(std=0.02), seed=0, name="embedding.weight", shape=torch.Size([64, 512]))
    assert abs(float(values.mean())) < 5 * 0.02 / math.sqrt(values.numel())
    assert abs(float(values.std()) / 0.02 - 1) < 5 / math.sqrt(2 * values.numel())
    # The first values of seed 0: they must be the same on every machine and in every version.
    torch.testing.assert_close(values[0, :3], torch.tensor(PINNED), rtol=0, atol=0)


PINNED = [-0.009891998954117298, -0.02849602699279785, -0.006867177318781614]


@pytest.mark.parametrize("options", [Baseline(), AttnRes(), Mhar(heads=4)], ids=lambda o: o.method)
def test_documents_packed_into_one_sequence_do_not_meet(
    build: Build, perturb: Callable[..., Any], options: Baseline
) -> None:
    model = perturb(build(options))
    first, second = torch.arange(5), torch.arange(20, 27)
    packed = torch.cat((first, second)).unsqueeze(0)
    document_BT = torch.tensor([[0] * 5 + [1] * 7])
    together = model(packed, document_BT)
    torch.testing.assert_close(together[:, :5], model(first.unsqueeze(0)), rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(together[:, 5:], model(second.unsqueeze(0)), rtol=1e-10, atol=1e-12)


def test_rotation_keeps_lengths_and_depends_on_distance_only() -> None:
    config = ModelConfig(num_layers=1, d_model=8, num_heads=1, num_kv_heads=1, d_ffn=8, vocab_size=8)
    context = make_context(torch.zeros(1, 12, dtype=torch.long), None, config, torch.float64)
    q, k = torch.randn(8, dtype=torch.float64), torch.randn(8, dtype=torch.float64)
    rq, rk = (rotate(x.expand(1, 12, 1, 8), context)[0, :, 0] for x in (q, k))
    torch.testing.assert_close(rq.norm(dim=-1), q.norm().expand(12))
    products = rq @ rk.T
    for offset in range(-5, 6):
        along = products.diagonal(offset)
        torch.testing.assert_close(along, along[:1].expand_as(along))


def test_bfloat16_autocast_keeps_the_stream_and_the_loss_close(build: Build, tokens_BT: Tensor) -> None:
    for options in (Baseline(), Mhar(heads=4)):
        model = build(options, dtype=torch.float32)
        exact = model(tokens_BT)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rounded = model(tokens_BT)
        assert rounded.dtype == torch.float32
        error = float((rounded - exact).detach().norm() / exact.detach().norm())
        assert error < 4 * torch.finfo(torch.bfloat16).eps, (options.method, error)


def test_additions_within_sublayers_change_nothing(build: Build, tokens_BT: Tensor) -> None:
    model = build(Baseline(), dtype=torch.float32)
    found = []
    for apart in (False, True):
        model.residual.recomputed = apart  # then the stream adds by itself
        hidden_BTD = model(tokens_BT)
        gradients = torch.autograd.grad(hidden_BTD.square().sum(), list(model.parameters()))
        found.append([hidden_BTD, *gradients])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_names_of_connection_parameters(build: Build) -> None:
    assert build(Baseline()).connection_parameters() == set()
    assert build(Mhar(heads=4)).connection_parameters() == {"residual.query_SD", "residual.gain_SD"}


def test_logits_use_the_tied_embedding(build: Build, tokens_BT: Tensor) -> None:
    model = build(Baseline())
    hidden_BTD = model(tokens_BT)
    torch.testing.assert_close(model.logits(hidden_BTD), F.linear(hidden_BTD, model.embedding.weight))
