"""Epoch's fit of the Chinchilla points, written from its description: what the golden tests and the benchmark run.

Parameters in the order log A, log B, log E, alpha, beta.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

DELTA = 1e-3
# Hoffmann et al. (2022), TeX source: log A, log B, log E, alpha, beta.
HOFFMANN = np.array([6.0073404, 6.0179186, 0.5267228, 0.33917084, 0.2849083])


def objective(theta: Floats, log_n: Floats, log_d: Floats, log_l: Floats) -> float:
    """Sum of Huber losses of log residuals, as in Epoch's notebook."""
    a, b, e, alpha, beta = theta
    r = log_l - np.logaddexp(np.logaddexp(a - alpha * log_n, b - beta * log_d), e)
    size = np.abs(r)
    return float(np.sum(np.where(size <= DELTA, 0.5 * r**2, DELTA * (size - 0.5 * DELTA))))


def gradient(theta: Floats, log_n: Floats, log_d: Floats, log_l: Floats) -> Floats:
    """What automatic differentiation gives them."""
    a, b, e, alpha, beta = theta
    parts = np.array([a - alpha * log_n, b - beta * log_d, np.full_like(log_n, e)])
    f = np.logaddexp.reduce(parts)
    p = np.exp(parts - f)
    push = -np.clip(log_l - f, -DELTA, DELTA)
    return np.array([push @ p[0], push @ p[1], push @ p[2], -push @ (p[0] * log_n), -push @ (p[1] * log_d)])
