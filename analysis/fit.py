"""Fit a scaling law to a table of runs.

Between tables (``columns``, ``screen``) and the solver (``certify``, ``uncertainty``): picks rows, fits one law or one a
method with some parameters shared, tests which sharing the data warrant, adds the intervals asked for and the checklist.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.certify import Fitted, solve
from scaling.analysis.checklist import conventions, describe_dropped, describe_seeds, make_checklist
from scaling.analysis.laws import Law, get_law
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.robust import check_loss
from scaling.analysis.screen import Screened, check_spread, numbers, screen
from scaling.analysis.uncertainty import (
    Draws,
    cell_noise,
    cluster_bootstrap,
    covariance,
    delta_interval,
    dispersion,
    parametric_bootstrap,
    percentile_interval,
    profile_interval,
    t_interval,
    two_level_bootstrap,
)
from scaling.errors import UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]
logger = logging.getLogger(__name__)

INTERVALS = ("cluster", "pairs", "two-level", "parametric", "delta", "profile", "all", "none")
SHARES = ("free", "E", "exponents", "E+exponents", "test")
# Below this many clusters a bootstrap of clusters often loses the end points of the range.
FEW_CLUSTERS = 20
SHARING_LEVEL = 0.05


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
        A column (``method``) whose groups get their own law, and what they share: ``free`` nothing, ``E``, ``exponents``,
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
        ``estimate`` in natural units, labels like ``A`` or ``A[mhar]``; ``details`` holds curves, residuals, sharing tests.

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
    law = get_law(form)
    needs = [*law.variables, "loss", *([by] if by else []), *([weights] if weights else [])]
    screened = screen(table, needs=needs, analysis="fit law", keep_unfinished=keep_unfinished)
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
    intervals, errors = _intervals(
        fitted, frame, by=by, level=level, kind=interval, cluster=cluster, draws=draws, rng=np.random.default_rng(rng)
    )
    headline = intervals.get("cluster" if interval == "all" else interval)
    return _result(
        law, fitted, screened, by=by, chosen=chosen, tests=tests, intervals=intervals, errors=errors,
        headline=None if interval == "none" else headline, loss=loss, delta=delta, residual=residual,
    )  # fmt: skip


def shared_names(law: Law, share: str) -> tuple[str, ...]:
    """Parameters that groups share under ``share``."""
    kinds = {"E": ("asymptote",), "exponents": ("exponent",), "E+exponents": ("asymptote", "exponent")}.get(share, ())
    return tuple(p.name for p in law.parameters if p.kind in kinds)


def compare_sharing(name: str, restricted: Fitted, full: Fitted) -> dict[str, Any]:
    """Drop-in-dispersion test of shared parameters against free ones (the F test when the loss is squares).

    References
    ----------
    Schrader and Hettmansperger (1980), Robust analysis of variance based upon a likelihood ratio criterion.
    """
    q = len(full.phi_P) - len(restricted.phi_P)
    if full.df <= 0:
        return {"share": name, "statistic": None, "df": [q, full.df], "p": None}
    rise = max(restricted.objective - full.objective, 0.0)
    statistic = 2 * rise / q / max(dispersion(full), 1e-300)
    return {"share": name, "statistic": statistic, "df": [q, full.df], "p": float(stats.f.sf(statistic, q, full.df))}


def pick_sharing(tests: Sequence[Mapping[str, Any]]) -> str:
    """The most shared alternative that is not rejected; ``free`` when all are."""
    for name in ("E+exponents", "exponents", "E"):
        for test in tests:
            if test["share"] == name and (test["p"] is None or test["p"] > SHARING_LEVEL):
                return name
    return "free"


def _check_options(residual: str, interval: str, share: str, level: float) -> None:
    if residual not in ("log", "raw"):
        raise UsageError(f"residual {residual!r} is unknown; allowed: log, raw")
    if interval not in INTERVALS:
        raise UsageError(f"interval {interval!r} is unknown; {nearest(interval, INTERVALS)}")
    if share not in SHARES:
        raise UsageError(f"share {share!r} is unknown; {nearest(share, SHARES)}")
    if not 0 < level < 1:
        raise UsageError(f"level must lie between 0 and 1, got {level!r}")


def _cells(fitted: Fitted, frame: pd.DataFrame, by: str | None) -> list[str]:
    columns = [np.round(np.log(fitted.model.x[v]), 9).astype(str) for v in fitted.model.law.variables]
    if by:
        columns.append(frame[by].to_numpy(dtype=str))
    return ["|".join(parts) for parts in zip(*columns, strict=True)]


def _intervals(
    fitted: Fitted, frame: pd.DataFrame, *, by: str | None, level: float, kind: str, cluster: str | None, draws: int,
    rng: np.random.Generator,
) -> tuple[dict[str, Interval], dict[str, float]]:  # fmt: skip
    """Intervals by kind and standard errors of the headline one; nothing at 0 degrees of freedom."""
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

    def keep(name: str, made: Draws, interval: Interval) -> None:
        out[name] = interval
        if name == kind or (kind == "all" and name == "cluster"):
            spread = np.std(made.natural_RP[made.converged_R], axis=0, ddof=1)
            errors.update(zip(names, map(float, spread), strict=True))

    wanted = INTERVALS[:-2] if kind == "all" else (kind,)
    if "cluster" in wanted:
        made = cluster_bootstrap(fitted, clusters, draws, rng)
        keep("cluster", made, percentile_interval(fitted, made, level, "cluster bootstrap, percentile"))
    if "pairs" in wanted:
        made = cluster_bootstrap(fitted, None, draws, rng)
        keep("pairs", made, percentile_interval(fitted, made, level, "pairs bootstrap, percentile"))
    if "two-level" in wanted:
        made = two_level_bootstrap(fitted, cells, draws, rng, sd=sd_cell)
        keep("two-level", made, t_interval(fitted, made, df_cell, level, "two-level bootstrap, t"))
    if "parametric" in wanted:
        made = parametric_bootstrap(fitted, sd_cell, draws, rng)
        keep("parametric", made, t_interval(fitted, made, df_cell, level, "parametric bootstrap, t"))
    if "profile" in wanted and fitted.goal.loss != "l1":
        out["profile"] = profile_interval(fitted, level)
    if kind == "profile" and "profile" not in out:
        raise UsageError("interval 'profile' needs loss huber or l2: the profile of absolute values has kinks")
    return out, errors


def _result(
    law: Law, fitted: Fitted, screened: Screened, *, by: str | None, chosen: str, tests: list[dict[str, Any]],
    intervals: Mapping[str, Interval], errors: Mapping[str, float], headline: Interval | None, loss: str, delta: float,
    residual: str,
) -> Result:  # fmt: skip
    frame = screened.frame
    certificate = dict(fitted.certificate)
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
        warnings=(*screened.cautions, *_cautions(fitted, frame, headline)),
        dropped=screened.dropped,
        checklist=make_checklist(entries),
        details=_details(law, fitted, frame, by=by, chosen=chosen, tests=tests),
    )


def _cautions(fitted: Fitted, frame: pd.DataFrame, headline: Interval | None) -> list[Caution]:
    out = []
    evidence = fitted.certificate
    if fitted.df == 0:
        text = f"{fitted.model.n} rows for {len(fitted.phi_P)} parameters: the law passes through the data, no interval exists"
        out.append(Caution(code="no-degrees-of-freedom", message=text))
    if fitted.status == "bound-hit":
        text = f"{evidence['at_bound']} ended at a bound: the data do not show that term; its interval is one-sided"
        out.append(Caution(code="bound-hit", message=text))
    if fitted.status == "multimodal":
        text = f"{evidence['rivals']} other starts end at different parameters that fit as well"
        out.append(Caution(code="multimodal", message=text))
    if fitted.status == "undetermined" and fitted.df > 0:
        text = f"condition number {evidence['condition']:.2g}: the data do not determine all parameters"
        out.append(Caution(code="undetermined", message=text))
    if fitted.status in ("max-iter", "unmoved"):
        text = f"the solver stopped at a scaled gradient of {evidence['gradient']:.2g}; do not use these numbers"
        out.append(Caution(code="not-converged", message=text))
    distinct = len({*zip(*(fitted.model.x[v] for v in fitted.model.law.variables), strict=True)})
    if headline is not None and headline.method.startswith(("cluster", "pairs")) and distinct < FEW_CLUSTERS:
        text = f"{distinct} distinct points: resampled rows may lose the ends of the range; prefer interval two-level or parametric"
        out.append(Caution(code="few-clusters", message=text))
    ratio = evidence.get("residual_sd_over_delta")
    if isinstance(ratio, float) and ratio > 30:
        text = f"residual SD is {ratio:.3g} delta: the Huber loss acts as absolute values"
        out.append(Caution(code="delta-small", message=text))
    return out


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
