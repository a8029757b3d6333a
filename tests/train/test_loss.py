"""The chunked cross-entropy against plain PyTorch in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from scaling import loss as module
from scaling.loss import IGNORED, linear_cross_entropy, negative_log_likelihood

N, D, V = 37, 8, 50


def problem(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(N, D, generator=generator, dtype=torch.float64).to(dtype)
    weight = torch.randn(V, D, generator=generator, dtype=torch.float64).to(dtype)
    target = torch.randint(0, V, (N,), generator=generator)
    target[::5] = IGNORED
    return hidden.requires_grad_(), weight.requires_grad_(), target


def plain(hidden: Tensor, weight: Tensor, target: Tensor, z_loss: float) -> tuple[Tensor, Tensor]:
    logits = hidden @ weight.t()
    loss = F.cross_entropy(logits, target, reduction="sum", ignore_index=IGNORED)
    square = logits.logsumexp(1).square()[target != IGNORED].sum()
    return loss + z_loss * square, loss


@pytest.mark.parametrize("z_loss", [0.0, 1e-2])
@pytest.mark.parametrize("chunk_rows", [1, 5, N, 10 * N])
def test_value_and_gradients_match_float64(z_loss: float, chunk_rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(module.CHUNK_BYTES, "cpu", chunk_rows * V * 8)
    results = []
    for function in (linear_cross_entropy, plain):
        hidden, weight, target = problem()
        if function is linear_cross_entropy:
            objective, loss = linear_cross_entropy(hidden, weight, target, z_loss=z_loss)
        else:
            objective, loss = plain(hidden, weight, target, z_loss)
        torch.autograd.backward(objective * 0.25)
        results.append((objective.detach(), loss.detach(), hidden.grad, weight.grad))
    for own, expected in zip(*results, strict=True):
        assert own is not None and expected is not None
        torch.testing.assert_close(own, expected, rtol=1e-12, atol=1e-12)


def test_fusible_form_is_the_same_function() -> None:
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(N, V, generator=generator)
    target = problem()[2]
    expected = module._pieces(logits.clone(), target, 1e-2)
    for own, other in zip(module._fusible_pieces(logits, target, 1e-2), expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-6, atol=1e-6)


def test_bf16_products_keep_fp32_sums() -> None:
    hidden, weight, target = problem(torch.bfloat16)
    objective, loss = linear_cross_entropy(hidden, weight, target)
    torch.autograd.backward(objective)
    wide_hidden, wide_weight, _ = (tensor.detach().double() for tensor in (hidden, weight, target))
    exact = plain(wide_hidden.requires_grad_(), wide_weight.requires_grad_(), target, 0.0)
    torch.autograd.backward(exact[0])
    assert loss.dtype == torch.float32
    # logits are rounded to bf16 once each: the sum over 29 tokens is off by at most 29 * eps * max|logit| / 2
    bound = 30 * torch.finfo(torch.bfloat16).eps * float((wide_hidden @ wide_weight.t()).detach().abs().max()) / 2
    assert abs(float(loss) - float(exact[1].detach())) < bound
    assert hidden.grad is not None and wide_hidden.grad is not None
    assert F.cosine_similarity(hidden.grad.double().flatten(), wide_hidden.grad.flatten(), dim=0) > 0.999


def test_per_token_losses() -> None:
    hidden, weight, target = problem()
    own = negative_log_likelihood(hidden, weight, target)
    expected = F.cross_entropy(hidden @ weight.t(), target, reduction="none", ignore_index=IGNORED)
    torch.testing.assert_close(own, expected.detach().float(), rtol=1e-6, atol=1e-6)
    assert not own.requires_grad and float(own[0]) == 0.0


def test_large_logits_stay_finite() -> None:
    hidden, weight, target = problem()
    objective, _ = linear_cross_entropy(hidden * 1e4, weight, target)
    assert objective.isfinite()
