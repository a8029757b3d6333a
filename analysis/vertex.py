"""The exact optimum of absolute values, which passes through as many rows as the law has parameters.

After ``solver``, whose Newton steps need the rounded absolute value, and before ``certify``: `vertex` goes from the
rounded optimum to the exact one, `vertex_gradient` says whether it is one.

Shapes: n rows, P parameters, in the solver's units of ``model``.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import lsq_linear

from scaling.analysis.model import Model
from scaling.analysis.solver import residuals

Floats = NDArray[np.float64]

# Residual (share of the loss) at which a law of least absolute values is said to pass through a row.
VERTEX_ROUNDING = 1e-12


def vertex(model: Model, y_n: Floats, w_n: Floats, phi_P: Floats, *, log: bool) -> Floats:
    """Exact least-absolute-value optimum near a rounded one: the law passes through as many rows as parameters.

    Returns ``phi_P`` itself where no such point is better.
    """
    best, size = phi_P, len(phi_P)
    lowest = float(np.sum(w_n * np.abs(residuals(model, phi_P[None], y_n[None], log=log))))
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
        there = float(np.sum(w_n * np.abs(residuals(model, phi[None], y_n[None], log=log))))
        if there < lowest:
            best = phi
    return best


def vertex_gradient(
    model: Model, y_n: Floats, w_n: Floats, phi_P: Floats, free_P: NDArray[np.bool_], *, log: bool
) -> float:
    """Gradient of absolute values that the rows met exactly cannot balance, scaled; 0 at an optimum.

    A row with residual 0 may push with any force up to its weight (Koenker and Bassett 1978, theorem 3.3).
    """
    r = residuals(model, phi_P[None], y_n[None], log=log)[0]
    jacobian = model.jacobian(phi_P[None])[0][:, free_P]
    if not log:
        jacobian = jacobian * (y_n - r)[:, None]
    scale = np.maximum(np.sum(w_n[:, None] * np.abs(jacobian), axis=0), 1e-300)
    met = np.abs(r) <= VERTEX_ROUNDING * np.maximum(np.abs(np.log(y_n)) if log else y_n, 1.0)
    pushed = (w_n * np.sign(r))[~met] @ jacobian[~met] / scale
    if not np.any(met):
        return float(np.max(np.abs(pushed)))
    answer = lsq_linear((jacobian[met] / scale).T, -pushed, bounds=(-w_n[met], w_n[met]), tol=1e-12)
    return float(np.max(np.abs(answer.fun)))


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
