"""The share of each residual method in a model's parameters, FLOPs and memory.

Below ``parameters``, ``flops`` and ``memory``, which add it to the backbone's. One function a method; the modules in
``scaling.models.residual`` state the same formulae, and tests hold them together. Notation: d width, L layers, 2L
sublayers, 2L + 1 sites (the last feeds the head), S sublayers a block.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from scaling.config.model import ModelConfig
from scaling.config.residual import (
    AttnRes,
    AttnResMhc,
    Baseline,
    Blocked,
    DeepNet,
    Delta,
    DenseFormer,
    HyperConnections,
    Mhar,
    Mhc,
    Msar,
    MuddFormer,
    RealFormer,
    ResidualConfig,
    ReZero,
)


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
    forward_flops_per_key
        The part that grows with attention: for one token and one key that it meets.
    stored_elements
        Numbers a token that it keeps for the backward pass, the inputs of the sublayers' norms among them, in the
        precision of the residual stream.
    stored_per_position
        Numbers a token and position of the sequence that it keeps (attention scores that fused attention would not).
    """

    parameters: int
    norm_parameters: int
    forward_flops: float
    stored_elements: float
    forward_flops_per_key: float = 0
    stored_per_position: float = 0


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
    stored = (config.num_sublayers + 1) * config.d_model
    return ResidualCost(parameters=0, norm_parameters=prenorm_gains(config), forward_flops=0, stored_elements=stored)


def _hyper_connections(config: ModelConfig, options: HyperConnections) -> ResidualCost:
    # Read n d, mixing n^2 d, writing n d multiply-adds; dynamic coefficients n (n + 2) d more.
    d, n, sublayers = config.d_model, options.streams, config.num_sublayers
    dynamic = options.variant == "dynamic"
    affine = 2 * d if dynamic and options.norm == "layer" else 0
    own = n * (n + 2) + (d * (n + 2) + 2 + affine if dynamic else 0)
    flops = 2 * d * (2 * n + n * n) + (2 * d * n * (n + 2) if dynamic else 0)
    # Streams, sublayer input and output; dynamic: normed streams and the coefficients through tanh, gate and sum;
    # static: the copy of the streams that a product with one matrix for all tokens makes.
    stored = n * d + 2 * d + (n * d + 3 * n * (n + 2) if dynamic else n * d)
    return ResidualCost(
        parameters=sublayers * own,
        norm_parameters=prenorm_gains(config),
        forward_flops=sublayers * flops,
        stored_elements=sublayers * stored - (n - 1) * d + d,  # the first streams are one
    )


def _mhc(config: ModelConfig, options: Mhc) -> ResidualCost:
    d, m, sublayers = config.d_model, options.streams, config.num_sublayers
    coefficients = m * m + 2 * m
    learned = options.read_out == "learned"
    # Projection of m d entries; read m d, mixing m^2 d, writing m d multiply-adds; Sinkhorn: a sum and a division an
    # entry and axis.
    flops = 2 * m * d * coefficients + 2 * d * coefficients + 4 * m * m * options.sinkhorn_iterations
    head = (2 * m * d * m + 2 * m * d) if learned else 0
    # Streams, sublayer input and output; coefficients through scale, gate and bias; every division's matrix and sums.
    stored = m * d + 2 * d + 3 * coefficients + 2 * options.sinkhorn_iterations * (m * m + m)
    return ResidualCost(
        parameters=sublayers * (m * d * coefficients + coefficients + 3) + (m * m * d + m + 1 if learned else 0),
        norm_parameters=prenorm_gains(config),
        forward_flops=sublayers * flops + head,
        stored_elements=sublayers * stored + d * (1 + m * learned),
    )


def _depth(config: ModelConfig, options: Blocked, *, heads: int, num_sites: int) -> ResidualCost:
    # Query and gain of width d a site. Per (site, source) pair 2d for the logit and 2d for the mixture; per source 2d
    # for its norm. Heads change none of it: they are a reshape (arXiv 2607.27230, section 2).
    # Kept: sources and mixtures of width d (site 0 has no mixture), logits and weights by (pair, head).
    d, sublayers = config.d_model, config.num_sublayers
    pairs = sum(source_counts(sublayers, options.sublayers_per_block(sublayers))[:num_sites])
    return ResidualCost(
        parameters=num_sites * 2 * d,
        norm_parameters=prenorm_gains(config),
        forward_flops=4 * d * pairs + 2 * d * num_sites,
        stored_elements=d * (2 * sublayers + 1) + heads * (2 * pairs - 1),
    )


