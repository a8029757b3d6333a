"""Whether a method beats the baseline over the same seeds.

After ``cells``, with the arithmetic of ``paired``: differences per scale and over scales, paired where runs of one seed
are correlated and unpaired (with more degrees of freedom) where they are not, corrected for the number of methods, with
what that many seeds can show at all.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cautions import CORRELATED, copied_runs, refuse, repeated_seeds, same_runs, seed_cautions
from scaling.analysis.cells import (
    OPPOSED,
    Cell,
    constant_pairs,
    identical,
    make_cells,
    paired,
    pick_methods,
    pooled_sd,
    seed_correlation,
    without_copies,
)
from scaling.analysis.checklist import describe_dropped, describe_seeds, make_checklist
from scaling.analysis.mixed import mixed_model
from scaling.analysis.multiplicity import correct
from scaling.analysis.options import check_level, check_noise
from scaling.analysis.paired import (
    TTest,
    hodges_lehmann,
    paired_t,
    sign_flip,
    t_summary,
    unpaired_t,
)
from scaling.analysis.result import Interval, Result
from scaling.analysis.screen import Screened, screen
from scaling.errors import FitError, UsageError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

PAIRINGS = ("auto", "paired", "unpaired")


def compare_seeds(
    table: pd.DataFrame,
    *,
    baseline: str,
    method: str | None = None,
    pairing: str = "auto",
    noise_sd: float | None = None,
    level: float = 0.95,
    keep_unfinished: bool = False,
) -> dict[str, Result]:
    """Difference of loss (method minus baseline; negative is better) per scale and over scales.

    Parameters
    ----------
    table
        Runs with ``method``, ``loss``, ``seed``; the scale from ``size``, N or D where there is one.
    baseline, method
        The baseline, and one method (all others by default).
    pairing
        ``paired``, ``unpaired``, or ``auto``: paired where the correlation of runs that share a seed is positive at 5%,
        or negative at 25% (an unpaired interval would be too narrow).
    noise_sd
        Seed standard deviation known from elsewhere (then z instead of t).

    Returns
    -------
    dict
        Method -> result. ``estimate``: ``delta`` (mean over scales) and ``delta[scale]``.

    Raises
    ------
    UsageError, TableError
        When an option or column is wrong or the baseline is missing.
    """
    check_level(level)
    check_noise(noise_sd)
    if pairing not in PAIRINGS:
        raise UsageError(f"pairing {pairing!r} is unknown; allowed: {', '.join(PAIRINGS)}")
    needs = ["method", "loss", *(["seed"] if pairing == "paired" else [])]
    screened = screen(table, needs=needs, analysis="compare seeds", keep_unfinished=keep_unfinished)
    cells = make_cells(screened.frame, cost=None)
    names = pick_methods(cells, baseline, method)
    out = {}
    for name in names:
        try:
            out[name] = _compare(
                cells[baseline], cells[name], screened, pairing=pairing, noise_sd=noise_sd, level=level
            )
        except FitError as error:
            out[name] = refuse("compare seeds", str(error), screened)
    return correct(out)


def _compare(
    baseline: dict[str, Cell],
    method: dict[str, Cell],
    screened: Screened,
    *,
    pairing: str,
    noise_sd: float | None,
    level: float,
) -> Result:
    common = [s for s in baseline if s in method]
    if not common:
        raise FitError(
            f"no-common-scale: baseline has {', '.join(baseline)}; the method has {', '.join(method)}: nothing to "
            "compare"
        )
    listed = [(method[s], baseline[s]) for s in common]
    bases, others = without_copies([b for _, b in listed], [m for m, _ in listed])
    arms = list(zip(others, bases, strict=True))
    pairs = [paired(m, b) for m, b in arms]
    rho, rho_df, rho_p = seed_correlation(pairs)
    both = [c for arm in arms for c in arm]
    sd, sd_df = pooled_sd(both)
    equal = noise_sd is None and identical(both, sd)
    if equal:  # what varies are rounding errors: they have no spread and no correlation
        sd, sd_df = float("nan"), 0
        rho, rho_df, rho_p = float("nan"), 0, float("nan")
    likely = rho_df > 0 and (rho_p < CORRELATED or rho_p > 1 - OPPOSED)
    use_pairs = pairing == "paired" or (pairing == "auto" and likely and noise_sd is None)
    per_scale = [
        _scale(m, b, p, sd=noise_sd or sd, sd_df=np.inf if noise_sd else sd_df, level=level, equal=equal)
        for (m, b), p in zip(arms, pairs, strict=True)
    ]
    deltas = np.array([row["delta"] for row in per_scale])
    joint = _joint(
        arms, pairs, use_pairs=use_pairs, sd=noise_sd or sd, sd_df=np.inf if noise_sd else sd_df, level=level
    )
    key = "paired" if use_pairs else "pooled"
    estimate = {
        "delta": float(np.mean(deltas)),
        **{f"delta[{s}]": float(d) for s, d in zip(common, deltas, strict=True)},
    }
    interval, errors = _interval(joint, common, per_scale, key, level, use_pairs)
    flips = np.concatenate([m - b for m, b in pairs]) if pairs else np.empty(0)
    tested = np.empty(0) if equal else _tested(pairs)
    flip_p, flip_floor = sign_flip(tested) if len(tested) else (float("nan"), float("nan"))
    details: dict[str, Any] = {
        "baseline": both[1].method,
        "method": both[0].method,
        "scales": per_scale,
        "joint": asdict(joint) if joint else None,
        "pairing": {"used": "paired" if use_pairs else "unpaired", "rho": rho, "df": rho_df, "p_one_sided": rho_p},
        "sign_flip": {"p": flip_p, "smallest_possible_p": flip_floor, "pairs": len(tested) or len(flips)},
        "hodges_lehmann": hodges_lehmann(flips),
        "pooled_sd": {"sd": sd, "df": sd_df, "homogeneity_p": _homogeneity(both, equal), "identical": equal},
        "mixed_model": mixed_model(arms, pairs),
    }
    names = [both[0].method, both[1].method]
    runs = [*(b for _, b in listed), *(m for m, _ in listed)]
    copied = copied_runs(runs, [*bases, *others])
    doubtful = [*repeated_seeds(screened.frame, names), *same_runs(listed), *copied]
    cautions = [
        *screened.cautions,
        *doubtful,
        *seed_cautions(arms, pairs, baseline, method, joint, noise_sd or sd, details),
    ]
    entries = {
        "form": "difference of mean losses, method minus baseline, mean over scales",
        "variables": "loss, method, seed, scale",
        "conventions": f"{'paired by seed' if use_pairs else 'unpaired'} ({pairing})",
        "rows": str(sum(len(c.losses) for c in runs)),
        "dropped": describe_dropped(screened.dropped),
        "seeds": describe_seeds(screened.frame),
        "interval": interval.method if interval else "none",
    }
    return Result(
        kind="compare seeds",
        estimate=estimate,
        standard_error=errors,
        interval=interval,
        n=sum(len(c.losses) for c in runs),
        df=joint.df if joint else None,
        conventions={"difference": "method minus baseline", "pairing": "paired" if use_pairs else "unpaired"},
        warnings=tuple(cautions),
        dropped=screened.dropped,
        checklist=make_checklist(entries),
        details=details,
    )


def _scale(
    m: Cell, b: Cell, pair: tuple[Floats, Floats], *, sd: float, sd_df: float, level: float, equal: bool
) -> dict[str, Any]:
    d = pair[0] - pair[1]
    pooled = None
    if np.isfinite(sd) and sd_df > 0:
        pooled = t_summary(m.mean - b.mean, sd * float(np.sqrt(1 / len(m.losses) + 1 / len(b.losses))), sd_df, level)
    flip = sign_flip(d) if len(d) and not equal and not constant_pairs(pair) else (float("nan"), float("nan"))
    tests = {
        "paired": None if constant_pairs(pair) else paired_t(d, level),
        "unpaired": None if identical([m, b], pooled_sd([m, b])[0]) else unpaired_t(m.losses, b.losses, level),
        "pooled": pooled,
    }
    return {
        "scale": m.scale,
        "n_method": len(m.losses),
        "n_baseline": len(b.losses),
        "pairs": len(d),
        "mean_method": m.mean,
        "mean_baseline": b.mean,
        "delta": m.mean - b.mean,
        "token_ratio": float(np.mean(m.tokens) / np.mean(b.tokens)) if m.tokens and b.tokens else None,
        "pair_deltas": d.tolist(),
        "seeds": [s for s in m.seeds if s in b.seeds],
        "sign_flip_p": flip[0],
        "sign_flip_floor": flip[1],
        "hodges_lehmann": hodges_lehmann(d),
        **{name: asdict(t) if t else None for name, t in tests.items()},
    }


def _tested(pairs: list[tuple[Floats, Floats]]) -> Floats:
    """Pair differences whose signs are a test: where all pairs of a scale differ by one amount, they are one pair.

    None where no scale has pairs that vary, though several: the signs of one difference agree whatever is true.
    """
    several = [pair for pair in pairs if len(pair[0]) > 1]
    if several and all(constant_pairs(pair) for pair in several):
        return np.empty(0)
    d = [m[:1] - b[:1] if constant_pairs((m, b)) else m - b for m, b in pairs]
    return np.concatenate(d) if d else np.empty(0)


def _joint(
    arms: list[tuple[Cell, Cell]],
    pairs: list[tuple[Floats, Floats]],
    *,
    use_pairs: bool,
    sd: float,
    sd_df: float,
    level: float,
) -> TTest | None:
    """Mean difference over scales: pooled variance of pair differences, or of runs."""
    k = len(arms)
    if use_pairs:
        d = [m - b for m, b in pairs if len(m)]
        df = sum(len(v) - 1 for v in d)
        if len(d) < k or df < 1:
            return None
        variance = sum(float(np.sum((v - v.mean()) ** 2)) for v in d) / df
        error = np.sqrt(variance * sum(1 / len(v) for v in d)) / k
        if identical([c for arm in arms for c in arm], float(error)):
            return None
        return t_summary(float(np.mean([v.mean() for v in d])), float(error), df, level)
    if not (np.isfinite(sd) and sd_df > 0):
        return None
    error = sd * np.sqrt(sum(1 / len(m.losses) + 1 / len(b.losses) for m, b in arms)) / k
    return t_summary(float(np.mean([m.mean - b.mean for m, b in arms])), float(error), sd_df, level)


def _interval(
    joint: TTest | None, scales: list[str], rows: list[dict[str, Any]], key: str, level: float, use_pairs: bool
) -> tuple[Interval | None, dict[str, float]]:
    if joint is None:
        return None, {}
    low, high, errors = {"delta": joint.low}, {"delta": joint.high}, {"delta": joint.standard_error}
    for scale, row in zip(scales, rows, strict=True):
        if row[key]:
            name = f"delta[{scale}]"
            low[name], high[name], errors[name] = row[key]["low"], row[key]["high"], row[key]["standard_error"]
    kind = "z" if np.isinf(joint.df) else f"t, {joint.df:g} df"
    method = f"paired {kind}" if use_pairs else f"unpaired {kind}, SD pooled over cells"
    return Interval(level=level, method=method, low=low, high=high), errors


def _homogeneity(cells: list[Cell], equal: bool) -> float | None:
    """Levene's test (median) that cells have one variance; ``None`` where it cannot be made."""
    if equal:
        return None
    groups = [c.losses for c in cells if len(c.losses) > 2]
    if len(groups) < 2 or all(np.ptp(g) == 0 for g in groups):
        return None
    return float(stats.levene(*groups, center="median").pvalue)
