"""The band around a fitted law: how the mean loss it predicts moves with the losses it was fitted to.

After ``inversion``, before ``findings``: the same least-squares laws that a speedup inverts, drawn over the range of
compute with an interval of the mean by the delta method.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cells import Cell, without_copies
from scaling.analysis.inversion import Inverse, fit_baseline
from scaling.analysis.readings import Curve

Floats = NDArray[np.float64]
_POINTS = 60


def pair_curves(
    baseline: Sequence[Cell],
    method: Sequence[Cell],
    *,
    shared: bool,
    sd: float,
    df: float,
    level: float = 0.95,
) -> tuple[Curve, Curve | None]:
    """Laws of the baseline and of one method over their ranges, with bands.

    Parameters
    ----------
    baseline, method
        Cells of both arms, in order of cost.
    shared
        Whether both laws have one asymptote, as in the speedup they belong to.
    sd, df
        Standard deviation of one run within a cell and its degrees of freedom; without them there are no bands.

    Returns
    -------
    tuple
        The baseline's curve, and the method's or ``None`` where it has too few scales for a law of its own.

    Raises
    ------
    FitError
        When the baseline's law cannot be fitted.
    """
    baseline, method = without_copies(baseline, method)  # as the speedup counts them
    if shared:
        both = fit_baseline(baseline, method, asymptote="shared", sd=sd, sd_df=df)
        first = _curve(both, 0, baseline, sd=sd, df=df, level=level)
        return first, _curve(both, 1, method, sd=sd, df=df, level=level) if both.method_curve else None
    alone = fit_baseline(baseline, (), asymptote="free", sd=sd, sd_df=df)
    first = _curve(alone, 0, baseline, sd=sd, df=df, level=level)
    if len({cell.x for cell in method}) < 4 or method[0].mean <= method[-1].mean:
        return first, None
    other = fit_baseline(method, (), asymptote="free", sd=sd, sd_df=df)
    return first, _curve(other, 0, method, sd=sd, df=df, level=level)


def _curve(law: Inverse, group: int, cells: Sequence[Cell], *, sd: float, df: float, level: float) -> Curve:
    places = [int(place) for place in law.model.columns[group]]
    theta = law.model.from_solver(law.phi_P[None])[0]
    log_e, log_a, slope = theta[places]
    x = np.geomspace(min(cell.x for cell in cells), max(cell.x for cell in cells), _POINTS)
    fall = np.exp(log_a - slope * np.log(x))
    loss = np.exp(log_e) + fall
    formula = f"{np.exp(log_e):.3g} + {np.exp(log_a):.3g} C^-{slope:.3g}"
    if not (np.isfinite(sd) and df > 0):
        return Curve(method=cells[0].method, x=tuple(x), loss=tuple(loss), formula=formula)
    gradient = np.zeros((_POINTS, len(theta)))
    gradient[:, places] = np.stack([np.full(_POINTS, np.exp(log_e)), fall, -fall * np.log(x)], axis=1)
    move = law.model.from_solver(np.eye(len(theta))).T
    seeds = np.array([len(cell.losses) for cell in law.cells])
    spread: Floats = gradient @ move @ law.response * (sd / np.sqrt(seeds))
    half = float(stats.t.ppf((1 + level) / 2, df)) * np.sqrt(np.sum(spread**2, axis=1))
    return Curve(
        method=cells[0].method,
        x=tuple(x),
        loss=tuple(loss),
        low=tuple(loss - half),
        high=tuple(loss + half),
        formula=formula,
    )
