"""What joins the sublayers of the benchmark's decoder: each method by our kernels, by PyTorch, and by others' kernels.

Between :mod:`scaling.kernels.decoder` and :mod:`scaling.kernels.benchmark`. A method has the parameters of its default
options and one function an implementation: ``kernels`` (ours), ``compiled`` (PyTorch in ``torch.compile``'d regions),
``eager`` (the same uncompiled), and where they are installed ``fla`` (flash-linear-attention, one head) and ``liger``.

Shape legend: B batch, T time, D width, S sites, H heads, M streams, K coefficients.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from scaling.kernels.bank import SourceBank
from scaling.kernels.decoder import (
    EPS,
    Decoder,
    Inputs,
    Shape,
    inner_of,
    normed_region,
    plain_region,
    rms_norm,
    stream_region,
)
from scaling.kernels.hyper import Rule
from scaling.kernels.hyper_streams import HyperStreams
from scaling.kernels.joining_others import mhc_liger, routed_fla, routed_liger
from scaling.kernels.joining_plain import (
    BLOCKS,
    ROUNDS,
    STREAMS,
    WIDTHS,
    Depth,
    StreamDepth,
    block_size,
    hyper_plain,
    newest_source,
    query_of,
    routed_plain,
)
from scaling.kernels.stream_bank import StreamBank

HEADS = 8

Run = Callable[[Decoder, Tensor, Inputs], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Parameters as they start, and implementations by name."""

    parameters: Callable[[Shape], dict[str, Tensor]]
    runs: Mapping[str, Run]


def _routes(shape: Shape) -> dict[str, Tensor]:
    sites = 2 * shape.layers + 1
    return {"query": torch.randn(sites, shape.width) * 0.02, "key_gain": torch.ones(sites, shape.width)}


def _baseline(model: Decoder, embedding: Tensor, inputs: Inputs) -> Tensor:
    stream, update = embedding, torch.zeros_like(embedding)
    for function, gain, weights in inputs:
        stream, update = model.region(stream_region)(function, stream, update, gain, *weights)
    return update


def _routed(model: Decoder, source: Tensor, inputs: Inputs, *, heads: int, blocks: bool = False) -> Tensor:
    block = block_size(inputs) if blocks else 1
    bank = SourceBank(query_of(model), source, heads=heads, eps=EPS, block=block)
    update = source
    for site, (function, gain, weights) in enumerate(inputs):
        update = model.region(plain_region)(function, bank.normed_site(site, source, gain, EPS), *weights)
        source = newest_source(block, update, source, site)
    return update


def _gated_routes(shape: Shape) -> dict[str, Tensor]:
    return {**_routes(shape), "gate": torch.ones(2 * shape.layers)}


