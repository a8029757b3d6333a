"""The backbone's parts: linear map, RMSNorm, rotary embedding, grouped-query attention, SwiGLU.

After ``initialisation`` in the flow; ``transformer`` puts them together. Definitions follow Qwen3 (arXiv 2505.09388)
and the MHAR paper's training details (arXiv 2607.27230): no biases, no dropout, RMSNorm on every query and key head
before the rotary embedding.

Shapes: B batch, T time, D model width, H query heads, K key/value heads, C head width, F feed-forward width, S input
streams.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaling.config.model import ModelConfig
from scaling.kernels.products import products
from scaling.models.initialisation import Constant, Normal, Rule


class Linear(nn.Linear):
    """A linear map without bias whose weight starts as N(0, std^2)."""

    def __init__(self, width_in: int, width_out: int, *, std: float) -> None:
        super().__init__(width_in, width_out, bias=False)
        self.std = std

    def reset_parameters(self) -> None:
        """Leave the values to ``initialise``."""

    def initial_values(self) -> Mapping[str, Rule]:
        return {"weight": Normal(std=self.std)}


class RMSNorm(nn.Module):
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv 1910.07467); weights start at ``start``.

    Computed in the weight's precision: float32 under autocast.
    """

    def __init__(self, width: int, *, eps: float, start: float = 1.0) -> None:
        super().__init__()
        self.eps = eps
        self.start = start
        self.weight = nn.Parameter(torch.empty(width))

    def initial_values(self) -> Mapping[str, Rule]:
        return {"weight": Constant(value=self.start)}

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.to(self.weight.dtype), self.weight.shape, self.weight, self.eps)


@dataclass(frozen=True, kw_only=True, slots=True)
class Context:
    """What every layer of one forward pass shares: rotation tables and the mask where documents must not meet."""

    cos_TC: Tensor
    sin_TC: Tensor
    mask_B1TT: Tensor | None


def make_context(tokens_BT: Tensor, document_BT: Tensor | None, config: ModelConfig, dtype: torch.dtype) -> Context:
    """Rotation tables for T positions, and the causal same-document mask where ``document_BT`` is given."""
    length, device = tokens_BT.shape[1], tokens_BT.device
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    half = torch.arange(0, config.attention_head_dim, 2, device=device, dtype=wide) / config.attention_head_dim
    angle_TC = torch.outer(torch.arange(length, device=device, dtype=wide), config.rope_theta**-half)
    mask = None
    if document_BT is not None:
        causal_TT = torch.ones(length, length, dtype=torch.bool, device=device).tril()
        mask = ((document_BT[:, :, None] == document_BT[:, None, :]) & causal_TT).unsqueeze(1)
    return Context(cos_TC=angle_TC.cos().to(dtype), sin_TC=angle_TC.sin().to(dtype), mask_B1TT=mask)


def rotate(x_BTHC: Tensor, context: Context) -> Tensor:
    """Rotary position embedding, first half of the head paired with the second (arXiv 2104.09864, Qwen3's layout)."""
    a, b = x_BTHC.chunk(2, dim=-1)
    cos, sin = context.cos_TC[:, None, :], context.sin_TC[:, None, :]
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)


class Sublayer(nn.Module, ABC):
    """A norm and what it feeds; ``norm`` is ``False`` for residual methods that norm elsewhere."""

    def __init__(self, config: ModelConfig, *, norm: bool) -> None:
        super().__init__()
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps) if norm else nn.Identity()

    @abstractmethod
    def transform(self, x_BTD: Tensor, context: Context | None, *, normed: bool) -> Tensor:
        """The output for an input that has been through the norm: the sublayer's own, or elsewhere (``normed``)."""

    def forward(
        self,
        h_BTD: Tensor,
        context: Context | None = None,
        update_BTD: Tensor | None = None,
        *,
        normed: bool = False,
    ) -> Tensor | tuple[Tensor, Tensor]:
        """The sublayer's output; attention needs a context.

        With ``update_BTD``, what the sublayer before put out and nobody has added to ``h_BTD`` yet: the sum, which
        compiles into one kernel with the norm that reads it, and the output. ``normed`` says that the input has been
        through the sublayer's norm.
        """
        h_BTD = h_BTD if update_BTD is None else h_BTD + update_BTD
        out_BTD = self.transform(h_BTD if normed else self.norm(h_BTD), context, normed=normed)
        return out_BTD if update_BTD is None else (h_BTD, out_BTD)


