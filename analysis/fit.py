"""Fit a scaling law to a table of runs.

Between tables (``columns``, ``screen``) and the solver (``certify``, ``uncertainty``): picks rows, fits one law or
one a method with some parameters shared, tests which sharing the data warrant, adds the intervals asked for and the
checklist.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.certify import Fitted, solve
from scaling.analysis.checklist import conventions, describe_dropped, describe_seeds, make_checklist
from scaling.analysis.copies import without_copies
from scaling.analysis.intervals import INTERVALS, equal_repeats, make_intervals
from scaling.analysis.laws import Law, get_law
from scaling.analysis.options import check_draws, check_level, generator
from scaling.analysis.result import Dropped, Interval, Result
from scaling.analysis.robust import check_loss
from scaling.analysis.screen import Screened, check_spread, numbers, screen
from scaling.analysis.sharing import SHARES, compare_sharing, pick_sharing, shared_names
from scaling.analysis.uncertainty import covariance
from scaling.analysis.verdict import fit_cautions
from scaling.errors import TableError, UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
logger = logging.getLogger(__name__)


def fit_law(
    table: pd.DataFrame,
    *,
    form: str = "chinchilla",
    loss: str = "huber",
    delta: float = 1e-3,
    residual: str = "log",
    by: str | None = None,
    share: str = "free",
    weights: str | None = None,
    level: float = 0.95,
    interval: str = "cluster",
    cluster: str | None = None,
    draws: int = 1000,
    rng: int | np.random.Generator = 0,
    keep_unfinished: bool = False,
) -> Result:
    """Fit a law, with its certificate and intervals.

    Parameters
    ----------
    table
        Runs with the law's variables and ``loss`` (short names, or the tidy table's columns).
    form
        Name of a registered law.
    loss, delta, residual
        ``huber`` (with ``delta`` in units of the residual), ``l1`` or ``l2``, on ``log`` or ``raw`` residuals.
    by, share
        A column (``method``) whose groups get their own law, and what they share: ``free`` nothing, ``E``,
        ``exponents``,
        ``E+exponents``, or ``test`` (the most shared one that is not rejected at 5%).
    weights
        A column of row weights.
    level, interval, draws, rng
        Level and kind of the headline interval (see ``uncertainty``; ``all`` makes them all), bootstrap draws and seed.
    cluster
        Column whose equal values are one run for ``interval="cluster"``; ``run_key`` where present.

    Returns
    -------
    Result
        ``estimate`` in natural units, labels like ``A`` or ``A[mhar]``; ``details`` holds curves, residuals,
        sharing tests.

    Raises
    ------
    UsageError
        When an option is unknown.
    TableError
        When columns are missing or no row is usable.
    FitError
        When there are fewer points than parameters.
    """
    check_loss(loss, delta)
    _check_options(residual, interval, share, level)
    check_draws(draws, at_least=0 if interval in ("delta", "profile", "none") else 2)
    random = generator(rng)
    law = get_law(form)
    needs = [*law.variables, "loss", *([by] if by else []), *([weights] if weights else [])]
    screened = screen(
        table, needs=needs, analysis="fit law", keep_unfinished=keep_unfinished, labels=[by] if by else []
    )
    frame = screened.frame
    if cluster is not None and (cluster not in frame.columns or frame[cluster].nunique() < 2):
        there = "is not in the table" if cluster not in frame.columns else "has one value: nothing can be resampled"
        raise TableError(f"fit law: cluster column {cluster!r} {there}; it has: {', '.join(map(str, table.columns))}")
    if weights:
        screened = _weighed(screened, weights)
    screened = without_copies(screened, law.variables, by)
    frame = screened.frame
    for variable in law.variables:
        check_spread(numbers(frame, variable), variable, "fit law")
    groups = [str(g) for g in frame[by]] if by else None
    options = {"loss": loss, "delta": delta, "log": residual == "log"}
    x = {v: numbers(frame, v) for v in law.variables}
    y_n = numbers(frame, "loss")
    w_n = numbers(frame, weights) if weights else np.ones(len(y_n))
    tests: list[dict[str, Any]] = []
    if groups is None or len(set(groups)) == 1:
        fitted = solve(law, x, y_n, w_n, groups=None, **options)  # type: ignore[arg-type]
        chosen = "one group"
    else:
        fits = {
            name: solve(law, x, y_n, w_n, groups=groups, shared=shared_names(law, name), **options)  # type: ignore[arg-type]
            for name in SHARES[:-1]
            if name == "free" or shared_names(law, name)
        }
        tests = [compare_sharing(name, fits[name], fits["free"]) for name in fits if name != "free"]
        chosen = pick_sharing(tests) if share == "test" else share
        if chosen not in fits:
            raise UsageError(
                f"share {chosen!r}: {law.name} has nothing of that kind to share; allowed: {', '.join(fits)}"
            )
        fitted = fits[chosen]
    intervals, errors = make_intervals(
        fitted, frame, by=by, level=level, kind=interval, cluster=cluster, draws=draws, rng=random
    )
    headline = intervals.get("cluster" if interval == "all" else interval)
    return _result(
        law, fitted, screened, by=by, chosen=chosen, tests=tests, intervals=intervals, errors=errors,
        headline=None if interval == "none" else headline, asked=interval, draws=draws, loss=loss, delta=delta,
        residual=residual,
    )  # fmt: skip


def _weighed(screened: Screened, column: str) -> Screened:
    """The rows that weigh anything: one of weight 0 is no row of the fit and gives it no degree of freedom."""
    w_n = numbers(screened.frame, column)
    if not (np.all(np.isfinite(w_n)) and np.all(w_n >= 0) and np.sum(w_n) > 0):
        raise TableError(f"fit law: weights in column {column!r} must be numbers of 0 or more, not all 0")
    rows = screened.frame["row"].to_numpy()[w_n == 0]
    left = tuple(Dropped(row=int(row), reason=f"weight {column} is 0") for row in rows)
    return replace(screened, frame=screened.frame[w_n > 0].reset_index(drop=True), dropped=(*screened.dropped, *left))


def _check_options(residual: str, interval: str, share: str, level: float) -> None:
    if residual not in ("log", "raw"):
        raise UsageError(f"residual {residual!r} is unknown; allowed: log, raw")
    if interval not in INTERVALS:
        raise UsageError(f"interval {interval!r} is unknown; {nearest(interval, INTERVALS)}")
    if share not in SHARES:
        raise UsageError(f"share {share!r} is unknown; {nearest(share, SHARES)}")
    check_level(level)


def _result(
    law: Law, fitted: Fitted, screened: Screened, *, by: str | None, chosen: str, tests: list[dict[str, Any]],
    intervals: Mapping[str, Interval], errors: Mapping[str, float], headline: Interval | None, asked: str, draws: int,
    loss: str, delta: float, residual: str,
) -> Result:  # fmt: skip
    frame = screened.frame
    certificate = dict(fitted.certificate)
    equal = equal_repeats(fitted, frame, by)
    used = conventions(frame, [*law.variables, "loss"])
    starts = f"{certificate['starts']} computed from the data, {certificate['starts_agreeing']} agree"
    entries = {
        "form": f"{law.formula}" + (f", one a {by}, shared: {chosen}" if by else ""),
        "variables": ", ".join(f"{k} = {v}" for k, v in used.items()),
        "conventions": f"residual of {residual} loss",
        "rows": str(len(frame)),
        "dropped": describe_dropped(screened.dropped),
        "seeds": describe_seeds(frame),
        "loss": loss,
        "delta": f"{delta:g}" if loss == "huber" else "does not apply",
        "solver": "damped Newton from variable-projection starts, Huber continuation",
        "starts": starts,
        "convergence": f"{fitted.status}, scaled gradient {certificate['gradient']:.2g}",
        "interval": headline.method if headline else "none",
    }
    return Result(
        kind="fit law",
        estimate=fitted.estimate,
        standard_error=errors,
        interval=headline,
        intervals=dict(intervals),
        n=len(frame),
        df=float(fitted.df),
        status=fitted.status,
        objective=fitted.objective,
        certificate=certificate,
        conventions={**used, "residual": residual, "loss_function": loss},
        warnings=(*screened.cautions, *fit_cautions(fitted, headline, asked=asked, draws=draws, equal=equal)),
        dropped=screened.dropped,
        checklist=make_checklist(entries),
        details=_details(law, fitted, frame, by=by, chosen=chosen, tests=tests),
    )


def _details(
    law: Law, fitted: Fitted, frame: pd.DataFrame, *, by: str | None, chosen: str, tests: list[dict[str, Any]]
) -> dict[str, Any]:
    natural = fitted.natural_P
    labels = fitted.model.labels if len(fitted.model.rows) > 1 else (None,)
    curves = {}
    for label, columns in zip(labels, fitted.model.columns, strict=True):
        curves[label or "all"] = dict(zip(law.names(), map(float, natural[columns]), strict=True))
    predicted = np.exp(fitted.model.prepare(fitted.phi_P[None])[0][0])
    rows = {
        "row": [int(r) for r in frame["row"]],
        "loss": fitted.y_n.tolist(),
        "predicted": predicted.tolist(),
        "residual": fitted.residual_n.tolist(),
        **{v: fitted.model.x[v].tolist() for v in law.variables},
    }
    if by:
        rows[by] = [str(g) for g in frame[by]]
    hat = _influence(fitted)
    return {
        "form": law.name,
        "formula": law.formula,
        "by": by,
        "shared": chosen,
        "sharing_tests": tests,
        "curves": curves,
        "rows": rows,
        "influence": hat.tolist(),
        "covariance_solver_units": covariance(fitted).tolist() if fitted.df > 0 else None,
    }


def _influence(fitted: Fitted) -> Floats:
    """Leverage of each row: the diagonal of the hat matrix of the linearised law."""
    free = np.flatnonzero(fitted.free_P)
    jacobian = fitted.model.jacobian(fitted.phi_P[None])[0][:, free] * np.sqrt(fitted.w_n)[:, None]
    q, _ = np.linalg.qr(jacobian)
    out: Floats = np.sum(q**2, axis=1)
    return out
