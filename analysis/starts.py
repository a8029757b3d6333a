"""Starting points of a law computed from the data, so that no user has to guess one.

Between ``laws`` and ``solver``. Given the exponents, a sum of power terms is linear in its amplitudes; so each point
of a coarse grid of exponents has its best amplitudes in closed form (variable projection, Golub and Pereyra 1973).
Rows are weighted by 1/L**2, which makes squares of the loss stand for squares of its logarithm. The best cells of
that grid that are not neighbours are the starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from scaling.analysis.laws import PowerSum

Floats = NDArray[np.float64]

GRID_POINTS = {0: 1, 1: 64, 2: 24, 3: 10, 4: 6}
STARTS = 2
# A term below this share of the smallest loss counts as absent in a start (amplitudes must be positive in logarithms).
SMALLEST_SHARE = 1e-4


def variable_projection(law: PowerSum, x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
    """Starts of a sum of power terms.

    Parameters
    ----------
    law
        The law; ``x`` holds an array of n positive numbers for each of its variables.
    y_n, w_n
        Losses and row weights, shape (n,).

    Returns
    -------
    array, shape (k, P)
        At most `STARTS` starting points in the solver's units, best first.
    """
    names = law.names()
    exponents = [p.name for p in law.parameters if p.kind == "exponent"]
    level = float(np.exp(np.mean(np.log(y_n))))
    y_n = y_n / level  # squares of very small losses would vanish
    axis, index_GE = exponent_grid(GRID_POINTS[len(exponents)], len(exponents))
    grid_GE = axis[index_GE]
    centre = {v: float(np.mean(np.log(x[v]))) for v in law.variables}
    column = {e: k for k, e in enumerate(exponents)}
    tables, places = [], []
    for term in law.terms:
        used = sorted({column[e] for e in term.exponents.values()})
        _, own_UE = exponent_grid(len(axis), len(used))
        values_UE = axis[own_UE]
        power_Un = np.zeros((len(values_UE), len(y_n)))
        for variable, exponent in term.exponents.items():
            offset_n = np.log(x[variable]) - centre[variable]
            power_Un -= np.outer(values_UE[:, used.index(column[exponent])], offset_n)
        tables.append(np.exp(power_Un) / y_n)
        places.append(index_GE[:, used] @ len(axis) ** np.arange(len(used) - 1, -1, -1))
    amplitude_GT, rss_G = _amplitudes(tables, places, w_n, SMALLEST_SHARE * float(np.min(y_n)))
    chosen = _separate(rss_G, grid_GE)
    theta_kP = np.empty((len(chosen), len(names)))
    for row, g in enumerate(chosen):
        for exponent, k in column.items():
            theta_kP[row, names.index(exponent)] = grid_GE[g, k]
        for t, term in enumerate(law.terms):
            shift = sum(grid_GE[g, column[e]] * centre[v] for v, e in term.exponents.items())
            theta_kP[row, names.index(term.amplitude)] = np.log(amplitude_GT[g, t] * level) + shift
    return theta_kP


def exponent_grid(points: int, dimensions: int) -> tuple[Floats, NDArray[np.intp]]:
    """Exponents from 0.03 to 1.6 in geometric steps, and all combinations of their places, shape (points**d, d)."""
    axis = np.geomspace(0.03, 1.6, points)
    places = np.indices((points,) * dimensions).reshape(dimensions, -1).T if dimensions else np.zeros((1, 0), int)
    return axis, np.ascontiguousarray(places, dtype=np.intp)


def _amplitudes(
    tables: list[Floats], places: list[NDArray[np.intp]], w_n: Floats, floor: float
) -> tuple[Floats, Floats]:
    """Non-negative least squares of 1 on the terms, for all grid points at once, by trying every set of terms.

    ``tables[t]`` holds term t at each distinct value of its own exponents, ``places[t]`` which of them a grid
    point has.
    """
    terms, points = len(tables), len(places[0])
    gram_GTT = np.empty((points, terms, terms))
    moment_GT = np.empty((points, terms))
    for s in range(terms):
        moment_GT[:, s] = (tables[s] @ w_n)[places[s]]
        for t in range(s, terms):
            products = (tables[s] * w_n) @ tables[t].T
            gram_GTT[:, s, t] = gram_GTT[:, t, s] = products[places[s], places[t]]
    total = float(np.sum(w_n))
    best_GT = np.full((points, terms), floor)
    rss_G = np.full(points, np.inf)
    # All terms first: where they come out positive, no subset fits better.
    todo = np.arange(points)
    for mask in range(2**terms - 1, 0, -1):
        members = [t for t in range(terms) if mask >> t & 1]
        sub = gram_GTT[todo][:, members][:, :, members]
        moment = moment_GT[todo][:, members]
        ridge = 1e-12 * np.trace(sub, axis1=1, axis2=2)[:, None, None] * np.eye(len(members))
        value = np.linalg.solve(sub + ridge, moment[..., None])[..., 0]
        rss = total - np.sum(value * moment, axis=1)
        better = np.all(value > 0, axis=1) & (rss < rss_G[todo])
        at = todo[better]
        rss_G[at] = rss[better]
        best_GT[at] = floor
        best_GT[np.ix_(at, members)] = np.maximum(value[better], floor)
        if len(members) == terms:
            todo = todo[~better]
    return best_GT, rss_G


def _separate(rss_G: Floats, grid_GE: Floats) -> list[int]:
    """Indices of the best grid points, each at least a factor 1.5 in some exponent from those before it."""
    logs_GE = np.log(grid_GE)
    left_G = np.where(np.isfinite(rss_G), rss_G, np.inf)
    chosen: list[int] = []
    while len(chosen) < STARTS and np.isfinite(left_G.min()):
        best = int(np.argmin(left_G))
        chosen.append(best)
        left_G[np.max(np.abs(logs_GE - logs_GE[best]), axis=1, initial=0.0) <= np.log(1.5)] = np.inf
    return chosen