def linear_maps(x_BTD: Tensor, maps: Sequence[Linear], *, normed: bool) -> tuple[Tensor, ...]:
    """What the maps make of one input.

    An input that was normed elsewhere has no compiled norm beside it whose backward kernel takes the sum of the maps'
    input gradients: :func:`scaling.kernels.products.products` adds them up inside the matrix products.
    """
    if normed:
        return products(x_BTD, *(linear.weight for linear in maps))
    return tuple(linear(x_BTD) for linear in maps)


class Attention(Sublayer):
    """Causal grouped-query attention with normed heads, and the norm in front of it."""

    def __init__(self, config: ModelConfig, *, norm: bool = True) -> None:
        super().__init__(config, norm=norm)
        d, self.head_dim, std = config.d_model, config.attention_head_dim, config.init_std
        self.num_heads, self.num_kv_heads = config.num_heads, config.num_kv_heads
        self.query = Linear(d, config.num_heads * self.head_dim, std=std)
        self.key = Linear(d, config.num_kv_heads * self.head_dim, std=std)
        self.value = Linear(d, config.num_kv_heads * self.head_dim, std=std)
        self.query_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.key_norm = RMSNorm(self.head_dim, eps=config.norm_eps) if config.qk_norm else nn.Identity()
        self.output = Linear(config.num_heads * self.head_dim, d, std=std)

    def transform(self, x_BTD: Tensor, context: Context | None, *, normed: bool) -> Tensor:
        assert context is not None
        query, key, value = linear_maps(x_BTD, (self.query, self.key, self.value), normed=normed)
        return self.attend(query, key, value, context)

    def _heads(self, x: Tensor) -> Tensor:
        return x.view(*x.shape[:-1], -1, self.head_dim)

    def attend(self, query: Tensor, key: Tensor, value: Tensor, context: Context) -> Tensor:
        """Attention over projected queries, keys and values of shape (B, T, heads * C)."""
        q_BTHC = rotate(self.query_norm(self._heads(query)), context)
        k_BTKC = rotate(self.key_norm(self._heads(key)), context)
        v_BTKC = self._heads(value)
        out_BHTC = F.scaled_dot_product_attention(
            q_BTHC.to(v_BTKC.dtype).transpose(1, 2),
            k_BTKC.to(v_BTKC.dtype).transpose(1, 2),
            v_BTKC.transpose(1, 2),
            attn_mask=context.mask_B1TT,
            is_causal=context.mask_B1TT is None,
            enable_gqa=self.num_heads != self.num_kv_heads,
        )
        out_BTD: Tensor = self.output(out_BHTC.transpose(1, 2).flatten(-2))
        return out_BTD


class SwiGLU(Sublayer):
    """down(silu(gate x) * up x) (arXiv 2002.05202), and the norm in front of it."""

    def __init__(self, config: ModelConfig, *, norm: bool = True, width: int | None = None) -> None:
        super().__init__(config, norm=norm)
        d, std = config.d_model, config.init_std
        hidden = config.d_ffn if width is None else width
        self.gate = Linear(d, hidden, std=std)
        self.up = Linear(d, hidden, std=std)
        self.down = Linear(hidden, d, std=std)

    def transform(self, x_BTD: Tensor, context: Context | None, *, normed: bool) -> Tensor:
        gate_BTF, up_BTF = linear_maps(x_BTD, (self.gate, self.up), normed=normed)
        out_BTD: Tensor = self.down(F.silu(gate_BTF) * up_BTF)
        return out_BTD