def _attnres(config: ModelConfig, options: AttnRes) -> ResidualCost:
    return _depth(config, options, heads=1, num_sites=config.num_sublayers + 1)


def _mhar(config: ModelConfig, options: Mhar) -> ResidualCost:
    cost = _depth(config, options, heads=options.heads, num_sites=config.num_sublayers + 1)
    if options.align == "slices":
        return cost
    # Attention sites route G full-width mixtures in place of one.
    d, sublayers, more = config.d_model, config.num_sublayers, config.num_kv_heads - 1
    counts = source_counts(sublayers, options.sublayers_per_block(sublayers))[0:sublayers:2]
    saved = 2 * (config.num_kv_heads - options.heads) * sum(counts)
    return ResidualCost(
        parameters=cost.parameters + config.num_layers * more * d,
        norm_parameters=cost.norm_parameters,
        forward_flops=cost.forward_flops + more * 4 * d * sum(counts),
        # mixtures, and their normed copies that attention projects
        stored_elements=cost.stored_elements + more * d * (2 * config.num_layers - 1) + saved,
    )


def _delta(config: ModelConfig, options: Delta) -> ResidualCost:
    d, sublayers = config.d_model, config.num_sublayers
    cost = _depth(config, options, heads=options.heads, num_sites=sublayers)
    null = sublayers if options.null_source else 0  # one more pair at each site
    gate = sublayers if options.gate == "learned" else 0
    # Kept besides sources, weights and logits: the norm's input, stream plus routed; with a gate the routed part too.
    stored = cost.stored_elements + (gate + 1) * d + 2 * options.heads * null + (d if null else 0)
    return ResidualCost(
        parameters=cost.parameters + gate + (d if null else 0),
        norm_parameters=cost.norm_parameters,
        forward_flops=cost.forward_flops + 4 * d * null + d * gate,
        stored_elements=stored,
    )


