"""One fit of a law with the evidence that it is one.

Between ``solver`` and ``fit``: `solve` starts from the data, never from a guess of the user, tries a second and blind
start, and grades what came out. `certify` grades parameters that came from elsewhere, e.g. a published fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.laws import Law
from scaling.analysis.model import Model, bind
from scaling.analysis.result import Status
from scaling.analysis.robust import curvature, objective, slope
from scaling.analysis.solver import GRADIENT_TOLERANCE, Goal, Solution, minimise, residuals
from scaling.analysis.vertex import descend, vertex, vertex_gradient
from scaling.errors import FitError

Floats = NDArray[np.float64]

# Above this condition number of the scaled Hessian, parameters are not determined by the data.
WORST_CONDITION = 1e10
# Scaled gradient above which given parameters are certainly no optimum.
NOT_STATIONARY = 1e-3


@dataclass(frozen=True, kw_only=True, slots=True)
class Fitted:
    """A graded fit; arrays in the solver's units (``phi``) and the rows it was made from."""

    model: Model
    goal: Goal
    y_n: Floats
    w_n: Floats
    phi_P: Floats
    objective: float
    status: Status
    certificate: Mapping[str, float | str | bool | None]

    @property
    def natural_P(self) -> Floats:
        """Parameters in natural units."""
        out: Floats = self.model.natural(self.phi_P[None])[0]
        return out

    @property
    def estimate(self) -> dict[str, float]:
        """Label -> natural value."""
        return dict(zip(self.model.parameters, map(float, self.natural_P), strict=True))

    @property
    def residual_n(self) -> Floats:
        """Residuals in the space that was fitted."""
        out: Floats = residuals(self.model, self.phi_P[None], self.y_n[None], log=self.goal.log)[0]
        return out

    @property
    def delta(self) -> float:
        """Delta in force: the Huber delta, infinite for squares, a thousandth of the spread for absolute values."""
        if self.goal.loss == "l2":
            return float("inf")
        if self.goal.loss == "huber":
            return self.goal.delta
        return 1e-3 * float(np.mean(np.abs(self.residual_n)))

    @property
    def df(self) -> int:
        """Rows minus parameters."""
        return len(self.y_n) - len(self.phi_P)

    @property
    def free_P(self) -> NDArray[np.bool_]:
        """Parameters that are not at a bound."""
        return ~_at_bound(self.phi_P, self.goal)


def make_goal(model: Model, y_n: Floats, *, loss: str, delta: float, log: bool) -> Goal:
    """The goal with the box of the model's parameters."""
    low, high = model.bounds(float(np.min(y_n)))
    return Goal(loss=loss, delta=delta, log=log, low_P=low, high_P=high)


def solve(
    law: Law,
    x: Mapping[str, Floats],
    y_n: Floats,
    w_n: Floats,
    *,
    loss: str = "huber",
    delta: float = 1e-3,
    log: bool = True,
    groups: Sequence[str] | None = None,
    shared: Sequence[str] = (),
) -> Fitted:
    """Fit a law and grade the result.

    Parameters
    ----------
    law, x, y_n, w_n
        The law, its variables, losses and row weights.
    loss, delta, log
        What is minimised on which residuals (``log``: of log losses).
    groups, shared
        Group of each row and the parameters all groups share.

    Raises
    ------
    FitError
        When there are fewer rows, or fewer distinct points, than parameters, or not one loss and weight a row.
    """
    _check_shapes(x, losses=y_n, weights=w_n)
    model = bind(law, x, groups=groups, shared=shared)
    _check_points(model, law, groups)
    goal = make_goal(model, y_n, loss=loss, delta=delta, log=log)
    start = _starts(model, law, x, y_n, w_n, groups)
    solution = minimise(model, y_n[None], w_n[None], start, goal, race=True)
    best = solution.best()
    phi, at_vertex = solution.phi_RP[best], False
    if loss == "l1":
        moved = vertex(model, y_n, w_n, phi, log=log)
        if moved is phi and not solution.converged_R[best]:
            moved = descend(model, y_n, w_n, phi, (goal.low_P, goal.high_P), log=log)
            solution = solution.ending(best, moved)
        at_vertex = moved is not phi
        phi = moved
    value = objective(residuals(model, phi[None], y_n[None], log=log)[0], w_n, loss=loss, delta=delta)
    evidence = _evidence(model, goal, y_n, w_n, solution, best, start)
    evidence["passes_through_rows"] = at_vertex if loss == "l1" else None
    if at_vertex:
        left = vertex_gradient(model, y_n, w_n, phi, ~_at_bound(phi, goal), log=log)
        evidence |= {"gradient": left, "converged": evidence["converged"] or left <= GRADIENT_TOLERANCE}
    status = _grade(goal, phi, evidence, len(y_n))
    return Fitted(
        model=model, goal=goal, y_n=y_n, w_n=w_n, phi_P=phi, objective=value, status=status, certificate=evidence
    )


