"""``mhar``: multi-head attention residuals (arXiv 2607.27230).

As ``attnres``, with the site's query cut into H slices that each have their own softmax over depth:

    h_(s,[h]) = sum_i softmax_i( w_(s,[h]) . (RMSNorm(v_i) * g_s)_[h] ) v_(i,[h])

The norm is taken over the full width before slicing: the paper's equation and released code say so, its listing norms
each slice (``key_norm="per_head"``). No parameters and no FLOPs beyond ``attnres``; H = 1 is ``attnres`` bit for bit.
Queries start at 0 (the released code's default), gains at 1.

``align="kv_groups"`` is the paper's null result: at attention sites each of the G key/value groups has a full-width
query and reads a mixture of its own; (G - 1) d parameters more an attention site, and G times its routing FLOPs.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scaling.config.model import ModelConfig
from scaling.config.residual import Mhar
from scaling.models.initialisation import Constant, Rule
from scaling.models.residual.attnres import DepthRouting, DepthState
from scaling.models.residual.banked import BankedGroups
from scaling.models.residual.method import Inputs
from scaling.models.residual.routing import depth_logits, mix, routing_weights


class GroupState(DepthState):
    """Slices at feed-forward sites and the last; at attention sites one mixture for each key/value group."""

    def __init__(self, embedding_BTD: Tensor, method: GroupRouting) -> None:
        self.group_keys_LGD = method.group_query_LGD * method.group_gain_LD.unsqueeze(1)
        super().__init__(embedding_BTD, method)

    def logits_of(self, source_BTD: Tensor, sites: slice) -> tuple[Tensor, ...]:
        method, end = self.method, self.method.num_sublayers
        wanted = range(sites.start, end + 1 if sites.stop is None else sites.stop)
        sliced = [site for site in wanted if site % 2 or site == end]
        grouped = [site for site in wanted if site not in sliced]
        logits: dict[int, Tensor] = {}
        if sliced:  # row r of the keys is site 2 r + 1, the last row site 2 L: site // 2 in both cases
            keys_SHC = self.keys_SHC[[site // 2 for site in sliced]]
            by_site = depth_logits(source_BTD, keys_SHC, eps=method.eps, norm_per_head=method.norm_per_head)
            logits.update(zip(sliced, by_site, strict=True))
        if grouped:
            keys_LGD = self.group_keys_LGD[[site // 2 for site in grouped]]
            flat = depth_logits(source_BTD, keys_LGD.flatten(0, 1).unsqueeze(1), eps=method.eps)
            groups = keys_LGD.shape[1]
            for i, site in enumerate(grouped):
                logits[site] = torch.cat(flat[i * groups : (i + 1) * groups], dim=-1)  # (B, T, G)
        return tuple(logits[site] for site in wanted)

    def read(self, site: int) -> Inputs:
        if site % 2 or site == self.method.num_sublayers:
            return super().read(site)
        sources, logits = self.visible(site)
        weights_NBTG = routing_weights(logits)
        return tuple(mix(weights.unsqueeze(-1), sources) for weights in weights_NBTG.unbind(dim=-1))


class GroupRouting(DepthRouting):
    """Routing aligned to key/value groups at attention sites."""

    attention = "kv_groups"

    def __init__(self, config: ModelConfig, options: Mhar) -> None:
        super().__init__(
            config,
            options,
            heads=options.heads,
            query_init=options.query_init,
            num_sites=config.num_layers + 1,
            norm_per_head=options.key_norm == "per_head",
            cumulative=options.source == "cumulative",
        )
        self.group_query_LGD = nn.Parameter(torch.empty(config.num_layers, config.num_kv_heads, config.d_model))
        self.group_gain_LD = nn.Parameter(torch.empty(config.num_layers, config.d_model))

    def initial_values(self) -> Mapping[str, Rule]:
        groups: dict[str, Rule] = {"group_query_LGD": self.query_start, "group_gain_LD": Constant(value=1.0)}
        return {**super().initial_values(), **groups}

    def eager(self, embedding_BTD: Tensor) -> DepthState:
        return GroupState(embedding_BTD, self)

    def banked(self, embedding_BTD: Tensor) -> BankedGroups:
        return BankedGroups(embedding_BTD, self)


def make_mhar(config: ModelConfig, options: Mhar) -> DepthRouting:
    """Depth routing in ``options.heads`` slices, or aligned to key/value groups."""
    if options.align == "kv_groups":
        return GroupRouting(config, options)
    return DepthRouting(
        config,
        options,
        heads=options.heads,
        query_init=options.query_init,
        num_sites=config.num_sublayers + 1,
        norm_per_head=options.key_norm == "per_head",
        cumulative=options.source == "cumulative",
    )
