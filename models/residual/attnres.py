"""``attnres``: attention residuals, full and block (arXiv 2603.15031).

Site s has a query w_s and a norm gain g_s over the full width and reads

    h_s = sum_i softmax_i( w_s . (RMSNorm(v_i) * g_s) ) v_i

over sources v_0 = embedding, v_i = output of sublayer i (full), or block summaries: sums of S consecutive outputs, and
the unfinished block's partial sum where it has begun. Values are not normed, logits not scaled by 1/sqrt(d). Outputs
are not added to a stream; the sublayer norms h_s as usual. A last site feeds the final norm.

Start: queries 0 (the authors' requirement), gains 1; then every site returns the mean of its sources, which is parallel
to the pre-norm stream, and since each reader norms its input, the model computes the pre-norm function. Parameters:
2 d (2L + 1). FLOPs a token, forward: 4 d sum_s N_s + 2 d (2L + 1) with N_s the sources of site s. Site 0 has one source
and returns it; its query and gain get no gradient.

Shapes: B batch, T time, D width, H heads (1 here), C slice width, S sites.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scaling.config.model import ModelConfig
from scaling.config.residual import Blocked, QueryInit
from scaling.models.initialisation import Constant, Normal, Rule
from scaling.models.residual.method import Residual, State
from scaling.models.residual.routing import depth_logits, mix, routing_weights


class DepthState(State):
    """Sources written so far, and the logits that each has for the sites to come."""

    def __init__(self, embedding_BTD: Tensor, keys_SHC: Tensor, *, block_sublayers: int, eps: float) -> None:
        self.keys_SHC = keys_SHC
        self.block_sublayers = block_sublayers
        self.eps = eps
        self.sources: list[Tensor] = []
        self.logits: list[tuple[int, tuple[Tensor, ...]]] = []  # first site, then a tensor (B, T, H) a site
        self.partial_BTD: Tensor | None = None
        self._add_source(embedding_BTD, first_site=0)

    def _add_source(self, source_BTD: Tensor, *, first_site: int) -> None:
        self.sources.append(source_BTD)
        self.logits.append((first_site, depth_logits(source_BTD, self.keys_SHC[first_site:], eps=self.eps)))

    def read(self, site: int) -> Tensor:
        sources = list(self.sources)
        logits = [by_site[site - first] for first, by_site in self.logits]
        if self.partial_BTD is not None:
            sources.append(self.partial_BTD)
            logits += depth_logits(self.partial_BTD, self.keys_SHC[site : site + 1], eps=self.eps)
        if len(sources) == 1:
            return sources[0]
        return mix(routing_weights(logits), sources)

    def write(self, site: int, out_BTD: Tensor) -> None:
        block_BTD = out_BTD if self.partial_BTD is None else self.partial_BTD + out_BTD
        last = len(self.keys_SHC) - 1
        if (site + 1) % self.block_sublayers == 0 or site + 1 == last:
            self.partial_BTD = None
            self._add_source(block_BTD, first_site=site + 1)
        else:
            self.partial_BTD = block_BTD


class DepthRouting(Residual):
    """A query and a gain a site, read in ``heads`` slices of the width."""

    def __init__(self, config: ModelConfig, options: Blocked, *, heads: int, query_init: QueryInit) -> None:
        super().__init__(config)
        self.heads = heads
        self.eps = config.norm_eps
        self.query_init = query_init
        self.init_std = config.init_std
        self.block_sublayers = options.sublayers_per_block(config.num_sublayers)
        sites = config.num_sublayers + 1
        self.query_SD = nn.Parameter(torch.empty(sites, config.d_model))
        self.gain_SD = nn.Parameter(torch.empty(sites, config.d_model))

    def initial_values(self) -> Mapping[str, Rule]:
        query: Rule = Constant(value=0.0) if self.query_init == "zero" else Normal(std=self.init_std)
        return {"query_SD": query, "gain_SD": Constant(value=1.0)}

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> DepthState:
        keys_SHC = (self.query_SD * self.gain_SD).view(self.num_sublayers + 1, self.heads, -1)
        return DepthState(embedding_BTD, keys_SHC, block_sublayers=self.block_sublayers, eps=self.eps)

    def statistics(self) -> dict[str, float]:
        norms_S = self.query_SD.detach().float().norm(dim=-1)[1:]
        return {"route/query_norm_mean": float(norms_S.mean()), "route/query_norm_max": float(norms_S.max())}