def certify(
    law: Law,
    x: Mapping[str, Floats],
    y_n: Floats,
    given: Mapping[str, float],
    *,
    loss: str = "huber",
    delta: float = 1e-3,
    log: bool = True,
) -> Fitted:
    """Grade parameters that came from elsewhere: ``unmoved`` where the gradient says that nothing was optimised.

    The certificate holds the scaled gradient there and the objective of a real fit (``objective_of_refit``).
    """
    w_n = np.ones(np.shape(y_n))
    refit = solve(law, x, y_n, w_n, loss=loss, delta=delta, log=log)
    phi = refit.model.internal(np.array([given[name] for name in refit.model.parameters]))
    wide = Goal(loss=loss, delta=delta, log=log, low_P=np.full(len(phi), -np.inf), high_P=np.full(len(phi), np.inf))
    gradient = scaled_gradient(refit.model, phi, y_n, w_n, wide)
    r = residuals(refit.model, phi[None], y_n[None], log=log)[0]
    value = objective(r, w_n, loss=loss, delta=delta)
    worse = value > refit.objective * (1 + 1e-3)
    status: Status = "unmoved" if gradient > NOT_STATIONARY and worse else ("multimodal" if worse else "converged")
    evidence = {
        "gradient": gradient,
        "objective_of_refit": refit.objective,
        "excess": value / refit.objective - 1,
        "residual_sd": float(np.std(r, ddof=1)) if len(r) > 1 else None,
    }
    return Fitted(
        model=refit.model, goal=wide, y_n=y_n, w_n=w_n, phi_P=phi, objective=value, status=status, certificate=evidence
    )


def gauss_newton(model: Model, phi_P: Floats, w_n: Floats, *, log: bool) -> Floats:
    """``sum w df df'``, shape (P, P)."""
    jacobian = model.jacobian(phi_P[None])[0]
    if not log:
        jacobian = jacobian * np.exp(model.prepare(phi_P[None])[0][0])[:, None]
    out: Floats = (jacobian * w_n[:, None]).T @ jacobian
    return out


def scaled_gradient(model: Model, phi_P: Floats, y_n: Floats, w_n: Floats, goal: Goal) -> float:
    """Largest gradient component in units of the square roots of its curvature and of the objective."""
    delta = np.inf if goal.loss == "l2" else goal.delta
    r = residuals(model, phi_P[None], y_n[None], log=goal.log)[0]
    jacobian = model.jacobian(phi_P[None])[0]
    if not goal.log:
        jacobian = jacobian * (y_n - r)[:, None]
    push = w_n * (np.sign(r) if goal.loss == "l1" else slope(r, delta))
    weight = w_n * np.maximum(curvature(r, delta), np.minimum(1.0, delta / np.maximum(np.abs(r), 1e-300)))
    scale = np.sqrt(np.maximum((weight[:, None] * jacobian**2).sum(axis=0), 1e-300))
    value = objective(r, w_n, loss=goal.loss, delta=goal.delta)
    return float(np.max(np.abs(push @ jacobian) / scale) / np.sqrt(max(value, 1e-300)))


def condition_number(matrix_PP: Floats) -> float:
    """Condition number after scaling to a unit diagonal, infinite where singular."""
    d = np.sqrt(np.maximum(np.diag(matrix_PP), 1e-300))
    values = np.linalg.eigvalsh(matrix_PP / np.outer(d, d))
    return float(values[-1] / values[0]) if values[0] > 0 else float("inf")


def _check_shapes(x: Mapping[str, Floats], **columns: Floats) -> None:
    """Refuse a column of shape (n, 1): beside one of shape (n,) numpy would make n x n residuals of it."""
    variables = ", ".join(x)
    rows = np.shape(next(iter(x.values())))
    for name, values in {**x, **columns}.items():
        if np.ndim(values) != 1 or np.shape(values) != rows:
            raise FitError(
                f"{name} have shape {np.shape(values)} beside {variables} of shape {rows}: one number a row is needed"
            )


