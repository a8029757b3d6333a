"""One place decides which implementation runs, and says why."""

from __future__ import annotations

import pytest
import torch

from scaling.errors import KernelError
from scaling.kernels import dispatch
from scaling.kernels.bank import SourceBank

CPU, GPU = torch.device("cpu"), torch.device("cuda")


def test_default(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels on a GPU, the reference elsewhere, a reason always."""
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    for operation in ("depth_routing", "routed_norm", "streams", "hyper"):
        assert dispatch.choose(operation, GPU).runs == "triton"
    assert "no Triton kernel" in dispatch.choose("hybrid", GPU).reason
    choice = dispatch.choose("depth_routing", CPU)
    assert choice.runs == "reference" and choice.reason == "no CUDA device (cpu)"
    assert set(dispatch.describe()) == set(dispatch.OPERATIONS)
    assert all(dispatch.choose(operation, GPU).reason for operation in dispatch.OPERATIONS)


def test_forced(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment variable wins, where the choice can run."""
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.choose("depth_routing", GPU).reason == "ISOLOSS_KERNELS=reference"
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    with pytest.raises(KernelError, match="needs a CUDA device, or TRITON_INTERPRET=1"):
        dispatch.choose("depth_routing", CPU)
    monkeypatch.setenv(dispatch.VARIABLE, "fast")
    with pytest.raises(KernelError, match="ISOLOSS_KERNELS='fast': allowed: auto, reference, triton"):
        dispatch.choose("depth_routing", CPU)


@pytest.mark.parametrize("word", ["1", "true", "ON"])
def test_the_interpreter_is_never_a_gpus(monkeypatch: pytest.MonkeyPatch, word: str) -> None:
    """It would train on the host, silently; Triton takes more words than 1."""
    monkeypatch.setenv("TRITON_INTERPRET", word)
    monkeypatch.delenv(dispatch.VARIABLE, raising=False)
    with pytest.raises(KernelError, match=f"depth_routing on cuda: TRITON_INTERPRET={word} would run .* unset it"):
        dispatch.choose("depth_routing", GPU)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    assert dispatch.choose("depth_routing", CPU).reason == "ISOLOSS_KERNELS=triton in Triton's interpreter"
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    assert dispatch.choose("depth_routing", GPU).runs == "reference"


def test_unknown_operation() -> None:
    """Operations are named."""
    with pytest.raises(KernelError, match="did you mean 'streams'"):
        dispatch.choose("stream", CPU)


def test_both_banks_route_alike(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """The reference bank has the interface and the results of the kernels' bank, blocks included."""
    torch.manual_seed(0)
    query, source, gain = torch.randn(4, 32, device=device), torch.randn(4, 1, 2, 32, device=device), torch.rand(32)
    monkeypatch.setenv(dispatch.VARIABLE, "reference")
    plain = dispatch.open_bank(query, source[0], heads=2, eps=1e-6, block=2)
    assert isinstance(plain, dispatch.ReferenceBank)
    monkeypatch.setenv(dispatch.VARIABLE, "triton")
    fused = dispatch.open_bank(query, source[0], heads=2, eps=1e-6, block=2)
    assert isinstance(fused, SourceBank)
    for site in range(4):
        if site % 2:
            a, b = plain.site(site, source[site]), fused.site(site, source[site])
        else:
            a, b = (bank.normed_site(site, source[site], gain.to(device), 1e-6) for bank in (plain, fused))
        torch.testing.assert_close(a, b)
