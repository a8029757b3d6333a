"""``baseline``: the pre-norm residual stream.

h_0 = embedding, h_(s+1) = h_s + f_s(h_s) with f_s(h) = sublayer_s(RMSNorm(h)). No parameters, no extra FLOPs. Source:
arXiv 2002.04745 (pre-norm), as in Qwen3.
"""

from __future__ import annotations

from torch import Tensor, nn

from scaling.models.layers import Context
from scaling.models.residual.method import Residual, State


class Stream(State):
    """One running sum."""

    def __init__(self, embedding_BTD: Tensor) -> None:
        self.stream_BTD = embedding_BTD

    def read(self, site: int) -> Tensor:
        return self.stream_BTD

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.stream_BTD = self.stream_BTD + out_BTD


class FusedStream(Stream):
    """The running sum whose additions are left to the sublayers that read it, with the norms in front of them."""

    def __init__(self, embedding_BTD: Tensor) -> None:
        super().__init__(embedding_BTD)
        self.update_BTD: Tensor | None = None

    def read(self, site: int) -> Tensor:
        return self.stream_BTD if self.update_BTD is None else self.stream_BTD + self.update_BTD

    def step(self, site: int, sublayer: nn.Module, context: Context) -> None:
        if self.update_BTD is None:
            self.update_BTD = sublayer(self.stream_BTD, context)
        else:
            self.stream_BTD, self.update_BTD = sublayer(self.stream_BTD, context, self.update_BTD)


class Baseline(Residual):
    """The residual stream of the standard decoder."""

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> Stream:
        # of a checkpointed sublayer all inputs are kept: there one is better than two
        return Stream(embedding_BTD) if self.recomputed else FusedStream(embedding_BTD)
