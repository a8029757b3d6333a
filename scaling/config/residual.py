"""Options of each residual method: one frozen dataclass a method, chosen by ``model.residual.method``.

Part of the configuration tree (``scaling.config.tree``); the method itself lives in ``scaling.models.residual``. A new
method adds its dataclass here and its name to ``METHODS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from scaling.errors import ConfigError

QueryInit = Literal["zero", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualConfig:
    """Base of the methods' options; ``method`` names the class in a configuration file."""

    method: ClassVar[str]

    def check(self, *, d_model: int, num_layers: int) -> None:
        """Raise ``ConfigError`` when the options do not fit the model's shape."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Baseline(ResidualConfig):
    """Pre-norm residual stream."""

    method: ClassVar[str] = "baseline"


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked(ResidualConfig):
    """Methods that route over block summaries: sums of ``block_sublayers`` consecutive sublayer outputs.

    Give ``block_sublayers`` (S) or ``num_blocks`` (then S is the sublayers divided by it, rounded up); with neither,
    every sublayer is a source of its own (S = 1, "full").
    """

    block_sublayers: int | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.block_sublayers is not None and self.num_blocks is not None:
            raise ConfigError("block_sublayers and num_blocks are both given; keep one")
        for name in ("block_sublayers", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ConfigError(f"{name}={value} is not positive")

    def check(self, *, d_model: int, num_layers: int) -> None:
        for name in ("block_sublayers", "num_blocks"):
            value = getattr(self, name)
            if value is not None and value > 2 * num_layers:
                raise ConfigError(f"{name}={value} exceeds the model's {2 * num_layers} sublayers")

    def sublayers_per_block(self, num_sublayers: int) -> int:
        """S, the number of consecutive sublayers summed into one source."""
        if self.num_blocks is not None:
            return -(-num_sublayers // self.num_blocks)
        return self.block_sublayers or 1


@dataclass(frozen=True, kw_only=True, slots=True)
class AttnRes(Blocked):
    """Attention residuals, one query a site over the full width (arXiv 2603.15031)."""

    method: ClassVar[str] = "attnres"
    query_init: QueryInit = "zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mhar(Blocked):
    """Multi-head attention residuals, ``heads`` queries a site over slices of the width (arXiv 2607.27230)."""

    method: ClassVar[str] = "mhar"
    heads: int = 8
    query_init: QueryInit = "zero"

    def __post_init__(self) -> None:
        Blocked.__post_init__(self)
        if self.heads < 1:
            raise ConfigError(f"heads={self.heads} is not positive; allowed: a divisor of model.d_model")

    def check(self, *, d_model: int, num_layers: int) -> None:
        Blocked.check(self, d_model=d_model, num_layers=num_layers)
        if d_model % self.heads:
            divisors = [h for h in range(1, min(d_model, 64) + 1) if d_model % h == 0]
            raise ConfigError(
                f"heads={self.heads} does not divide model.d_model={d_model}; allowed: {', '.join(map(str, divisors))}"
            )


METHODS: dict[str, type[ResidualConfig]] = {cls.method: cls for cls in (Baseline, AttnRes, Mhar)}
