"""Other projects' kernels in the benchmark's decoder, where they are installed: for comparison alone.

Before :mod:`scaling.kernels.joining`. flash-linear-attention and Liger route with one head; Liger has mHC too.

Shape legend: B batch, T time, D width, M streams.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from scaling.kernels.decoder import EPS, Decoder, Inputs, normed_region
from scaling.kernels.joining_plain import ROUNDS, STREAMS, block_size, newest_source


def routed_fla(model: Decoder, source: Tensor, inputs: Inputs, *, blocks: bool = False) -> Tensor:
    from fla.ops.attnres import fused_attnres

    return _listed(model, source, inputs, blocks, lambda q, g, seen: fused_attnres(q, seen, g, rms_eps=EPS))


def routed_liger(model: Decoder, source: Tensor, inputs: Inputs, *, blocks: bool = False) -> Tensor:
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
        source = newest_source(block, update, source, site)
    return update


def mhc_liger(model: Decoder, embedding: Tensor, inputs: Inputs) -> Tensor:
    from liger_kernel.transformers.functional import liger_mhc_coeffs, liger_mhc_post_res, liger_mhc_pre

    joining = model.joining
    x_BTMD = embedding.unsqueeze(2).expand(-1, -1, STREAMS, -1).contiguous()
    for site, (function, gain, weights) in enumerate(inputs[:-1]):
        scales = joining["scale"][site].unbind()
        read, write, mix = liger_mhc_coeffs(x_BTMD, joining["phi"][site], joining["bias"][site], *scales, tmax=ROUNDS)
        h = liger_mhc_pre(x_BTMD, read)
        update = model.region(normed_region)(function, h, gain, *weights)
        x_BTMD = liger_mhc_post_res(x_BTMD, update, write, mix)
    function, gain, weights = inputs[-1]
    return cast(Tensor, model.region(normed_region)(function, x_BTMD.sum(2), gain, *weights))
