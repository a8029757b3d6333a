"""Options of the methods that add up earlier blocks' outputs with learned weights.

Beside ``stream`` and ``depth`` in ``scaling.config.residual``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scaling.config.residual.base import ResidualConfig, check_positive


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseFormer(ResidualConfig):
    """Depth-weighted averages after every ``period``-th block, over every ``dilation``-th earlier output.

    arXiv 2402.02622.
    """

    method: ClassVar[str] = "denseformer"
    dilation: int = 1
    period: int = 1

    def __post_init__(self) -> None:
        check_positive(self, "dilation", "period")


@dataclass(frozen=True, kw_only=True, slots=True)
class MuddFormer(ResidualConfig):
    """Multiway dynamic dense connections (arXiv 2502.12170), without the paper's widening of the feed-forward.

    ``pre_post_norm`` norms the sources before and the mixture behind (PrePostDANorm), which deep models need.
    ``hidden_multiple`` is what the hidden width of the weight generators is rounded up to.
    """

    method: ClassVar[str] = "muddformer"
    pre_post_norm: bool = False
    hidden_multiple: int = 64

    def __post_init__(self) -> None:
        check_positive(self, "hidden_multiple")
