"""Standard deviations: their intervals, whether several are one, and how they move with scale.

Under ``noise`` and ``curve_noise``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats
from scipy.special import digamma, polygamma

from scaling.analysis.cells import group_near
from scaling.analysis.screen import numbers

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def chi_square_limits(sd: float, df: float, level: float) -> tuple[float, float]:
    """Interval of a standard deviation of normal noise."""
    upper, lower = stats.chi2.ppf([(1 + level) / 2, (1 - level) / 2], df)
    return sd * float(np.sqrt(df / upper)), sd * float(np.sqrt(df / lower))


def homogeneity(samples: Sequence[Floats]) -> dict[str, float | None]:
    """p of Levene's (median) and Bartlett's tests of equal variances, and Shapiro's of normal scaled residuals."""
    usable = [s for s in samples if len(s) > 2 and np.ptp(s) > 0]
    if len(usable) < 2:
        return {"levene_p": None, "bartlett_p": None, "shapiro_p": None}
    scaled = np.concatenate([(s - s.mean()) / np.std(s, ddof=1) for s in usable])
    return {
        "levene_p": float(stats.levene(*usable, center="median").pvalue),
        "bartlett_p": float(stats.bartlett(*usable).pvalue),
        "shapiro_p": float(stats.shapiro(scaled[:5000]).pvalue),
    }


def scale_dependence(parts: Sequence[pd.DataFrame], samples: Sequence[Floats]) -> dict[str, Any]:
    """Slope of log SD on log of the first of C, N, D there is, weighted by degrees of freedom."""
    name = next((n for n in ("C", "N", "D") if all(n in p.columns and p[n].notna().all() for p in parts)), None)
    usable = [k for k, s in enumerate(samples) if np.ptp(s) > 0]
    if name is None or len(usable) < 3:
        return {"variable": name, "slope": None, "p": None}
    x = np.array([float(np.mean(np.log(numbers(parts[k], name)))) for k in usable])
    if len(set(group_near(np.exp(x)))) < 2:
        return {"variable": name, "slope": None, "p": None}
    df = np.array([len(samples[k]) - 1 for k in usable], dtype=np.float64)
    y = np.array([np.log(np.std(samples[k], ddof=1)) for k in usable])
    # log of an SD with v degrees of freedom is biased by (digamma(v/2) - log(v/2))/2 and has variance trigamma(v/2)/4.
    y = y - 0.5 * (digamma(df / 2) - np.log(df / 2))
    w = 4 / polygamma(1, df / 2)
    centred = x - np.sum(w * x) / np.sum(w)
    slope = float(np.sum(w * centred * y) / np.sum(w * centred**2))
    error = float(1 / np.sqrt(np.sum(w * centred**2)))
    return {
        "variable": name,
        "slope": slope,
        "standard_error": error,
        "p": float(2 * stats.norm.sf(abs(slope) / error)),
    }
