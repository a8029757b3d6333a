"""What joins the sublayers of the benchmark's decoder: each method by our kernels, by PyTorch, and by others' kernels.

Between :mod:`scaling.kernels.decoder` and :mod:`scaling.kernels.benchmark`. A method has the parameters of its default
options and one function an implementation: ``kernels`` (ours), ``compiled`` (PyTorch in ``torch.compile``'d regions),
``eager`` (the same uncompiled), and where they are installed ``fla`` (flash-linear-attention, one head) and ``liger``.
PyTorch's versions are the models' algorithms: a source's scores for all sites at once, no copies of sources.

Shape legend: B batch, T time, D width, S sites, H heads, M streams, K coefficients.
"""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.kernels.bank import SourceBank
from scaling.kernels.decoder import (
    EPS,
    Decoder,
    Inputs,
    Shape,
    normed_region,
    plain_region,
    rms_norm,
    stream_region,
)
from scaling.kernels.hyper import Rule
from scaling.kernels.hyper_step import HyperStreams
from scaling.kernels.reference import hyper_read, hyper_weights, hyper_write
from scaling.kernels.stream_bank import StreamBank

HEADS = 8
STREAMS = 4
_BLOCKS = 8
_WIDTHS = (4, 8, 12)  # tokens of msar's convolutions
_ROUNDS = 20  # of Sinkhorn's iteration

