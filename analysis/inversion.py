"""The compute at which a law reaches a loss, and how that answer moves with the data.

Between ``certify`` and ``speedup``. A baseline's law is fitted by least squares to the mean losses of its cells, free
or with the asymptote shared with the method it is compared to; inverting it gives the cost of any loss above the
asymptote, with derivatives for the delta method.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cells import Cell
from scaling.analysis.certify import gauss_newton
from scaling.analysis.laws import Power
from scaling.analysis.model import Model, bind
from scaling.analysis.solver import Goal, minimise
from scaling.errors import FitError

Floats = NDArray[np.float64]

# Equality of asymptotes is kept unless rejected at this level.
SHARE_LEVEL = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Inverse:
    """A baseline law ready to be inverted.

    ``cells`` are those it was fitted to, baseline first; ``response`` (P, cells) is how its parameters move with their
    mean losses; ``at`` are the places of E, A, a among the parameters. ``rss`` and ``df`` are the lack of fit of the
    laws used, ``noise_rss`` and ``noise_df`` the one that measures the noise where nothing else does.
    """

    model: Model
    goal: Goal
    phi_P: Floats
    cells: tuple[Cell, ...]
    response: Floats
    at: tuple[int, int, int]
    asymptote: str
    sharing_p: float | None
    rss: float
    df: int
    noise_rss: float
    noise_df: int

    @property
    def curve(self) -> dict[str, float]:
        """E, A, a of the baseline in natural units."""
        natural = self.model.natural(self.phi_P[None])[0]
        return {name: float(natural[k]) for name, k in zip(("E", "A", "a"), self.at, strict=True)}

    @property
    def method_curve(self) -> dict[str, float] | None:
        """E, A, a of the method where it was fitted together with the baseline."""
        if len(self.model.columns) < 2:
            return None
        natural = self.model.natural(self.phi_P[None])[0]
        return {name: float(natural[k]) for name, k in zip(("E", "A", "a"), self.model.columns[1], strict=True)}

    def log_cost(self, losses_Rk: Floats, phi_RP: Floats) -> Floats:
        """Logarithm of the cost at which the baseline reaches each loss; NaN at or below its asymptote."""
        theta = self.model.from_solver(phi_RP)
        e, a, slope = (theta[:, [k]] for k in self.at)
        above = losses_Rk - np.exp(e)
        with np.errstate(invalid="ignore", divide="ignore"):
            out: Floats = np.where(above > 0, (a - np.log(np.where(above > 0, above, 1.0))) / slope, np.nan)
        return out

    def gradient(self, losses_k: Floats) -> tuple[Floats, Floats]:
        """d log cost / d loss (k,) and d log cost / d phi (k, P)."""
        theta = self.model.from_solver(self.phi_P[None])[0]
        e, a, slope = (theta[k] for k in self.at)
        above = losses_k - np.exp(e)
        by_theta = np.zeros((len(losses_k), len(theta)))
        by_theta[:, self.at[0]] = np.exp(e) / (slope * above)
        by_theta[:, self.at[1]] = 1.0 / slope
        by_theta[:, self.at[2]] = -(a - np.log(above)) / slope**2
        move = self.model.from_solver(np.eye(len(theta))).T
        return -1.0 / (slope * above), by_theta @ move


def budget_invariant_speedup(loss_worse: float, loss_better: float, *, asymptote: float, exponent: float) -> float:
    """Speedup between two runs of equal cost on laws that differ in their amplitude only.

    >>> round(budget_invariant_speedup(3.0, 2.9, asymptote=1.6, exponent=0.15), 4)
    1.6389

    References
    ----------
    ``s = ((L_worse - E) / (L_better - E)) ** (1 / a)``, from ``L = E + A C^-a``; it does not depend on the cost.
    """
    if loss_better <= asymptote:
        raise FitError(f"loss {loss_better:g} is not above the asymptote {asymptote:g}: no finite cost reaches it")
    return float(((loss_worse - asymptote) / (loss_better - asymptote)) ** (1.0 / exponent))


def parse_asymptote(text: str) -> str | float:
    """``auto``, ``free``, ``shared`` or a number.

    >>> parse_asymptote("1.8")
    1.8
    """
    try:
        return float(text)
    except ValueError:
        return text


def fit_baseline(
    baseline: Sequence[Cell], method: Sequence[Cell], *, asymptote: str | float, sd: float, sd_df: float
) -> Inverse:
    """Fit the baseline's law to its cell means.

    Parameters
    ----------
    baseline, method
        Cells of both arms.
    asymptote
        ``free``, ``shared`` (one E for both arms), ``auto`` (shared unless the data reject it), or a number.
    sd, sd_df
        Standard deviation of one run within a cell for the test of equal asymptotes (NaN: the lack of fit is used).

    Raises
    ------
    FitError
        When there are too few scales, or the baseline's loss does not fall with cost.
    """
    scales = len({c.x for c in baseline})
    asymptote = float(asymptote) if isinstance(asymptote, int) else asymptote
    pinned = isinstance(asymptote, float)
    if scales < (2 if pinned else 3):
        raise FitError(
            f"too-few-scales: baseline {baseline[0].method!r} has {scales} scale{'s' * (scales != 1)}; inverting "
            "its law needs 3 "
            "(2 with a given asymptote): add sizes, or give one with `scaling compare speedup --asymptote`"
        )
    losses = [c.mean for c in baseline]
    order = np.argsort([c.x for c in baseline])
    if losses[order[0]] <= losses[order[-1]]:
        raise FitError(
            f"baseline-not-falling: mean loss of {baseline[0].method!r} is {losses[order[-1]]:.6g} at the largest "
            "cost and "
            f"{losses[order[0]]:.6g} at the smallest; no loss can be turned into a cost"
        )
    alone = _fit(baseline, (), asymptote)
    if pinned:
        return alone
    if asymptote == "free":
        if len({c.x for c in method}) < 4:
            return alone
        return _both(alone, _fit(method, (), "free"))
    together = len({c.x for c in method}) >= 2 and len(baseline) + len(method) >= 5
    if not together:
        return alone
    shared = _fit(baseline, method, "shared")
    if asymptote == "shared":
        return shared
    if len({c.x for c in method}) < 3:
        return shared
    free_method = _fit(method, (), "free")
    rise = max(shared.rss - alone.rss - free_method.rss, 0.0)
    apart = _both(alone, free_method)
    if np.isnan(sd):
        p = float(stats.f.sf(rise / (apart.rss / apart.df), 1, apart.df)) if apart.df > 0 else 1.0
    else:
        p = float(stats.f.sf(rise / sd**2, 1, sd_df)) if np.isfinite(sd_df) else float(stats.chi2.sf(rise / sd**2, 1))
    if p <= SHARE_LEVEL:
        return replace(apart, sharing_p=p)
    if apart.df == 0:
        return replace(shared, sharing_p=p)
    # A shared law is kept only where its lack of fit is small: that of the free laws does not know the choice.
    return replace(shared, sharing_p=p, noise_rss=apart.rss, noise_df=apart.df)


def _both(alone: Inverse, other: Inverse) -> Inverse:
    """The baseline's law with the lack of fit of both arms."""
    rss, df = alone.rss + other.rss, alone.df + other.df
    return replace(alone, rss=rss, df=df, noise_rss=rss, noise_df=df)


