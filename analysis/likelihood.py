"""Profile intervals: how far one parameter can go while refitting the others keeps the fit good.

Beside ``uncertainty``, whose dispersion turns a rise of the objective into an F statistic; right where a parameter is
skewed or near a bound, and slower than the delta method.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.certify import Fitted
from scaling.analysis.model import bind
from scaling.analysis.result import Interval
from scaling.analysis.robust import huber
from scaling.analysis.solver import Goal, minimise
from scaling.analysis.uncertainty import covariance, dispersion, log_parameters, make_interval, restored

Floats = NDArray[np.float64]


def profile_interval(fitted: Fitted, level: float) -> Interval:
    """Where fixing one parameter and refitting the rest raises the objective to the F quantile.

    A limit is infinite (or 0 for positive parameters) where the objective never rises that far.
    """
    threshold = 0.5 * dispersion(fitted) * float(stats.f.ppf(level, 1, max(fitted.df, 1)))
    logs = log_parameters(fitted)
    model = bind(
        fitted.model.law, fitted.model.x, groups=_row_groups(fitted), shared=_shared(fitted), centred=False
    )  # fmt: skip
    theta = fitted.model.from_solver(fitted.phi_P[None])[0]
    sd = np.sqrt(np.maximum(np.diag(restored(fitted, covariance(fitted))), 1e-16))
    low, high = np.empty(len(theta)), np.empty(len(theta))
    for k in range(len(theta)):
        for side, out in ((-1.0, low), (1.0, high)):
            edge = _crossing(fitted, model.parameters, k, side, sd[k], threshold)
            out[k] = np.exp(edge) if logs[k] else edge
    return make_interval(fitted, low, high, level, "profile, F")


def _crossing(fitted: Fitted, names: list[str], k: int, side: float, sd: float, threshold: float) -> float:
    """Walk out from the optimum in steps of half an SD, then bisect; the solver holds one linear combination fixed."""
    model = fitted.model
    theta = model.from_solver(fitted.phi_P[None])[0]
    at, start, inside = theta[k], theta, 0.0
    outside: float | None = None
    step = 0.5 * max(sd, 1e-6)
    for _ in range(60):
        reach = (inside + step) if outside is None else 0.5 * (inside + outside)
        rise, found = _held(fitted, start, k, at + side * reach)
        if rise > threshold:
            outside = reach
        else:
            inside, start = reach, found
            step *= 1.5 if outside is None else 1.0
        if outside is not None and outside - inside < 1e-5 * max(sd, 1e-12):
            return float(at + side * 0.5 * (inside + outside))
        if outside is None and reach > 60 * max(sd, 1e-6):
            return side * np.inf
    return float(at + side * inside)


def _held(fitted: Fitted, start_theta: Floats, k: int, value: float) -> tuple[float, Floats]:
    """Rise of the objective with parameter ``k`` (in the law's own units) held at ``value``, and where it ends."""
    held = bind(
        fitted.model.law, fitted.model.x, groups=_row_groups(fitted), shared=_shared(fitted), centred=False
    )  # fmt: skip
    theta = start_theta.copy()
    theta[k] = value
    low = np.full(len(theta), -60.0)
    high = np.full(len(theta), 400.0)
    low[k] = high[k] = value
    goal = Goal(loss=fitted.goal.loss, delta=fitted.goal.delta, log=fitted.goal.log, low_P=low, high_P=high)
    found = minimise(held, fitted.y_n[None], fitted.w_n[None], theta[None], goal, warm=True)
    return float(found.objective_R[0] - _smooth_objective(fitted)), found.phi_RP[0]


def _smooth_objective(fitted: Fitted) -> float:
    if fitted.goal.loss == "l1":
        return fitted.objective
    return float(np.sum(fitted.w_n * huber(fitted.residual_n, fitted.delta)))


def _row_groups(fitted: Fitted) -> list[str] | None:
    if len(fitted.model.rows) == 1:
        return None
    groups = np.empty(fitted.model.n, dtype=object)
    for label, rows in zip(fitted.model.labels, fitted.model.rows, strict=True):
        groups[rows] = label
    return [str(g) for g in groups]


def _shared(fitted: Fitted) -> list[str]:
    return [s.name for s in fitted.model.slots if s.group is None]
