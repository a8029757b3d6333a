"""The benchmark's decoder: what is timed beside each other computes the same."""

from __future__ import annotations

import pytest
import torch

from scaling.kernels.benchmark import make_decoder
from scaling.kernels.decoder import Shape

TINY = Shape(name="tiny", width=64, layers=1, query_heads=2, kv_heads=1, ffn=32, batch=1, time=3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["delta", "msar", "hc", "mhc"])
def test_implementations_agree(method: str, device: torch.device) -> None:
    """Loss and gradients by our kernels are those of PyTorch."""
    tokens = torch.tensor([[3, 1, 4]], device=device)
    found = []
    for implementation in ("kernels", "eager"):
        torch.manual_seed(0)
        model = make_decoder(TINY, 7, method, implementation)
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.joining.values():
                parameter.add_(torch.randn(parameter.shape, generator=generator), alpha=0.1)
        model.compiled = False
        model.to(device)
        loss = model(tokens, tokens.roll(-1, 1))
        loss.backward()
        gradients = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
        found.append({"loss": loss.detach(), **gradients})
    ours, plain = found
    assert set(plain) <= set(ours)
    for name, expected in plain.items():
        torch.testing.assert_close(ours[name], expected, rtol=1e-3, atol=2e-6, msg=name)
