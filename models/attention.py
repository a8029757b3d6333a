"""Attention for residual methods that feed it more than one tensor; the plain one is in ``layers``.

After ``layers`` in the flow; ``transformer`` picks by what the residual method asks for. Parameters that these share
with the plain attention have the same names, hence the same start.

Shapes: B batch, T time, D width, H query heads, K key/value heads, C head width.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from scaling.config.model import ModelConfig
from scaling.models.layers import Attention, Context, RMSNorm, rotate


class QkvAttention(Attention):
    """Query, key and value projections read three tensors, each through a norm of its own (MUDDFormer)."""

    def __init__(self, config: ModelConfig, *, norm: bool = True) -> None:
        assert norm, "three inputs without norms: no method asks for that"
        super().__init__(config)
        self.key_input_norm = RMSNorm(config.d_model, eps=config.norm_eps)
        self.value_input_norm = RMSNorm(config.d_model, eps=config.norm_eps)

    def forward(self, h_BTD: tuple[Tensor, ...], context: Context) -> Tensor:  # type: ignore[override]
        query, key, value = h_BTD
        return self.attend(
            self.query(self.norm(query)),
            self.key(self.key_input_norm(key)),
            self.value(self.value_input_norm(value)),
            context,
        )


class GroupedAttention(Attention):
    """Each key/value group, with the query heads that share it, reads a tensor of its own (head-aligned MHAR)."""

    def forward(self, h_BTD: tuple[Tensor, ...], context: Context) -> Tensor:  # type: ignore[override]
        groups = len(h_BTD)
        x_BTD = [self.norm(group) for group in h_BTD]
        query, key, value = (
            torch.cat([F.linear(x, part) for x, part in zip(x_BTD, weight.chunk(groups), strict=True)], dim=-1)
            for weight in (self.query.weight, self.key.weight, self.value.weight)
        )
        return self.attend(query, key, value, context)


class ScoreAttention(Attention):
    """Adds the previous layer's scores before the softmax and hands on its own (RealFormer).

    Scores are T x T and kept for every layer: fused attention cannot be used.
    """

    def forward(  # type: ignore[override]
        self, h_BTD: Tensor, context: Context, scores_BHTT: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        x_BTD = self.norm(h_BTD)
        q_BHTC = rotate(self.query_norm(self._heads(self.query(x_BTD))), context).transpose(1, 2)
        k_BKTC = rotate(self.key_norm(self._heads(self.key(x_BTD))), context).transpose(1, 2)
        v_BKTC = self._heads(self.value(x_BTD)).transpose(1, 2)
        repeats = self.num_heads // self.num_kv_heads
        k_BHTC, v_BHTC = (x.repeat_interleave(repeats, dim=1) for x in (k_BKTC, v_BKTC))
        own = (q_BHTC @ k_BHTC.transpose(-1, -2)) / math.sqrt(self.head_dim)
        scores = own if scores_BHTT is None else own + scores_BHTT
        length = scores.shape[-1]
        mask = context.mask_B1TT
        if mask is None:
            mask = torch.ones(length, length, dtype=torch.bool, device=scores.device).tril()
        weights = torch.softmax(scores.masked_fill(~mask, -math.inf), dim=-1)
        out_BTD: Tensor = self.output((weights.to(v_BHTC.dtype) @ v_BHTC).transpose(1, 2).flatten(-2))
        return out_BTD, scores
