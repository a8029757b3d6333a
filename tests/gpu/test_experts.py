"""The grouped product of a GPU's experts against the loop in float64: ``pytest -m gpu tests/gpu``."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from scaling.models import moe
from scaling.models.moe import Experts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
NUM, WIDTH, HIDDEN = 16, 256, 128


def results(experts: Experts, x_nD: Tensor, counts_E: Tensor, cotangent: Tensor, *, autocast: bool) -> list[Tensor]:
    x = x_nD.clone().requires_grad_()
    with torch.autocast("cuda", dtype=torch.bfloat16, enabled=autocast):
        out = experts(x, counts_E)
    gradients = torch.autograd.grad(out, [x, *experts.parameters()], cotangent.to(out.dtype))
    return [result.detach().double() for result in (out, *gradients)]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("tokens", [1, 1000])
def test_grouped_product_is_as_exact_as_the_loop(tokens: int, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator().manual_seed(0)
    experts = Experts(NUM, WIDTH, HIDDEN, std=0.02)
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * parameter.shape[-1] ** -0.5)
    experts.cuda()
    # the first and the last experts have no token
    counts_E = torch.bincount(torch.randint(1, NUM - 1, (tokens,), generator=generator), minlength=NUM).cuda()
    x_nD = torch.randn(tokens, WIDTH, generator=generator).cuda()
    cotangent = torch.randn(tokens, WIDTH, generator=generator).cuda()
    assert moe._has_grouped_product(x_nD.bfloat16())
    if compiled:
        experts.compile(fullgraph=True)
    ours = results(experts, x_nD, counts_E, cotangent, autocast=True)
    plain = Experts(NUM, WIDTH, HIDDEN, std=0.02).cuda()
    plain.load_state_dict(experts.state_dict())
    monkeypatch.setattr(moe, "_has_grouped_product", lambda x: False)
    loop = results(plain, x_nD, counts_E, cotangent, autocast=True)
    truth = results(plain.double(), x_nD.double(), counts_E, cotangent.double(), autocast=False)
    for found, peer, exact in zip(ours, loop, truth, strict=True):
        scale = exact.abs().max()
        # the loop rounds in the same places; sums in another order differ by roundings
        assert (found - exact).abs().max() / scale <= 1.5 * (peer - exact).abs().max() / scale + 2**-9
