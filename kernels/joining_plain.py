"""Plain PyTorch versions of what joins the sublayers of the benchmark's decoder: the reference beside the kernels.

Before :mod:`scaling.kernels.joining`. They are the models' algorithms: a source's scores for all sites in one product,
no copies of sources; every function with arithmetic is a region of its own, compiled or not as the decoder says.

Shape legend: B batch, T time, D width, S sites, H heads, M streams.
"""

from __future__ import annotations

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from scaling.kernels.decoder import EPS, Decoder, Inputs, normed_region
from scaling.kernels.reference import hyper_read, hyper_weights, hyper_write

STREAMS = 4
WIDTHS = (4, 8, 12)  # tokens of msar's convolutions
ROUNDS = 20  # of Sinkhorn's iteration
BLOCKS = 8


def block_size(inputs: Inputs) -> int:
    """Sublayers a block, for eight blocks."""
    return max(1, (len(inputs) - 1) // BLOCKS)


def newest_source(block: int, update: Tensor, source: Tensor, site: int) -> Tensor:
    """The newest source after a sublayer: its output, or with blocks the running sum."""
    return update if site % block == 0 else source + update


def query_of(model: Decoder) -> Tensor:
    return cast(Tensor, model.joining["query"].float() * model.joining["key_gain"].float())


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


class Depth:
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


def routed_plain(model: Decoder, source: Tensor, inputs: Inputs, *, heads: int, blocks: bool = False) -> Tensor:
    block = block_size(inputs) if blocks else 1
    depth = Depth(model, query_of(model).unflatten(-1, (heads, -1)), block)
    update = source
    for site, (function, gain, weights) in enumerate(inputs):
        update = model.region(normed_region)(function, depth.read(site, source), gain, *weights)
        source = newest_source(block, update, source, site)
    return update


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


class StreamDepth:
    """Multi-stream routing of one pass in PyTorch: one :class:`Depth` a stream."""

    def __init__(self, model: Decoder, block: int) -> None:
        self.model, self.block = model, block
        key_SMD = model.joining["key"]
        self.depths = [Depth(model, key_SMD[:, j].unsqueeze(1), block) for j in range(STREAMS)]

    def add_site(self, site: int, total: Tensor, update: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`site` of a running sum that goes on."""
        source = total + update
        return source, self.site(site, source)

    def site(self, site: int, source: Tensor) -> Tensor:
        """What a site reads, its newest source being ``source``."""
        joining, owner = self.model.joining, -(-site // self.block)
        taps = [joining[f"kernel{width}"][owner] for width in WIDTHS]
        streams = (source, *self.model.region(convolve)(source, *taps))
        mixed = [depth.read(site, x) for depth, x in zip(self.depths, streams, strict=True)]
        blended: Tensor = self.model.region(blend)(
            mixed, joining["phi"][site], joining["scale"][site], joining["bias"][site]
        )
        return blended


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
    weights = hyper_weights(flat.float(), phi, scale_3, bias, EPS, ROUNDS)
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


def hyper_plain(model: Decoder, embedding: Tensor, inputs: Inputs, *, kind: str) -> Tensor:
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
