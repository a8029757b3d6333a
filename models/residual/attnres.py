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

``DepthRouting`` here serves ``mhar`` and ``delta`` too. Shapes: B batch, T time, D width, H heads, C slice width, S
sites.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scaling.config.model import ModelConfig
from scaling.config.residual import AttnRes, Blocked
from scaling.kernels import dispatch
from scaling.models.initialisation import Constant, Normal, Rule
from scaling.models.residual.banked import BankedState
from scaling.models.residual.method import Inputs, Residual, State
from scaling.models.residual.routing import depth_logits, mix, routing_weights


class DepthState(State):
    """Sources written so far, and the logits that each has for the sites to come."""

    def __init__(self, embedding_BTD: Tensor, method: DepthRouting) -> None:
        self.method = method
        self.keys_SHC = (method.query_SD * method.gain_SD).view(len(method.query_SD), method.heads, -1)
        self.sources: list[Tensor] = []
        self.logits: list[tuple[int, tuple[Tensor, ...]]] = []  # first site, then a tensor (B, T, H) a site
        self.partial_BTD: Tensor | None = None
        self.stream_BTD = embedding_BTD if method.cumulative else None
        self.add_source(embedding_BTD, first_site=0)

    def logits_of(self, source_BTD: Tensor, sites: slice) -> tuple[Tensor, ...]:
        """Logits of a source for a range of sites."""
        keys_SHC = self.keys_SHC[sites]
        if len(keys_SHC) == 0:
            return ()
        method = self.method
        return depth_logits(source_BTD, keys_SHC, eps=method.eps, norm_per_head=method.norm_per_head)

    def add_source(self, source_BTD: Tensor, *, first_site: int) -> None:
        """Let every site from ``first_site`` on see a source."""
        self.sources.append(source_BTD)
        self.logits.append((first_site, self.logits_of(source_BTD, slice(first_site, None))))

    def visible(self, site: int) -> tuple[list[Tensor], list[Tensor]]:
        """Sources that a site sees and their logits for it."""
        sources = list(self.sources)
        logits = [by_site[site - first] for first, by_site in self.logits]
        if self.partial_BTD is not None:
            sources.append(self.partial_BTD)
            logits += self.logits_of(self.partial_BTD, slice(site, site + 1))
        return sources, logits

    def read(self, site: int) -> Inputs:
        sources, logits = self.visible(site)
        if len(sources) == 1:
            return sources[0]
        return mix(routing_weights(logits), sources)

    def write(self, site: int, out_BTD: Tensor) -> None:
        if self.stream_BTD is not None:
            block_BTD = self.stream_BTD = self.stream_BTD + out_BTD
        else:
            block_BTD = out_BTD if self.partial_BTD is None else self.partial_BTD + out_BTD
        if self.method.ends_block(site):
            self.partial_BTD = None
            self.add_source(block_BTD, first_site=site + 1)
        else:
            self.partial_BTD = block_BTD


class DepthRouting(Residual):
    """A query and a gain a site, read in ``heads`` slices of the width."""

    def __init__(
        self,
        config: ModelConfig,
        options: Blocked,
        *,
        heads: int,
        query_init: str,
        num_sites: int,
        norm_per_head: bool = False,
        cumulative: bool = False,
    ) -> None:
        super().__init__(config)
        self.heads, self.norm_per_head, self.cumulative = heads, norm_per_head, cumulative
        self.eps = config.norm_eps
        self.query_start: Rule = Normal(std=config.init_std) if query_init == "random" else Constant(value=0.0)
        self.block_sublayers = options.sublayers_per_block(config.num_sublayers)
        self.query_SD = nn.Parameter(torch.empty(num_sites, config.d_model))
        self.gain_SD = nn.Parameter(torch.empty(num_sites, config.d_model))

    def ends_block(self, site: int) -> bool:
        """Whether sublayer ``site`` is the last of its block."""
        return (site + 1) % self.block_sublayers == 0 or site + 1 == self.num_sublayers

    def initial_values(self) -> Mapping[str, Rule]:
        return {"query_SD": self.query_start, "gain_SD": Constant(value=1.0)}

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> State:
        if dispatch.choose("depth_routing", embedding_BTD.device).runs == "reference":
            return self.eager(embedding_BTD)
        return self.banked(embedding_BTD)

    def banked(self, embedding_BTD: Tensor) -> BankedState:
        """The state whose sources are in a bank, which kernels read."""
        return BankedState(embedding_BTD, self)

    def eager(self, embedding_BTD: Tensor) -> DepthState:
        """The state in plain PyTorch, whose sources and logits can be looked at."""
        return DepthState(embedding_BTD, self)

    def statistics(self) -> dict[str, float]:
        norms_S = self.query_SD.detach().float().norm(dim=-1)[1:]
        return {"route/query_norm_mean": float(norms_S.mean()), "route/query_norm_max": float(norms_S.max())}


def make_attnres(config: ModelConfig, options: AttnRes) -> DepthRouting:
    """Depth routing over the full width."""
    sites = config.num_sublayers + 1
    return DepthRouting(config, options, heads=1, query_init=options.query_init, num_sites=sites)
