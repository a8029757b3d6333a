"""Bytes that training a model takes on one device: parameters, gradients, optimiser, activations, logits.

Reads ``config`` and the other counts; planning and ``scaling model info`` read it. Parameters, gradients and optimiser
are exact. Activations are those kept between the forward and the backward pass by the modules of ``scaling.models``
with fused norms (CUDA) and without activation checkpointing, tensor by tensor; allocator slack and temporary workspaces
come on top.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from scaling.accounting.parameters import count_parameters
from scaling.accounting.residual import residual_cost
from scaling.config.model import ModelConfig
from scaling.config.tree import RunConfig

# Bytes of (parameter, gradient, one AdamW moment, activation of a matrix multiplication, residual stream) by precision:
# "mixed" keeps fp32 masters and an fp32 residual stream and multiplies in bf16; "bf16" keeps everything in bf16.
_BYTES: Final = {"mixed": (4, 4, 4, 2, 4), "bf16": (2, 2, 2, 2, 2), "fp32": (4, 4, 4, 4, 4)}


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryEstimate:
    """Bytes by what they hold; ``activations`` and ``logits`` are for one micro-batch."""

    parameters: int
    gradients: int
    optimizer: int
    activations: int
    logits: int

    @property
    def total(self) -> int:
        return self.parameters + self.gradients + self.optimizer + self.activations + self.logits


def estimate_memory(config: RunConfig) -> MemoryEstimate:
    """Estimate the bytes of one training process without sharding.

    The micro-batch is ``data.micro_batch_size``, or the whole ``data.batch_size`` where that is not given.
    """
    parameter, gradient, moment, matmul, stream = _BYTES[config.precision.mode]
    count = count_parameters(config.model).total
    tokens = (config.data.micro_batch_size or config.data.batch_size) * config.data.seq_len
    moments = 2 + (config.optimizer.ema_decay is not None)
    return MemoryEstimate(
        parameters=count * parameter,
        gradients=count * gradient,
        optimizer=count * moment * moments,
        activations=round(tokens * _activation_bytes_per_token(config.model, config.data.seq_len, matmul, stream)),
        logits=tokens * config.model.vocab_size * (matmul + 4),  # the matrix product and its fp32 log-softmax
    )


def _activation_bytes_per_token(config: ModelConfig, seq_len: int, matmul: int, stream: int) -> float:
    d, layers, head_dim = config.d_model, config.num_layers, config.attention_head_dim
    width, kv_width = config.num_heads * head_dim, config.num_kv_heads * head_dim
    # Attention keeps the normed input, rotated q and k, v, its output; q and k before their norms (cast for them in
    # "mixed"); the scales of three norms and the log-sum-exp.
    attention = matmul * (d + 2 * width + 2 * kv_width) + 4 * (1 + config.num_heads)
    if config.qk_norm:
        attention += stream * (width + kv_width) + 4 * (config.num_heads + config.num_kv_heads)
    dense = matmul * (d + 4 * config.d_ffn) + 4  # normed input, gate, silu(gate), up, product
    dense_layers = layers if config.moe is None else min(layers, config.moe.num_dense_layers)
    feed_forward = float(dense_layers * dense)
    if config.moe is not None:
        routed = config.moe.top_k * (2 * d + 4 * config.moe.d_expert)
        shared = config.moe.num_shared_experts * 4 * config.moe.d_expert
        feed_forward += (layers - dense_layers) * (matmul * (d + routed + shared) + 4 * config.moe.num_experts)
    cost = residual_cost(config)
    residual = (cost.stored_elements + cost.stored_per_position * seq_len) * stream
    return layers * attention + feed_forward + residual + matmul * d
