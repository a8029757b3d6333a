"""A law bound to rows: predicted log losses with gradient and Hessian sums, for many refits at once.

Between ``laws`` and ``solver``. Binding takes logarithms and centres them once, so that a refit costs only elementwise
work and matrix products; several groups of rows (methods) may have their own copy of some parameters and share the
others. `Model.system` returns the two sums Newton's method needs without ever holding an array of R x n x P numbers for
sums of power terms.

Shapes: R refits, n rows, P parameters of all groups together, T terms.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.laws import VANISHING_LOG, Law, PowerSum

Floats = NDArray[np.float64]
Ints = NDArray[np.intp]

# Relative step of central differences, near the cube root of the rounding unit.
DIFFERENCE_STEP = 6e-6


@dataclass(frozen=True, slots=True)
class Slot:
    """One parameter of the bound model: its law's name and the group it belongs to (``None``: shared by all)."""

    name: str
    group: str | None

    @property
    def label(self) -> str:
        """``A`` or ``A[mhar]``."""
        return self.name if self.group is None else f"{self.name}[{self.group}]"


class Model:
    """A law on n rows; subclasses differ in how they get derivatives.

    Parameters
    ----------
    law
        The law.
    x
        One array of n positive numbers for each variable of the law.
    groups
        Group of each row (``None``: one group).
    shared
        Names of parameters that all groups share; the others exist once a group.
    """

    def __init__(
        self,
        law: Law,
        x: Mapping[str, Floats],
        *,
        groups: Sequence[str] | None = None,
        shared: Sequence[str] = (),
    ) -> None:
        self.law = law
        self.x = {v: np.asarray(x[v], dtype=np.float64) for v in law.variables}
        self.n = len(next(iter(self.x.values())))
        self.labels: tuple[str, ...] = tuple(dict.fromkeys(groups)) if groups is not None else ()
        one = len(self.labels) < 2
        self.slots: list[Slot] = []
        for p in law.parameters:
            owners: list[str | None] = [None] if one or p.name in shared else list(self.labels)
            self.slots += [Slot(p.name, g) for g in owners]
        self.columns: list[Ints] = []
        self.rows: list[Ints] = []
        members: list[str | None] = [None] if one else list(self.labels)
        for g in members:
            self.columns.append(
                np.array([next(k for k, s in enumerate(self.slots) if s.name == p.name and s.group in (None, g))
                          for p in law.parameters])
            )  # fmt: skip
            self.rows.append(np.arange(self.n) if g is None else np.flatnonzero(np.asarray(groups, dtype=object) == g))

    @property
    def parameters(self) -> list[str]:
        """Labels of the P parameters."""
        return [s.label for s in self.slots]

    def bounds(self, smallest_loss: float) -> tuple[Floats, Floats]:
        """Lowest and highest value of each parameter, in the solver's units."""
        by_name = {p.name: p for p in self.law.parameters}
        low, high = np.empty(len(self.slots)), np.empty(len(self.slots))
        for k, s in enumerate(self.slots):
            p = by_name[s.name]
            low[k], high[k] = p.low, p.high
            if p.kind == "asymptote":
                low[k] = np.log(smallest_loss) + VANISHING_LOG
        return low, high

    def to_solver(self, theta_RP: Floats) -> Floats:
        """From the law's own units to the solver's, shape (R, P)."""
        return theta_RP

    def from_solver(self, phi_RP: Floats) -> Floats:
        """Inverse of `to_solver`."""
        return phi_RP

    def natural(self, phi_RP: Floats) -> Floats:
        """From the solver's units to natural ones, shape (R, P)."""
        theta_RP = self.from_solver(phi_RP)
        kinds = {p.name: p.is_log for p in self.law.parameters}
        logs = np.array([kinds[s.name] for s in self.slots])
        with np.errstate(over="ignore"):
            return np.where(logs, np.exp(np.where(logs, theta_RP, 0.0)), theta_RP)

    def internal(self, natural_P: Floats) -> Floats:
        """Inverse of `natural` for one point, shape (P,)."""
        kinds = {p.name: p.is_log for p in self.law.parameters}
        logs = np.array([kinds[s.name] for s in self.slots])
        theta_P = np.where(logs, np.log(np.where(logs, natural_P, 1.0)), natural_P)
        out: Floats = self.to_solver(theta_P[None])[0]
        return out

    def pack(self, theta_GL: Floats) -> Floats:
        """One point in the solver's units from the law's own (G, P of the law); shared parameters take the median."""
        out = np.empty(len(self.slots))
        for k, _ in enumerate(self.slots):
            values = [theta_GL[g, np.flatnonzero(c == k)[0]] for g, c in enumerate(self.columns) if k in c]
            out[k] = float(np.median(values))
        packed: Floats = self.to_solver(out[None])[0]
        return packed

    def log_loss(self, theta_RP: Floats) -> Floats:
        """Predicted log losses, shape (R, n)."""
        f_Rn = np.empty((len(theta_RP), self.n))
        for columns, rows in zip(self.columns, self.rows, strict=True):
            f_Rn[:, rows] = self.law.log_loss(theta_RP[:, columns], {v: a[rows] for v, a in self.x.items()})
        return f_Rn

    def prepare(self, theta_RP: Floats) -> tuple[Floats, Any]:
        """Predicted log losses and whatever `system` needs with them."""
        return self.log_loss(theta_RP), theta_RP

    def jacobian(self, theta_RP: Floats) -> Floats:
        """Derivatives of the log losses, shape (R, n, P), by central differences."""
        j_RnP = np.empty((len(theta_RP), self.n, len(self.slots)))
        for k in range(len(self.slots)):
            step = DIFFERENCE_STEP * np.maximum(1.0, np.abs(theta_RP[:, k]))
            up, down = theta_RP.copy(), theta_RP.copy()
            up[:, k] += step
            down[:, k] -= step
            j_RnP[:, :, k] = (self.log_loss(up) - self.log_loss(down)) / (2 * step[:, None])
        return j_RnP

    def system(self, cache: Any, slope_Rn: Floats, weight_Rn: Floats, curve_Rn: Floats) -> tuple[Floats, Floats]:
        """``sum slope * df`` (R, P) and ``sum weight * df df' + curve * d2f`` (R, P, P); here d2f is left out."""
        j_RnP = self.jacobian(cache)
        gradient = np.einsum("rn,rnp->rp", slope_Rn, j_RnP, optimize=True)
        hessian = np.einsum("rn,rnp,rnq->rpq", weight_Rn, j_RnP, j_RnP, optimize=True)
        return gradient, hessian


