"""Damped Newton on robust losses, for many refits of one law at once.

Between ``model`` and ``fit``/``uncertainty``. Each refit has its own weights (a resample is a vector of counts over
the same rows) or its own losses (a parametric draw). A refit first takes steps of reweighted least squares, which
cannot overshoot, while the Huber delta shrinks from the spread of its residuals to the one asked for; then exact
Newton steps. Convergence is the solver's own test on the gradient relative to the objective: no tolerance is
absolute, so an objective of 1e-3 or 1e-9 is minimised as well as one of 1 (scipy's L-BFGS-B divides by ``max(|f|,
1)`` and stops at its start).

Shapes: R refits, n rows, P parameters, in the solver's units of ``model``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.model import Model
from scaling.analysis.robust import L1_ROUNDING

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

# Scaled gradient over the square root of the objective at which a refit counts as converged.
GRADIENT_TOLERANCE = 1e-8
# The same in units of rounding: exact data have an objective of rounding errors only.
ROUNDING_TOLERANCE = 3e-14
# Scaled gradient at which a refit whose next step would gain less than 1e-13 of the objective counts as converged.
STALL_TOLERANCE = 1e-6
MAX_ITERATIONS = 200
# Steps allowed where starts compete for one fit: noise far above delta leaves curved valleys that are followed slowly.
RACE_LIMIT = 1000
# Starts that are still on their way this many steps after another one arrived are given up.
RACE_ITERATIONS = 40
# Trial steps may predict anything; raw residuals are capped here so that their squares exist.
LARGEST_LOG_LOSS = 100.0
STAGE_ITERATIONS = 8
STAGE_FACTOR = 10.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Solution:
    """Where R refits ended: parameters (R, P), objective, scaled gradient, convergence and steps taken (R,)."""

    phi_RP: Floats
    objective_R: Floats
    gradient_R: Floats
    converged_R: Bools
    iterations_R: NDArray[np.int64]

    def best(self) -> int:
        """Index of the lowest objective; converged refits win over those that are not."""
        return int(np.lexsort((self.objective_R, ~self.converged_R))[0])

    def ending(self, refit: int, phi_P: Floats) -> Solution:
        """The same with one refit that ends elsewhere."""
        phi_RP = self.phi_RP.copy()
        phi_RP[refit] = phi_P
        return replace(self, phi_RP=phi_RP)


@dataclass(frozen=True, kw_only=True, slots=True)
class Goal:
    """What is minimised: the loss on residuals, its delta, whether residuals are of log losses, and the box."""

    loss: str = "huber"
    delta: float = 1e-3
    log: bool = True
    low_P: Floats  # (P,), or (R, P) where refits differ (a profile holds one parameter: low = high)
    high_P: Floats


def residuals(model: Model, phi_RP: Floats, y_Rn: Floats, *, log: bool) -> Floats:
    """``log L - log L_hat`` or ``L - L_hat``, shape (R, n); ``y_Rn`` holds losses."""
    f_Rn, _ = model.prepare(phi_RP)
    return np.log(y_Rn) - f_Rn if log else y_Rn - np.exp(f_Rn)


def minimise(
    model: Model, y_Rn: Floats, w_Rn: Floats, start_RP: Floats, goal: Goal, *, warm: bool = False, race: bool = False
) -> Solution:
    """Minimise the goal from each start.

    Parameters
    ----------
    model
        The bound law.
    y_Rn, w_Rn
        Losses and weights, shape (R, n) or (1, n) where all refits share them.
    start_RP
        Starts in the solver's units.
    goal
        What to minimise.
    race
        Whether the starts compete for one optimum: latecomers are given up.
    warm
        Whether the starts are near the optimum (a resample started from the full fit): fewer deltas are passed through.
    """
    phi = np.clip(start_RP, goal.low_P, goal.high_P)
    # Hopeless starts and their trial steps may overflow; they are rejected.
    with np.errstate(over="ignore", invalid="ignore"):
        delta_R = _deltas(model, phi, y_Rn, w_Rn, goal)
        for scale_R, limit in _stages(model, phi, y_Rn, w_Rn, goal, delta_R, warm=warm, race=race):
            patience = (RACE_ITERATIONS if limit == RACE_LIMIT else 0) if race else limit
            solution = _newton(model, y_Rn, w_Rn, phi, goal, scale_R, limit, patience=patience)
            phi = solution.phi_RP
    return solution


def _deltas(model: Model, phi: Floats, y: Floats, w: Floats, goal: Goal) -> Floats:
    if goal.loss == "l2":
        return np.full(len(phi), np.inf)
    if goal.loss == "huber":
        return np.full(len(phi), goal.delta)
    return L1_ROUNDING * np.maximum(_spread(model, phi, y, w, goal), 1e-12)


def _spread(model: Model, phi: Floats, y: Floats, w: Floats, goal: Goal) -> Floats:
    r = residuals(model, phi, y, log=goal.log)
    total = np.sum(w, axis=-1)
    return np.broadcast_to(np.sum(w * np.abs(r), axis=-1) / total, (len(phi),)).copy()


def _stages(
    model: Model, phi: Floats, y: Floats, w: Floats, goal: Goal, delta_R: Floats, *, warm: bool, race: bool
) -> list[tuple[Floats, int]]:
    """Deltas to pass through with the steps allowed for each; the last is the one asked for."""
    last = (delta_R, RACE_LIMIT if race else MAX_ITERATIONS)
    if goal.loss == "l2":
        return [last]
    widest = _spread(model, phi, y, w, goal)
    # One far start among competitors must not send all through stages that only it needs.
    ratio = float((np.median if race else np.max)(widest / delta_R))
    passed = int(np.clip(np.ceil(np.log(max(ratio, 1.0)) / np.log(STAGE_FACTOR)), 0, 8))
    if warm and goal.loss == "huber":
        passed = 0
    return [(delta_R * STAGE_FACTOR**k, STAGE_ITERATIONS) for k in range(passed, 0, -1)] + [last]


def _newton(
    model: Model, y: Floats, w: Floats, start: Floats, goal: Goal, delta_R: Floats, limit: int, *, patience: int
) -> Solution:
    count, size = start.shape
    phi = start.copy()
    objective = np.full(count, np.nan)
    gradient = np.full(count, np.nan)
    converged = np.zeros(count, dtype=bool)
    iterations = np.zeros(count, dtype=np.int64)
    live = np.arange(count)
    # Damping of both kinds of step, apart: the long steps of one say nothing about the other.
    damping = np.full((2, count), 1e-4)
    newton = np.zeros(count, dtype=bool)
    shared_y, shared_w = len(y) == 1, len(w) == 1
    log_y = np.log(y) if goal.log else y
    total_w = np.sum(w, axis=-1)
    low = np.broadcast_to(goal.low_P, phi.shape)
    high = np.broadcast_to(goal.high_P, phi.shape)
    state: _Place | None = None
    for iteration in range(limit):
        if live.size == 0 or (iteration >= patience and np.any(converged)):
            break
        yl = log_y if shared_y else log_y[live]
        wl = w if shared_w else w[live]
        dl = delta_R[live, None]
        at = _visit(model, phi[live], yl, wl, dl, log=goal.log) if state is None else state
        here = at.value_R
        grad, hess = _system(model, at, wl, dl, newton[live])
        kind = newton[live].astype(np.intp)
        step, scaled, expected = _step(grad, hess, phi[live], (low[live], high[live]), damping[kind, live])
        floor = GRADIENT_TOLERANCE * np.sqrt(here) + ROUNDING_TOLERANCE * np.sqrt(
            total_w if shared_w else total_w[live]
        )
        objective[live], gradient[live] = here, scaled / np.maximum(np.sqrt(here), 1e-300)
        done = (scaled <= floor) | ((scaled <= STALL_TOLERANCE * np.sqrt(here)) & (expected <= 1e-13 * here))
        converged[live[done]] = True
        keep = ~done & (damping[0, live] < 1e12)
        if not np.any(keep):
            live = live[keep]
            break
        live, step, here, expected = live[keep], step[keep], here[keep], expected[keep]
        iterations[live] += 1
        trial = np.minimum(np.maximum(phi[live] + step, low[live]), high[live])
        yl = log_y if shared_y else log_y[live]
        wl = w if shared_w else w[live]
        new = _visit(model, trial, yl, wl, delta_R[live, None], log=goal.log)
        gain = here - new.value_R
        accepted = gain >= -1e-15 * here
        accepted &= np.isfinite(new.value_R)
        phi[live[accepted]] = trial[accepted]
        good = accepted & (gain > 0.25 * expected)
        kind = newton[live].astype(np.intp)
        mu = damping[kind, live]
        mu = np.where(good, mu * 0.1, np.where(accepted, mu, np.maximum(mu, 1e-6) * 10))
        damping[kind, live] = np.maximum(mu, 1e-12)
        newton[live] = np.where(accepted, newton[live] | (gain < 0.2 * here), False)
        state = new if bool(np.all(accepted)) else None
    return Solution(
        phi_RP=phi, objective_R=objective, gradient_R=gradient, converged_R=converged, iterations_R=iterations
    )


@dataclass(frozen=True, slots=True)
class _Place:
    """What is known at one set of parameters: residuals, the model's cache, objective; ``outer`` is dL/df, if not 1."""

    r_Rn: Floats
    outer_Rn: Floats | None
    cache: Any
    value_R: Floats