def _msar(config: ModelConfig, options: Msar) -> ResidualCost:
    d, m, sublayers = config.d_model, options.streams, config.num_sublayers
    size = options.sublayers_per_block(sublayers)
    pairs = sum(source_counts(sublayers, size)[:sublayers])
    num_sources = 1 + -(-sublayers // size)
    taps = sum(options.kernel_widths)
    owners = {"global": 1, "source": num_sources, "site": sublayers}[options.conv_scope]
    # Expansions made: each source and partial sum that a site reads, once; or anew for each pair where kernels belong
    # to sites. The last block's sum is only merged.
    expansions = pairs if options.conv_scope == "site" else sublayers
    mixes = options.mixer == "sigmoid" and m > 1
    gains = m if options.gain == "stream" else 1
    parameters = sublayers * d * (m + gains) + owners * d * taps
    flops = 4 * d * m * pairs + expansions * (2 * d * taps + 2 * d * m) + num_sources * d
    # Kept: source, its convolved streams and each convolution's padded input, retrieved streams and their mixture,
    # logits and weights of every pair.
    stored = d * sublayers + 2 * expansions * d * len(options.kernel_widths) + sublayers * d + 2 * m * pairs
    if m > 1:
        flops += sublayers * 2 * m * d
    if mixes:
        parameters += sublayers * (m * m * d + m + 1)
        flops += sublayers * 2 * m * m * d
        stored += sublayers * (2 * m * d + 3 * m)  # retrieved streams, and beside each other
    return ResidualCost(
        parameters=parameters, norm_parameters=prenorm_gains(config), forward_flops=flops, stored_elements=stored + d
    )


def _attnres_mhc(config: ModelConfig, options: AttnResMhc) -> ResidualCost:
    d, sublayers = config.d_model, config.num_sublayers
    size = options.sublayers_per_block(sublayers)
    mhc = _mhc(config, options.mhc)
    # At each site the finished summaries and the streams' current read.
    pairs = sum(2 + site // size for site in range(sublayers)) + 2 + -(-sublayers // size)
    normed = sublayers + 1 + 1 + -(-sublayers // size)
    return ResidualCost(
        parameters=mhc.parameters + 2 * d * (sublayers + 1),
        norm_parameters=mhc.norm_parameters,
        forward_flops=mhc.forward_flops + 4 * d * pairs + 2 * d * normed,
        stored_elements=mhc.stored_elements + d * (sublayers + 1 + -(-sublayers // size)) + 2 * pairs,
    )


def _denseformer(config: ModelConfig, options: DenseFormer) -> ResidualCost:
    d, layers = config.d_model, config.num_layers
    lengths = [(i + 1) // options.dilation + 1 for i in range(layers) if (i + 1) % options.period == 0]
    # Kept: each block's output and its averaged input, and the stream between its sublayers.
    return ResidualCost(
        parameters=sum(lengths),
        norm_parameters=prenorm_gains(config),
        forward_flops=2 * d * sum(lengths),
        stored_elements=d * (2 * layers + 1 + len(lengths)),
    )


def _muddformer(config: ModelConfig, options: MuddFormer) -> ResidualCost:
    d, layers = config.d_model, config.num_layers
    parameters, flops, stored = 0, 0, 0
    for block in range(layers):
        ways, sources = (4 if block < layers - 1 else 1), block + 2
        wanted = ways * sources * (4 if ways == 1 else 1)
        hidden = -(-wanted // options.hidden_multiple) * options.hidden_multiple
        parameters += hidden * (d + ways * sources) + ways * sources
        flops += 2 * hidden * (d + ways * sources) + 2 * d * ways * sources
        # Mixtures, normed input of the generator, its hidden layer before and after GELU, the weights; and the normed
        # copies from which key and value are projected.
        stored += ways * d + d + 2 * hidden + ways * sources + (2 * d if ways == 4 else 0)
        if options.pre_post_norm:
            parameters += ways * d + d
            stored += ways * d + d
    if options.pre_post_norm:
        parameters += d
        stored += d
    return ResidualCost(
        parameters=parameters,
        norm_parameters=prenorm_gains(config) + 2 * layers * d,
        forward_flops=flops,
        stored_elements=stored + d * (2 * layers + 1) + 2 * d,
    )


def _rezero(config: ModelConfig, options: ReZero) -> ResidualCost:
    d, sublayers = config.d_model, config.num_sublayers
    return ResidualCost(
        parameters=sublayers,
        norm_parameters=d if options.final_norm else 0,
        forward_flops=sublayers * d,
        stored_elements=(sublayers + (1 if options.final_norm else 0)) * d,
    )


def _deepnet(config: ModelConfig, _: DeepNet) -> ResidualCost:
    d, sublayers = config.d_model, config.num_sublayers
    return ResidualCost(
        parameters=0, norm_parameters=sublayers * d, forward_flops=sublayers * d, stored_elements=(sublayers + 1) * d
    )


def _realformer(config: ModelConfig, options: RealFormer) -> ResidualCost:
    d, sublayers = config.d_model, config.num_sublayers
    return ResidualCost(
        parameters=0,
        norm_parameters=(sublayers + (options.norm == "pre")) * d,
        forward_flops=0,
        forward_flops_per_key=config.num_layers * config.num_heads,
        stored_elements=(sublayers + 1) * d,
        stored_per_position=config.num_layers * config.num_heads,  # the softmax's output
    )


_COSTS: dict[type[ResidualConfig], Callable[[ModelConfig, Any], ResidualCost]] = {
    Baseline: _baseline,
    HyperConnections: _hyper_connections,
    Mhc: _mhc,
    AttnRes: _attnres,
    Mhar: _mhar,
    Delta: _delta,
    Msar: _msar,
    AttnResMhc: _attnres_mhc,
    DenseFormer: _denseformer,
    MuddFormer: _muddformer,
    ReZero: _rezero,
    DeepNet: _deepnet,
    RealFormer: _realformer,
}


def residual_cost(config: ModelConfig) -> ResidualCost:
    """The cost of ``config.residual`` on this backbone."""
    return _COSTS[type(config.residual)](config, config.residual)
