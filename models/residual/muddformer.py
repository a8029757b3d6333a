"""``muddformer``: multiway dynamic dense connections (arXiv 2502.12170).

x_0 = embedding, x_(i+1) = output of block i. After block i a small network gives each token weights over all of them,
for the query, key, value and residual stream of the next block (C = 4 ways; after the last block the residual alone):

    w = GELU(RMS(x_(i+1)) W1) W2 + a,    stream_c = sum_j w_(c,j) x_j

W1 is d by C (i + 2), four times that at the last block, rounded up to ``hidden_multiple``; query, key and value streams
have norms of their own. W2 = 0 and a one-hot on the newest at the start: the pre-norm model. W1 starts as N(0, 1/d).

``pre_post_norm`` (the paper's equation 10, which deep models need): sources are normed (gain 1), every mixture is
normed (gain 1e-3) and added to x_(i+1), a = 0. The paper also widens the feed-forward with depth at equal parameters;
that changes the backbone and is left out.

Parameters: sum_i (d + C (i + 2)) K_i + C (i + 2), K_i the hidden width, and 2 d L norms. FLOPs: twice that, and
2 d C (i + 2) a block for the mixtures.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.initialisation import Constant, Normal, Rule, Values
from scaling.models.layers import RMSNorm
from scaling.models.residual.method import Inputs, Residual, State
from scaling.models.residual.routing import mix, widen

POST_NORM_START = 1e-3  # gain of the norm behind a mixture, as in the authors' JAX code


class DenseWeights(nn.Module):
    """The network that makes one block's connection weights."""

    def __init__(self, width: int, *, ways: int, sources: int, hidden: int, one_hot: bool, eps: float) -> None:
        super().__init__()
        self.ways, self.eps, self.one_hot = ways, eps, one_hot
        self.hidden_KD = nn.Parameter(torch.empty(hidden, width))
        self.weights_OK = nn.Parameter(torch.empty(ways * sources, hidden))
        self.static_WN = nn.Parameter(torch.empty(ways, sources))

    def initial_values(self) -> Mapping[str, Rule]:
        static = torch.zeros(self.static_WN.shape)
        if self.one_hot:
            static[:, -1] = 1.0
        return {
            "hidden_KD": Normal(std=self.hidden_KD.shape[1] ** -0.5),
            "weights_OK": Constant(value=0.0),
            "static_WN": Values(static),
        }

    def forward(self, x_BTD: Tensor) -> tuple[Tensor, ...]:
        """For each way the weights (N, B, T, 1) over the sources."""
        normed = F.rms_norm(x_BTD, x_BTD.shape[-1:], None, self.eps)
        dynamic = F.linear(F.gelu(F.linear(normed, self.hidden_KD)), self.weights_OK)
        weights_BTWN = widen(dynamic).view(*x_BTD.shape[:2], *self.static_WN.shape) + self.static_WN
        return weights_BTWN.permute(2, 3, 0, 1).unsqueeze(-1).unbind(0)


class MuddState(State):
    """Block outputs, and the streams that feed the current block."""

    def __init__(self, embedding_BTD: Tensor, method: MuddFormer) -> None:
        self.method = method
        self.outputs = [embedding_BTD]
        self.normed = [method.normed_source(embedding_BTD, 0)]
        self.qkv_BTD: tuple[Tensor, ...] = (embedding_BTD, embedding_BTD, embedding_BTD)
        self.stream_BTD = embedding_BTD

    def read(self, site: int) -> Inputs:
        return self.qkv_BTD if site % 2 == 0 and site < self.method.num_sublayers else self.stream_BTD

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.stream_BTD = self.stream_BTD + out_BTD
        if site % 2 == 0:
            return
        block = site // 2
        self.outputs.append(self.stream_BTD)
        self.normed.append(self.method.normed_source(self.stream_BTD, block + 1))
        streams = self.method.streams(block, self.stream_BTD, self.normed)
        *qkv, self.stream_BTD = streams
        self.qkv_BTD = tuple(qkv)


class MuddFormer(Residual):
    """A weight network after each block, four ways but for the last."""

    attention = "qkv"

    def __init__(self, config: ModelConfig, choice: options.MuddFormer) -> None:
        super().__init__(config)
        d, layers, self.pre_post_norm = config.d_model, config.num_layers, choice.pre_post_norm
        self.blocks = nn.ModuleList()
        for block in range(layers):
            ways, sources = (4, block + 2) if block < layers - 1 else (1, block + 2)
            wanted = ways * sources * (4 if ways == 1 else 1)
            hidden = -(-wanted // choice.hidden_multiple) * choice.hidden_multiple
            self.blocks.append(
                DenseWeights(
                    d, ways=ways, sources=sources, hidden=hidden, one_hot=not self.pre_post_norm, eps=config.norm_eps
                )
            )
        if self.pre_post_norm:
            self.pre_norms = nn.ModuleList(RMSNorm(d, eps=config.norm_eps) for _ in range(layers + 1))
            ways_in_all = 4 * (layers - 1) + 1
            self.post_norms = nn.ModuleList(
                RMSNorm(d, eps=config.norm_eps, start=POST_NORM_START) for _ in range(ways_in_all)
            )

    def normed_source(self, x_BTD: Tensor, index: int) -> Tensor:
        """The source as mixtures see it."""
        out_BTD: Tensor = self.pre_norms[index](x_BTD) if self.pre_post_norm else x_BTD
        return out_BTD

    def streams(self, block: int, newest_BTD: Tensor, sources_BTD: list[Tensor]) -> list[Tensor]:
        """Query, key, value and residual streams after a block; after the last one the residual stream alone."""
        mixtures = [mix(weights, sources_BTD) for weights in self.blocks[block](newest_BTD)]
        if self.pre_post_norm:
            norms = self.post_norms[4 * block : 4 * block + len(mixtures)]
            mixtures = [newest_BTD + norm(mixture) for norm, mixture in zip(norms, mixtures, strict=True)]
        return mixtures

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> MuddState:
        return MuddState(embedding_BTD, self)
