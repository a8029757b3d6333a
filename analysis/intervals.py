"""The intervals a fit was asked for, by name.

Between ``uncertainty`` and ``fit``: knows which rows are one run and which are one cell, and which makers to call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from scaling.analysis.cells import ROUNDING
from scaling.analysis.certify import Fitted
from scaling.analysis.copies import cell_labels
from scaling.analysis.likelihood import profile_interval
from scaling.analysis.result import Interval
from scaling.analysis.uncertainty import (
    Draws,
    cell_noise,
    cluster_bootstrap,
    delta_interval,
    parametric_bootstrap,
    percentile_interval,
    t_interval,
    two_level_bootstrap,
)
from scaling.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

NEED_NOISE = ("two-level", "parametric")  # that of runs of one cell
INTERVALS = ("cluster", "pairs", "two-level", "parametric", "delta", "profile", "all", "none")


def _cells(fitted: Fitted, frame: pd.DataFrame, by: str | None) -> list[str]:
    variables = {name: fitted.model.x[name] for name in fitted.model.law.variables}
    return cell_labels(variables, None if by is None else frame[by].to_numpy(dtype=str))


def equal_repeats(fitted: Fitted, frame: pd.DataFrame, by: str | None) -> bool:
    """Whether runs of a cell differ by rounding at most: copies, or seeds that change nothing; never noise measured."""
    sd, df = cell_noise(fitted.residual_n, _cells(fitted, frame, by))
    return df > 0 and sd <= ROUNDING * (1.0 if fitted.goal.log else float(np.min(fitted.y_n)))


def make_intervals(
    fitted: Fitted, frame: pd.DataFrame, *, by: str | None, level: float, kind: str, cluster: str | None, draws: int,
    rng: np.random.Generator,
) -> tuple[dict[str, Interval], dict[str, float]]:  # fmt: skip
    """Intervals by kind and standard errors of the headline one; nothing at 0 degrees of freedom.

    Where the runs of each cell are equal there is no noise to draw, so that the kinds that need it are not made. A
    bootstrap of which too few refits converge gives no interval.
    """
    if fitted.df <= 0 or kind == "none":
        return {}, {}
    names = fitted.model.parameters
    out: dict[str, Interval] = {}
    column = cluster or ("run_key" if "run_key" in frame.columns else None)
    clusters = None if column is None else [str(v) for v in frame[column]]
    repeated = clusters is not None and len(set(clusters)) < len(clusters)
    out["delta"], sd = delta_interval(fitted, level, clusters if repeated else None)
    errors = dict(zip(names, map(float, sd), strict=True))
    cells = _cells(fitted, frame, by)
    sd_cell, df_cell = cell_noise(fitted.residual_n, cells)
    if df_cell == 0:
        sd_cell, df_cell = float(np.sqrt(np.sum(fitted.residual_n**2) / fitted.df)), fitted.df

    def keep(name: str, made: Draws, method: str, df: float | None = None) -> None:
        if not made.enough:
            return
        out[name] = (
            percentile_interval(fitted, made, level, f"{method} bootstrap, percentile")
            if df is None
            else t_interval(fitted, made, df, level, f"{method} bootstrap, t")
        )
        if name == kind or (kind == "all" and name == "cluster"):
            spread = np.std(made.kept_RP, axis=0, ddof=1)
            errors.update(zip(names, map(float, spread), strict=True))

    left_out = NEED_NOISE if equal_repeats(fitted, frame, by) else ()
    wanted = [name for name in (INTERVALS[:-2] if kind == "all" else (kind,)) if name not in left_out]
    if "cluster" in wanted:
        keep("cluster", cluster_bootstrap(fitted, clusters, draws, rng), "cluster")
    if "pairs" in wanted:
        keep("pairs", cluster_bootstrap(fitted, None, draws, rng), "pairs")
    if "two-level" in wanted:
        keep("two-level", two_level_bootstrap(fitted, cells, draws, rng, sd=sd_cell), "two-level", df_cell)
    if "parametric" in wanted:
        keep("parametric", parametric_bootstrap(fitted, sd_cell, draws, rng), "parametric", df_cell)
    if "profile" in wanted and fitted.goal.loss != "l1":
        out["profile"] = profile_interval(fitted, level)
    if kind == "profile" and "profile" not in out:
        raise UsageError("interval 'profile' needs loss huber or l2: the profile of absolute values has kinks")
    return out, errors