def _check_points(model: Model, law: Law, groups: Sequence[str] | None) -> None:
    parameters = len(model.slots)
    keys = [tuple(row) for row in np.column_stack([model.x[v] for v in law.variables])]
    points = len({(g, k) for g, k in zip(groups if groups is not None else [None] * len(keys), keys, strict=True)})
    if points < parameters:
        raise FitError(
            f"{law.name} ({law.formula}) has {parameters} parameters, but the rows hold {points} distinct points of "
            f"{', '.join(law.variables)}; add scales, share parameters, or use a form with fewer"
        )


def _starts(
    model: Model, law: Law, x: Mapping[str, Floats], y_n: Floats, w_n: Floats, groups: Sequence[str] | None
) -> Floats:
    together = law.starts(x, y_n, w_n)
    if len(model.rows) == 1:
        blind = together[:1].copy()
        for k, p in enumerate(law.parameters):
            if p.kind == "exponent":
                blind[0, k] = 0.3
            elif p.kind == "asymptote":
                blind[0, k] = np.log(0.5 * np.min(y_n))
        return model.to_solver(np.concatenate([together, blind]))
    apart = []
    for rows in model.rows:
        part = {v: a[rows] for v, a in model.x.items()}
        alone = bind(law, part)
        low, high = alone.bounds(float(np.min(y_n[rows])))
        goal = Goal(loss="l2", log=True, low_P=low, high_P=high)
        first = alone.to_solver(law.starts(part, y_n[rows], w_n[rows]))
        found = minimise(alone, y_n[rows][None], w_n[rows][None], first, goal, race=True)
        apart.append(alone.from_solver(found.phi_RP[[found.best()]])[0])
    starts = [model.pack(np.array(apart))] + [model.pack(np.repeat(t[None], len(model.rows), axis=0)) for t in together]
    return np.array(starts)


def _evidence(
    model: Model, goal: Goal, y_n: Floats, w_n: Floats, solution: Solution, best: int, start: Floats
) -> dict[str, float | str | bool | None]:
    phi = solution.phi_RP[best]
    hessian = gauss_newton(model, phi, w_n, log=goal.log)
    free = ~_at_bound(phi, goal)
    d = np.sqrt(np.maximum(np.diag(hessian), 1e-300))
    apart = np.max(np.abs(solution.phi_RP - phi) * d, axis=1) / np.sqrt(max(solution.objective_R[best], 1e-300))
    excess = solution.objective_R / max(solution.objective_R[best], 1e-300) - 1
    noise = len(y_n) * 1e-28  # squared rounding of log losses: exact data have nothing else
    level = solution.objective_R <= solution.objective_R[best] * (1 + 1e-6) + noise
    same = level & ((apart < 1e-3) | (solution.objective_R <= noise))
    others = solution.converged_R & ~same
    rivals = others & (excess < 1.0 / max(len(y_n) - len(phi), 1)) & (apart > 0.1)
    r = residuals(model, phi[None], y_n[None], log=goal.log)[0]
    spread = float(np.std(r, ddof=1)) if len(r) > 1 else None
    return {
        "gradient": float(solution.gradient_R[best]),
        "gradient_tolerance": GRADIENT_TOLERANCE,
        "converged": bool(solution.converged_R[best]),
        "iterations": int(solution.iterations_R[best]),
        "moved": float(np.linalg.norm(phi - np.clip(start[best], goal.low_P, goal.high_P))),
        "starts": len(start),
        "starts_agreeing": int(np.sum(same)),
        "rivals": int(np.sum(rivals)),
        "second_best_excess": float(np.min(excess[others])) if np.any(others) else None,
        "condition": condition_number(hessian[np.ix_(free, free)]) if np.any(free) else None,
        "residual_sd": spread,
        "residual_sd_over_delta": spread / goal.delta if spread is not None and goal.loss == "huber" else None,
        "at_bound": ", ".join(np.array(model.parameters)[~free]) or None,
    }


def _at_bound(phi: Floats, goal: Goal) -> NDArray[np.bool_]:
    return (phi <= goal.low_P + 1e-9) | (phi >= goal.high_P - 1e-9)


def _grade(goal: Goal, phi: Floats, evidence: Mapping[str, float | str | bool | None], rows: int) -> Status:
    if not evidence["converged"]:
        return "unmoved" if float(evidence["moved"] or 0.0) < 1e-9 else "max-iter"
    if np.any(_at_bound(phi, goal)):
        return "bound-hit"
    condition = evidence["condition"]
    if rows <= len(phi) or (isinstance(condition, float) and condition > WORST_CONDITION):
        return "undetermined"
    return "multimodal" if evidence["rivals"] else "converged"