class PowerModel(Model):
    """A sum of power terms: every term's logarithm is linear in the parameters, so all derivatives are exact.

    The solver sees amplitudes at the centre of the rows instead of at x = 1 (unless ``centred`` is false): the
    condition number falls by many orders of magnitude.
    """

    def __init__(
        self,
        law: PowerSum,
        x: Mapping[str, Floats],
        *,
        groups: Sequence[str] | None = None,
        shared: Sequence[str] = (),
        centred: bool = True,
    ) -> None:
        super().__init__(law, x, groups=groups, shared=shared)
        names = law.names()
        count = len(self.slots)
        self._restore = np.eye(count)  # theta = restore @ phi
        raw: list[Floats] = []
        for term in law.terms:
            full_nP = np.zeros((self.n, count))
            for columns, rows in zip(self.columns, self.rows, strict=True):
                amplitude = columns[names.index(term.amplitude)]
                full_nP[rows, amplitude] = 1.0
                for variable, exponent in term.exponents.items():
                    k = columns[names.index(exponent)]
                    logs = np.log(self.x[variable])
                    full_nP[rows, k] -= logs[rows]
                    own = self.slots[k].group is None or self.slots[amplitude].group is not None
                    if centred and own:
                        self._restore[amplitude, k] = np.mean(logs)
            raw.append(full_nP)
        self.design: list[tuple[Ints, Floats]] = []
        for full_nP in raw:
            moved = full_nP @ self._restore
            used = np.flatnonzero(np.any(full_nP != 0, axis=0))
            self.design.append((used, np.ascontiguousarray(moved[:, used])))
        self._products = {
            (i, j): np.einsum("np,nq->npq", a[1], b[1]).reshape(self.n, -1)
            for i, a in enumerate(self.design)
            for j, b in enumerate(self.design)
            if i <= j
        }
        self._place_gradient = np.concatenate([np.eye(count)[used] for used, _ in self.design])
        self._place_hessian = np.concatenate(
            [_places(self.design[i][0], self.design[j][0], count) for i, j in self._products]
        )

    def bounds(self, smallest_loss: float) -> tuple[Floats, Floats]:
        low, high = super().bounds(smallest_loss)
        for k, slot in enumerate(self.slots):
            if any(slot.name == t.amplitude for t in self.law.terms):  # type: ignore[attr-defined]
                low[k] = np.log(smallest_loss) + VANISHING_LOG
        return low, high

    def to_solver(self, theta_RP: Floats) -> Floats:
        out = np.asarray(np.linalg.solve(self._restore, theta_RP.T).T, dtype=np.float64)
        return out

    def from_solver(self, phi_RP: Floats) -> Floats:
        return phi_RP @ self._restore.T

    def _terms(self, phi_RP: Floats) -> list[Floats]:
        return [phi_RP[:, used] @ m_np.T for used, m_np in self.design]

    def prepare(self, phi_RP: Floats) -> tuple[Floats, Any]:
        logs = self._terms(phi_RP)
        if len(logs) == 1:
            return logs[0], [np.ones_like(logs[0])]
        top = logs[0]
        for other in logs[1:]:
            top = np.maximum(top, other)
        parts = [np.exp(u - top) for u in logs]
        total = parts[0]
        for other in parts[1:]:
            total = total + other
        for part in parts:
            np.divide(part, total, out=part)
        return top + np.log(total), parts

    def jacobian(self, phi_RP: Floats) -> Floats:
        _, parts = self.prepare(phi_RP)
        j_RnP = np.zeros((len(phi_RP), self.n, len(self.slots)))
        for (used, m_np), part in zip(self.design, parts, strict=True):
            j_RnP[:, :, used] += part[:, :, None] * m_np[None]
        return j_RnP

    def system(self, cache: Any, slope_Rn: Floats, weight_Rn: Floats, curve_Rn: Floats) -> tuple[Floats, Floats]:
        parts: list[Floats] = cache
        size = len(self.slots)
        # d2f = sum_j p_j m_j m_j' - df df', so the outer products of df carry weight - curve.
        net_Rn = weight_Rn - curve_Rn
        gradient = [(slope_Rn * part) @ m for part, (_, m) in zip(parts, self.design, strict=True)]
        blocks = []
        scaled_Rn = net_Rn
        for (i, j), products in self._products.items():
            if i == j:
                scaled_Rn = net_Rn * parts[i]
            coefficient = scaled_Rn * parts[j]
            if i == j:
                coefficient += curve_Rn * parts[i]
            blocks.append(coefficient @ products)
        hessian = np.concatenate(blocks, axis=1) @ self._place_hessian
        return np.concatenate(gradient, axis=1) @ self._place_gradient, hessian.reshape(-1, size, size)


def _places(rows: Ints, columns: Ints, size: int) -> Floats:
    """Where the numbers of a block of the Hessian go, mirrored unless it lies on the diagonal; shape (r c, P P)."""
    out = np.zeros((len(rows) * len(columns), size * size))
    for k, (p, q) in enumerate(product(rows, columns)):
        out[k, p * size + q] += 1.0
        if rows is not columns:
            out[k, q * size + p] += 1.0
    return out


def bind(
    law: Law,
    x: Mapping[str, Floats],
    *,
    groups: Sequence[str] | None = None,
    shared: Sequence[str] = (),
    centred: bool = True,
) -> Model:
    """The right `Model` for a law: exact derivatives where the law is a sum of power terms."""
    if isinstance(law, PowerSum):
        return PowerModel(law, x, groups=groups, shared=shared, centred=centred)
    return Model(law, x, groups=groups, shared=shared)
