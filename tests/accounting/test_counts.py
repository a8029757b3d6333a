"""Counts against hand computation, the modules themselves, and torch's FLOP counter."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from scaling.accounting import count_flops, count_parameters, estimate_memory
from scaling.config.ladder import SIZES, shape
from scaling.config.model import ModelConfig
from scaling.config.residual import METHODS, Mhar
from scaling.config.training import DataConfig, PrecisionConfig
from scaling.config.tree import RunConfig
from scaling.models.transformer import Transformer


def sized(size: str, **more: Any) -> ModelConfig:
    """A named size with some fields changed."""
    fields: dict[str, Any] = {**shape(size), **more}
    return ModelConfig(**fields)


def test_100m_by_hand() -> None:
    # d 512, 12 layers, 8 heads of 64, 4 key/value heads, feed-forward 1536, vocabulary 151,936.
    count = count_parameters(sized("100m"))
    attention_layer = 512 * 512 + 512 * 256 + 512 * 256 + 512 * 512  # q, k, v, output
    assert count.groups == {
        "embedding": 151_936 * 512,
        "attention": 12 * attention_layer,
        "mlp": 12 * 3 * 512 * 1536,
        "norms": 12 * (512 + 512 + 64 + 64) + 512,
        "routing": 0,
    }
    assert count.total == 115_554_304
    assert count.non_embedding == 37_763_072
    flops = count_flops(sized("100m"), 2048)
    by_hand = 2 * (12 * attention_layer + 12 * 3 * 512 * 1536 + 151_936 * 512) + 12 * 2 * 2 * 512 * (2048 + 1) / 2
    assert flops.forward == by_hand
    assert flops.training == 3 * by_hand
    assert flops.six_nd == 6 * 37_763_072
    assert flops.six_nd_total == 6 * 115_554_304
    assert flops.routing == 0


def test_350m_by_hand() -> None:
    # d 1024, 24 layers, 16 heads of 64, 8 key/value heads, feed-forward 4096; mhar: query and gain at 49 sites.
    config = sized("350m", residual=Mhar(heads=8))
    count = count_parameters(config)
    assert count.groups["attention"] == 24 * (2 * 1024 * 1024 + 2 * 1024 * 512)
    assert count.groups["mlp"] == 24 * 3 * 1024 * 4096
    assert count.groups["routing"] == 2 * 1024 * 49
    assert count.total == 533_123_072 + 100_352
    pairs = 49 * 50 // 2
    assert count_flops(config, 1024).groups["routing"] == 4 * 1024 * pairs + 2 * 1024 * 49
    assert count_flops(config, 1024).routing == 3 * (4 * 1024 * pairs + 2 * 1024 * 49)


def test_1b_by_hand_and_the_paper_s_overhead() -> None:
    # d 1280, 36 layers, 16 heads of 80, 8 key/value heads, feed-forward 5120.
    base = count_parameters(sized("1b"))
    assert base.non_embedding == 36 * (2 * 1280 * 1280 + 2 * 1280 * 640 + 3 * 1280 * 5120 + 2 * 1280 + 160) + 1280
    assert base.total == base.non_embedding + 151_936 * 1280 == 1_079_313_280
    mhar = count_parameters(sized("1b", residual=Mhar()))
    # "the extra parameters are only +0.02%" at 1B (arXiv 2607.27230, appendix F)
    assert round(100 * (mhar.total / base.total - 1), 2) == 0.02


def test_small_sizes_are_named_by_their_non_embedding_parameters() -> None:
    units = {"k": 1e3, "m": 1e6}
    for size in SIZES.keys() - {"100m", "350m", "1b"}:  # those are the MHAR paper's names for its totals
        nominal = float(size[:-1]) * units[size[-1]]
        actual = count_parameters(sized(size)).non_embedding
        assert abs(actual / nominal - 1) < 0.08, (size, actual)


@pytest.mark.parametrize("method", sorted(METHODS))
@pytest.mark.parametrize("size", ["50k", "500k"])
def test_parameters_are_those_of_the_module(size: str, method: str) -> None:
    config = sized(size, residual=METHODS[method]())
    with torch.device("meta"):
        model = Transformer(config)
    assert count_parameters(config).total == sum(p.numel() for p in model.parameters())


@pytest.mark.parametrize("seq_len", [7, 32])
def test_flops_are_those_of_torch_s_counter(seq_len: int) -> None:
    config = ModelConfig(num_layers=3, d_model=48, num_heads=6, num_kv_heads=2, d_ffn=80, vocab_size=97, head_dim=10)
    model = Transformer(config)
    model.init_weights(0)
    tokens_BT = torch.zeros(2, seq_len, dtype=torch.long)
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        loss = model.logits(model(tokens_BT)).sum()
        forward = counter.get_total_flops()
        loss.backward()
    expected = count_flops(config, seq_len, causal=False)
    assert forward == 2 * seq_len * expected.forward
    assert counter.get_total_flops() == 2 * seq_len * expected.training


def test_causal_attention_counts_the_pairs_there_are() -> None:
    config = sized("50k")
    for seq_len in (1, 5, 128):
        pairs = sum(t + 1 for t in range(seq_len))
        per_token = count_flops(config, seq_len).groups["attention_scores"]
        assert per_token * seq_len == pytest.approx(pairs * 4 * 48 * 2)


def test_bytes_of_parameters_gradients_and_optimizer() -> None:
    config = sized("500k")
    total = count_parameters(config).total
    mixed = estimate_memory(RunConfig(model=config))
    assert (mixed.parameters, mixed.gradients, mixed.optimizer) == (4 * total, 4 * total, 8 * total)
    half = estimate_memory(RunConfig(model=config, precision=PrecisionConfig(mode="bf16")))
    assert (half.parameters, half.gradients, half.optimizer) == (2 * total, 2 * total, 4 * total)
    assert half.total == half.parameters + half.gradients + half.optimizer + half.activations + half.logits


@pytest.mark.parametrize("method", ["baseline", "mhar"])
def test_bytes_of_activations_are_those_kept_for_the_backward_pass(method: str) -> None:
    config = sized("500k", vocab_size=256, residual=METHODS[method]())
    model = Transformer(config)
    model.init_weights(0)
    kept: dict[int, int] = {}
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        hidden_BTD = model(torch.zeros(4, 128, dtype=torch.long))
    run = RunConfig(model=config, data=DataConfig(seq_len=128, batch_size=4), precision=PrecisionConfig(mode="fp32"))
    assert hidden_BTD.requires_grad
    # On the CPU a norm is not fused and keeps x * scale besides what the estimate counts.
    norms = (config.num_sublayers + 1) * config.d_model + 4 * (6 + 3) * 16
    kept_elements = sum(kept.values()) / 4 / (4 * 128)
    assert estimate_memory(run).activations / 4 / (4 * 128) + norms == pytest.approx(kept_elements, rel=0.02)
