"""What every analysis asks of its options, refused in one line where they make no sense.

Before the computing modules: each calls these first, so that a wrong level or seed never becomes a traceback or a
nonsensical interval.
"""

from __future__ import annotations

import math

import numpy as np

from scaling.errors import UsageError


def check_level(level: float, name: str = "level") -> None:
    """Refuse a level that is no share.

    Raises
    ------
    UsageError
        When it does not lie strictly between 0 and 1.
    """
    if not 0 < level < 1:
        raise UsageError(f"{name} must lie between 0 and 1, got {level!r}; write 95% as 0.95")


def check_draws(draws: int, *, at_least: int = 0) -> None:
    """Refuse a number of bootstrap draws that gives no spread.

    Raises
    ------
    UsageError
        When it is below ``at_least``.
    """
    if draws < at_least:
        raise UsageError(f"draws must be {at_least} or more, got {draws!r}")


def check_noise(noise_sd: float | None) -> None:
    """Refuse a seed SD that is none.

    Raises
    ------
    UsageError
        When it is given and not a positive number.
    """
    if noise_sd is not None and not (noise_sd > 0 and math.isfinite(noise_sd)):
        raise UsageError(f"noise_sd must be a positive number of nats, got {noise_sd!r}")


def generator(rng: int | np.random.Generator) -> np.random.Generator:
    """The random numbers of an analysis.

    Raises
    ------
    UsageError
        When a seed is negative.
    """
    if isinstance(rng, int) and rng < 0:
        raise UsageError(f"the random seed must be 0 or more, got {rng!r}")
    return np.random.default_rng(rng)
