"""How many routing heads: the optimum with the counts that cannot be told from it, and the checks around it.

After ``cells``: head counts at fixed method and size, alone or per key-value count; whether the loss is U-shaped in
log2 H; whether a method still wins when every method has its own best learning rate; whether the edge grows with width.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cells import order_scales, size_key
from scaling.analysis.envelope import best_settings
from scaling.analysis.options import check_level, check_noise
from scaling.analysis.paired import dunnett, t_summary
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.screen import Screened, numbers, screen
from scaling.errors import FitError, TableError, UsageError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]


def head_optimum(
    table: pd.DataFrame, *, by: str | None = None, noise_sd: float | None = None, level: float = 0.95
) -> dict[str, Result]:
    """Best head count, the set not distinguishable from it, and the U-shape in log2 H.

    Parameters
    ----------
    table
        Runs with H, ``loss`` (several seeds a count, or ``noise_sd``).
    by
        A column (``kv``, ``size``) whose values are analysed apart; noise is pooled over them.
    noise_sd
        Seed standard deviation from elsewhere.

    Returns
    -------
    dict
        Value of ``by`` (or ``all``) -> result. ``estimate``: ``best_heads``, ``curvature`` (of loss in log2 H;
        positive is a
        U), ``vertex_heads``. ``details.indistinguishable`` lists the counts.
    """
    check_level(level)
    check_noise(noise_sd)
    screened = screen(table, needs=["H", "loss"], analysis="head count")
    frame = screened.frame
    if by and by not in frame.columns:
        raise TableError(f"head count: column {by!r} missing; the table has: {', '.join(map(str, frame.columns))}")
    groups = {str(k): g for k, g in frame.groupby(by, sort=True)} if by else {"all": frame}
    groups = {name: groups[name] for name in sorted(groups, key=size_key)}
    squares, df = 0.0, 0
    for part in groups.values():
        for _, cell in part.groupby("H"):
            squares += float(((cell["loss"] - cell["loss"].mean()) ** 2).sum())
            df += len(cell) - 1
    sd, sd_df = (noise_sd, np.inf) if noise_sd else (float(np.sqrt(squares / df)) if df else float("nan"), float(df))
    return {name: _heads(part, screened, sd=float(sd), df=sd_df, level=level) for name, part in groups.items()}


def _heads(part: pd.DataFrame, screened: Screened, *, sd: float, df: float, level: float) -> Result:
    grouped = part.groupby("H", sort=True)["loss"]
    heads = grouped.mean().index.to_numpy(dtype=np.float64)
    mean: Floats = grouped.mean().to_numpy(dtype=np.float64)
    count = np.asarray(grouped.size(), dtype=np.float64)
    if len(heads) < 2:
        raise FitError(f"head count: only H = {heads[0]:g} was run, two or more counts are needed")
    best = int(np.argmin(mean))
    known = np.isfinite(sd) and df > 0
    others = [k for k in range(len(heads)) if k != best]
    rows: list[dict[str, Any]] = [
        {"heads": int(h), "mean": float(m), "n": int(c), "p_against_best": None}
        for h, m, c in zip(heads, mean, count, strict=True)
    ]
    cautions = list(screened.cautions)
    indistinguishable = [int(heads[best])]
    if known:
        # One-sided multiple comparison with the best (Hsu 1981), by the two-sided Dunnett probability,
        # which is conservative.
        t = [(mean[k] - mean[best]) / (sd * np.sqrt(1 / count[k] + 1 / count[best])) for k in others]
        for k, p in zip(others, dunnett([float(v) for v in t], df), strict=True):
            rows[k]["p_against_best"] = p
            if p > 1 - level:
                indistinguishable.append(int(heads[k]))
    else:
        text = "one run a head count and no noise given: no count can be told from the best"
        cautions.append(Caution(code="one-seed", message=text))
        indistinguishable = [int(h) for h in heads]
    estimate, low, high, errors = {"best_heads": float(heads[best])}, {}, {}, {}
    shape = _u_shape(np.asarray(np.log2(heads), dtype=np.float64), mean, count, sd=sd, df=df, level=level)
    if shape:
        estimate |= {"curvature": shape["curvature"], "vertex_heads": shape["vertex_heads"]}
        if known:
            errors["curvature"] = shape["standard_error"]
            low["curvature"], high["curvature"] = shape["low"], shape["high"]
            if shape["low"] <= 0:
                text = (
                    f"curvature in log2 H is {shape['curvature']:.3g} ({shape['low']:.3g} to {shape['high']:.3g}): no "
                    "U-shape is shown"
                )
                cautions.append(Caution(code="no-u-shape", message=text))
    if best in (0, len(heads) - 1):
        cautions.append(
            Caution(code="optimum-at-edge", message=f"the best count H = {heads[best]:g} is the end of the range tried")
        )
    name = "z, given noise" if np.isinf(df) else f"t, {df:g} df"
    return Result(
        kind="head count",
        estimate=estimate,
        standard_error=errors,
        interval=Interval(level=level, method=name, low=low, high=high) if low else None,
        n=int(count.sum()),
        df=df if known else None,
        conventions={"variable": "log2 H"},
        warnings=tuple(cautions),
        dropped=screened.dropped,
        details={"counts": rows, "indistinguishable": sorted(indistinguishable), "u_shape": shape},
    )


def _u_shape(x: Floats, mean: Floats, count: Floats, *, sd: float, df: float, level: float) -> dict[str, float] | None:
    """Weighted quadratic of loss in log2 H; ``None`` below three counts."""
    if len(x) < 3:
        return None
    centre = float(x.mean())
    basis = np.column_stack([np.ones_like(x), x - centre, (x - centre) ** 2])
    inverse = np.linalg.inv((basis * count[:, None]).T @ basis)
    b = inverse @ (basis * count[:, None]).T @ mean
    error = float(sd * np.sqrt(inverse[2, 2])) if np.isfinite(sd) else float("nan")
    quantile = float(stats.t.ppf((1 + level) / 2, df)) if df > 0 else float("nan")
    vertex = centre - b[1] / (2 * b[2]) if b[2] > 0 else float("nan")
    gradient = np.array([0.0, -1 / (2 * b[2]), b[1] / (2 * b[2] ** 2)]) if b[2] > 0 else np.zeros(3)
    vertex_sd = float(sd * np.sqrt(gradient @ inverse @ gradient)) if b[2] > 0 else float("nan")
    return {
        "curvature": float(b[2]),
        "standard_error": error,
        "low": float(b[2] - quantile * error),
        "high": float(b[2] + quantile * error),
        "p": float(2 * stats.t.sf(abs(b[2]) / error, df)) if error > 0 and df > 0 else float("nan"),
        "vertex_heads": float(2**vertex) if abs(vertex) < 50 else float("nan"),
        "vertex_low": float(2 ** np.clip(vertex - quantile * vertex_sd, -50, 50)),
        "vertex_high": float(2 ** np.clip(vertex + quantile * vertex_sd, -50, 50)),
    }


def learning_rate_robustness(
    table: pd.DataFrame, *, baseline: str, noise_sd: float, level: float = 0.95, rng: int | np.random.Generator = 0
) -> dict[str, Result]:
    """Difference of each method from the baseline, each at its own best learning rate, per size.

    Parameters
    ----------
    table
        Runs with ``method``, ``lr``, ``loss`` and, where there are several, ``size``.
    noise_sd
        Seed standard deviation of one run.
    """
    check_level(level)
    check_noise(noise_sd)
    frame = table if "size" in table.columns else table.assign(size="all")
    best, cautions = best_settings(frame, over=("lr",), by=("method", "size"), noise_sd=noise_sd, rng=rng)
    best = best.iloc[np.argsort(best["size"].astype(str).map(order_scales(frame, list(frame["size"].astype(str)))))]
    methods = list(dict.fromkeys(best["method"].astype(str)))
    if baseline not in methods:
        raise TableError(f"method {baseline!r} is not in the table; it has: {', '.join(methods)}")
    quantile = float(stats.norm.ppf((1 + level) / 2))
    base = best[best["method"] == baseline].set_index("size")
    out = {}
    for name in methods:
        if name == baseline:
            continue
        estimate, low, high, errors, rows = {}, {}, {}, {}, []
        for _, row in best[best["method"] == name].iterrows():
            if row["size"] not in base.index:
                continue
            other = base.loc[row["size"]]
            delta = float(row["loss"] - other["loss"])
            parts = [float(r["loss_sd"]) if r["inside"] else noise_sd for r in (row, other)]
            error = float(np.hypot(parts[0], parts[1]))
            key = f"delta[{row['size']}]"
            estimate[key], errors[key], low[key], high[key] = (
                delta,
                error,
                delta - quantile * error,
                delta + quantile * error,
            )
            rows.append(
                {
                    "size": str(row["size"]),
                    "best_lr": float(row["lr"]),
                    "best_lr_baseline": float(other["lr"]),
                    "delta": delta,
                }
            )
        out[name] = Result(
            kind="learning-rate robustness",
            estimate=estimate,
            standard_error=errors,
            interval=Interval(level=level, method="normal, parabola in log lr", low=low, high=high),
            n=int((table["method"].isin([name, baseline])).sum()),
            conventions={"difference": "method minus baseline, each at its own best learning rate, optimism taken off"},
            warnings=cautions,
            details={"rows": rows},
        )
    return out


def width_contrast(
    table: pd.DataFrame,
    *,
    baseline: str,
    method: str,
    narrow: str,
    wide: str,
    noise_sd: float | None = None,
    level: float = 0.95,
) -> Result:
    """Whether the method's edge over the baseline changes from narrow to wide: a difference of differences."""
    check_level(level)
    check_noise(noise_sd)
    if method == baseline or narrow == wide:
        same = f"method {method!r} is the baseline" if method == baseline else f"{narrow!r} is both narrow and wide"
        raise UsageError(f"width contrast: {same}; a contrast needs two")
    screened = screen(table, needs=["method", "loss"], analysis="width contrast")
    frame = screened.frame
    if "size" not in frame.columns:
        raise TableError("width contrast: column 'size' missing; it tells narrow from wide")
    cells = {}
    for name in (baseline, method):
        for size in (narrow, wide):
            losses = numbers(frame[(frame["method"] == name) & (frame["size"].astype(str) == size)], "loss")
            if not len(losses):
                raise TableError(f"width contrast: no run of {name!r} at size {size!r}")
            cells[name, size] = losses
    edge = {s: float(cells[method, s].mean() - cells[baseline, s].mean()) for s in (narrow, wide)}
    contrast = edge[wide] - edge[narrow]
    df = float("inf") if noise_sd else float(sum(len(v) - 1 for v in cells.values()))
    sd = noise_sd or (
        float(np.sqrt(sum(float(np.sum((v - v.mean()) ** 2)) for v in cells.values()) / df)) if df else float("nan")
    )
    interval, errors, cautions = None, {}, list(screened.cautions)
    if df > 0:
        test = t_summary(contrast, sd * float(np.sqrt(sum(1 / len(v) for v in cells.values()))), df, level)
        errors = {"contrast": test.standard_error}
        interval = Interval(
            level=level, method=f"t, {df:g} df", low={"contrast": test.low}, high={"contrast": test.high}
        )
    else:
        cautions.append(
            Caution(code="one-seed", message="one seed a cell and no given noise: the contrast has no interval")
        )
    return Result(
        kind="width contrast",
        estimate={"contrast": contrast, f"delta[{narrow}]": edge[narrow], f"delta[{wide}]": edge[wide]},
        standard_error=errors,
        interval=interval,
        n=sum(len(v) for v in cells.values()),
        df=df if df > 0 else None,
        conventions={"contrast": f"(method - baseline) at {wide} minus the same at {narrow}"},
        warnings=tuple(cautions),
        dropped=screened.dropped,
        details={},
    )
