"""The benchmark: what is timed beside each other computes the same, and every call runs."""

from __future__ import annotations

import pytest
import torch

from scaling.kernels.benchmark import make_decoder
from scaling.kernels.decoder import Shape
from scaling.kernels.timed import OPERATIONS, cases

TINY = Shape(name="tiny", width=64, layers=1, query_heads=2, kv_heads=1, ffn=32, batch=1, time=3)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["mhar", "block", "delta", "msar", "hc", "mhc"])
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


@pytest.mark.slow
def test_every_timed_call_runs(device: torch.device) -> None:
    """What ``scaling bench kernels`` times can be called, and moves bytes."""
    shape = Shape(name="tiny", width=32, layers=10, query_heads=2, kv_heads=1, ffn=32, batch=1, time=1)
    names = set()
    for operation, direction, moved, call in cases(shape, device.type):
        assert moved > 0 and direction in ("forward", "backward")
        names.add(operation.split()[0])
        if operation.split()[0] in ("streams", "mhc", "hc"):  # the others are timed as they were before
            call()
    assert names == {
        "pull",
        "pull_group",
        "receive",
        "gather",
        "gather_group",
        "query_gradient",
        "streams",
        "mhc",
        "hc",
    }
    assert names == set(OPERATIONS)
