"""Losses on residuals: what a fit minimises, row by row.

First module of the law solver: ``solver`` asks it for the value, slope and curvature of each residual's loss, and
``uncertainty`` for the same quantities in a sandwich. Squares and absolute values are limits of one Huber function, so
one code path serves all three.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from scaling.errors import UsageError, nearest

Floats = NDArray[np.float64]
LossName = Literal["huber", "l1", "l2"]
LOSSES: tuple[str, ...] = ("huber", "l1", "l2")

# Share of the residuals' spread at which an absolute value is rounded off, so that Newton steps exist. The optimum
# moves
# by less than this share of the spread (measured on the 240 Chinchilla points: 6 digits agree with the vertex
# solution).
L1_ROUNDING = 1e-5


def check_loss(loss: str, delta: float) -> None:
    """Refuse an unknown loss or a meaningless delta.

    Raises
    ------
    UsageError
        When ``loss`` is not one of `LOSSES`, or ``delta`` is not a positive number.
    """
    if loss not in LOSSES:
        raise UsageError(f"loss {loss!r} is unknown; {nearest(loss, LOSSES)}")
    if not (np.isfinite(delta) and delta > 0):
        raise UsageError(f"delta must be a positive number in units of the residual, got {delta!r}")


def huber(r: Floats, delta: float) -> Floats:
    """``r**2/2`` inside ``delta``, ``delta*(|r| - delta/2)`` outside; elementwise.

    References
    ----------
    Huber (1964), Robust Estimation of a Location Parameter.
    """
    if np.isinf(delta):
        return 0.5 * r * r
    size = np.abs(r)
    inside = np.minimum(size, delta)
    return inside * (size - 0.5 * inside)


def slope(r: Floats, delta: float) -> Floats:
    """Derivative of `huber`: the residual clipped to ``[-delta, delta]``."""
    return r if np.isinf(delta) else np.clip(r, -delta, delta)


def majorant(r: Floats, delta: float) -> Floats:
    """Curvature of the parabola that touches `huber` at ``r`` from above (the weight of reweighted least squares)."""
    if np.isinf(delta):
        return np.ones_like(r)
    return np.minimum(1.0, delta / np.maximum(np.abs(r), 1e-300))


def curvature(r: Floats, delta: float) -> Floats:
    """Second derivative of `huber`: 1 inside ``delta``, 0 outside."""
    return (np.abs(r) <= delta).astype(np.float64)


def objective(r: Floats, w: Floats, *, loss: str, delta: float) -> float:
    """Weighted sum of the loss that was asked for (L1 is the true absolute value, not its rounded form)."""
    if loss == "l1":
        return float(np.sum(w * np.abs(r)))
    return float(np.sum(w * huber(r, np.inf if loss == "l2" else delta)))


def spread(r: Floats) -> float:
    """Standard deviation read off the median absolute deviation from zero, 0 for no rows."""
    return float(1.4826 * np.median(np.abs(r))) if r.size else 0.0