def delta_region(
    function: Callable[..., Tensor],
    stream: Tensor, update: Tensor, routed: Tensor, gate: Tensor, gain: Tensor, *weights: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Delta attention residuals: the stream goes on, the sublayer sees it with the gated mix added."""
    stream = stream + update
    normed = rms_norm(stream + gate * routed, gain)
    return stream, function(inner_of(function), normed, *weights)


def _delta(model: Decoder, embedding: Tensor, inputs: Inputs, *, kernels: bool) -> Tensor:
    stream, update, last = embedding, torch.zeros_like(embedding), len(inputs) - 1
    query = query_of(model)[:last]
    bank: SourceBank | None = None
    if kernels:
        bank = SourceBank(query, embedding, heads=HEADS, eps=EPS)
    depth = Depth(model, query.unflatten(-1, (HEADS, -1)), 1)
    for site, (function, gain, weights) in enumerate(inputs):
        if site == last:
            update = model.region(stream_region)(function, stream, update, gain, *weights)[1]
            break
        newest = update if site else embedding
        routed = depth.read(site, newest) if bank is None else bank.site(site, newest)
        gate = model.joining["gate"][site]
        stream, update = model.region(delta_region)(function, stream, update, routed, gate, gain, *weights)
    return update


def _streams(shape: Shape) -> dict[str, Tensor]:
    sites, d = 2 * shape.layers, shape.width
    owners = 1 + -(-sites // max(1, sites // BLOCKS))
    taps = {f"kernel{width}": torch.randn(owners, width, d) * width**-0.5 for width in WIDTHS}
    return {
        "key": torch.randn(sites, STREAMS, d) * 0.02,
        **taps,
        "phi": torch.randn(sites, STREAMS * d, STREAMS) * 0.02,
        "scale": torch.full((sites,), 0.01),
        "bias": torch.full((sites, STREAMS), -1.0986),  # gates of 1 / 4
    }


def _msar(model: Decoder, source: Tensor, inputs: Inputs, *, kernels: bool) -> Tensor:
    block, last, total = block_size(inputs), len(inputs) - 1, source
    weights = [model.joining[name] for name in ("key", *(f"kernel{width}" for width in WIDTHS))]
    mixer = (model.joining["phi"], model.joining["scale"], model.joining["bias"])
    reader = (
        StreamBank(weights[0], weights[1:], mixer, source, None, block=block, scope="source", eps=EPS)
        if kernels
        else StreamDepth(model, block)
    )
    update = source
    for site, (function, gain, region_weights) in enumerate(inputs[:last]):
        if site == 0 or (site - 1) % block == 0:  # a block's first output, or the embedding
            source = update
            routed = reader.site(site, source)
        else:
            source, routed = reader.add_site(site, source, update)
        if site > 0 and site % block == 0:
            total = total + source
        update = model.region(normed_region)(function, routed, gain, *region_weights)
    total = total + newest_source(block, update, source, last - 1)
    function, gain, region_weights = inputs[last]
    return cast(Tensor, model.region(normed_region)(function, total, gain, *region_weights))


def _hc_parameters(shape: Shape) -> dict[str, Tensor]:
    sites, m = 2 * shape.layers, STREAMS
    static = torch.cat((torch.zeros(m, 1), torch.eye(m), torch.ones(m, 1)), dim=1).repeat(sites, 1, 1)
    static[torch.arange(sites), torch.arange(sites) % m, 0] = 1.0
    return {
        "static": static.flatten(1),
        "phi": torch.randn(sites, shape.width, m + 2) * 0.02,
        "gate": torch.tensor(0.01),
    }


def _mhc_parameters(shape: Shape) -> dict[str, Tensor]:
    sites, m = 2 * shape.layers, STREAMS
    count = m * (m + 2)
    phi = torch.randn(sites, m * shape.width, count) * 0.02
    return {"phi": phi, "scale": torch.full((sites, 3), 0.01), "bias": torch.zeros(sites, count)}


def _scales(scale_3: Tensor) -> Tensor:
    m = STREAMS
    return torch.cat([scale.expand(count) for scale, count in zip(scale_3, (m, m, m * m), strict=True)])


def _hyper(model: Decoder, embedding: Tensor, inputs: Inputs, *, kind: str) -> Tensor:
    joining, last = model.joining, len(inputs) - 1
    rule = Rule(kind="hc", tanh=True, eps=EPS) if kind == "hc" else Rule(kind="mhc", iterations=ROUNDS, eps=EPS)
    streams = HyperStreams(embedding, STREAMS)
    update: Tensor | None = None
    for site, (function, gain, weights) in enumerate(inputs):
        if site == last:
            x = streams.step(Rule(kind="sum"), update)
        elif kind == "hc":
            scale = joining["gate"].expand(STREAMS * (STREAMS + 2))
            x = streams.step(rule, update, phi=joining["phi"][site], scale_K=scale, bias_K=joining["static"][site])
        else:
            scale = _scales(joining["scale"][site])
            x = streams.step(rule, update, phi=joining["phi"][site], scale_K=scale, bias_K=joining["bias"][site])
        update = model.region(normed_region)(function, x, gain, *weights)
    return cast(Tensor, update)


def _implementations(ours: Run, plain: Run, **others: Run) -> dict[str, Run]:
    installed = {"fla": "fla", "liger": "liger_kernel"}
    kept = {name: run for name, run in others.items() if importlib.util.find_spec(installed[name]) is not None}
    return {"kernels": ours, "compiled": plain, "eager": plain, **kept}


def _methods() -> Iterator[tuple[str, Method]]:
    yield "baseline", Method(parameters=lambda _: {}, runs={"compiled": _baseline, "eager": _baseline})
    one = _implementations(
        partial(_routed, heads=1), partial(routed_plain, heads=1), fla=routed_fla, liger=routed_liger
    )
    yield "attnres", Method(parameters=_routes, runs=one)
    eight = _implementations(partial(_routed, heads=HEADS), partial(routed_plain, heads=HEADS))
    yield "mhar", Method(parameters=_routes, runs=eight)
    blocks = _implementations(
        partial(_routed, heads=HEADS, blocks=True), partial(routed_plain, heads=HEADS, blocks=True)
    )
    yield "block", Method(parameters=_routes, runs=blocks)
    single = _implementations(
        partial(_routed, heads=1, blocks=True), partial(routed_plain, heads=1, blocks=True),
        fla=partial(routed_fla, blocks=True), liger=partial(routed_liger, blocks=True),
    )  # fmt: skip
    yield "block-attnres", Method(parameters=_routes, runs=single)
    delta = _implementations(partial(_delta, kernels=True), partial(_delta, kernels=False))
    yield "delta", Method(parameters=_gated_routes, runs=delta)
    msar = _implementations(partial(_msar, kernels=True), partial(_msar, kernels=False))
    yield "msar", Method(parameters=_streams, runs=msar)
    hc = _implementations(partial(_hyper, kind="hc"), partial(hyper_plain, kind="hc"))
    yield "hc", Method(parameters=_hc_parameters, runs=hc)
    mhc = _implementations(partial(_hyper, kind="mhc"), partial(hyper_plain, kind="mhc"), liger=mhc_liger)
    yield "mhc", Method(parameters=_mhc_parameters, runs=mhc)


METHODS: dict[str, Method] = dict(_methods())
IMPLEMENTATIONS = ("kernels", "compiled", "eager", "fla", "liger")
