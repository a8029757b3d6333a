"""The decoder: embedding, sublayers joined by a residual method, final norm, tied output.

Last of the model's own modules; the trainer, the probes and the exporters use it. What joins the sublayers is behind
``scaling.models.residual.method``; sizes come from ``scaling.config``.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from typing import Final, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaling.config.model import ModelConfig
from scaling.models.attention import GroupedAttention, QkvAttention, ScoreAttention
from scaling.models.initialisation import Normal, Rule, bare_name, initialise
from scaling.models.layers import Attention, RMSNorm, SwiGLU, make_context
from scaling.models.moe import MoE
from scaling.models.registry import make_residual

_ATTENTION: Final = {"one": Attention, "qkv": QkvAttention, "kv_groups": GroupedAttention, "scores": ScoreAttention}


class Embedding(nn.Module):
    """Token embedding whose matrix is the output matrix too; starts as N(0, std^2)."""

    def __init__(self, vocab_size: int, width: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.weight = nn.Parameter(torch.empty(vocab_size, width))

    def initial_values(self) -> Mapping[str, Rule]:
        return {"weight": Normal(std=self.std)}

    def forward(self, tokens_BT: Tensor) -> Tensor:
        return F.embedding(tokens_BT, self.weight)


class Layer(nn.Module):
    """An attention sublayer and a feed-forward sublayer; ``Transformer`` joins them through the residual method."""

    def __init__(self, config: ModelConfig, *, attention: str, experts: bool, norm: bool) -> None:
        super().__init__()
        self.attention = _ATTENTION[attention](config, norm=norm)
        self.mlp = MoE(config, norm=norm) if experts else SwiGLU(config, norm=norm)


class Transformer(nn.Module):
    """A decoder-only Transformer with a residual method of choice.

    Parameters are not filled on construction: call ``init_weights`` (or load a state dict).
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = Embedding(config.vocab_size, config.d_model, std=config.init_std)
        self.residual = make_residual(config)
        norm = self.residual.norm_placement == "pre"
        first_sparse = config.num_layers if config.moe is None else config.moe.num_dense_layers
        self.layers = nn.ModuleList(
            Layer(config, attention=self.residual.attention, experts=index >= first_sparse, norm=norm)
            for index in range(config.num_layers)
        )
        self.residual.adapt(self.sublayers())
        self._load_LE: Tensor | None = None  # tokens by layer and expert in the last step
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps) if self.residual.final_norm else nn.Identity()

    @property
    def output_weight_VD(self) -> Tensor:
        """The output matrix: the embedding's."""
        return self.embedding.weight

    def init_weights(self, seed: int) -> None:
        """Fill every parameter as a function of (seed, parameter name) only."""
        initialise(self, seed)
        for mlp in self.mixtures():
            mlp.bias_E.zero_()

    def sublayers(self) -> Iterator[nn.Module]:
        """Attention and feed-forward modules in order: the units to compile, checkpoint or shard."""
        for layer in cast(list[Layer], self.layers):
            yield layer.attention
            yield layer.mlp

    def forward(self, tokens_BT: Tensor, document_BT: Tensor | None = None) -> Tensor:
        """Hidden states after the final norm.

        Parameters
        ----------
        tokens_BT
            Token ids.
        document_BT
            Document number of each position, where attention must not cross documents packed into one sequence.

        Returns
        -------
        Tensor
            hidden_BTD.
        """
        embedding_BTD = self.embedding(tokens_BT)
        context = make_context(tokens_BT, document_BT, self.config, embedding_BTD.dtype)
        state = self.residual.start(embedding_BTD, document_BT)
        for site, sublayer in enumerate(self.sublayers()):
            state.step(site, sublayer, context)
        hidden_BTD: Tensor = self.norm(state.read(self.config.num_sublayers))
        return hidden_BTD

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Next-token logits (B, T, V)."""
        return F.linear(hidden_BTD, self.output_weight_VD)

    def mixtures(self) -> Iterator[MoE]:
        """Feed-forwards of experts in order, none on a dense backbone."""
        return (module for module in self.modules() if isinstance(module, MoE))

    @torch.no_grad()
    def after_step(self, sum_: Callable[[Tensor], None] | None = None) -> None:
        """Move the routers' biases; call it after every optimiser step. Does nothing on a dense backbone.

        Parameters
        ----------
        sum_
            Sums a tensor over all processes that train the model, in place; ``None`` where there is one.
        """
        used = [mlp for mlp in self.mixtures() if mlp.load_E is not None]
        if not used:
            return
        load_LE = torch.stack([mlp.load_E for mlp in used if mlp.load_E is not None])
        if sum_ is not None:
            sum_(load_LE)
        for mlp, load_E in zip(used, load_LE, strict=True):
            mlp.update_bias(load_E)
        self._load_LE = load_LE

    def statistics(self) -> dict[str, float]:
        """Figures for the journal.

        ``route/...`` are about the residual method's parameters. With experts, of the last step over all layers and
        processes: ``moe/load_max`` and ``moe/load_min`` (tokens of the fullest and emptiest expert over the mean),
        ``moe/load_entropy`` (of the load over its maximum; 1 = even), ``moe/dropped`` (tokens that no expert took).
        """
        routing = self.residual.statistics()
        return routing if self._load_LE is None else {**routing, **_load_statistics(self._load_LE.double())}

    def connection_parameters(self) -> set[str]:
        """Names (as in ``named_parameters``) of the residual method's own parameters."""
        own = {f"residual.{name}" for name in self.residual.connection_parameters()}
        return {name for name, _ in self.named_parameters() if bare_name(name) in own}


def _load_statistics(load_LE: Tensor) -> dict[str, float]:
    share_LE = load_LE / load_LE.sum(dim=-1, keepdim=True)
    experts = share_LE.shape[-1]
    entropy_L = torch.special.entr(share_LE).sum(dim=-1)
    return {
        "moe/load_max": float(share_LE.max()) * experts,
        "moe/load_min": float(share_LE.min()) * experts,
        "moe/load_entropy": float(entropy_L.mean()) / math.log(experts) if experts > 1 else 1.0,
        "moe/dropped": 0.0,  # there is no capacity: every choice is computed
    }
