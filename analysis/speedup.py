"""How much less a method costs at equal loss.

After ``cells`` and ``inversion``: at each scale i the method's mean loss is read off the baseline's fitted law as a
cost, ``s_i = C_b(L_m(C_i)) / C_i``; the headline is the geometric mean over scales. The interval is the delta method
with the pooled standard deviation within cells and t (simulated coverage 95%), beside a two-level bootstrap that keeps
pairs of seeds. One currency a result: FLOPs, tokens, wall seconds or GPU-hours, never mixed.

Shapes: R draws, k scales of the method, c cells of both arms (baseline first).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cautions import copied_runs, extrapolation, refuse, speedup_cautions
from scaling.analysis.cells import make_cells, pick_methods, without_copies
from scaling.analysis.checklist import describe_dropped, describe_seeds, make_checklist
from scaling.analysis.inversion import Inverse, fit_baseline
from scaling.analysis.isoloss import (
    IDENTICAL,
    Arms,
    Bools,
    Noise,
    bootstrap,
    chord,
    log_covariance,
    loss_gradient,
    measure_noise,
    trend_contrast,
)
from scaling.analysis.options import check_draws, check_level, check_noise, generator
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.screen import Screened, numbers, screen
from scaling.errors import FitError, UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

# Currency -> column and what divides it.
CURRENCIES = {
    "flops": ("C", 1.0),
    "tokens": ("D", 1.0),
    "seconds": ("wall_time_s", 1.0),
    "gpu_hours": ("gpu_seconds", 3600.0),
}
INVERSIONS = ("law", "chord")


def compare_speedup(
    table: pd.DataFrame,
    *,
    baseline: str,
    method: str | None = None,
    currency: str = "flops",
    level: float = 0.95,
    asymptote: str | float = "auto",
    noise_sd: float | None = None,
    inversion: str = "law",
    draws: int = 1000,
    rng: int | np.random.Generator = 0,
    keep_unfinished: bool = False,
) -> dict[str, Result]:
    """Iso-loss speedup of each method over the baseline.

    Parameters
    ----------
    table
        Runs with ``method``, ``loss`` and the currency's column (C, D, wall_time_s or gpu_seconds); ``size``
        and ``seed``
        where there are any.
    baseline, method
        The baseline, and one method (all others by default).
    currency
        ``flops``, ``tokens``, ``seconds`` or ``gpu_hours``.
    asymptote
        ``auto`` (shared by both arms unless the data reject it), ``free``, ``shared``, or a number.
    noise_sd
        Seed standard deviation known from elsewhere; needed for an interval where every cell has one seed, unless the
        lack of fit leaves degrees of freedom.
    inversion
        ``law``, or ``chord`` (straight lines between scales: biased upwards, for comparison only).
    draws, rng
        Bootstrap draws (0: none) and seed.

    Returns
    -------
    dict
        Method -> result; ``estimate`` holds ``speedup``, ``log_speedup``, ``trend_per_decade``. A method that cannot be
        compared has status ``refused`` and the reason in ``warnings``.

    Raises
    ------
    UsageError, TableError
        When an option or column is wrong, or the baseline is missing.
    """
    check_level(level)
    check_noise(noise_sd)
    check_draws(draws)
    generator(rng)
    if currency not in CURRENCIES:
        raise UsageError(f"currency {currency!r} is unknown; {nearest(currency, CURRENCIES)}")
    if inversion not in INVERSIONS:
        raise UsageError(f"inversion {inversion!r} is unknown; {nearest(inversion, INVERSIONS)}")
    if isinstance(asymptote, str) and asymptote not in ("auto", "free", "shared"):
        raise UsageError(f"asymptote {asymptote!r} is unknown; allowed: auto, free, shared, or a number")
    column, divisor = CURRENCIES[currency]
    screened = screen(
        table,
        needs=["method", "loss", column],
        analysis=f"compare speedup in {currency}",
        keep_unfinished=keep_unfinished,
    )
    frame = screened.frame.assign(**{column: numbers(screened.frame, column) / divisor})
    cells = make_cells(frame, cost=column)
    out = {}
    for name in pick_methods(cells, baseline, method):
        arms = Arms(baseline=list(cells[baseline].values()), method=list(cells[name].values()))
        try:
            out[name] = _compare(
                arms, screened, frame, currency=currency, level=level, asymptote=asymptote, noise_sd=noise_sd,
                inversion=inversion, draws=draws, rng=np.random.default_rng(rng),
            )  # fmt: skip
        except FitError as error:
            out[name] = refuse("compare speedup", str(error), screened, currency=currency)
    return out


def _compare(
    arms: Arms, screened: Screened, frame: pd.DataFrame, *, currency: str, level: float, asymptote: str | float,
    noise_sd: float | None, inversion: str, draws: int, rng: np.random.Generator,
) -> Result:  # fmt: skip
    listed = arms
    baseline, method = without_copies(arms.baseline, arms.method)
    arms = Arms(baseline=baseline, method=method)
    noise = measure_noise(arms, noise_sd)
    inverse = fit_baseline(arms.baseline, arms.method, asymptote=asymptote, sd=noise.sd, sd_df=noise.sd_df)
    if np.isnan(noise.sd) and inverse.noise_df > 0 and noise.source != IDENTICAL:
        noise = Noise(
            sd=float(np.sqrt(inverse.noise_rss / inverse.noise_df)),
            sd_df=inverse.noise_df,
            df=inverse.noise_df,
            source="lack of fit",
            rho=np.nan,
            rho_p=np.nan,
            used_rho=0.0,
        )
    losses = np.array([c.mean for c in arms.method])
    costs = np.log([c.x for c in arms.method])
    log_s = inverse.log_cost(losses[None], inverse.phi_P[None])[0] - costs
    cautions = [*screened.cautions, *copied_runs(listed.cells, arms.cells)]
    usable = np.isfinite(log_s)
    if not np.all(usable):
        names = ", ".join(c.scale for c, ok in zip(arms.method, usable, strict=True) if not ok)
        text = (
            f"at {names} the method's loss is below the baseline's asymptote {inverse.curve['E']:.6g}: no finite "
            "cost, left out"
        )
        cautions.append(Caution(code="below-asymptote", message=text))
    if not np.any(usable):
        raise FitError(
            f"below-asymptote: every loss of the method lies below the baseline's asymptote {inverse.curve['E']:.6g}"
        )
    gradient = loss_gradient(inverse, arms, losses, usable)
    if inversion == "chord":
        log_s = chord(arms, costs)
        text = "chords between scales lie above a convex law: the speedup is biased upwards by more than its noise"
        cautions.append(Caution(code="chord-bias", message=text))
    cov = log_covariance(gradient, arms, noise)
    weights = usable / np.sum(usable)
    contrast = trend_contrast(costs, usable)
    mean = float(weights @ np.where(usable, log_s, 0.0))
    trend = float(contrast @ np.where(usable, log_s, 0.0) * np.log(10.0)) if contrast is not None else float("nan")
    boot = bootstrap(inverse, arms, noise, usable, costs, draws, rng) if draws > 1 and inversion == "law" else None
    cautions += speedup_cautions(arms, inverse, log_s, usable, noise)
    return _result(
        arms, screened, frame, inverse, noise, cautions, currency=currency, level=level, log_s=log_s, usable=usable,
        cov=cov, weights=weights, contrast=contrast, mean=mean, trend=trend, boot=boot, inversion=inversion,
    )  # fmt: skip


def _result(
    arms: Arms, screened: Screened, frame: pd.DataFrame, inverse: Inverse, noise: Noise, cautions: list[Caution], *,
    currency: str, level: float, log_s: Floats, usable: Bools, cov: Floats, weights: Floats, contrast: Floats | None,
    mean: float, trend: float, boot: Floats | None, inversion: str,
) -> Result:  # fmt: skip
    estimate = {"speedup": float(np.exp(mean)), "log_speedup": mean, "trend_per_decade": trend}
    known = np.isfinite(noise.sd) and noise.df > 0 and inversion == "law"
    errors: dict[str, float] = {}
    intervals: dict[str, Interval] = {}
    trend_p = float("nan")
    quantile = float(stats.t.ppf((1 + level) / 2, noise.df)) if known else float("nan")
    name = "z, given noise" if np.isinf(noise.df) else f"t, {noise.source}"
    if known:
        sd = float(np.sqrt(weights @ cov @ weights))
        errors = {"speedup": float(np.exp(mean)) * sd, "log_speedup": sd}
        low, high = _limits(mean, quantile * sd)
        if contrast is not None:
            errors["trend_per_decade"] = float(np.sqrt(contrast @ cov @ contrast)) * float(np.log(10))
            half = quantile * errors["trend_per_decade"]
            low["trend_per_decade"], high["trend_per_decade"] = trend - half, trend + half
            trend_p = float(2 * stats.t.sf(abs(trend) / max(errors["trend_per_decade"], 1e-300), noise.df))
        intervals["delta"] = Interval(level=level, method=f"delta method, {name}", low=low, high=high)
    if known and boot is not None and np.sum(np.isfinite(boot)) > 0.5 * len(boot):
        low, high = _limits(mean, quantile * float(np.nanstd(boot, ddof=1)))
        intervals["two-level"] = Interval(
            level=level, method=f"two-level bootstrap keeping pairs, {name}", low=low, high=high
        )
    if trend_p < 0.05:
        text = (
            f"log speedup changes by {trend:.3g} a decade of cost (p {trend_p:.2g}): one number does not describe "
            "this method"
        )
        cautions.append(Caution(code="trend", message=text))
    rows = frame[frame["method"].isin([arms.baseline[0].method, arms.method[0].method])]
    entries = {
        "form": "L = E + A C^-a for the baseline, inverted at the method's mean losses"
        if inversion == "law"
        else "chords",
        "variables": f"C = {currency}, loss, method, scale",
        "conventions": f"geometric mean of per-scale speedups in {currency}; asymptote {inverse.asymptote}",
        "rows": str(len(rows)),
        "dropped": describe_dropped(screened.dropped),
        "seeds": describe_seeds(rows),
        "loss": "least squares on cell means of raw loss, weighted by seeds",
        "solver": "damped Newton from variable-projection starts",
        "interval": intervals["delta"].method if "delta" in intervals else "none",
    }
    return Result(
        kind="compare speedup",
        estimate=estimate,
        standard_error=errors,
        interval=intervals.get("delta"),
        intervals=intervals,
        n=len(rows),
        df=noise.df if known else None,
        objective=inverse.rss / 2,
        conventions={"currency": currency, "asymptote": inverse.asymptote, "mean": "geometric", "inversion": inversion},
        warnings=tuple(cautions),
        dropped=screened.dropped,
        checklist=make_checklist(entries),
        details=_details(arms, inverse, noise, log_s=log_s, usable=usable, cov=cov, quantile=quantile, trend_p=trend_p),
    )


def _limits(mean: float, half: float) -> tuple[dict[str, float], dict[str, float]]:
    low = {"speedup": float(np.exp(mean - half)), "log_speedup": mean - half}
    return low, {"speedup": float(np.exp(mean + half)), "log_speedup": mean + half}


def _details(
    arms: Arms,
    inverse: Inverse,
    noise: Noise,
    *,
    log_s: Floats,
    usable: Bools,
    cov: Floats,
    quantile: float,
    trend_p: float,
) -> dict[str, Any]:
    factors = extrapolation(arms, log_s)
    by_scale = {c.scale: c for c in arms.baseline}
    scales = []
    for i, cell in enumerate(arms.method):
        sd = float(np.sqrt(cov[i, i]))
        other = by_scale.get(cell.scale)
        scales.append(
            {
                "scale": cell.scale,
                "cost": cell.x,
                "cost_baseline": other.x if other else None,
                "loss": cell.mean,
                "loss_baseline": other.mean if other else None,
                "seeds": len(cell.losses),
                "seeds_baseline": len(other.losses) if other else 0,
                "speedup": float(np.exp(log_s[i])) if usable[i] else None,
                "low": float(np.exp(log_s[i] - quantile * sd)) if usable[i] else None,
                "high": float(np.exp(log_s[i] + quantile * sd)) if usable[i] else None,
                "extrapolated": bool(factors[i] > 1) if usable[i] else None,
                "extrapolation_factor": float(factors[i]) if usable[i] else None,
            }
        )
    by_loss, _ = inverse.gradient(np.array([c.mean for c in arms.method])[usable])
    steepness = float(np.mean(np.abs(by_loss)))
    return {
        "baseline": arms.baseline[0].method,
        "method": arms.method[0].method,
        "scales": scales,
        "baseline_law": inverse.curve,
        "method_law": inverse.method_curve,
        "asymptotes_equal_p": inverse.sharing_p,
        "trend_p": trend_p,
        "noise_floor": {
            "sd_loss": noise.sd,
            "df": noise.sd_df,
            "source": noise.source,
            "log_speedup_single_run": noise.sd * steepness,
            "log_speedup_per_loss": steepness,
        },
        "pairing": {"rho": noise.rho, "p_one_sided": noise.rho_p, "used": noise.used_rho != 0.0},
        "cells": [
            {"method": c.method, "scale": c.scale, "cost": c.x, "losses": c.losses.tolist(), "seeds": list(c.seeds)}
            for c in arms.cells
        ],
    }
