"""``denseformer``: depth-weighted averages of block outputs (arXiv 2402.02622).

x_0 = embedding, x_(i+1) = output of block i before averaging; after block i (counted from 0)

    y_(i+1) = sum_j a_(i,j) x_j  over j <= i + 1 with j = i + 1 (mod q),   where (i + 1) mod p = 0, else x_(i+1)

feeds block i + 1 or the head; q is the dilation, p the period. a_(i,i+1) starts at 1 and the others at 0: the pre-norm
model. About L^2 / (2 p q) scalars; 2 d FLOPs each a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.initialisation import Rule, Values
from scaling.models.residual.method import Residual, State


class BlockAverage(nn.Module):
    """Weights over some of the block outputs; the newest starts at 1."""

    def __init__(self, num_outputs: int) -> None:
        super().__init__()
        self.weights_N = nn.Parameter(torch.empty(num_outputs))

    def initial_values(self) -> Mapping[str, Rule]:
        return {"weights_N": Values(torch.eye(len(self.weights_N))[-1])}

    def forward(self, outputs_BTD: list[Tensor]) -> Tensor:
        first, *rest = [weight * x for weight, x in zip(self.weights_N.unbind(), outputs_BTD, strict=True)]
        return sum(rest, start=first)


class DenseState(State):
    """The stream inside the current block, and all block outputs."""

    def __init__(self, embedding_BTD: Tensor, averages: nn.ModuleDict, dilation: int) -> None:
        self.averages = averages
        self.dilation = dilation
        self.outputs = [embedding_BTD]
        self.stream_BTD = embedding_BTD

    def read(self, site: int) -> Tensor:
        return self.stream_BTD

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.stream_BTD = self.stream_BTD + out_BTD
        if site % 2 == 0:
            return
        self.outputs.append(self.stream_BTD)
        block = str(site // 2)
        if block in self.averages:
            newest = len(self.outputs) - 1
            self.stream_BTD = self.averages[block](self.outputs[newest % self.dilation :: self.dilation])


class DenseFormer(Residual):
    """Averages after every ``period``-th block."""

    def __init__(self, config: ModelConfig, choice: options.DenseFormer) -> None:
        super().__init__(config)
        self.dilation = choice.dilation
        self.averages = nn.ModuleDict(
            {
                str(block): BlockAverage((block + 1) // choice.dilation + 1)
                for block in range(config.num_layers)
                if (block + 1) % choice.period == 0
            }
        )

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> DenseState:
        return DenseState(embedding_BTD, self.averages, self.dilation)
