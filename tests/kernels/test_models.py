"""Whole models: with the kernels, loss and every gradient are those of plain PyTorch in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from scaling.config.model import ModelConfig, MoEConfig
from scaling.config.residual import AttnRes, Delta, HyperConnections, Mhar, Mhc, Msar, ResidualConfig
from scaling.kernels import dispatch
from scaling.models.residual.attnres import DepthRouting
from scaling.models.residual.banked import BankedDelta, BankedGroups, BankedState
from scaling.models.residual.hc import FusedHyperState
from scaling.models.residual.mhc import FusedMhcState
from scaling.models.residual.msar import BankedStreams
from scaling.models.transformer import Transformer

METHODS: dict[str, tuple[ResidualConfig, type]] = {
    "attnres": (AttnRes(), BankedState),
    "mhar": (Mhar(heads=2), BankedState),
    "block": (Mhar(heads=2, block_sublayers=2), BankedState),
    "per-head": (Mhar(heads=2, key_norm="per_head", source="cumulative"), BankedState),
    "groups": (Mhar(heads=2, align="kv_groups"), BankedGroups),
    "groups-block": (Mhar(heads=2, align="kv_groups", block_sublayers=2), BankedGroups),
    "delta": (Delta(heads=2), BankedDelta),
    "delta-null": (Delta(heads=2, gate="learned", null_source=True), BankedDelta),
    "msar-block": (Msar(streams=2, kernels=(3,), block_sublayers=2), BankedStreams),
    "msar-site": (Msar(streams=2, kernels=(2,), num_blocks=1, conv_scope="site", gain="stream"), BankedStreams),
    "hc": (HyperConnections(streams=2), FusedHyperState),
    "mhc": (Mhc(streams=2, sinkhorn_iterations=3), FusedMhcState),
    "delta-block": (Delta(heads=2, null_source=True, block_sublayers=3, block_delta="recursive"), BankedDelta),
}


def build(residual: ResidualConfig, device: torch.device, **sizes: Any) -> Transformer:
    """A tiny model, every parameter of the method moved away from its start."""
    shape: dict[str, Any] = {"num_layers": 2, "d_model": 32, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 16} | sizes
    model = Transformer(ModelConfig(residual=residual, vocab_size=13, **shape))
    model.init_weights(0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.residual.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.3)
    return model.to(device)


def gradients(model: Transformer, document_BT: torch.Tensor | None = None) -> dict[str, torch.Tensor]:
    """Loss and gradients on fixed tokens."""
    tokens = torch.arange(6, device=model.embedding.weight.device).view(2, 3)
    hidden = model(tokens, document_BT)
    loss = torch.nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


def compare(
    residual: ResidualConfig,
    state: type,
    monkeypatch: pytest.MonkeyPatch,
    device: torch.device,
    document_BT: torch.Tensor | None = None,
    **sizes: Any,
) -> None:
    """Hold a model with kernels in float32 to PyTorch in float64."""
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    truth = gradients(build(residual, device, **sizes).double(), document_BT)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    model = build(residual, device, **sizes)
    assert type(model.residual.start(torch.zeros(1, 1, model.config.d_model, device=device), None)) is state
    found = gradients(model, document_BT)
    assert {key for key in truth if float(truth[key].abs().max())} <= set(found)
    for key, value in truth.items():
        torch.testing.assert_close(found[key].double(), value, rtol=2e-4, atol=1e-6, msg=key)


@pytest.mark.slow
@pytest.mark.parametrize("name", METHODS)
def test_gradients_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Every way to route over depth: heads, blocks, norms, key/value groups, streams with gates and null sources."""
    residual, state = METHODS[name]
    document_BT = torch.tensor([[0, 0, 1], [0, 0, 0]], device=device) if "msar" in name else None
    layers = 2 if "block" in name else 1
    compare(residual, state, monkeypatch, device, document_BT, num_layers=layers)


def test_norms_are_fused_where_it_pays(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Not in checkpointed or sharded sublayers, nor in front of experts; the reason is told."""
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    model = build(Mhar(heads=2), device, moe=MoEConfig(num_experts=2, top_k=1, d_expert=8, num_dense_layers=1))
    assert isinstance(model.residual, DepthRouting)
    state = model.residual.banked(torch.zeros(1, 1, 32, device=device))
    fused = [state.fused_gain(sublayer) is not None for sublayer in model.sublayers()]
    assert fused == [True, True, True, False]
    model.residual.recomputed = True
    assert state.fused_gain(next(model.sublayers())) is None
    assert "one more tensor a site" in dispatch.describe(device, recomputed=True)["routed_norm"]
    assert "gains are sharded" in dispatch.describe(device, sharded=True)["routed_norm"]
