"""Small models to test with: every size a few dozen wide, float64 where an identity is exact."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from scaling.config.model import ModelConfig
from scaling.config.residual import ResidualConfig
from scaling.models.transformer import Transformer

Build = Callable[..., Transformer]


@pytest.fixture
def build() -> Build:
    """Make an initialised float64 model: ``build(options, d_model=..., ...)``."""

    def make(
        residual: ResidualConfig, *, seed: int = 0, dtype: torch.dtype = torch.float64, **shape: Any
    ) -> Transformer:
        sizes: dict[str, Any] = {
            "num_layers": 3, "d_model": 24, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 40, "vocab_size": 61,
        } | shape  # fmt: skip
        model = Transformer(ModelConfig(residual=residual, **sizes)).to(dtype)
        model.init_weights(seed)
        return model

    return make


@pytest.fixture
def tokens_BT() -> Tensor:
    return torch.randint(0, 61, (2, 9), generator=torch.Generator().manual_seed(1))


@pytest.fixture
def perturb() -> Callable[[Transformer], Transformer]:
    """Move every parameter away from its start, so that nothing is zero or equal by accident."""

    def move(model: Transformer, scale: float = 0.3) -> Transformer:
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in model.parameters():
                noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
                parameter.add_(noise, alpha=scale)
        return model

    return move
