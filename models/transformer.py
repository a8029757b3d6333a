"""The decoder: embedding, sublayers joined by a residual method, final norm, tied output.

Last of the model's own modules; the trainer, the probes and the exporters use it. What joins the sublayers is behind
``scaling.models.residual.method``; sizes come from ``scaling.config``.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaling.config.model import ModelConfig
from scaling.models.initialisation import Normal, Rule, bare_name, initialise
from scaling.models.layers import Attention, RMSNorm, SwiGLU, make_context
from scaling.models.registry import make_residual


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

    def __init__(self, config: ModelConfig, *, norm: bool) -> None:
        super().__init__()
        self.attention = Attention(config, norm=norm)
        self.mlp = SwiGLU(config, norm=norm)


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
        self.layers = nn.ModuleList(Layer(config, norm=norm) for _ in range(config.num_layers))
        self.norm = RMSNorm(config.d_model, eps=config.norm_eps) if self.residual.final_norm else nn.Identity()

    @property
    def output_weight_VD(self) -> Tensor:
        """The output matrix: the embedding's."""
        return self.embedding.weight

    def init_weights(self, seed: int) -> None:
        """Fill every parameter as a function of (seed, parameter name) only."""
        initialise(self, seed)

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
            state.write(site, sublayer(state.read(site), context))
        hidden_BTD: Tensor = self.norm(state.read(self.config.num_sublayers))
        return hidden_BTD

    def logits(self, hidden_BTD: Tensor) -> Tensor:
        """Next-token logits (B, T, V)."""
        return F.linear(hidden_BTD, self.output_weight_VD)

    def statistics(self) -> dict[str, float]:
        """Figures about routing for the journal, names ``route/...`` and ``moe/...``."""
        return self.residual.statistics()

    def connection_parameters(self) -> set[str]:
        """Names (as in ``named_parameters``) of the residual method's own parameters."""
        return {name for name, _ in self.named_parameters() if bare_name(name).startswith("residual.")}
