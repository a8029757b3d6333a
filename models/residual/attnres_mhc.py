"""``attnres_mhc``: attention residuals on top of mHC's streams, the MSAR paper's hybrid.

The paper gives one sentence ("AttnRes's historical sources with mHC's multi-stream recurrent state") and a loss. The
construction here, ours: mHC keeps its streams X and writes them as ever; site s reads

    h_s = sum_i softmax_i( w_s . (RMSNorm(v_i) * g_s) ) v_i

over the finished block summaries (embedding included) and the current H^pre X, and the last site over the summaries and
the sum of the streams. With the softmax on the current source alone it is mHC; with one stream it is attention over
block summaries and the cumulative stream.

Parameters: those of ``mhc`` and 2 d (2L + 1). FLOPs: those of ``mhc`` and 4 d sum_s N_s + 2 d (2L + 2 + blocks).
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.initialisation import Constant, Normal, Rule
from scaling.models.residual.method import State
from scaling.models.residual.mhc import Mhc, MhcState
from scaling.models.residual.routing import depth_logits, mix, routing_weights


class HybridState(MhcState):
    """mHC's streams, finished block summaries and their logits, and the begun block's sum."""

    method: AttnResMhc

    def __init__(self, embedding_BTD: Tensor, method: AttnResMhc) -> None:
        super().__init__(embedding_BTD, method)
        self.keys_S1D = (method.query_SD * method.gain_SD).unsqueeze(1)
        self.summaries: list[Tensor] = []
        self.logits: list[tuple[int, tuple[Tensor, ...]]] = []
        self.partial_BTD: Tensor | None = None
        self._add_summary(embedding_BTD, first_site=0)

    def _add_summary(self, summary_BTD: Tensor, *, first_site: int) -> None:
        self.summaries.append(summary_BTD)
        self.logits.append((first_site, depth_logits(summary_BTD, self.keys_S1D[first_site:], eps=self.method.eps)))

    def read(self, site: int) -> Tensor:
        current_BTD = super().read(site)
        logits = [by_site[site - first] for first, by_site in self.logits]
        logits += depth_logits(current_BTD, self.keys_S1D[site : site + 1], eps=self.method.eps)
        return mix(routing_weights(logits), [*self.summaries, current_BTD])

    def write(self, site: int, out_BTD: Tensor) -> None:
        super().write(site, out_BTD)
        summary_BTD = out_BTD if self.partial_BTD is None else self.partial_BTD + out_BTD
        if (site + 1) % self.method.block_sublayers == 0 or site + 1 == self.method.num_sublayers:
            self.partial_BTD = None
            self._add_summary(summary_BTD, first_site=site + 1)
        else:
            self.partial_BTD = summary_BTD


class AttnResMhc(Mhc):
    """mHC with a query and a gain a site."""

    def __init__(self, config: ModelConfig, choice: options.AttnResMhc) -> None:
        super().__init__(config, choice.mhc)
        self.block_sublayers = choice.sublayers_per_block(config.num_sublayers)
        self.query_start: Rule = Normal(std=config.init_std) if choice.query_init == "random" else Constant(value=0.0)
        self.query_SD = nn.Parameter(torch.empty(config.num_sublayers + 1, config.d_model))
        self.gain_SD = nn.Parameter(torch.empty(config.num_sublayers + 1, config.d_model))

    def initial_values(self) -> Mapping[str, Rule]:
        return {**super().initial_values(), "query_SD": self.query_start, "gain_SD": Constant(value=1.0)}

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> State:
        return HybridState(embedding_BTD, self)
