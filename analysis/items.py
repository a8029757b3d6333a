"""Whether two models differ on the same test items.

Takes per-item outcomes (or the two discordant counts) of a method and a baseline: McNemar's exact and mid-p tests, the
odds ratio with its interval, a sign-flip test that keeps clusters of items together, and Holm's correction over tasks.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.options import check_level, generator
from scaling.analysis.paired import holm, sign_flip
from scaling.analysis.result import Caution, Interval, Result
from scaling.errors import TableError, UsageError, nearest
from scaling.record import DOWNSTREAM

if TYPE_CHECKING:
    import pandas as pd


_TOLD_APART = ("size", "seed", "weights", "name", "run")  # columns of ``scaling eval``'s items, coarse to fine


def read_items(folder: Path) -> pd.DataFrame:
    """Items of all runs below a folder, as ``scaling eval`` wrote them.

    Raises
    ------
    TableError
        When there are none, or a file is damaged.
    """
    import pandas as pd

    paths = sorted(folder.glob(f"**/{DOWNSTREAM}/*/*.csv"))
    if not paths:
        raise TableError(f"{folder}: no items of runs here; `scaling eval RUN --tasks ...` writes them")
    parts = []
    for path in paths:
        try:
            parts.append(pd.read_csv(path, dtype={"method": str, "task": str, "run": str}))
        except (ValueError, OSError) as error:
            raise TableError(f"{path}: cannot be read ({str(error).splitlines()[0]}); evaluate the run again") from None
    return pd.concat(parts, ignore_index=True)


def mcnemar(gains: int, losses: int) -> dict[str, float]:
    """Two-sided tests that a changed item is a gain or a loss with equal chance.

    Parameters
    ----------
    gains, losses
        Items only the method, or only the baseline, has right.

    Returns
    -------
    dict
        ``exact``, ``mid_p``, ``chi2``, ``chi2_continuity``: p-values, all 1 without a discordant item.

    References
    ----------
    Fagerland, Lydersen, Laake (2013), The McNemar test for binary matched-pairs data: mid-p is better than exact.
    """
    if min(gains, losses) < 0:
        raise UsageError(f"counts of items cannot be negative, got {gains} and {losses}")
    total = gains + losses
    if total == 0:
        return {"exact": 1.0, "mid_p": 1.0, "chi2": 1.0, "chi2_continuity": 1.0}
    fewer = min(gains, losses)
    tail = float(stats.binom.cdf(fewer, total, 0.5))
    at = float(stats.binom.pmf(fewer, total, 0.5))
    # With equal counts the two tails overlap in one point.
    exact = 1.0 if gains == losses else min(1.0, 2 * tail)
    mid = 1.0 - 0.5 * at if gains == losses else 2 * tail - at
    difference = abs(gains - losses)
    return {
        "exact": exact,
        "mid_p": min(1.0, mid),
        "chi2": float(stats.chi2.sf(difference**2 / total, 1)),
        "chi2_continuity": float(stats.chi2.sf(max(difference - 1, 0) ** 2 / total, 1)),
    }


def odds_interval(gains: int, losses: int, level: float) -> tuple[float, float, float]:
    """Conditional odds ratio of a change being a gain, with the exact (Clopper-Pearson) interval."""
    total = gains + losses
    ratio = gains / losses if losses else (float("inf") if gains else float("nan"))
    if total == 0:
        return float("nan"), 0.0, float("inf")
    tail = (1 - level) / 2
    low = float(stats.beta.ppf(tail, gains, losses + 1)) if gains else 0.0
    high = float(stats.beta.ppf(1 - tail, gains + 1, losses)) if losses else 1.0
    return ratio, low / (1 - low), high / (1 - high) if high < 1 else float("inf")


def compare_items(
    table: pd.DataFrame | None = None,
    *,
    baseline: str | None = None,
    method: str | None = None,
    gains: int | None = None,
    losses: int | None = None,
    items: int | None = None,
    level: float = 0.95,
    rng: int | np.random.Generator = 0,
) -> dict[str, Result]:
    """Compare outcomes on the same items.

    Parameters
    ----------
    table
        One row an item and method: ``item``, ``method``, ``correct`` (0/1), optionally ``task`` and ``cluster`` (items
        that share a passage or template).
    baseline, method
        Which methods; all others against the baseline by default.
    gains, losses, items
        Instead of a table: the discordant counts, and of how many items in all (without it only the odds are known).

    Returns
    -------
    dict
        Method (and ``method/task`` where there are tasks) -> result; ``details`` hold every p-value and Holm's.

    Raises
    ------
    TableError, UsageError
        When columns or methods are missing, or an item is answered twice.
    """
    check_level(level)
    if table is None:
        if gains is None or losses is None:
            raise UsageError("compare items: give a table, or both counts of discordant items (--gains and --losses)")
        if items is not None and items < gains + losses:
            raise UsageError(f"items must be {gains + losses} or more (--gains plus --losses), got {items}")
        return {method or "method": _from_counts(gains, losses, items, level, None, None)}
    _check(table, baseline, method)
    out: dict[str, Result] = {}
    random = generator(rng)
    tasks = list(dict.fromkeys(table["task"].astype(str))) if "task" in table.columns else [None]
    for name in [method] if method else [m for m in dict.fromkeys(table["method"].astype(str)) if m != baseline]:
        for task in tasks:
            part = table if task is None else table[table["task"].astype(str) == task]
            key = name if task is None or len(tasks) == 1 else f"{name}/{task}"
            out[key] = _pair(part, str(baseline), str(name), level, random)
    return _add_holm(out)


def _check(table: pd.DataFrame, baseline: str | None, method: str | None) -> None:
    absent = [c for c in ("item", "method", "correct") if c not in table.columns]
    if absent:
        raise TableError(
            f"compare items: column {absent[0]!r} missing; the table has: {', '.join(map(str, table.columns))}"
        )
    names = set(table["method"].astype(str))
    if baseline is None:
        raise UsageError(f"compare items: name the baseline; methods: {', '.join(sorted(names))}")
    for name in (baseline, *([method] if method else [])):
        if name not in names:
            raise TableError(f"method {name!r} is not in the table; {nearest(name, names)}")
    if method == baseline:
        raise UsageError(f"method {baseline!r} is the baseline itself; name another, or none for all others")
    if len(names) < 2:
        raise TableError(f"the table holds only the baseline {baseline!r}: nothing to compare it with")
    if not table["correct"].isin([0, 1]).all():
        raise TableError("compare items: column 'correct' must hold 0 and 1 (or true and false) only")
    keys = ["item", "method", *(["task"] if "task" in table.columns else [])]
    if table.duplicated(keys).any():
        first = table[table.duplicated(keys)].iloc[0]
        same = table[(table[keys] == first[keys]).all(axis=1)]
        differ = [c for c in _TOLD_APART if c in same.columns and same[c].nunique(dropna=False) > 1]
        hint = f"; its rows differ in {' and '.join(differ)}: choose with --where {differ[0]}==..." if differ else ""
        raise TableError(f"compare items: item {first['item']} of {str(first['method'])!r} occurs twice{hint}")


def _pair(part: pd.DataFrame, baseline: str, method: str, level: float, rng: np.random.Generator) -> Result:
    methods = part["method"].astype(str)
    ours = part[methods == method].set_index("item")
    base = part[methods == baseline].set_index("item")
    common = [i for i in ours.index if i in base.index]
    if not common:
        raise TableError(f"compare items: {method!r} and {baseline!r} share no item")
    d = ours.loc[common, "correct"].to_numpy(dtype=np.int64) - base.loc[common, "correct"].to_numpy(dtype=np.int64)
    clusters = ours.loc[common, "cluster"].astype(str).to_numpy() if "cluster" in ours.columns else None
    left = (len(ours) - len(common)) + (len(base) - len(common))
    result = _from_counts(
        int(np.sum(d > 0)), int(np.sum(d < 0)), len(d), level, d if clusters is not None else None, clusters, rng
    )
    if left:
        from dataclasses import replace

        text = f"{left} outcomes of items that only one of the two answered are left out"
        result = replace(result, warnings=(*result.warnings, Caution(code="unmatched-items", message=text)))
    return result


def difference_interval(gains: int, losses: int, items: int, level: float) -> tuple[float, float]:
    """Interval of the difference of shares right, over paired items; never of width 0, never beyond -1 and 1.

    References
    ----------
    Bonett and Price (2012), Adjusted Wald confidence interval for a difference of binomial proportions based on
    paired data: one is added to each discordant count and two to the items.
    """
    more, less = (gains + 1) / (items + 2), (losses + 1) / (items + 2)
    half = float(stats.norm.ppf((1 + level) / 2)) * float(np.sqrt((more + less - (more - less) ** 2) / (items + 2)))
    return max(more - less - half, -1.0), min(more - less + half, 1.0)


def _from_counts(
    gains: int, losses: int, items: int | None, level: float, d: NDArray[np.int64] | None,
    clusters: NDArray[np.str_] | None, rng: np.random.Generator | None = None,
) -> Result:  # fmt: skip
    p = mcnemar(gains, losses)
    ratio, low, high = odds_interval(gains, losses, level)
    cautions, extra, errors = [], {}, {}
    estimate, lows, highs = {"odds_ratio": ratio}, {"odds_ratio": low}, {"odds_ratio": high}
    kind = ""
    headline = p["mid_p"]
    if items:
        estimate["difference"] = (gains - losses) / items
        errors["difference"] = float(np.sqrt((gains + losses - (gains - losses) ** 2 / items) / items**2))
    if d is not None and clusters is not None and items:
        sums = np.array([np.sum(d[clusters == c]) for c in dict.fromkeys(clusters)], dtype=np.float64)
        kept = sums[sums != 0]
        headline, floor = sign_flip(kept, rng) if len(kept) else (1.0, 1.0)
        extra = {"clusters": len(sums), "cluster_sign_flip_p": headline, "cluster_sign_flip_floor": floor}
        text = (
            f"items come in {len(sums)} clusters: McNemar's p treats them as independent; the cluster sign flip is used"
        )
        cautions.append(Caution(code="clustered-items", message=text))
        del errors["difference"]
        if len(sums) > 1:
            df = len(sums) - 1
            errors["difference"] = float(np.sqrt(np.sum((sums - sums.mean()) ** 2) * len(sums) / df)) / items
            half = float(stats.t.ppf((1 + level) / 2, df)) * errors["difference"]
            lows["difference"] = max(estimate["difference"] - half, -1.0)
            highs["difference"] = min(estimate["difference"] + half, 1.0)
            kind = "; difference: t, by cluster"
    elif items:
        lows["difference"], highs["difference"] = difference_interval(gains, losses, items, level)
        kind = "; difference: adjusted Wald (Bonett and Price)"
    if gains + losses == 0:
        cautions.append(Caution(code="no-discordant-items", message="both answer every item alike: p is 1"))
    if not items:
        text = "only the discordant items were counted: the difference of shares right needs the number of all (items)"
        cautions.append(Caution(code="items-not-counted", message=text))
    wald = wald_odds(gains, losses, level)
    return Result(
        kind="compare items",
        estimate=estimate,
        standard_error=errors,
        interval=Interval(level=level, method=f"odds: exact conditional{kind}", low=lows, high=highs),
        n=items or gains + losses,
        conventions={"difference": "method minus baseline", "p": "mid-p" if clusters is None else "cluster sign flip"},
        warnings=tuple(cautions),
        details={"gains": gains, "losses": losses, "p": headline, **p, "odds_ratio_wald": wald, **extra},
    )


def wald_odds(gains: int, losses: int, level: float) -> list[float | None]:
    """Interval of the odds ratio on a log scale, normal approximation."""
    if min(gains, losses) == 0:
        return [None, None]
    half = float(stats.norm.ppf((1 + level) / 2)) * np.sqrt(1 / gains + 1 / losses)
    return [float(gains / losses * np.exp(-half)), float(gains / losses * np.exp(half))]


def _add_holm(results: dict[str, Result]) -> dict[str, Result]:
    from dataclasses import replace

    adjusted = holm([float(r.details["p"]) for r in results.values()])
    return {
        name: replace(r, details={**r.details, "holm": value, "tests": len(results)})
        for (name, r), value in zip(results.items(), adjusted, strict=True)
    }
