"""IsoFLOP profiles (Approach 2): the best size at each budget, then a power law through the optima.

After ``screen``. Each budget's losses give a minimum in log N by an Akima spline or a parabola; minima at the edge
and parabolas that open downwards are refused, not used. Noise is drawn anew in every replicate, so the interval
contains the uncertainty of each optimum. The known bias is stated with every result: where alpha and beta differ, the
vertex of a parabola is shifted by a constant factor, and grids off their centre bias the exponent (arXiv:2603.22339).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy.interpolate import Akima1DInterpolator

from scaling.analysis.cells import group_near
from scaling.analysis.checklist import describe_dropped, describe_seeds, make_checklist
from scaling.analysis.options import check_draws, check_level, check_noise, generator
from scaling.analysis.result import Caution, Dropped, Interval, Result
from scaling.analysis.screen import numbers, screen
from scaling.analysis.verdict import few_draws
from scaling.errors import FitError, UsageError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

CURVES = ("akima", "parabola")
# Points of the search grid between two sizes; the optimum's SD is at least a third of the gap of sizes (Porian et
# al. 2024).
FINER = 25
GAP_SHARE = 1.0 / 3.0
FEWEST_SIZES = {"akima": 4, "parabola": 4}
BUDGET_FACTOR = 1.25
# Budgets that a profile may span in all; runs spread over compute without gaps are no profiles.
WIDEST_PROFILE = 1.6
# Share of draws at the edge from which the spread of an optimum is said to be too small.
NOISY_SHARE = 0.05
BIAS = (
    "a parabola or spline through finite IsoFLOP grids shifts N* by a constant factor where alpha and "
    "beta differ, and biases "
    "the exponent where grids are off centre: prefer fit law with form chinchilla"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NoiseLevel:
    """SD of one loss, interpolated on a line between two losses: ``sd_low`` at or below ``loss_low``..."""

    loss_low: float
    sd_low: float
    loss_high: float
    sd_high: float

    def at(self, losses: Floats) -> Floats:
        """SD at each loss."""
        return np.asarray(
            np.interp(losses, [self.loss_low, self.loss_high], [self.sd_low, self.sd_high]), dtype=np.float64
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Profile:
    budget: float
    log_n: Floats
    losses: Floats
    sd: Floats


def fit_isoflop(
    table: pd.DataFrame,
    *,
    curve: str = "akima",
    noise: float | NoiseLevel | None = None,
    weighted: bool = True,
    level: float = 0.95,
    draws: int = 1000,
    rng: int | np.random.Generator = 0,
    keep_unfinished: bool = False,
) -> Result:
    """Exponent a of ``N* ~ C^a`` from IsoFLOP profiles.

    Parameters
    ----------
    table
        Runs with N, C (the budget) and ``loss``; budgets within 25% of the next are one profile, 60% in all.
    curve
        ``akima`` (log loss on log N) or ``parabola`` (loss on log N).
    noise
        SD of one loss (a number, or one that depends on the loss); without it there is no interval and no weighting.
    weighted
        Weight each optimum by 1/SD**2 of its draws.

    Raises
    ------
    UsageError, TableError
        When an option or column is wrong.
    FitError
        When fewer than two budgets have an inner minimum.
    """
    check_level(level)
    check_draws(draws, at_least=2)
    check_noise(noise if isinstance(noise, (int, float)) else None)
    random = generator(rng)
    if curve not in CURVES:
        raise UsageError(f"curve {curve!r} is unknown; allowed: {', '.join(CURVES)}")
    screened = screen(table, needs=["N", "C", "loss"], analysis="fit isoflop", keep_unfinished=keep_unfinished)
    frame = screened.frame
    profiles, dropped = _profiles(frame, curve, noise)
    kept: list[_Profile] = []
    optima: list[float] = []
    spreads: list[float] = []
    drawn: list[Floats] = []
    rows: list[dict[str, Any]] = []
    for p in profiles:
        best, reason = _minimum(p, p.losses[None], curve)
        row: dict[str, Any] = {
            "budget": p.budget,
            "N": np.exp(p.log_n).tolist(),
            "loss": p.losses.tolist(),
            "optimum": None,
        }
        rows.append(row)
        if not np.isfinite(best[0]):
            dropped.append(Dropped(run=f"budget {p.budget:.3g}", reason=reason))
            continue
        where, spread, sample = float(best[0]), float("nan"), np.full(0, np.nan)
        if noise is not None:
            sample, _ = _minimum(p, p.losses + random.normal(size=(draws, len(p.losses))) * p.sd, curve)
            inner = sample[np.isfinite(sample)]
            row["draws_at_edge"] = 1 - len(inner) / draws
            if len(inner) < max(2, 0.5 * draws):
                dropped.append(
                    Dropped(run=f"budget {p.budget:.3g}", reason="with its noise the minimum is mostly at the edge")
                )
                continue
            where = float(np.median(inner))
            spread = max(float(np.std(inner, ddof=1)), GAP_SHARE * float(np.median(np.diff(p.log_n))))
            # Budgets are independent: draws of one that have no inner minimum need not cost those of the others.
            sample = inner if len(inner) == draws else random.choice(inner, draws)
        kept.append(p)
        optima.append(where)
        spreads.append(spread)
        drawn.append(sample)
        row |= {"optimum": float(np.exp(where)), "log_sd": spread}
    if len(kept) < 2:
        raise FitError(
            f"too-few-budgets: {len(kept)} of {len(profiles)} budgets have an inner minimum, 2 are needed "
            f"({'; '.join(f'{d.run}: {d.reason}' for d in dropped) or 'the runs have one budget C'})"
        )
    budgets = np.array([p.budget for p in kept])
    weights = 1 / np.square(spreads) if weighted and noise is not None else np.ones(len(kept))
    slope, intercept = weighted_line(np.log(budgets), np.array(optima)[None], weights)
    estimate = {
        "N_exponent": float(slope[0]),
        "log_N_coefficient": float(intercept[0]),
        "D_exponent": 1 - float(slope[0]),
    }
    interval, errors = None, {}
    if noise is not None:
        slopes, intercepts = weighted_line(np.log(budgets), np.column_stack(drawn), weights)
        drawn_by = {"N_exponent": slopes, "log_N_coefficient": intercepts, "D_exponent": 1 - slopes}
        ends = {k: np.quantile(v, [(1 - level) / 2, (1 + level) / 2]) for k, v in drawn_by.items()}
        errors = {k: float(np.std(v, ddof=1)) for k, v in drawn_by.items()}
        low = {k: float(e[0]) for k, e in ends.items()}
        high = {k: float(e[1]) for k, e in ends.items()}
        interval = Interval(level=level, method="parametric noise bootstrap, percentile", low=low, high=high)
    cautions = [*screened.cautions, Caution(code="approach-2-bias", message=BIAS)]
    if noise is None:
        cautions.append(Caution(code="no-noise", message="no noise level given: no interval, and optima count alike"))
    cautions += [*_noisy(rows), *few_draws(interval, draws)]
    if dropped:
        cautions.append(Caution(code="refused-minima", message="; ".join(f"{d.run}: {d.reason}" for d in dropped)))
    entries = {
        "form": f"{curve} minimum per budget, log N* = a log C + b",
        "variables": "N, C, loss",
        "rows": str(len(frame)),
        "dropped": describe_dropped([*screened.dropped, *dropped]),
        "seeds": describe_seeds(frame),
        "solver": f"minimum on a grid {FINER} times finer" if curve == "akima" else "closed form",
        "interval": interval.method if interval else "none",
    }
    return Result(
        kind="fit isoflop",
        estimate=estimate,
        standard_error=errors,
        interval=interval,
        n=len(kept),
        df=float(len(kept) - 2),
        conventions={
            "curve": curve,
            "weights": "1/SD^2 of each optimum" if weighted and noise is not None else "equal",
        },
        warnings=tuple(cautions),
        dropped=(*screened.dropped, *dropped),
        checklist=make_checklist(entries),
        details={"profiles": rows},
    )


def weighted_line(x_n: Floats, y_Rn: Floats, w_n: Floats) -> tuple[Floats, Floats]:
    """Slope and intercept of weighted straight lines, shapes (R,) and (R,)."""
    mean = np.sum(w_n * x_n) / np.sum(w_n)
    centred = x_n - mean
    slope = (y_Rn * w_n) @ centred / np.sum(w_n * centred**2)
    return slope, (y_Rn @ w_n) / np.sum(w_n) - slope * mean


def _profiles(
    frame: pd.DataFrame, curve: str, noise: float | NoiseLevel | None
) -> tuple[list[_Profile], list[Dropped]]:
    budgets, dropped = numbers(frame, "C"), []
    index = group_near(budgets, BUDGET_FACTOR)
    out = []
    for g in range(int(index.max()) + 1):
        grouped = frame[index == g].groupby("N", sort=True)["loss"]
        part = grouped.mean()
        budget = float(np.exp(np.mean(np.log(budgets[index == g]))))
        low, high = float(budgets[index == g].min()), float(budgets[index == g].max())
        if high > WIDEST_PROFILE * low:
            reason = f"its runs spread from C = {low:.3g} to {high:.3g} without a gap: no single budget"
            dropped.append(Dropped(run=f"budget {budget:.3g}", reason=reason))
            continue
        if len(part) < FEWEST_SIZES[curve]:
            dropped.append(
                Dropped(run=f"budget {budget:.3g}", reason=f"{len(part)} sizes, {FEWEST_SIZES[curve]} are needed")
            )
            continue
        losses = part.to_numpy(dtype=np.float64)
        sd = noise.at(losses) if isinstance(noise, NoiseLevel) else np.full(len(losses), float(noise or 0.0))
        sd = sd / np.sqrt(grouped.size().to_numpy(dtype=np.float64))
        out.append(_Profile(budget=budget, log_n=np.log(part.index.to_numpy(dtype=np.float64)), losses=losses, sd=sd))
    return out, dropped


def _noisy(rows: list[dict[str, Any]]) -> list[Caution]:
    shares = [(row["budget"], row.get("draws_at_edge", 0.0)) for row in rows if row["optimum"] is not None]
    noisy = [f"{budget:.3g} ({share:.0%})" for budget, share in shares if share > NOISY_SHARE]
    if not noisy:
        return []
    text = (
        f"with their noise the minimum is at the edge in a share of the draws at budget {', '.join(noisy)}: they are "
        "left out, and the interval is too narrow; add sizes or seeds"
    )
    return [Caution(code="noisy-minima", message=text)]


def profile_curve(sizes_m: Floats, losses_m: Floats, at_N: Floats, *, curve: str) -> Floats:
    """The curve through one budget's losses whose minimum :func:`fit_isoflop` takes, at sizes within the range."""
    log_n = np.log(sizes_m)
    if curve == "parabola":
        centre = log_n.mean()
        return np.asarray(np.polyval(np.polyfit(log_n - centre, losses_m, 2), np.log(at_N) - centre))
    spline = Akima1DInterpolator(log_n, np.log(np.maximum(losses_m, 1e-9)))
    return np.asarray(np.exp(spline(np.log(at_N))), dtype=np.float64)


