"""A mixed-effects model over scales: the joint claim that a method differs, when the scales are a sample of scales.

Beside ``seeds``; the model itself is statsmodels'.
"""

from __future__ import annotations

import warnings
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cells import Cell, constant_pairs

Floats = NDArray[np.float64]


def mixed_model(arms: list[tuple[Cell, Cell]], pairs: list[tuple[Floats, Floats]]) -> dict[str, Any]:
    """Random-intercept model of the pair differences over scales: does the mean differ when scales are a sample?"""
    d = [m - b for m, b in pairs]
    if len(d) < 3 or sum(len(v) for v in d) < len(d) + 2:
        return {
            "fitted": False,
            "reason": f"{len(d)} scales with {sum(len(v) for v in d)} pairs: needs 3 scales and some seeds",
        }
    if all(constant_pairs(pair) for pair in pairs if len(pair[0]) > 1):
        return {"fitted": False, "reason": "the pairs of each scale differ by one amount: no spread within scales"}
    from statsmodels.regression.mixed_linear_model import MixedLM

    values = np.concatenate(d)
    groups = np.repeat([m.scale for m, _ in arms], [len(v) for v in d])
    size = float(np.std(values)) or 1.0
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = MixedLM(values / size, np.ones((len(values), 1)), groups=groups).fit(reml=True)
        except (np.linalg.LinAlgError, ValueError) as error:
            return {"fitted": False, "reason": str(error)}
    return {
        "fitted": True,
        "converged": bool(found.converged),
        "delta": float(found.params[0]) * size,
        "standard_error": float(found.bse[0]) * size,
        "sd_between_scales": float(np.sqrt(max(float(np.asarray(found.cov_re)[0, 0]), 0.0))) * size,
        "sd_within": float(np.sqrt(found.scale)) * size,
        "p": float(2 * stats.t.sf(abs(float(found.params[0] / found.bse[0])), len(d) - 1)),
        "df": len(d) - 1,
        "notes": sorted({str(w.message).splitlines()[0] for w in caught}),
    }
