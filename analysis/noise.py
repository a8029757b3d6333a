"""How much losses differ for no reason: the noise floor every claim is measured against.

After ``screen``. Four kinds, kept apart because they answer different questions: spread over seeds (the only one that
counts for claims about methods), fluctuation at the end of a curve (which is not seed noise: a run keeps its offset
from the ensemble), sampling of the evaluation set (common to all runs, cancels in differences), and repeats of one
seed. ``designs`` turns a floor into what an experiment can show.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.cells import constant, order_scales
from scaling.analysis.checklist import describe_dropped, describe_seeds, make_checklist
from scaling.analysis.options import check_level
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.screen import numbers, screen
from scaling.analysis.spread import chi_square_limits, homogeneity, scale_dependence
from scaling.errors import FitError, TableError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

# Columns that tell configurations apart where the user does not say; runs equal in all of them differ by seed only.
CONFIGURATION = (
    "group",
    "method",
    "size",
    "heads",
    "kv",
    "variant",
    "lr",
    "batch_tokens",
    "N",
    "D",
    "precision",
    "sweep",
)
HOMOGENEOUS = 0.05
SURELY_UNEQUAL = 1e-3
EQUAL_REPEATS = (
    "repeats of one seed have equal losses: training repeats itself, or they are copies of one run; no interval"
)


def noise_floor(
    table: pd.DataFrame,
    *,
    by: Sequence[str] | None = None,
    level: float = 0.95,
    min_runs: int = 2,
    keep_unfinished: bool = False,
) -> Result:
    """Seed standard deviation pooled over configurations.

    Parameters
    ----------
    table
        Runs with ``loss`` and, where recorded, ``seed``; copies are found by curve hash and left out.
    by
        Columns that define a configuration; those of `CONFIGURATION` present by default.
    min_runs
        Configurations with fewer runs are not used.

    Returns
    -------
    Result
        ``estimate``: ``seed_sd`` (nats) and, where one seed was run more than once, ``same_seed_sd``; the interval is
        the chi-square one. ``details`` hold every configuration, tests of homogeneity and the dependence on scale.
        Where all runs of each configuration have equal losses there is no ``seed_sd``, and ``status`` is
        ``undetermined``; repeats of a seed that are equal have ``same_seed_sd`` 0 without an interval.

    Raises
    ------
    TableError
        When a column is missing.
    FitError
        When no configuration has ``min_runs`` runs.
    """
    check_level(level)
    screened = screen(table, needs=["loss"], analysis="noise floor", keep_unfinished=keep_unfinished)
    frame = screened.frame
    columns = _configuration(frame, by)
    same_sd, same_df, frame = _merge_repeats(frame, columns)
    groups = [
        (key, part) for key, part in (frame.groupby(columns, dropna=False, sort=False) if columns else [("all", frame)])
        if len(part) >= max(min_runs, 2)
    ]  # fmt: skip
    if not groups:
        raise FitError(
            f"noise floor: no configuration ({', '.join(columns) or 'all rows'}) has {max(min_runs, 2)} or more "
            "runs; repeat one configuration with other seeds, or name the columns that define one with "
            "`scaling noise floor --by`"
        )
    if "size" in frame.columns and frame["size"].notna().all():
        places = order_scales(frame, list(frame["size"].astype(str)))
        groups.sort(key=lambda group: places[str(group[1]["size"].iloc[0])])
    samples = [numbers(part, "loss") for _, part in groups]
    measured = not all(constant(s) for s in samples)
    # equal losses are copies, or seeds that change nothing: degrees of freedom without a spread would lower the SD
    varied = [s for s in samples if not constant(s)] if measured else samples
    df = sum(len(s) - 1 for s in varied)
    sd = float(np.sqrt(sum(float(np.sum((s - s.mean()) ** 2)) for s in varied) / df))
    estimate, errors, limits = {}, {}, {}
    if measured:
        estimate["seed_sd"], errors["seed_sd"] = sd, sd / float(np.sqrt(2 * df))
        limits["seed_sd"] = chi_square_limits(sd, df, level)
    if same_df:
        estimate["same_seed_sd"] = same_sd
        if same_sd > 0:
            limits["same_seed_sd"] = chi_square_limits(same_sd, same_df, level)
    tests = homogeneity(samples)
    cautions = [*screened.cautions, *(_cautions(df, tests, samples) if measured else [_all_equal(samples)])]
    if same_sd == 0:
        cautions.append(Caution(code="identical-repeats", message=EQUAL_REPEATS))
    interval = Interval(
        level=level,
        method="chi-square",
        low={name: low for name, (low, _) in limits.items()},
        high={name: high for name, (_, high) in limits.items()},
    )
    entries = {
        "form": "standard deviation of final loss within configurations, pooled",
        "variables": f"loss; configuration: {', '.join(columns) or 'all rows'}",
        "conventions": "runs of one seed count once (their mean)",
        "rows": str(sum(len(s) for s in varied)),
        "dropped": describe_dropped(screened.dropped),
        "seeds": describe_seeds(frame),
        "interval": "chi-square" if limits else "none: equal losses",
    }
    return Result(
        kind="noise floor",
        estimate=estimate,
        standard_error=errors,
        interval=interval if limits else None,
        n=sum(len(s) for s in varied),
        df=float(df),
        status="converged" if measured else "undetermined",
        conventions={"configuration": ", ".join(columns) or "all rows"},
        warnings=tuple(cautions),
        dropped=screened.dropped,
        checklist=make_checklist(entries),
        details={
            "configurations": [_describe(key, columns, s, level) for (key, _), s in zip(groups, samples, strict=True)],
            "homogeneity": tests,
            "scale": scale_dependence([part for _, part in groups], samples),
            "same_seed": {"sd": same_sd if same_df else None, "df": same_df},
        },
    )


def _configuration(frame: pd.DataFrame, by: Sequence[str] | None) -> list[str]:
    if by is not None:
        absent = [c for c in by if c not in frame.columns]
        if absent:
            raise TableError(
                f"noise floor: column {absent[0]!r} is not in the table; it has: {', '.join(map(str, frame.columns))}"
            )
        return list(by)
    return [c for c in CONFIGURATION if c in frame.columns and not (c == "N" and "size" in frame.columns)]


def _merge_repeats(frame: pd.DataFrame, columns: Sequence[str]) -> tuple[float, int, pd.DataFrame]:
    """Runs of one configuration and one seed: their spread, and the table with their mean in their place."""
    if "seed" not in frame.columns or frame["seed"].isna().all():
        return float("nan"), 0, frame
    keys = [*columns, "seed"]
    grouped = frame.groupby(keys, dropna=False, sort=False)["loss"]
    df = int((grouped.transform("size") > 1).sum() - (grouped.size() > 1).sum())
    if df == 0:
        return float("nan"), 0, frame
    squares = float(((frame["loss"] - grouped.transform("mean")) ** 2).sum())
    if all(constant(part.to_numpy(dtype=np.float64)) for _, part in grouped):
        squares = 0.0
    merged = frame.assign(loss=grouped.transform("mean")).drop_duplicates(keys)
    return float(np.sqrt(squares / df)), df, merged


def _describe(key: Any, columns: Sequence[str], sample: Floats, level: float) -> dict[str, Any]:
    values = key if isinstance(key, tuple) else (key,)
    sd = float(np.std(sample, ddof=1))
    low, high = (None, None) if constant(sample) else chi_square_limits(sd, len(sample) - 1, level)
    return {
        "configuration": {c: str(v) for c, v in zip(columns or ["rows"], values, strict=True)},
        "n": len(sample),
        "mean": float(sample.mean()),
        "sd": sd,
        "low": low,
        "high": high,
    }


def _all_equal(samples: Sequence[Floats]) -> Caution:
    runs = sum(len(s) for s in samples)
    text = (
        f"all runs of a configuration have equal losses ({runs} runs, {len(samples)} configuration"
        f"{'s' * (len(samples) != 1)}): no spread could be measured, so there is no SD and no interval; likely one run "
        "or seed repeated under several names; check the runs' seeds, then train with others"
    )
    return Caution(code="identical-losses", message=text)


def _cautions(df: int, tests: dict[str, float | None], samples: Sequence[Floats]) -> list[Caution]:
    out = []
    if df < 10:
        low, high = chi_square_limits(1.0, df, 0.95)
        text = f"{df} degrees of freedom: the true SD may be {low:.2f} to {high:.2f} times the estimate"
        out.append(Caution(code="few-seeds", message=text))
    levene, bartlett = tests["levene_p"], tests["bartlett_p"]
    # Levene's test has little power with a handful of runs a configuration; Bartlett's is trusted only when extreme.
    if (levene is not None and levene < HOMOGENEOUS) or (bartlett is not None and bartlett < SURELY_UNEQUAL):
        sds = [float(np.std(s, ddof=1)) for s in samples if not constant(s)]
        text = (
            f"configurations differ in spread (Levene p {levene:.2g}, Bartlett p {bartlett:.2g}; SD {min(sds):.3g} to "
            f"{max(sds):.3g}): do not pool them all"
        )
        out.append(Caution(code="unequal-variances", message=text))
    equal = sum(constant(s) for s in samples)
    if equal:
        text = (
            f"{equal} of {len(samples)} configurations have runs with equal losses: copies of one run, or seeds that "
            "change nothing; they are left out of the SD; check those runs' seeds, then train with others"
        )
        out.append(Caution(code="identical-losses", message=text))
    return out
