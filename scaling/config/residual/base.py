"""What the options of all residual methods have in common; first of ``scaling.config.residual``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from scaling.errors import ConfigError


@dataclass(frozen=True, kw_only=True, slots=True)
class ResidualConfig:
    """Base of the methods' options; ``method`` names the class in a configuration file."""

    method: ClassVar[str]

    def check(self, *, d_model: int, num_layers: int) -> None:
        """Raise ``ConfigError`` when the options do not fit the model's shape."""


def check_positive(options: ResidualConfig, *names: str) -> None:
    """Raise ``ConfigError`` where a given value is below 1."""
    for name in names:
        value = getattr(options, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name}={value} is not positive")


def check_heads(heads: int, d_model: int) -> None:
    """Raise ``ConfigError`` where the width cannot be cut into ``heads`` equal slices."""
    if d_model % heads:
        divisors = [h for h in range(1, min(d_model, 64) + 1) if d_model % h == 0]
        raise ConfigError(
            f"heads={heads} does not divide model.d_model={d_model}; allowed: {', '.join(map(str, divisors))}"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Blocked(ResidualConfig):
    """Methods that route over block summaries: sums of ``block_sublayers`` consecutive sublayer outputs.

    Give ``block_sublayers`` (S; 1 is "full": every sublayer a source of its own) or ``num_blocks`` (then S is the
    sublayers divided by it, rounded up); with neither, ``default_blocks`` holds.
    """

    default_blocks: ClassVar[int | None] = None  # None: full
    block_sublayers: int | None = None
    num_blocks: int | None = None

    def __post_init__(self) -> None:
        if self.block_sublayers is not None and self.num_blocks is not None:
            raise ConfigError("block_sublayers and num_blocks are both given; keep one")
        check_positive(self, "block_sublayers", "num_blocks")

    def check(self, *, d_model: int, num_layers: int) -> None:
        if self.block_sublayers is not None and self.block_sublayers > 2 * num_layers:
            raise ConfigError(
                f"block_sublayers={self.block_sublayers} exceeds the model's {2 * num_layers} sublayers; "
                f"allowed: 1 to {2 * num_layers}"
            )

    def sublayers_per_block(self, num_sublayers: int) -> int:
        """S, the number of consecutive sublayers summed into one source."""
        if self.block_sublayers is not None:
            return self.block_sublayers
        blocks = self.num_blocks or self.default_blocks or num_sublayers
        return -(-num_sublayers // blocks)