def _visit(model: Model, phi_RP: Floats, y: Floats, w: Floats, delta: Floats, *, log: bool) -> _Place:
    f, cache = model.prepare(phi_RP)
    outer = None if log else np.exp(np.minimum(f, LARGEST_LOG_LOSS))
    r = y - f if outer is None else y - outer
    size = np.abs(r)
    inside = np.minimum(size, delta)
    return _Place(r, outer, cache, np.add.reduce(w * inside * (size - 0.5 * inside), axis=-1))


def _system(model: Model, at: _Place, w: Floats, delta: Floats, newton: Bools) -> tuple[Floats, Floats]:
    """Gradient and Hessian (exact where ``newton``, else of the touching parabola) of the objective."""
    r, outer = at.r_Rn, at.outer_Rn
    size = np.abs(r)
    push = w * np.minimum(np.maximum(r, -delta), delta)
    exact = newton[:, None]
    weight = w * np.where(exact, size <= delta, np.minimum(1.0, delta / np.maximum(size, 1e-300)))
    curve = np.where(exact, -push, 0.0)
    if outer is not None:
        weight = weight * outer * outer + curve * outer
        curve = curve * outer
        push = push * outer
    return model.system(at.cache, -push, weight, curve)


def _step(
    grad: Floats, hess: Floats, phi: Floats, box: tuple[Floats, Floats], mu: Floats
) -> tuple[Floats, Floats, Floats]:
    """Damped step, scaled gradient and expected decrease; parameters pushed against their bound stay there."""
    size = grad.shape[1]
    held = ((phi <= box[0]) & (grad > 0)) | ((phi >= box[1]) & (grad < 0))
    grad = np.where(held, 0.0, grad)
    diagonal = np.abs(np.einsum("rpp->rp", hess))
    top = np.max(diagonal, axis=1, keepdims=True)
    d = np.sqrt(np.maximum(diagonal, 1e-14 * np.maximum(top, 1e-300)))
    h = hess / (d[:, :, None] * d[:, None, :])
    free = ~held
    h = h * (free[:, :, None] & free[:, None, :]) + np.eye(size) * held[:, :, None]
    # A row whose derivatives overflow stands still and is not converged; its damping grows until it is given up.
    broken = ~(np.isfinite(h).all(axis=(1, 2)) & np.isfinite(grad).all(axis=1) & np.isfinite(d).all(axis=1))
    h = np.where(broken[:, None, None], np.eye(size), h)
    d = np.where(broken[:, None], 1.0, d)
    values, vectors = np.linalg.eigh(h)
    g = np.where(broken[:, None], 0.0, grad / d)
    lifted = np.maximum(np.abs(values), 1e-13) + mu[:, None]
    along = (g[:, None, :] @ vectors)[:, 0]
    s = -(vectors @ (along / lifted)[:, :, None])[:, :, 0]
    expected = 0.5 * np.sum(along**2 / lifted, axis=1)
    scaled = np.where(broken, np.inf, np.max(np.abs(g), axis=1))
    return s / d, scaled, np.where(broken, np.inf, expected)
