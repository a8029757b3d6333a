"""Compilation of sublayers: everything that a process asks for is compiled, not only its first eight shapes."""

from __future__ import annotations

import functools

import pytest
import torch

from scaling import distributed
from scaling.config.model import ModelConfig
from scaling.config.training import RunSettings
from scaling.models.transformer import Transformer


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # the compiler looks at inputs that are no leaves
def test_many_shapes_stay_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kinds of sublayer, widths, batches, training and evaluation are more builds than the compiler's own limit."""
    from torch._dynamo import config as compiler

    torch._dynamo.reset()
    monkeypatch.setattr(compiler, "recompile_limit", 8)
    monkeypatch.setattr(compiler, "fail_on_recompile_limit_hit", True)
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    for width in (16, 32):
        transformer = Transformer(
            ModelConfig(num_layers=1, d_model=width, num_heads=2, num_kv_heads=1, d_ffn=16, vocab_size=7)
        )
        distributed.prepare(transformer, RunSettings(compile=True))
        for batch in (1, 2, 3):
            tokens = torch.zeros(batch, 4, dtype=torch.long)
            transformer(tokens)
            with torch.no_grad():
                transformer(tokens)
    torch._dynamo.reset()
