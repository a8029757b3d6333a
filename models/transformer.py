"""The decoder: embedding, sublayers joined by a residual method, final norm, tied output.

Last of the model's own modules; the trainer, the probes and the exporters use it. What joins the sublayers is behind
``scaling.models.residual.method``; sizes come from ``scaling.config``.

Shapes: B batch, T time, D model width, V vocabulary.
"""

from __future__ import annotations

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

    def after_step(self, reduce: Callable[[Tensor], Tensor] | None = None) -> dict[str, float]:
        """Move the routers' biases; call it after every optimiser step.

        Parameters
        ----------
        reduce
            Sums a tensor over all processes that train the model; ``None`` where there is one.

        Returns
        -------
        dict of str to float
            The step's load over all layers and processes, empty on a dense backbone: ``moe/load_max`` and
            ``moe/load_min`` (tokens of the fullest and emptiest expert over the mean), ``moe/load_entropy`` (of the
            load's distribution over its maximum, 1 = even), ``moe/dropped`` (tokens that no expert took: always 0).
        """
        loads = []
        for mlp in self.mixtures():
            if mlp.load_E is None:
                continue  # nothing went through since the last call
            load_E = reduce(mlp.load_E) if reduce is not None else mlp.load_E
            mlp.update_bias(load_E)
            loads.append(load_E.double())
        return _load_statistics(torch.stack(loads)) if loads else {}

    def statistics(self) -> dict[str, float]:
        """Figures about the residual method's parameters for the journal, names ``route/...``."""
        return self.residual.statistics()

    def connection_parameters(self) -> set[str]:
        """Names (as in ``named_parameters``) of the residual method's own parameters."""
        own = {f"residual.{name}" for name in self.residual.connection_parameters()}
        return {name for name, _ in self.named_parameters() if bare_name(name) in own}


def _load_statistics(load_LE: Tensor) -> dict[str, float]:
    share_LE = load_LE / load_LE.sum(dim=-1, keepdim=True)
    entropy_L = -(share_LE * share_LE.clamp_min(1e-300).log()).sum(dim=-1)
    relative_LE = share_LE * load_LE.shape[-1]
    return {
        "moe/load_max": float(relative_LE.max()),
        "moe/load_min": float(relative_LE.min()),
        "moe/load_entropy": float(entropy_L.mean()) / max(1e-9, torch.log(torch.tensor(load_LE.shape[-1])).item()),
        "moe/dropped": 0.0,
    }
