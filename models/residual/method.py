"""The interface through which a residual method plugs into the backbone.

After ``layers`` in the flow; every module beside this one implements it, ``registry`` finds them, ``transformer``
drives them. A method is a module with its own parameters; one forward pass is a ``State`` that it starts::

    state = method.start(embedding_BTD, document_BT)
    for site, sublayer in enumerate(sublayers):        # attention, feed-forward, attention, ...
        state.step(site, sublayer, context)            # write(site, sublayer(read(site), context))
    hidden_BTD = norm(state.read(num_sublayers))       # the last site feeds the head

Each site is read once, in order, then written once. Shapes: B batch, T time, D width, S sites or sources.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import ClassVar, Literal

from torch import Tensor, nn

from scaling.config.model import ModelConfig
from scaling.models.layers import Context

Inputs = Tensor | tuple[Tensor, ...]


class State(ABC):
    """The residual state of one forward pass."""

    @abstractmethod
    def read(self, site: int) -> Inputs:
        """Input of sublayer ``site`` before its norm (B, T, D); at ``site = num_sublayers``, of the final norm.

        At an attention site it may be several such tensors, where the method asks for such attention.
        """

    @abstractmethod
    def write(self, site: int, out_BTD: Tensor) -> None:
        """Take the output of sublayer ``site``."""

    def step(self, site: int, sublayer: nn.Module, context: Context) -> None:
        """Run a sublayer on what its site reads and write its output."""
        self.write(site, sublayer(self.read(site), context))


class Residual(nn.Module, ABC):
    """A residual method: its parameters, and what it asks of the backbone."""

    #: Where the sublayers' norms are: in front of them, or with the method itself (behind the addition, or nowhere).
    norm_placement: ClassVar[Literal["pre", "own"]] = "pre"
    #: Which inputs attention takes: one; one for each of query, key, value; one for each key/value group; or one, and
    #: the previous layer's scores.
    attention: ClassVar[Literal["one", "qkv", "kv_groups", "scores"]] = "one"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.num_sublayers = config.num_sublayers
        #: Whether a norm of the backbone comes between the last site and the head.
        self.final_norm = True
        #: Whether sublayers are checkpointed, so that what they read is kept in any case.
        self.recomputed = False

    @abstractmethod
    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> State:
        """The state before the first sublayer."""

    def adapt(self, sublayers: Iterable[nn.Module]) -> None:
        """Change how the backbone's parameters start; called once, on construction."""

    def connection_parameters(self) -> set[str]:
        """Names of the parameters that make up the method: all of its own but norm gains of the backbone's kind."""
        return {name for name, _ in self.named_parameters()}

    def statistics(self) -> dict[str, float]:
        """Figures about the method's parameters for the journal, names ``route/...``."""
        return {}
