"""Attention over depth: what ``attnres``, ``mhar`` and their relatives share.

After ``residual.method`` in the flow. A *source* v_i is a tensor (B, T, D) that later sites may read; site s mixes the
sources it sees, head by head over slices of the width:

    z_(i,h) = r(v_i) <u_(s,h), v_(i,h)>,   p = softmax over i,   out_(h) = sum_i p_(i,h) v_(i,h)

with u = query * gain and r(v) = (mean(v^2) + eps)^(-1/2) over the full width: RMSNorm first, slice after. Queries do
not depend on the input, so a source meets all the sites that will read it in one product when it is written, and a
site only stacks logits, which are D / H times smaller than sources. No source is copied.

Shapes: B batch, T time, D width, H routing heads, C slice width (D = H C), S sites, N sources; n = B T tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def by_head(x_BTD: Tensor, heads: int) -> Tensor:
    """(B, T, D) as (B, T, H, C)."""
    return x_BTD.reshape(*x_BTD.shape[:-1], heads, -1)


class Mix(torch.autograd.Function):
    """sum_i p_i v_i by head, reading each source once in each direction instead of stacking copies of them.

    In plain autograd the products p_i v_i of every site would be kept; here the sources themselves are, which are kept
    anyway.
    """

    @staticmethod
    def forward(ctx: Any, weights_NBTH: Tensor, *sources_BTD: Tensor) -> Tensor:
        ctx.save_for_backward(weights_NBTH, *sources_BTD)
        heads = weights_NBTH.shape[-1]
        out = torch.empty_like(sources_BTD[0], dtype=weights_NBTH.dtype)
        out_BTHC = by_head(out, heads)
        weights = weights_NBTH.unsqueeze(-1).unbind(0)
        torch.mul(by_head(sources_BTD[0].to(out.dtype), heads), weights[0], out=out_BTHC)
        for weight, source in zip(weights[1:], sources_BTD[1:], strict=True):
            out_BTHC.addcmul_(by_head(source.to(out.dtype), heads), weight)
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> tuple[Tensor | None, ...]:
        weights_NBTH, *sources_BTD = ctx.saved_tensors
        heads = weights_NBTH.shape[-1]
        grad_BTHC = by_head(grad_BTD, heads)
        grad_weights = torch.empty_like(weights_NBTH) if ctx.needs_input_grad[0] else None
        grads: list[Tensor | None] = []
        for i, source in enumerate(sources_BTD):
            if grad_weights is not None:
                product = grad_BTHC * by_head(source.to(grad_BTD.dtype), heads)
                torch.sum(product, dim=-1, out=grad_weights[i])
            if ctx.needs_input_grad[i + 1]:
                grads.append((grad_BTHC * weights_NBTH[i].unsqueeze(-1)).flatten(-2).to(source.dtype))
            else:
                grads.append(None)
        return grad_weights, *grads


def mix(weights_NBTH: Tensor, sources_BTD: list[Tensor]) -> Tensor:
    """Mixture of the sources with weights by head; a single source comes back as it is."""
    if len(sources_BTD) == 1:
        return sources_BTD[0]
    out: Tensor = Mix.apply(weights_NBTH, *sources_BTD)  # type: ignore[no-untyped-call]
    return out


def widen(x: Tensor) -> Tensor:
    """Routing is computed in float32 at least, whatever the compute precision of the sublayers."""
    return x.float() if x.dtype in (torch.bfloat16, torch.float16) else x


def depth_logits(
    source_BTD: Tensor, keys_SHC: Tensor, *, eps: float, norm_per_head: bool = False
) -> tuple[Tensor, ...]:
    """Logits of one source for S sites at once.

    Parameters
    ----------
    source_BTD
        The source v.
    keys_SHC
        u = query * gain of those sites, cut into heads.
    eps
        Of the RMS norm.
    norm_per_head
        Norm each slice by itself instead of the full width.

    Returns
    -------
    tuple of Tensor
        For each site the logits (B, T, H).
    """
    wide_BTD = widen(source_BTD)
    heads, slice_width = keys_SHC.shape[1:]
    normed = by_head(wide_BTD, heads) if norm_per_head else wide_BTD.unsqueeze(-2)
    scale_BTH = torch.rsqrt(normed.square().mean(dim=-1) + eps)  # H = 1 for the full width
    slices_HnC = wide_BTD.reshape(-1, heads, slice_width).transpose(0, 1)
    with torch.autocast(source_BTD.device.type, enabled=False):  # logits are not rounded to bf16
        dots_HnS = torch.bmm(slices_HnC, widen(keys_SHC).permute(1, 2, 0))
    dots_BTHS = dots_HnS.transpose(0, 1).reshape(*source_BTD.shape[:2], heads, -1)
    by_site: tuple[Tensor, ...] = (dots_BTHS * scale_BTH.unsqueeze(-1)).unbind(dim=-1)
    return by_site


def routing_weights(logits_BTH: list[Tensor]) -> Tensor:
    """Softmax over sources: N tensors (B, T, H) to weights (N, B, T, H)."""
    return torch.softmax(torch.stack(logits_BTH), dim=0)
