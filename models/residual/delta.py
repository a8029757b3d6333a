"""``delta``: delta attention residuals (arXiv 2605.18855).

The ordinary stream h goes on, and each sublayer reads it plus what it routes from the deltas, the stream's changes:

    x_s = h_s + alpha_s sum_i softmax_i( w_s . (RMSNorm(v_i) * g_s) ) v_i,    h_(s+1) = h_s + f_s(x_s)

by head over slices as in ``mhar``; v_0 = embedding, v_i = outputs or, in blocks, their sums, and the begun block's
partial sum. No last site: the stream feeds the head.

``gate="fixed"``: alpha = 1 (from scratch); with queries 0 a site adds the mean of the deltas, parallel to h, so the
model starts as the pre-norm function. ``gate="learned"``: a scalar a site, 0 at first: bit for bit the model converted;
queries get gradients once it has moved. ``null_source``: a learned vector, 0 at first, before the sources, so that a
site can read nothing. ``block_delta="recursive"`` is what the released code computes in blocks: a source is the stream
minus the previous source, not minus the previous state; the partial sum likewise.

Parameters: 2 d a sublayer, and with them 1 for the gate, d in all for the null source. FLOPs as ``attnres`` without the
last site.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.initialisation import Constant, Rule
from scaling.models.residual.attnres import DepthRouting, DepthState
from scaling.models.residual.banked import BankedDelta
from scaling.models.residual.method import Inputs
from scaling.models.residual.routing import mix, routing_weights


class DeltaState(DepthState):
    """The stream, and the deltas as sources."""

    method: Delta

    def __init__(self, embedding_BTD: Tensor, method: Delta) -> None:
        super().__init__(embedding_BTD, method)
        self.h_BTD = embedding_BTD
        self.gates = method.gate_S.unbind() if method.gate_S is not None else None
        if method.null_D is not None:
            null_BTD = method.null_D.to(embedding_BTD.dtype).expand_as(embedding_BTD)
            (embedding,), (logits,) = self.sources, self.logits
            self.sources, self.logits = [], []
            self.add_source(null_BTD, first_site=0)
            self.sources.append(embedding)
            self.logits.append(logits)

    def read(self, site: int) -> Inputs:
        if site == self.method.num_sublayers:
            return self.h_BTD
        sources, logits = self.visible(site)
        routed_BTD = mix(routing_weights(logits), sources)
        return self.h_BTD + (routed_BTD if self.gates is None else self.gates[site] * routed_BTD)

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.h_BTD = self.h_BTD + out_BTD
        if not self.method.recursive:
            super().write(site, out_BTD)
            return
        delta_BTD = self.h_BTD - self.sources[-1]
        if self.method.ends_block(site):
            self.partial_BTD = None
            self.add_source(delta_BTD, first_site=site + 1)
        else:
            self.partial_BTD = delta_BTD


class Delta(DepthRouting):
    """Depth routing added to the stream."""

    def __init__(self, config: ModelConfig, choice: options.Delta) -> None:
        super().__init__(
            config, choice, heads=choice.heads, query_init=choice.query_init, num_sites=config.num_sublayers
        )
        self.recursive = choice.block_delta == "recursive"
        learned = choice.gate == "learned"
        self.gate_S = nn.Parameter(torch.empty(config.num_sublayers)) if learned else None
        self.null_D = nn.Parameter(torch.empty(config.d_model)) if choice.null_source else None

    def initial_values(self) -> Mapping[str, Rule]:
        zero = Constant(value=0.0)
        return {**super().initial_values(), "gate_S": zero, "null_D": zero}

    def eager(self, embedding_BTD: Tensor) -> DepthState:
        return DeltaState(embedding_BTD, self)

    def banked(self, embedding_BTD: Tensor) -> BankedDelta:
        return BankedDelta(embedding_BTD, self)

    def statistics(self) -> dict[str, float]:
        gate = {} if self.gate_S is None else {"route/gate_abs_mean": float(self.gate_S.detach().abs().mean())}
        return {**super().statistics(), **gate}
