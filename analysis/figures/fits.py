"""Figures about fits themselves: residuals and influence, IsoFLOP parabolas, backtest error against extrapolation."""

from __future__ import annotations

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from scaling.analysis.arms import natural
from scaling.analysis.figures import style
from scaling.analysis.isoflop import profile_curve
from scaling.analysis.result import Result


def residuals(fit: Result, *, baseline: str | None = None, width_in: float = style.WIDE_IN) -> Figure:
    """Residuals of a ``fit law`` result against the predicted loss, and against each row's influence on the fit."""
    rows = fit.details["rows"]
    predicted, rest = np.array(rows["predicted"], dtype=float), np.array(rows["residual"], dtype=float)
    influence = np.array(fit.details["influence"], dtype=float)
    by = fit.details.get("by")
    groups = [str(group) for group in rows[by]] if by else ["all runs"] * len(rest)
    names = sorted(set(groups), key=lambda name: (name != baseline, natural(name)))
    look = style.looks(names, baseline=baseline if baseline in names else None)
    figure, (left, right) = style.canvas(2, width_in=width_in, panel_height_in=2.7)
    for name in names:
        mine = np.array([group == name for group in groups])
        for axis, x in ((left, predicted), (right, influence)):
            axis.plot(x[mine], rest[mine], look[name].marker, color=look[name].color, alpha=0.8, linestyle="none")
    for axis in (left, right):
        axis.axhline(0, color=style.INK, linewidth=0.9)
        axis.xaxis.set_major_locator(style.few_ticks())
        axis.xaxis.set_major_formatter(style.plain_ticks())
        axis.yaxis.set_major_formatter(style.plain_ticks())
    left.set_xlabel("predicted loss (nats)")
    right.set_xlabel("influence of the run on the fit")
    left.set_ylabel(f"residual of {fit.conventions.get('residual', 'log')} loss")
    parameters = len(fit.estimate)
    threshold = 2 * parameters / max(len(rest), 1)  # Belsley, Kuh and Welsch (1980): twice the mean leverage
    if influence.max(initial=0) > threshold:
        right.axvline(threshold, color=style.SOFT, linestyle="--", linewidth=0.9)
    if len(names) > 1:
        style.legend(figure, names, look, width_in=width_in)
    return figure


def isoflop(fit: Result, *, width_in: float = style.WIDE_IN) -> Figure:
    """Loss over parameters at each compute budget of a ``fit isoflop`` result, each accepted minimum marked."""
    profiles: list[dict[str, Any]] = fit.details["profiles"]
    if not profiles:
        return style.empty("No budget has enough sizes.", width_in=width_in)
    figure = Figure(figsize=(width_in, 3.3), layout="constrained")
    axis = figure.subplots()
    shades = np.linspace(0.35, 1.0, len(profiles))
    for shade, profile in zip(shades, sorted(profiles, key=lambda p: float(p["budget"])), strict=True):
        n, loss = np.array(profile["N"], dtype=float), np.array(profile["loss"], dtype=float)
        axis.plot(n, loss, "o", color=style.PALETTE[0], alpha=float(shade), markersize=3.5, linestyle="none")
        grid = np.geomspace(n.min(), n.max(), 160)
        grid[[0, -1]] = n.min(), n.max()  # to the last digit: beyond the sizes there is no curve
        values = profile_curve(n, loss, grid, curve=fit.conventions["curve"])
        axis.plot(grid, values, color=style.PALETTE[0], alpha=float(shade), linewidth=1.2)
        if profile["optimum"]:
            at = np.array([float(profile["optimum"])])
            best = profile_curve(n, loss, at, curve=fit.conventions["curve"])
            axis.plot(at, best, "D", color=style.PALETTE[1], markersize=5, zorder=4)
        axis.annotate(
            style.tick(float(f"{profile['budget']:.2g}")), (n.max(), loss[np.argmax(n)]), xytext=(4, 0),
            textcoords="offset points", fontsize=7, color=style.SOFT, va="center",
        )  # fmt: skip
    style.log_axis(axis, "x")
    axis.margins(x=0.12)
    axis.set_xlabel("parameters N (numbers on the right: training FLOPs)")
    axis.set_ylabel("held-out loss (nats per token)")
    return figure


def backtest(fit: Result, *, width_in: float = style.WIDE_IN) -> Figure:
    """Relative error of every prediction of a larger run from smaller ones, over how far it extrapolates."""
    predictions: list[dict[str, Any]] = fit.details["predictions"]
    factor = np.array([p["factor"] for p in predictions], dtype=float)
    error = 100 * np.array([p["error"] for p in predictions], dtype=float)
    figure = Figure(figsize=(width_in, 3.1), layout="constrained")
    axis = figure.subplots()
    axis.axhline(0, color=style.INK, linewidth=0.9)
    axis.plot(factor, error, "o", color=style.PALETTE[0], alpha=0.6, markersize=4, linestyle="none")
    if fit.interval is not None:
        bound = 100 * fit.interval.high["error"]
        axis.axhspan(-bound, bound, color=style.SOFT, alpha=0.12, linewidth=0)
    style.log_axis(axis, "x")
    axis.set_xlabel("compute of the predicted run over the largest run fitted")
    axis.set_ylabel("predicted minus observed loss (%)")
    return figure
