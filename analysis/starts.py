"""Starting points of a law computed from the data, so that no user has to guess one.

Between ``laws`` and ``solver``. Given the exponents, a sum of power terms is linear in its amplitudes; so each point
of a coarse grid of exponents has its best amplitudes in closed form (variable projection, Golub and Pereyra 1973).
Rows are weighted by 1/L**2, which makes squares of the loss stand for squares of its logarithm. The best cells of
that grid that are not neighbours are the starts.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import product
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
    grid_GE = exponent_grid(GRID_POINTS[len(exponents)], len(exponents))
    centre = {v: float(np.mean(np.log(x[v]))) for v in law.variables}
    column = {e: k for k, e in enumerate(exponents)}
    tables, places = [], []
    for term in law.terms:
        used = sorted({column[e] for e in term.exponents.values()})
        values_UE, place_G = np.unique(grid_GE[:, used], axis=0, return_inverse=True)
        power_Un = np.zeros((len(values_UE), len(y_n)))
        for variable, exponent in term.exponents.items():
            offset_n = np.log(x[variable]) - centre[variable]
            power_Un -= np.outer(values_UE[:, used.index(column[exponent])], offset_n)
        tables.append(np.exp(power_Un) / y_n)
        places.append(place_G.reshape(-1) if used else np.zeros(len(grid_GE), dtype=np.intp))
    amplitude_GT, rss_G = _amplitudes(tables, places, w_n, SMALLEST_SHARE * float(np.min(y_n)))
    chosen = _separate(rss_G, grid_GE)
    theta_kP = np.empty((len(chosen), len(names)))
    for row, g in enumerate(chosen):
        for exponent, k in column.items():
            theta_kP[row, names.index(exponent)] = grid_GE[g, k]
        for t, term in enumerate(law.terms):
            shift = sum(grid_GE[g, column[e]] * centre[v] for v, e in term.exponents.items())
            theta_kP[row, names.index(term.amplitude)] = np.log(amplitude_GT[g, t]) + shift
    return theta_kP


def exponent_grid(points: int, dimensions: int) -> Floats:
    """All combinations of ``points`` exponents from 0.03 to 1.6 in geometric steps, shape (points**d, d)."""
    axis = np.geomspace(0.03, 1.6, points)
    return np.array(list(product(axis, repeat=dimensions)), dtype=np.float64)


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
    for mask in range(1, 2**terms):
        members = [t for t in range(terms) if mask >> t & 1]
        sub = gram_GTT[:, members][:, :, members]
        ridge = 1e-12 * np.trace(sub, axis1=1, axis2=2)[:, None, None] * np.eye(len(members))
        value = np.linalg.solve(sub + ridge, moment_GT[:, members, None])[..., 0]
        rss = total - np.einsum("gt,gt->g", value, moment_GT[:, members])
        better = np.all(value > 0, axis=1) & (rss < rss_G)
        rss_G[better] = rss[better]
        full = np.full((points, terms), floor)
        full[:, members] = value
        best_GT[better] = np.maximum(full[better], floor)
    return best_GT, rss_G


def _separate(rss_G: Floats, grid_GE: Floats) -> list[int]:
    """Indices of the best grid points, each at least a factor 1.5 in some exponent from those before it."""
    chosen: list[int] = []
    for g in np.argsort(rss_G, kind="stable"):
        if not np.isfinite(rss_G[g]) or len(chosen) == STARTS:
            break
        logs = np.log(grid_GE[g])
        if all(np.max(np.abs(logs - np.log(grid_GE[c])), initial=0.0) > np.log(1.5) for c in chosen):
            chosen.append(int(g))
        if grid_GE.shape[1] == 0:
            break
    return chosen
