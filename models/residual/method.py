"""The interface through which a residual method plugs into the backbone.

After ``layers`` in the flow; every module beside this one implements it, ``registry`` finds them, ``transformer``
drives them. A method is a module with its own parameters; one forward pass is a ``State`` that it starts::

    state = method.start(embedding_BTD, document_BT)
    for site, sublayer in enumerate(sublayers):        # attention, feed-forward, attention, ...
        state.write(site, sublayer(state.read(site)))
    hidden_BTD = norm(state.read(num_sublayers))       # the last site feeds the head

Each site is read once, in order, then written once. Shapes: B batch, T time, D width, S sites or sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar, Literal

from torch import Tensor, nn

from scaling.config.model import ModelConfig


class State(ABC):
    """The residual state of one forward pass."""

    @abstractmethod
    def read(self, site: int) -> Tensor:
        """Input of sublayer ``site`` before its norm (B, T, D); at ``site = num_sublayers``, of the final norm."""

    @abstractmethod
    def write(self, site: int, out_BTD: Tensor) -> None:
        """Take the output of sublayer ``site``."""


class Residual(nn.Module, ABC):
    """A residual method: its parameters, and what it asks of the backbone."""

    #: Where the sublayers' norms are: in front of them, behind the addition (then the method owns them), or nowhere.
    norm_placement: ClassVar[Literal["pre", "post", "none"]] = "pre"
    #: Whether a norm comes between the last site and the head.
    final_norm: ClassVar[bool] = True

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_sublayers = config.num_sublayers

    @abstractmethod
    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> State:
        """The state before the first sublayer."""

    def statistics(self) -> dict[str, float]:
        """Figures about the method's parameters for the journal, names ``route/...``."""
        return {}
