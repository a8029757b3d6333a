"""Parameters by group, so that any convention of "N" can be formed from them.

Reads ``scaling.config.model`` and ``scaling.accounting.residual``; ``scaling.resolve``, sweeps and analysis read it.
Kaplan et al. (arXiv 2001.08361) count without embeddings, Hoffmann et al. (arXiv 2203.15556) with: both totals are
here, and the run table carries both.
"""

from __future__ import annotations

from dataclasses import dataclass

from scaling.accounting.residual import residual_cost
from scaling.config.model import ModelConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Number of parameters by group.

    ``groups`` has ``embedding`` (tied with the output), ``attention``, ``mlp`` (dense feed-forward), ``norms``,
    ``routing`` (the residual method's own), and with experts ``experts`` (shared and routed) and ``router``.
    ``inactive`` is the part of ``experts`` that a token does not pass through.
    """

    groups: dict[str, int]
    inactive: int = 0

    @property
    def total(self) -> int:
        return sum(self.groups.values())

    @property
    def non_embedding(self) -> int:
        """Total without the embedding matrix, which is also the output matrix."""
        return self.total - self.groups["embedding"]

    @property
    def activated(self) -> int:
        """Parameters that one token passes through; equals ``total`` without experts."""
        return self.total - self.inactive

    @property
    def activated_non_embedding(self) -> int:
        return self.non_embedding - self.inactive


def count_parameters(config: ModelConfig) -> ParameterCount:
    """Count the parameters of the model that ``config`` describes.

    >>> from scaling.config.ladder import shape
    >>> count_parameters(ModelConfig(**shape("100m"))).total
    115554304
    """
    d, layers, head_dim = config.d_model, config.num_layers, config.attention_head_dim
    cost = residual_cost(config)
    projections = 2 * config.num_heads + 2 * config.num_kv_heads  # q and output; k and v
    dense_layers = layers if config.moe is None else min(layers, config.moe.num_dense_layers)
    groups = {
        "embedding": config.vocab_size * d,
        "attention": layers * projections * head_dim * d,
        "mlp": dense_layers * 3 * d * config.d_ffn,
        "norms": (layers * 2 * head_dim if config.qk_norm else 0) + cost.norm_parameters,
        "routing": cost.parameters,
    }
    inactive = 0
    if config.moe is not None:
        moe, sparse_layers = config.moe, layers - dense_layers
        expert = 3 * d * moe.d_expert
        groups["experts"] = sparse_layers * (moe.num_shared_experts + moe.num_experts) * expert
        groups["router"] = sparse_layers * d * moe.num_experts
        inactive = sparse_layers * (moe.num_experts - moe.top_k) * expert
    return ParameterCount(groups=groups, inactive=inactive)
