"""``rezero`` and ``deepnet``: one stream, with the sublayers' outputs or the stream rescaled.

ReZero (arXiv 2003.04887): h <- h + a_s f_s(h) with a scalar a_s = 0 at the start and no norm in front of the sublayer;
at the start every sublayer is skipped. 2L parameters. The backbone's norm before the head is kept unless
``final_norm=False`` (the paper has no norms), since the tied head is part of the backbone compared.

DeepNet (arXiv 2203.00555), decoder-only constants for M layers: h <- RMSNorm_s(alpha h + f_s(h)) with
alpha = (2M)^(1/4), and the starts of value, output and feed-forward weights times beta = (8M)^(-1/4). The norm is the
backbone's RMSNorm where the paper has LayerNorm, so that only the placement differs. No parameters beyond the
backbone's: 2L norms behind the additions in place of 2L in front, and no final norm, which the last one is.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Final

import torch
from torch import Tensor, nn

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.initialisation import Constant, Rule
from scaling.models.layers import RMSNorm
from scaling.models.residual.baseline import Stream
from scaling.models.residual.method import Residual

# What DeepNet's beta scales: value and output projections and the feed-forward (arXiv 2203.00555, figure 2).
_SCALED: Final = ("value", "output", "gate", "up", "down")


class ScaledStream(Stream):
    """h + scale_s f_s(h)."""

    def __init__(self, embedding_BTD: Tensor, scales: tuple[Tensor, ...]) -> None:
        super().__init__(embedding_BTD)
        self.scales = scales

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.stream_BTD = self.stream_BTD + self.scales[site] * out_BTD


class ReZero(Residual):
    """A scalar in front of each sublayer's output."""

    norm_placement = "own"

    def __init__(self, config: ModelConfig, choice: options.ReZero) -> None:
        super().__init__(config)
        self.final_norm = choice.final_norm
        self.scale_S = nn.Parameter(torch.empty(config.num_sublayers))

    def initial_values(self) -> Mapping[str, Rule]:
        return {"scale_S": Constant(value=0.0)}

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> ScaledStream:
        return ScaledStream(embedding_BTD, self.scale_S.unbind())

    def statistics(self) -> dict[str, float]:
        return {"route/scale_abs_mean": float(self.scale_S.detach().abs().mean())}


class PostNormStream(Stream):
    """norm_s(alpha h + f_s(h))."""

    def __init__(self, embedding_BTD: Tensor, norms: nn.ModuleList, alpha: float) -> None:
        super().__init__(embedding_BTD)
        self.norms = norms
        self.alpha = alpha

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.stream_BTD = self.norms[site](self.alpha * self.stream_BTD + out_BTD)


class DeepNet(Residual):
    """Norms behind an upscaled stream."""

    norm_placement = "own"

    def __init__(self, config: ModelConfig, _: options.DeepNet) -> None:
        super().__init__(config)
        self.final_norm = False
        self.alpha = (2 * config.num_layers) ** 0.25
        self.beta = (8 * config.num_layers) ** -0.25
        self.norms = nn.ModuleList(RMSNorm(config.d_model, eps=config.norm_eps) for _ in range(config.num_sublayers))

    def adapt(self, sublayers: Iterable[nn.Module]) -> None:
        for sublayer in sublayers:
            for name, module in sublayer.named_modules():
                if hasattr(module, "std") and name.rpartition(".")[-1] in (*_SCALED, "experts"):
                    module.std *= self.beta

    def connection_parameters(self) -> set[str]:
        return set()

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> PostNormStream:
        return PostNormStream(embedding_BTD, self.norms, self.alpha)
