"""Whole models: with the kernels, loss and every gradient are those of plain PyTorch."""

from __future__ import annotations

import pytest
import torch

from scaling.config.model import ModelConfig
from scaling.config.residual import AttnRes, Mhar
from scaling.kernels import dispatch
from scaling.models.residual.attnres import DepthRouting
from scaling.models.residual.banked import BankedState
from scaling.models.transformer import Transformer

METHODS = {"attnres": AttnRes(), "mhar": Mhar(heads=2), "block": Mhar(heads=2, block_sublayers=2)}


def _run(
    config: ModelConfig, monkeypatch: pytest.MonkeyPatch, device: torch.device, mode: str
) -> dict[str, torch.Tensor]:
    monkeypatch.setenv(dispatch.VARIABLE, mode)
    model = Transformer(config)
    model.init_weights(0)
    assert isinstance(model.residual, DepthRouting)
    with torch.no_grad():
        model.residual.query_SD.normal_(std=0.3, generator=torch.Generator().manual_seed(1))
    model.to(device)
    tokens = torch.arange(4, device=device).view(1, 4) % config.vocab_size
    assert isinstance(model.residual.start(model.embedding(tokens), None), BankedState) == (mode == "triton")
    hidden = model(tokens)
    loss = torch.nn.functional.cross_entropy(model.logits(hidden).flatten(0, 1), tokens.roll(-1, 1).flatten())
    loss.backward()
    found = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"loss": loss.detach(), **found}


@pytest.mark.slow
@pytest.mark.parametrize("name", ["attnres", "mhar", "block"])
def test_gradients_of_a_model(name: str, monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """Full routing with one and two heads, and blocks of two sublayers."""
    config = ModelConfig(
        residual=METHODS[name], num_layers=2, d_model=32, num_heads=4, num_kv_heads=2, d_ffn=48, vocab_size=13
    )
    plain, fused = (_run(config, monkeypatch, device, mode) for mode in ("reference", "triton"))
    assert {key for key in plain if float(plain[key].abs().max())} <= set(fused)
    for key, value in plain.items():
        torch.testing.assert_close(fused[key], value, rtol=2e-4, atol=1e-6, msg=key)
