"""Causal depthwise convolution over tokens, which does not look across packed documents; used by ``msar``.

out_t = sum_(tau < K) c_tau * v_(t - tau), element by element of the width, with v_(t - tau) = 0 before the
sequence's or the document's first token.

Shapes: B batch, T time, D width, K kernel width in tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F


def causal_convolution(v_BTD: Tensor, kernel_KD: Tensor, document_BT: Tensor | None) -> Tensor:
    """Convolve every element of the width with its own kernel.

    Parameters
    ----------
    v_BTD
        The source.
    kernel_KD
        c; tap 0 is the token itself.
    document_BT
        Document number of each position; taps that reach into another document count as 0. ``None``: one document.
    """
    width = kernel_KD.shape[0]
    if document_BT is None:
        padded_BDT = F.pad(v_BTD.transpose(1, 2), (width - 1, 0))
        # conv1d correlates: its last tap meets the newest token.
        kernel_D1K = kernel_KD.to(v_BTD.dtype).flip(0).t().unsqueeze(1)
        return F.conv1d(padded_BDT, kernel_D1K, groups=v_BTD.shape[-1]).transpose(1, 2).contiguous()
    out_BTD = kernel_KD[0] * v_BTD
    for tau in range(1, min(width, v_BTD.shape[1])):
        same_BT1 = (document_BT[:, tau:] == document_BT[:, :-tau]).unsqueeze(-1)
        reached = kernel_KD[tau] * torch.where(same_BT1, v_BTD[:, :-tau], torch.zeros_like(v_BTD[:, tau:]))
        out_BTD = out_BTD + F.pad(reached, (0, 0, tau, 0))
    return out_BTD
