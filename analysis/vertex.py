"""The exact optimum of absolute values, which passes through as many rows as the law has parameters.

After ``solver``, whose Newton steps need the rounded absolute value, and before ``certify``: `vertex` goes from the
rounded optimum to the exact one, `descend` gets to one where the rounded steps did not arrive, `vertex_gradient` says
whether it is one.

Shapes: n rows, P parameters, in the solver's units of ``model``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import linprog, lsq_linear

from scaling.analysis.model import Model
from scaling.analysis.solver import residuals

Floats = NDArray[np.float64]

# Residual (share of the loss) at which a law of least absolute values is said to pass through a row.
VERTEX_ROUNDING = 1e-12
# First trust radius of `descend` in units of the residuals, and its most steps (19 fits that needed it took 2 to 19).
FIRST_RADIUS = 0.1
MOST_STEPS = 100


def vertex(model: Model, y_n: Floats, w_n: Floats, phi_P: Floats, *, log: bool) -> Floats:
    """Exact least-absolute-value optimum near a rounded one: the law passes through as many rows as parameters.

    Returns ``phi_P`` itself where no such point is better.
    """
    best, size = phi_P, len(phi_P)
    lowest = _absolute(model, y_n, w_n, phi_P, log=log)
    rows = _independent_rows(model, phi_P, np.abs(residuals(model, phi_P[None], y_n[None], log=log)[0]))
    if len(rows) < size:
        return best
    phi = phi_P.copy()
    for _ in range(12):
        f_Rn, _ = model.prepare(phi[None])
        jacobian = model.jacobian(phi[None])[0, rows]
        try:
            phi = phi + np.linalg.solve(jacobian, np.log(y_n[rows]) - f_Rn[0, rows])
        except np.linalg.LinAlgError:
            return best
    if np.all(np.isfinite(phi)):
        there = _absolute(model, y_n, w_n, phi, log=log)
        if there < lowest:
            best = phi
    return best


def descend(model: Model, y_n: Floats, w_n: Floats, phi_P: Floats, box: tuple[Floats, Floats], *, log: bool) -> Floats:
    """Least absolute values from a point in a curved valley between kinks, where rounded steps only crawl.

    Each step is the best one of the linearised law within a trust radius (a linear program); the rows it passes through
    are then met exactly, so that long steps follow a valley that bends. Returns ``phi_P`` itself where nothing is
    lower.

    References
    ----------
    Fletcher and Sainz de la Maza (1989), Nonlinear programming and nonsmooth optimization by successive linear
    programming.
    """
    rows, size = len(y_n), len(phi_P)
    best, radius = phi_P, FIRST_RADIUS
    lowest = _absolute(model, y_n, w_n, best, log=log)
    for _ in range(MOST_STEPS):
        r, jacobian = _linearised(model, y_n, best, log=log)
        scale = np.maximum(np.max(np.abs(jacobian), axis=0), 1e-300)
        slope = jacobian / scale
        both = np.block([[-slope, -np.eye(rows)], [slope, -np.eye(rows)]])
        low = np.maximum(-radius, (box[0] - best) * scale)
        high = np.minimum(radius, (box[1] - best) * scale)
        answer = linprog(
            np.concatenate([np.zeros(size), w_n]),
            A_ub=both,
            b_ub=np.concatenate([-r, r]),
            bounds=[*zip(low, high, strict=True), *[(0.0, None)] * rows],
        )
        if answer.x is None or lowest - answer.fun <= 1e-14 * lowest:
            break
        step = answer.x[:size]
        met = np.flatnonzero(np.abs(r - slope @ step) <= 1e-9 * np.max(np.abs(r)))
        trial = _meet(model, y_n, np.clip(best + step / scale, *box), met, scale, box, log=log)
        there = _absolute(model, y_n, w_n, trial, log=log)
        share = (lowest - there) / (lowest - answer.fun)
        if share > 0.1:
            best, lowest = trial, there
            radius *= 2.0 if share > 0.7 else 1.0
        else:
            radius = 0.25 * min(radius, float(np.max(np.abs(step))))
    return best


def vertex_gradient(
    model: Model, y_n: Floats, w_n: Floats, phi_P: Floats, free_P: NDArray[np.bool_], *, log: bool
) -> float:
    """Gradient of absolute values that the rows met exactly cannot balance, scaled; 0 at an optimum.

    A row with residual 0 may push with any force up to its weight (Koenker and Bassett 1978, theorem 3.3).
    """
    r, jacobian = _linearised(model, y_n, phi_P, log=log)
    jacobian = jacobian[:, free_P]
    scale = np.maximum(np.sum(w_n[:, None] * np.abs(jacobian), axis=0), 1e-300)
    met = np.abs(r) <= VERTEX_ROUNDING * np.maximum(np.abs(np.log(y_n)) if log else y_n, 1.0)
    pushed = (w_n * np.sign(r))[~met] @ jacobian[~met] / scale
    if not np.any(met):
        return float(np.max(np.abs(pushed)))
    answer = lsq_linear((jacobian[met] / scale).T, -pushed, bounds=(-w_n[met], w_n[met]), tol=1e-12)
    return float(np.max(np.abs(answer.fun)))


def _absolute(model: Model, y_n: Floats, w_n: Floats, phi_P: Floats, *, log: bool) -> float:
    """Weighted sum of absolute residuals, infinite where a trial step overflows."""
    with np.errstate(over="ignore", invalid="ignore"):
        value = float(np.sum(w_n * np.abs(residuals(model, phi_P[None], y_n[None], log=log))))
    return value if np.isfinite(value) else float("inf")


def _linearised(model: Model, y_n: Floats, phi_P: Floats, *, log: bool) -> tuple[Floats, Floats]:
    """Residuals and minus their derivatives, shapes (n,) and (n, P)."""
    with np.errstate(over="ignore", invalid="ignore"):
        r = residuals(model, phi_P[None], y_n[None], log=log)[0]
        jacobian = model.jacobian(phi_P[None])[0]
    return r, jacobian if log else jacobian * (y_n - r)[:, None]


def _meet(
    model: Model, y_n: Floats, phi_P: Floats, rows: NDArray[np.intp], scale: Floats, box: tuple[Floats, Floats], *,
    log: bool,
) -> Floats:  # fmt: skip
    """The nearest point at which the law passes through the rows; parameters at a bound stay there."""
    free = (phi_P > box[0]) & (phi_P < box[1])
    for _ in range(4 if len(rows) else 0):
        r, jacobian = _linearised(model, y_n, phi_P, log=log)
        if not (np.all(np.isfinite(r)) and np.all(np.isfinite(jacobian))):
            break
        move = np.linalg.pinv(np.where(free, jacobian[rows] / scale, 0.0)) @ r[rows]
        phi_P = np.clip(phi_P + move / scale, *box)
    return phi_P


def _independent_rows(model: Model, phi_P: Floats, size_n: Floats) -> NDArray[np.intp]:
    """The rows of smallest residual that determine the parameters; copies of a row add nothing."""
    jacobian = model.jacobian(phi_P[None])[0]
    jacobian = jacobian / np.maximum(np.linalg.norm(jacobian, axis=1, keepdims=True), 1e-300)
    found: list[int] = []
    basis: list[Floats] = []
    for row in np.argsort(size_n, kind="stable"):
        rest = jacobian[row].copy()
        for _ in range(2):
            for b in basis:
                rest = rest - (rest @ b) * b
        length = float(np.linalg.norm(rest))
        if length > 1e-9:
            found.append(int(row))
            basis.append(rest / length)
        if len(found) == len(phi_P):
            break
    return np.array(found, dtype=np.intp)
