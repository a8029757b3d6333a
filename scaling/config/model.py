"""The model's shape: a section of the configuration tree that every later module reads.

Field names follow the field's usage; all counts are whole numbers, widths are in elements.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from scaling.config.residual import Baseline, ResidualConfig
from scaling.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class MoEConfig:
    """DeepSeekMoE-style feed-forward: shared plus fine-grained routed experts (arXiv 2401.06066, 2412.19437)."""

    num_experts: int = 64
    num_shared_experts: int = 1
    top_k: int = 6
    d_expert: int = 256
    num_dense_layers: int = 1
    bias_update_rate: float = 1e-3

    def __post_init__(self) -> None:
        for name in ("num_experts", "top_k", "d_expert"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name}={getattr(self, name)} is not positive")
        if self.top_k > self.num_experts:
            raise ConfigError(f"top_k={self.top_k} exceeds num_experts={self.num_experts}")
        if self.num_shared_experts < 0 or self.num_dense_layers < 0:
            raise ConfigError("num_shared_experts and num_dense_layers must not be negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """A decoder-only Transformer: pre-norm RMSNorm, SwiGLU, GQA, QK-norm before RoPE, tied embeddings, no biases.

    ``size`` is a label only: it does not enter the run key, the numbers do. ``qk_norm=False`` leaves the norms on query
    and key heads out: Llama's attention.
    """

    size: str | None = None
    num_layers: int
    d_model: int
    num_heads: int
    num_kv_heads: int
    d_ffn: int
    vocab_size: int
    head_dim: int | None = None
    rope_theta: float = 10_000.0
    norm_eps: float = 1e-6
    init_std: float = 0.02
    qk_norm: bool = True
    residual: ResidualConfig = field(default_factory=Baseline)
    moe: MoEConfig | None = None

    def __post_init__(self) -> None:
        for name in ("num_layers", "d_model", "num_heads", "num_kv_heads", "d_ffn", "vocab_size", "head_dim"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is not positive")
        for name in ("rope_theta", "norm_eps", "init_std"):
            value = getattr(self, name)
            if not 0 < value < math.inf:
                raise ConfigError(f"{name}={value} is not a positive finite number")
        if self.num_heads % self.num_kv_heads:
            divisors = [k for k in range(1, self.num_heads + 1) if self.num_heads % k == 0]
            raise ConfigError(
                f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; "
                f"allowed: {', '.join(map(str, divisors))}"
            )
        if self.head_dim is None and self.d_model % self.num_heads:
            raise ConfigError(
                f"num_heads={self.num_heads} does not divide d_model={self.d_model}; set head_dim or change num_heads"
            )
        if self.attention_head_dim % 2:
            raise ConfigError(f"head_dim={self.attention_head_dim} is odd; rotary embedding needs an even one")
        try:
            self.residual.check(d_model=self.d_model, num_layers=self.num_layers)
        except ConfigError as error:
            raise ConfigError(f"residual.{error}") from None

    @property
    def attention_head_dim(self) -> int:
        """Width of one attention head: ``head_dim``, or ``d_model / num_heads`` where that is not given."""
        return self.head_dim if self.head_dim is not None else self.d_model // self.num_heads

    @property
    def num_sublayers(self) -> int:
        """Attention and feed-forward sublayers together: ``2 * num_layers``."""
        return 2 * self.num_layers