Run = Callable[[Decoder, Tensor, Inputs], Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """Parameters as they start, and implementations by name."""

    parameters: Callable[[Shape], dict[str, Tensor]]
    runs: Mapping[str, Run]


def block_size(inputs: Inputs) -> int:
    """Sublayers a block, for eight blocks."""
    return max(1, (len(inputs) - 1) // _BLOCKS)


def _sources(block: int, update: Tensor, source: Tensor, site: int) -> Tensor:
    """The newest source after a sublayer: its output, or with blocks the running sum."""
    return update if site % block == 0 else source + update


def _routes(shape: Shape) -> dict[str, Tensor]:
    sites = 2 * shape.layers + 1
    return {"query": torch.randn(sites, shape.width) * 0.02, "key_gain": torch.ones(sites, shape.width)}


def _query(model: Decoder) -> Tensor:
    return cast(Tensor, model.joining["query"].float() * model.joining["key_gain"].float())


def _baseline(model: Decoder, embedding: Tensor, inputs: Inputs) -> Tensor:
    stream, update = embedding, torch.zeros_like(embedding)
    for function, gain, weights in inputs:
        stream, update = model.region(stream_region)(function, stream, update, gain, *weights)
    return update


def _routed(model: Decoder, source: Tensor, inputs: Inputs, *, heads: int, blocks: bool = False) -> Tensor:
    block = block_size(inputs) if blocks else 1
    bank = SourceBank(_query(model), source, heads=heads, eps=EPS, block=block)
    update = source
    for site, (function, gain, weights) in enumerate(inputs):
        update = model.region(plain_region)(function, bank.normed_site(site, source, gain, EPS), *weights)
        source = _sources(block, update, source, site)
    return update


def depth_logits(value: Tensor, query_SHC: Tensor) -> Tensor:
    """Scores of one source for some sites, ``(S, B, T, H)``."""
    heads = query_SHC.shape[1]
    key = value * torch.rsqrt(value.float().square().mean(-1, keepdim=True) + EPS).to(value.dtype)
    return torch.einsum("bthc,shc->sbth", key.unflatten(-1, (heads, -1)), query_SHC.to(value.dtype))


def depth_mix(scores: list[Tensor], values: list[Tensor]) -> Tensor:
    """Softmax over depth and mix."""
    weights = torch.stack(scores).float().softmax(0).to(values[0].dtype)
    heads = weights.shape[-1]
    mixed = sum(w.unsqueeze(-1) * v.unflatten(-1, (heads, -1)) for w, v in zip(weights.unbind(0), values, strict=True))
    return cast(Tensor, mixed).flatten(-2)


class _Depth:
    """Sources and scores of one pass, in PyTorch; a finished source is scored for all sites, a running sum for one."""

    def __init__(self, model: Decoder, query_SHC: Tensor, block: int) -> None:
        self.logits, self.mix = model.region(depth_logits), model.region(depth_mix)
        self.query_SHC, self.block = query_SHC, block
        self.values: list[Tensor] = []
        self.scores: list[Tensor] = []

    def read(self, site: int, source: Tensor) -> Tensor:
        if site % self.block == 0:
            self.values.append(source)
            self.scores.append(self.logits(source, self.query_SHC))
            values, scores = self.values, [score[site] for score in self.scores]
        else:
            own = self.logits(source, self.query_SHC[site : site + 1])[0]
            values, scores = [*self.values, source], [*(score[site] for score in self.scores), own]
        mixed: Tensor = self.mix(scores, values) if len(values) > 1 else source
        return mixed


def _routed_plain(model: Decoder, source: Tensor, inputs: Inputs, *, heads: int, blocks: bool = False) -> Tensor:
    block = block_size(inputs) if blocks else 1
    depth = _Depth(model, _query(model).unflatten(-1, (heads, -1)), block)
    update = source
    for site, (function, gain, weights) in enumerate(inputs):
        update = model.region(normed_region)(function, depth.read(site, source), gain, *weights)
        source = _sources(block, update, source, site)
    return update


def _routed_fla(model: Decoder, source: Tensor, inputs: Inputs, *, blocks: bool = False) -> Tensor:
    from fla.ops.attnres import fused_attnres

    return _listed(model, source, inputs, blocks, lambda q, g, seen: fused_attnres(q, seen, g, rms_eps=EPS))


def _routed_liger(model: Decoder, source: Tensor, inputs: Inputs, *, blocks: bool = False) -> Tensor:
    from liger_kernel.transformers.functional import liger_attn_res

    return _listed(model, source, inputs, blocks, lambda q, g, seen: liger_attn_res(torch.stack(seen), q, g, EPS))


def _listed(
    model: Decoder,
    source: Tensor,
    inputs: Inputs,
    blocks: bool,
    route: Callable[[Tensor, Tensor, list[Tensor]], Tensor],
) -> Tensor:
    """Others' operators take a list of sources at every site."""
    block = block_size(inputs) if blocks else 1
    finished: list[Tensor] = []
    update = source
    for site, (function, gain, weights) in enumerate(inputs):
        seen = [*finished, source]
        if site % block == 0:
            finished = seen
        mixed = route(model.joining["query"][site], model.joining["key_gain"][site], seen) if site else source
        update = model.region(normed_region)(function, mixed, gain, *weights)
        source = _sources(block, update, source, site)
    return update


def _gated_routes(shape: Shape) -> dict[str, Tensor]:
    return {**_routes(shape), "gate": torch.ones(2 * shape.layers)}


def delta_region(
    function: Callable[..., Tensor],
    stream: Tensor, update: Tensor, routed: Tensor, gate: Tensor, gain: Tensor, *weights: Any,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Delta attention residuals: the stream goes on, the sublayer sees it with the gated mix added."""
    stream = stream + update
    return stream, function(rms_norm(stream + gate * routed, gain), *weights)


def _delta(model: Decoder, embedding: Tensor, inputs: Inputs, *, kernels: bool) -> Tensor:
    stream, update, last = embedding, torch.zeros_like(embedding), len(inputs) - 1
    query = _query(model)[:last]
    bank: SourceBank | None = None
    if kernels:
        bank = SourceBank(query, embedding, heads=HEADS, eps=EPS)
    depth = _Depth(model, query.unflatten(-1, (HEADS, -1)), 1)
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
    owners = 1 + -(-sites // max(1, sites // _BLOCKS))
    taps = {f"kernel{width}": torch.randn(owners, width, d) * width**-0.5 for width in _WIDTHS}
    return {
        "key": torch.randn(sites, STREAMS, d) * 0.02,
        **taps,
        "phi": torch.randn(sites, STREAMS * d, STREAMS) * 0.02,
        "scale": torch.full((sites,), 0.01),
        "bias": torch.full((sites, STREAMS), -1.0986),  # gates of 1 / 4
    }


def _msar(model: Decoder, source: Tensor, inputs: Inputs, *, kernels: bool) -> Tensor:
    block, last, total = block_size(inputs), len(inputs) - 1, source
    weights = [model.joining[name] for name in ("key", *(f"kernel{width}" for width in _WIDTHS))]
    mixer = (model.joining["phi"], model.joining["scale"], model.joining["bias"])
    read: Callable[[int, Tensor], Tensor]
    if kernels:
        bank = StreamBank(weights[0], weights[1:], mixer, source, None, block=block, scope="source", eps=EPS)
        read = bank.site
    else:
        read = _Streams(model, block).read
    update = source
    for site, (function, gain, region_weights) in enumerate(inputs):
        if site == last:
            break
        update = model.region(normed_region)(function, read(site, source), gain, *region_weights)
        source = _sources(block, update, source, site)
        if (site + 1) % block == 0 or site + 1 == last:
            total = total + source
    function, gain, region_weights = inputs[last]
    return cast(Tensor, model.region(normed_region)(function, total, gain, *region_weights))


def convolve(value: Tensor, *kernels_KD: Tensor) -> tuple[Tensor, ...]:
    """Causal depthwise convolutions of one source."""
    signal = value.transpose(1, 2)
    streams = []
    for kernel_KD in kernels_KD:
        padded = F.pad(signal, (kernel_KD.shape[0] - 1, 0))
        taps = kernel_KD.to(value.dtype).flip(0).t().unsqueeze(1)
        streams.append(F.conv1d(padded, taps, groups=value.shape[-1]).transpose(1, 2))
    return tuple(streams)


def blend(mixed: list[Tensor], phi: Tensor, scale: Tensor, bias: Tensor) -> Tensor:
    """Gate and add the streams."""
    flat = torch.cat(mixed, -1).float()
    projected = (flat @ phi.float()) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + EPS)
    gates = torch.sigmoid(scale * projected + bias).to(mixed[0].dtype)
    return cast(Tensor, sum(gates[..., j : j + 1] * x for j, x in enumerate(mixed)))


class _Streams:
    """Multi-stream routing of one pass in PyTorch: one :class:`_Depth` a stream."""

    def __init__(self, model: Decoder, block: int) -> None:
        self.model, self.block = model, block
        key_SMD = model.joining["key"]
        self.depths = [_Depth(model, key_SMD[:, j].unsqueeze(1), block) for j in range(STREAMS)]

    def read(self, site: int, source: Tensor) -> Tensor:
        joining, owner = self.model.joining, -(-site // self.block)
        taps = [joining[f"kernel{width}"][owner] for width in _WIDTHS]
        streams = (source, *self.model.region(convolve)(source, *taps))
        mixed = [depth.read(site, x) for depth, x in zip(self.depths, streams, strict=True)]
        blended: Tensor = self.model.region(blend)(
            mixed, joining["phi"][site], joining["scale"][site], joining["bias"][site]
        )
        return blended


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
    rule = Rule(kind="hc", tanh=True, eps=EPS) if kind == "hc" else Rule(kind="mhc", iterations=_ROUNDS, eps=EPS)
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


def hc_weights(x_BTMD: Tensor, static: Tensor, phi: Tensor, gate: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Dynamic hyper-connections' read, write and mixing weights."""
    streams = x_BTMD.shape[-2]
    normed = F.rms_norm(x_BTMD.float(), x_BTMD.shape[-1:], None, EPS)
    weights = static.view(streams, streams + 2) + gate * torch.tanh(normed @ phi.float())
    read, mix, write = weights.to(x_BTMD.dtype).split([1, streams, 1], dim=-1)
    return read[..., 0], write[..., 0], mix.transpose(-1, -2)


def mhc_weights(x_BTMD: Tensor, phi: Tensor, scale_3: Tensor, bias: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """mHC's read, write and mixing weights."""
    flat = x_BTMD.flatten(0, 1)
    weights = hyper_weights(flat.float(), phi, scale_3, bias, EPS, _ROUNDS)
    read, write, mix = (weight.to(x_BTMD.dtype).unflatten(0, x_BTMD.shape[:2]) for weight in weights)
    return read, write, mix


def read_streams(x_BTMD: Tensor, read_BTM: Tensor) -> Tensor:
    """What a sublayer reads."""
    read = hyper_read(x_BTMD.flatten(0, 1), read_BTM.flatten(0, 1))
    return read.view(*x_BTMD.shape[:2], -1)


def write_streams(x_BTMD: Tensor, mix: Tensor, write: Tensor, update: Tensor) -> Tensor:
    """The streams after a sublayer."""
    parts = (tensor.flatten(0, 1) for tensor in (x_BTMD, mix, write, update))
    return hyper_write(*parts).view(x_BTMD.shape)


def _hyper_plain(model: Decoder, embedding: Tensor, inputs: Inputs, *, kind: str) -> Tensor:
    joining, last = model.joining, len(inputs) - 1
    x_BTMD = embedding.unsqueeze(2).expand(-1, -1, STREAMS, -1).contiguous()
    for site, (function, gain, weights) in enumerate(inputs[:-1]):
        if kind == "hc":
            found = model.region(hc_weights)(x_BTMD, joining["static"][site], joining["phi"][site], joining["gate"])
        else:
            part = (joining[name][site] for name in ("phi", "scale", "bias"))
            found = model.region(mhc_weights)(x_BTMD, *part)
        read, write, mix = found
        h = model.region(read_streams)(x_BTMD, read)
        update = model.region(normed_region)(function, h, gain, *weights)
        x_BTMD = model.region(write_streams)(x_BTMD, mix, write, update)
    function, gain, weights = inputs[last]
    return cast(Tensor, model.region(normed_region)(function, x_BTMD.sum(2), gain, *weights))


def _mhc_liger(model: Decoder, embedding: Tensor, inputs: Inputs) -> Tensor:
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

    joining = model.joining
    x_BTMD = embedding.unsqueeze(2).expand(-1, -1, STREAMS, -1).contiguous()
    for site, (function, gain, weights) in enumerate(inputs[:-1]):
        scales = joining["scale"][site].unbind()
        read, write, mix = liger_mhc_coeffs(x_BTMD, joining["phi"][site], joining["bias"][site], *scales, tmax=_ROUNDS)
        h = liger_mhc_pre(x_BTMD, read)
        update = model.region(normed_region)(function, h, gain, *weights)
        x_BTMD = liger_mhc_post_res(x_BTMD, update, write, mix)
    function, gain, weights = inputs[-1]
    return cast(Tensor, model.region(normed_region)(function, x_BTMD.sum(2), gain, *weights))


def _implementations(ours: Run, plain: Run, **others: Run) -> dict[str, Run]:
    installed = {"fla": "fla", "liger": "liger_kernel"}
    kept = {name: run for name, run in others.items() if importlib.util.find_spec(installed[name]) is not None}
    return {"kernels": ours, "compiled": plain, "eager": plain, **kept}


def _methods() -> Iterator[tuple[str, Method]]:
    yield "baseline", Method(parameters=lambda _: {}, runs={"compiled": _baseline, "eager": _baseline})
    one = _implementations(
        partial(_routed, heads=1), partial(_routed_plain, heads=1), fla=_routed_fla, liger=_routed_liger
    )
    yield "attnres", Method(parameters=_routes, runs=one)
    eight = _implementations(partial(_routed, heads=HEADS), partial(_routed_plain, heads=HEADS))
    yield "mhar", Method(parameters=_routes, runs=eight)
    blocks = _implementations(
        partial(_routed, heads=HEADS, blocks=True), partial(_routed_plain, heads=HEADS, blocks=True)
    )
    yield "block", Method(parameters=_routes, runs=blocks)
    single = _implementations(
        partial(_routed, heads=1, blocks=True), partial(_routed_plain, heads=1, blocks=True),
        fla=partial(_routed_fla, blocks=True), liger=partial(_routed_liger, blocks=True),
    )  # fmt: skip
    yield "block-attnres", Method(parameters=_routes, runs=single)
    delta = _implementations(partial(_delta, kernels=True), partial(_delta, kernels=False))
    yield "delta", Method(parameters=_gated_routes, runs=delta)
    msar = _implementations(partial(_msar, kernels=True), partial(_msar, kernels=False))
    yield "msar", Method(parameters=_streams, runs=msar)
    hc = _implementations(partial(_hyper, kind="hc"), partial(_hyper_plain, kind="hc"))
    yield "hc", Method(parameters=_hc_parameters, runs=hc)
    mhc = _implementations(partial(_hyper, kind="mhc"), partial(_hyper_plain, kind="mhc"), liger=_mhc_liger)
    yield "mhc", Method(parameters=_mhc_parameters, runs=mhc)


METHODS: dict[str, Method] = dict(_methods())
IMPLEMENTATIONS = ("kernels", "compiled", "eager", "fla", "liger")
