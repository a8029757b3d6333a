"""How far a law may be extrapolated: fit the small runs, predict the large ones.

After ``certify``; shown beside every extrapolation. Runs are ordered by compute, never drawn at random: a random
hold- out asks about interpolation. Each cut gives the relative error of every larger run against how many times more
compute it took than the largest run fitted.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.certify import Fitted, solve
from scaling.analysis.checklist import conventions, describe_dropped, describe_seeds, make_checklist
from scaling.analysis.laws import Law, get_law
from scaling.analysis.options import check_level
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.robust import check_loss
from scaling.analysis.screen import check_spread, numbers, screen
from scaling.errors import FitError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

# Edges of the classes of extrapolation factor the errors are summarised in.
FACTOR_EDGES = (1.0, 2.0, 4.0, 10.0, 30.0, 100.0, float("inf"))


def backtest(
    table: pd.DataFrame,
    *,
    form: str = "chinchilla",
    loss: str = "huber",
    delta: float = 1e-3,
    residual: str = "log",
    level: float = 0.9,
    cuts: int = 12,
    keep_unfinished: bool = False,
) -> Result:
    """Ordered hold-out by compute.

    Parameters
    ----------
    table
        Runs with the law's variables and ``loss``; ordered by C where there is one, else by N D, else by the first
        variable.
    level
        Quantile of the absolute error reported for each class of extrapolation factor.
    cuts
        Most cuts tried.

    Returns
    -------
    Result
        ``estimate``: median and ``level`` quantile of the absolute relative error over all predictions, and of
        those up to
        a factor of 10; ``details.predictions`` holds each one.

    Raises
    ------
    FitError
        When no cut leaves enough small runs for the law and a larger run to predict.
    """
    check_loss(loss, delta)
    check_level(level)
    law = get_law(form)
    screened = screen(table, needs=[*law.variables, "loss"], analysis="fit backtest", keep_unfinished=keep_unfinished)
    frame = screened.frame
    for v in law.variables:
        check_spread(numbers(frame, v), v, "fit backtest")
    order, by = _order(frame, law)
    x = {v: numbers(frame, v) for v in law.variables}
    y_n = numbers(frame, "loss")
    predictions: list[dict[str, Any]] = []
    skipped = 0
    for edge in _cuts(order, cuts):
        small = order <= edge * (1 + 1e-9)
        try:
            part = {v: a[small] for v, a in x.items()}
            weights = np.ones(int(small.sum()))
            fitted = solve(law, part, y_n[small], weights, loss=loss, delta=delta, log=residual == "log")
        except FitError:
            skipped += 1
            continue
        if fitted.df < 1 or fitted.status in ("max-iter", "unmoved"):
            skipped += 1
            continue
        large = np.flatnonzero(~small)
        predicted = predict(fitted, {v: a[large] for v, a in x.items()})
        for row, value in zip(large, predicted, strict=True):
            predictions.append(
                {
                    "cut": float(edge),
                    "fitted_rows": int(small.sum()),
                    "row": int(frame["row"].iloc[row]),
                    "factor": float(order[row] / edge),
                    "loss": float(y_n[row]),
                    "predicted": float(value),
                    "error": float(value / y_n[row] - 1),
                    "status": fitted.status,
                }
            )
    if not predictions:
        raise FitError(
            f"fit backtest: no cut leaves more distinct points than the {len(law.parameters)} parameters of "
            f"{law.name} and a larger "
            "run to predict; add scales or use a form with fewer parameters"
        )
    error = np.abs([p["error"] for p in predictions])
    factor = np.array([p["factor"] for p in predictions])
    near = error[factor <= 10.0]
    estimate = {"median_error": float(np.median(error)), "quantile_error": float(np.quantile(error, level))}
    if near.size:
        estimate["quantile_error_to_10x"] = float(np.quantile(near, level))
    cautions = list(screened.cautions)
    bias = float(np.mean([p["error"] for p in predictions]))
    if abs(bias) > 0.7 * float(np.mean(error)) and len(predictions) > 4:
        way = "above" if bias > 0 else "below"
        text = (
            f"predictions lie {way} the runs by {abs(bias):.2%} on average: the law bends, errors grow with the factor"
        )
        cautions.append(Caution(code="biased-extrapolation", message=text))
    entries = {
        "form": law.formula,
        "variables": ", ".join(f"{a} = {b}" for a, b in conventions(frame, [*law.variables, "loss"]).items()),
        "conventions": f"ordered by {by}, residual of {residual} loss",
        "rows": str(len(frame)),
        "dropped": describe_dropped(screened.dropped),
        "seeds": describe_seeds(frame),
        "loss": loss,
        "delta": f"{delta:g}" if loss == "huber" else "does not apply",
        "solver": "damped Newton from variable-projection starts, Huber continuation",
        "interval": f"empirical {level:g} quantile of the error by extrapolation factor",
    }
    return Result(
        kind="fit backtest",
        estimate=estimate,
        interval=Interval(
            level=level,
            method="empirical quantile of absolute relative errors",
            low={"error": -estimate["quantile_error"]},
            high={"error": estimate["quantile_error"]},
        ),
        n=len(predictions),
        conventions={"order": by, "error": "predicted / observed - 1"},
        warnings=tuple(cautions),
        dropped=screened.dropped,
        checklist=make_checklist(entries),
        details={"predictions": predictions, "by_factor": _by_factor(factor, error, level), "cuts_skipped": skipped},
    )


def predict(fitted: Fitted, x: dict[str, Floats]) -> Floats:
    """Losses a fitted law predicts at other points."""
    theta = fitted.model.from_solver(fitted.phi_P[None])
    out: Floats = np.exp(fitted.model.law.log_loss(theta, x)[0])
    return out


def _order(frame: pd.DataFrame, law: Law) -> tuple[Floats, str]:
    if "C" in frame.columns and frame["C"].notna().all():
        return numbers(frame, "C"), "C"
    if "N" in law.variables and "D" in law.variables:
        return numbers(frame, "N") * numbers(frame, "D"), "N D"
    return numbers(frame, law.variables[0]), law.variables[0]


def _cuts(order: Floats, most: int) -> Floats:
    edges = np.unique(order)[:-1]
    if len(edges) <= most:
        return edges
    return edges[np.unique(np.round(np.linspace(0, len(edges) - 1, most)).astype(np.intp))]


def _by_factor(factor: Floats, error: Floats, level: float) -> list[dict[str, float | int | None]]:
    out: list[dict[str, float | int | None]] = []
    for low, high in zip(FACTOR_EDGES[:-1], FACTOR_EDGES[1:], strict=True):
        inside = error[(factor > low) & (factor <= high)]
        if inside.size:
            out.append(
                {
                    "factor_low": low,
                    "factor_high": high if np.isfinite(high) else None,
                    "n": int(inside.size),
                    "median_error": float(np.median(inside)),
                    "quantile_error": float(np.quantile(inside, level)),
                }
            )
    return out