def _minimum(p: _Profile, losses_Rm: Floats, curve: str) -> tuple[Floats, str]:
    """log N of each replicate's inner minimum, NaN where there is none, and why the first has none."""
    if curve == "parabola":
        centre = p.log_n.mean()
        a, b, _ = np.polyfit(p.log_n - centre, losses_Rm.T, 2)
        with np.errstate(divide="ignore", invalid="ignore"):
            vertex = centre - b / (2 * a)
        inside = (a > 0) & (vertex > p.log_n[0]) & (vertex < p.log_n[-1])
        reason = "the parabola opens downwards" if a[0] <= 0 else "the minimum lies outside the sizes tried"
        return np.where(inside, vertex, np.nan), reason
    fine = np.unique(
        np.concatenate([np.linspace(a, b, FINER + 1) for a, b in zip(p.log_n[:-1], p.log_n[1:], strict=True)])
    )
    curve_values = Akima1DInterpolator(p.log_n, np.log(np.maximum(losses_Rm, 1e-9)), axis=1)(fine)
    k = np.argmin(curve_values, axis=1)
    # A minimum on the outermost sizes is the edge of the grid, not of the profile.
    inside = (k > 0) & (k < len(fine) - 1)
    return np.where(inside, fine[k], np.nan), "the smallest loss is at the edge of the sizes tried"
