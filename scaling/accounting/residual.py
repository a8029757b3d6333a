"""The share of each residual method in a model's parameters, FLOPs and memory.

Below ``parameters``, ``flops`` and ``memory``, which add it to the backbone's. One function a method, beside the
options it reads; the modules in ``scaling.models.residual`` state the same formulae, and tests hold them together.
Notation: d width, L layers, 2L sublayers, 2L + 1 sites (the last feeds the head), S sublayers a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scaling.config.model import ModelConfig
from scaling.config.residual import AttnRes, Baseline, Blocked, Mhar, ResidualConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualCost:
    """What a residual method adds.

    Attributes
    ----------
    parameters
        Its own parameters.
    norm_parameters
        Gains of the norms over the width that the whole model has under this method (pre-norm: one a sublayer and the
        final one).
    forward_flops
        Its arithmetic for one token in the forward pass.
    stored_elements
        Numbers a token that it keeps for the backward pass, the inputs of the sublayers' norms among them, in the
        precision of the residual stream.
    """

    parameters: int
    norm_parameters: int
    forward_flops: float
    stored_elements: float


def prenorm_gains(config: ModelConfig) -> int:
    """Gains of the pre-norm backbone over the width: one norm a sublayer, and the final norm."""
    return (config.num_sublayers + 1) * config.d_model


def source_counts(num_sublayers: int, block_sublayers: int) -> list[int]:
    """Number of sources that each site 0..2L sees: finished blocks, the embedding, and a partial block if begun.

    >>> source_counts(4, 1), source_counts(4, 2), source_counts(4, 4)
    ([1, 2, 3, 4, 5], [1, 2, 2, 3, 3], [1, 2, 2, 2, 2])
    """
    return [1 + -(-site // block_sublayers) for site in range(num_sublayers + 1)]


def _baseline(config: ModelConfig, _: Baseline) -> ResidualCost:
    return ResidualCost(
        parameters=0,
        norm_parameters=prenorm_gains(config),
        forward_flops=0,
        stored_elements=(config.num_sublayers + 1) * config.d_model,
    )


def _routed(config: ModelConfig, options: Blocked) -> ResidualCost:
    # Query and gain of width d a site. Per (site, source) pair 2d for the logit and 2d for the mixture; per source 2d
    # for its norm. Heads change none of it: they are a reshape (arXiv 2607.27230, section 2).
    # Kept: sources and mixtures of width d (site 0 has no mixture), logits and weights by (pair, head).
    d, sublayers = config.d_model, config.num_sublayers
    heads = options.heads if isinstance(options, Mhar) else 1
    counts = source_counts(sublayers, options.sublayers_per_block(sublayers))
    keys = sublayers + 1  # each sublayer's output (or the partial sum it completes) is normed once
    return ResidualCost(
        parameters=(sublayers + 1) * 2 * d,
        norm_parameters=prenorm_gains(config),
        forward_flops=4 * d * sum(counts) + 2 * d * keys,
        stored_elements=d * (2 * sublayers + 1) + heads * (2 * sum(counts) - 1),
    )


_COSTS: dict[type[ResidualConfig], Callable[[ModelConfig, Any], ResidualCost]] = {
    Baseline: _baseline,
    AttnRes: _routed,
    Mhar: _routed,
}


def residual_cost(config: ModelConfig) -> ResidualCost:
    """The cost of ``config.residual`` on this backbone."""
    return _COSTS[type(config.residual)](config, config.residual)
