"""Options of each residual method: one frozen dataclass a method, chosen by ``model.residual.method``.

Part of the configuration tree (``scaling.config.tree``); the method itself lives in ``scaling.models.residual``. A new
method adds its dataclass here and its name to ``METHODS``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from scaling.errors import ConfigError


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
class AttnRes(ResidualConfig):
    """Attention residuals, one query a site over the full width (arXiv 2603.15031)."""

    method: ClassVar[str] = "attnres"
    query_init: Literal["zero", "random"] = "zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mhar(ResidualConfig):
    """Multi-head attention residuals, ``heads`` queries a site over slices of the width (arXiv 2607.27230)."""

    method: ClassVar[str] = "mhar"
    heads: int = 8
    query_init: Literal["zero", "random"] = "zero"

    def __post_init__(self) -> None:
        if self.heads < 1:
            raise ConfigError(f"heads={self.heads} is not positive; allowed: a divisor of model.d_model")

    def check(self, *, d_model: int, num_layers: int) -> None:
        if d_model % self.heads:
            divisors = [h for h in range(1, min(d_model, 64) + 1) if d_model % h == 0]
            raise ConfigError(
                f"heads={self.heads} does not divide model.d_model={d_model}; allowed: {', '.join(map(str, divisors))}"
            )


METHODS: dict[str, type[ResidualConfig]] = {cls.method: cls for cls in (Baseline, AttnRes, Mhar)}
