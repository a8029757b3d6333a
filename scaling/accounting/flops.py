"""Exact floating-point operations of one token, forward and training.

Reads ``config`` and ``accounting.residual``; the trainer's MFU, the run table's compute column and the planner read it.

Conventions, all stated because published laws differ in them: a multiply-add is 2 FLOPs; what is counted is every
matrix multiplication (projections, feed-forward, attention scores and their product with the values, logits) and the
residual method's own arithmetic; element-wise work of the backbone (norms, activations, softmax, rotary) is not, as in
Hoffmann et al. (arXiv 2203.15556, appendix F). Causal attention is counted as computed: a query at position t meets t
keys, (T + 1) / 2 on average. Training costs three forward passes: the backward pass multiplies once for the input's
gradient and once for the weight's.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scaling.accounting.parameters import count_parameters
from scaling.accounting.residual import residual_cost
from scaling.config.model import ModelConfig

TRAINING_FACTOR: Final = 3  # forward, gradient of inputs, gradient of weights


@dataclass(frozen=True, kw_only=True, slots=True)
class FlopCount:
    """FLOPs per token.

    ``groups`` splits ``forward``: ``attention`` (projections), ``attention_scores``, ``mlp``, ``logits``, ``routing``,
    and with experts ``experts`` and ``router``. ``six_nd`` is 6 N per token with N the activated parameters without
    embedding; ``six_nd_total`` takes N with it.
    """

    groups: dict[str, float]
    six_nd: float
    six_nd_total: float

    @property
    def forward(self) -> float:
        return sum(self.groups.values())

    @property
    def training(self) -> float:
        return TRAINING_FACTOR * self.forward

    @property
    def routing(self) -> float:
        """The residual method's share of ``training``."""
        return TRAINING_FACTOR * self.groups["routing"]


def count_flops(config: ModelConfig, seq_len: int, *, causal: bool = True) -> FlopCount:
    """Count the FLOPs per token at a sequence length.

    Parameters
    ----------
    config
        The model.
    seq_len
        T, in tokens; documents inside a sequence are taken as one (masking saves work that is not counted).
    causal
        ``False`` counts attention over all T keys, as ``torch.utils.flop_counter`` does.
    """
    d, layers = config.d_model, config.num_layers
    width = config.num_heads * config.attention_head_dim
    kv_width = config.num_kv_heads * config.attention_head_dim
    keys = (seq_len + 1) / 2 if causal else seq_len
    dense_layers = layers if config.moe is None else min(layers, config.moe.num_dense_layers)
    cost = residual_cost(config)
    groups: dict[str, float] = {
        "attention": layers * 2 * d * (2 * width + 2 * kv_width),
        "attention_scores": layers * 4 * width * keys,
        "mlp": dense_layers * 6 * d * config.d_ffn,
        "logits": 2 * d * config.vocab_size,
        "routing": cost.forward_flops + cost.forward_flops_per_key * keys,
    }
    if config.moe is not None:
        moe, sparse_layers = config.moe, layers - dense_layers
        groups["experts"] = sparse_layers * 6 * d * moe.d_expert * (moe.num_shared_experts + moe.top_k)
        groups["router"] = sparse_layers * 2 * d * moe.num_experts
    count = count_parameters(config)
    return FlopCount(groups=groups, six_nd=6.0 * count.activated_non_embedding, six_nd_total=6.0 * count.activated)