def refit(inverse: Inverse, means_Rk: Floats) -> Floats:
    """Parameters for other mean losses of the same cells, shape (R, P)."""
    weights = np.array([float(len(c.losses)) for c in inverse.cells])
    start = np.repeat(inverse.phi_P[None], len(means_Rk), axis=0)
    return minimise(inverse.model, means_Rk, weights[None], start, inverse.goal, warm=True).phi_RP


def _fit(baseline: Sequence[Cell], method: Sequence[Cell], asymptote: str | float) -> Inverse:
    cells = (*baseline, *method)
    law = Power()
    x = {"C": np.array([c.x for c in cells])}
    y = np.array([c.mean for c in cells])
    w = np.array([float(len(c.losses)) for c in cells])
    groups = ["baseline"] * len(baseline) + ["method"] * len(method)
    model = bind(law, x, groups=groups, shared=("E",))
    low, high = model.bounds(float(np.min(y)))
    columns = model.columns[0]
    if isinstance(asymptote, float):
        if not 0 < asymptote < float(np.min(y)):
            raise FitError(f"asymptote {asymptote:g} does not lie between 0 and the smallest mean loss {np.min(y):.6g}")
        low[columns[0]] = high[columns[0]] = np.log(asymptote)
    goal = Goal(loss="l2", log=False, low_P=low, high_P=high)
    start = _start(model, law, x, y, w, groups)
    found = minimise(model, y[None], w[None], start[:1], goal)
    if not found.converged_R[0]:
        found = minimise(model, y[None], w[None], start, goal, race=True)
    best = found.best()
    phi = found.phi_RP[best]
    free = np.flatnonzero((phi > low + 1e-9) & (phi < high - 1e-9))
    jacobian = model.jacobian(phi[None])[0] * np.exp(model.prepare(phi[None])[0][0])[:, None]
    matrix = gauss_newton(model, phi, w, log=False)[np.ix_(free, free)]
    response = np.zeros((len(phi), len(cells)))
    response[free] = np.linalg.pinv(matrix, hermitian=True) @ (jacobian[:, free] * w[:, None]).T
    rss = 2 * float(found.objective_R[best])
    df = len(cells) - len(phi) + int(isinstance(asymptote, float))
    return Inverse(
        model=model,
        goal=goal,
        phi_P=phi,
        cells=cells,
        response=response,
        at=(int(columns[0]), int(columns[1]), int(columns[2])),
        asymptote=f"{asymptote:g}" if isinstance(asymptote, float) else ("shared" if method else "free"),
        sharing_p=None,
        rss=rss,
        df=df,
        noise_rss=rss,
        noise_df=df,
    )


def _start(model: Model, law: Power, x: dict[str, Floats], y: Floats, w: Floats, groups: Sequence[str]) -> Floats:
    if len(model.rows) == 1:
        return model.to_solver(law.starts(x, y, w)[:2])
    apart = [law.starts({"C": x["C"][rows]}, y[rows], w[rows])[0] for rows in model.rows]
    together = law.starts(x, y, w)
    return np.array([model.pack(np.array(apart))] + [model.pack(np.repeat(t[None], 2, axis=0)) for t in together[:1]])
