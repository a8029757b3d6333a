"""Options of the methods that keep running streams: one (``baseline`` and its rescaled kin) or several.

Beside ``depth`` and ``dense`` in ``scaling.config.residual``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from scaling.config.residual.base import Blocked, ResidualConfig, check_positive
from scaling.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline(ResidualConfig):
    """Pre-norm residual stream."""

    method: ClassVar[str] = "baseline"


@dataclass(frozen=True, kw_only=True, slots=True)
class HyperConnections(ResidualConfig):
    """Hyper-connections, n = ``streams`` (arXiv 2409.19606).

    ``variant="mhar_comparison"`` is the weaker static one that the MHAR paper compared with: uniform softmax read,
    write weights and mixing near the identity with N(0, 0.02^2) noise, mean as read-out.
    ``norm`` is what the dynamic part sees each stream through: the paper's LayerNorm, or RMSNorm.
    """

    method: ClassVar[str] = "hc"
    streams: int = 4
    variant: Literal["dynamic", "static", "mhar_comparison"] = "dynamic"
    tanh: bool = True
    norm: Literal["layer", "rms"] = "layer"

    def __post_init__(self) -> None:
        check_positive(self, "streams")


@dataclass(frozen=True, kw_only=True, slots=True)
class Mhc(ResidualConfig):
    """Manifold-constrained hyper-connections, m = ``streams`` (arXiv 2512.24880).

    Public code disagrees on much of it. ``order``: which axis the Sinkhorn iteration norms first (the paper: columns).
    ``sinkhorn_start``: from exp of the logits (the paper), or from a row softmax. ``transpose``: apply H^res
    transposed. ``read_out``: sum of the streams, or a learned sigmoid mixture. ``start``: the initial values, which the
    paper does not give; ``prenorm`` (projections 0, reads that favour one stream each) computes the pre-norm function
    exactly and can still separate the streams, ``random`` draws the projections from N(0, 0.02^2). ``mixing_start``:
    H^res near uniform or near the identity.
    """

    method: ClassVar[str] = "mhc"
    streams: int = 4
    sinkhorn_iterations: int = 20
    order: Literal["column_row", "row_column"] = "column_row"
    sinkhorn_start: Literal["exp", "softmax"] = "exp"
    transpose: bool = False
    post_scale: float = 2.0
    read_out: Literal["sum", "learned"] = "sum"
    start: Literal["prenorm", "random"] = "prenorm"
    mixing_start: Literal["uniform", "identity"] = "uniform"
    gate_start: float = 0.01

    def __post_init__(self) -> None:
        check_positive(self, "streams", "sinkhorn_iterations")
        if not self.post_scale > 0:
            raise ConfigError(f"post_scale={self.post_scale} is not positive")


@dataclass(frozen=True, kw_only=True, slots=True)
class AttnResMhc(Blocked):
    """Attention residuals over block summaries and mHC's read, written back by mHC (the MSAR paper's hybrid).

    The paper gives its loss only; see ``scaling.models.residual.attnres_mhc`` for the construction chosen here.
    """

    method: ClassVar[str] = "attnres_mhc"
    default_blocks: ClassVar[int | None] = 8
    streams: int = 4
    sinkhorn_iterations: int = 20
    start: Literal["prenorm", "random"] = "prenorm"
    query_init: Literal["zero", "random"] = "zero"

    def __post_init__(self) -> None:
        Blocked.__post_init__(self)
        check_positive(self, "streams", "sinkhorn_iterations")

    @property
    def mhc(self) -> Mhc:
        """The options of its multi-stream part."""
        return Mhc(streams=self.streams, sinkhorn_iterations=self.sinkhorn_iterations, start=self.start)


@dataclass(frozen=True, kw_only=True, slots=True)
class ReZero(ResidualConfig):
    """Each sublayer's output times a scalar that starts at 0, no norm in front of it (arXiv 2003.04887).

    ``final_norm`` keeps the backbone's norm before the head; the paper has none anywhere.
    """

    method: ClassVar[str] = "rezero"
    final_norm: bool = True


@dataclass(frozen=True, kw_only=True, slots=True)
class DeepNet(ResidualConfig):
    """Post-norm with an upscaled stream and downscaled starts, decoder-only constants (arXiv 2203.00555)."""

    method: ClassVar[str] = "deepnet"


@dataclass(frozen=True, kw_only=True, slots=True)
class RealFormer(ResidualConfig):
    """Residual attention scores (arXiv 2012.11747). Gives up fused attention: it keeps T x T scores of every layer.

    ``norm``: behind the addition, as in the paper, or in front.
    """

    method: ClassVar[str] = "realformer"
    norm: Literal["post", "pre"] = "post"
