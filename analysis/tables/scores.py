"""Downstream results: scores of tasks side by side as papers lay them out, and paired answers to single items."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pandas as pd
from scipy import stats

from scaling.analysis.result import Result
from scaling.analysis.tables.table import Column, Table

_AVERAGE = "average"
_LEVEL = 0.95


def tasks(scores: pd.DataFrame, *, sizes: Sequence[str] = ()) -> Table:
    """One row a size and method, one column a task, the average last; the best of each size bold beyond the noise.

    Parameters
    ----------
    scores
        method, size, task, score, se, seed (``scaling.analysis.supplements``).
    sizes
        Sizes, smallest first; others follow by name.
    """
    names = list(dict.fromkeys(scores["task"].astype(str)))
    cells = _cells(scores)
    order = {size: place for place, size in enumerate(sizes)}
    sized = sorted(set(cells["size"]), key=lambda size: (order.get(size, len(order)), size))
    rows = []
    for size in sized:
        part = cells[cells["size"] == size]
        block = [
            _row(size, sized.index(size), method, mine, names) for method, mine in part.groupby("method", sort=False)
        ]
        for key in [f"task{i}" for i in range(len(names))] + [_AVERAGE]:
            _mark(block, key)
        rows += block
    columns = [
        Column(key="size", label="size"),
        Column(key="method", label="method"),
        *(Column(key=f"task{i}", label=name, kind="rounded") for i, name in enumerate(names)),
        *([Column(key=_AVERAGE, label=f"average of {len(names)}", kind="rounded")] if len(names) > 1 else []),
    ]
    if len(sized) == 1 and sized[0] == "all":
        columns = columns[1:]
    known = cells["error"].notna().any()
    seeds = int(scores.groupby(["size", "method", "task"])["score"].size().max())
    caption = (
        f"Scores as given, up to {seeds} run{'s' if seeds != 1 else ''} a cell. "
        + (
            f"Digits follow the {_LEVEL:.0%} interval of each score, which is in the CSV. Bold: better than every "
            f"other "
            "method of its size by more than the noise, corrected for their number; = the best and what is not "
            "distinguishable from it."
            if known
            else "No noise is known (give standard errors in a column se, or several seeds): nothing is marked as best."
        )
        + " The average counts only where a method has every task."
    )
    return Table(
        name="tasks", title="Downstream tasks", caption=caption, columns=tuple(columns), frame=pd.DataFrame(rows)
    )


def _points(share: float | None) -> float | None:
    return None if share is None else 100 * share


def items(found: Mapping[str, Result]) -> Table:
    """McNemar's test of paired answers: ``compare items`` results by method and task."""
    rows = []
    for name, result in found.items():
        method, _, task = name.partition("/")
        interval = result.interval
        rows.append(
            {
                "method": method,
                "task": task or "all items",
                "n": result.n,
                "gains": result.details["gains"],
                "losses": result.details["losses"],
                "difference": 100 * result.estimate["difference"],
                "difference_low": _points(interval.low.get("difference") if interval else None),
                "difference_high": _points(interval.high.get("difference") if interval else None),
                "odds": result.estimate.get("odds_ratio"),
                "odds_low": interval.low.get("odds_ratio") if interval else None,
                "odds_high": interval.high.get("odds_ratio") if interval else None,
                "p": result.details["p"],
                "holm": result.details.get("holm"),
            }
        )
    columns = (
        Column(key="method", label="method"),
        Column(key="task", label="task"),
        Column(key="n", label="items", kind="integer"),
        Column(key="gains", label="right where the baseline is wrong", kind="integer"),
        Column(key="losses", label="wrong where the baseline is right", kind="integer"),
        Column(key="difference", label="difference [interval] (points)", kind="estimate"),
        Column(key="odds", label="odds ratio [interval]", kind="estimate"),
        Column(key="p", label="McNemar p", kind="number", digits=2),
        Column(key="holm", label="p, Holm", kind="number", digits=2),
    )
    level = next((r.interval.level for r in found.values() if r.interval), _LEVEL)
    words = sorted({r.conventions.get("p", "") for r in found.values()} - {""})
    caption = (
        f"Items that both models answered; only those answered differently count. {level:.0%} intervals; p: "
        f"{', '.join(words)}. Holm: corrected for the {len(found)} test{'s' if len(found) != 1 else ''} here."
    )
    return Table(name="items", title="Paired answers", caption=caption, columns=columns, frame=pd.DataFrame(rows))


def _cells(scores: pd.DataFrame) -> pd.DataFrame:
    """Mean of each size, method and task, and its standard error: from seeds where there are several, else as given.

    The spread over seeds is pooled over the cells of a task and size, like that of losses.
    """
    grouped = scores.groupby(["size", "method", "task"], sort=False)["score"]
    cells = grouped.agg(["mean", "size"]).rename(columns={"size": "n"})
    cells["squares"] = grouped.agg(lambda values: float(((values - values.mean()) ** 2).sum()))
    cells["given"] = scores.groupby(["size", "method", "task"], sort=False)["se"].agg(
        lambda errors: float(np.sqrt((errors**2).sum())) / len(errors) if errors.notna().all() else np.nan
    )
    cells = cells.reset_index()
    pooled = cells.groupby(["size", "task"]).agg(squares=("squares", "sum"), runs=("n", "sum"), cells=("n", "size"))
    keys = list(zip(cells["size"], cells["task"], strict=True))
    df = np.array([float(pooled.loc[key, "runs"] - pooled.loc[key, "cells"]) for key in keys])
    squares = np.array([float(pooled.loc[key, "squares"]) for key in keys])
    seeded = np.sqrt(squares / np.where(df > 0, df, np.nan) / cells["n"].to_numpy(dtype=float))
    return cells.assign(error=np.where(df > 0, seeded, cells["given"]), df=np.where(df > 0, df, np.inf))


def _row(size: str, place: int, method: object, cells: pd.DataFrame, names: Sequence[str]) -> dict[str, Any]:
    row: dict[str, Any] = {"size": size, "size_sort": place, "method": method}
    by = cells.set_index("task")
    for i, name in enumerate(names):
        if name in by.index:
            mean, error, df = by.loc[name, ["mean", "error", "df"]].to_numpy(dtype=np.float64)
            _fill(row, f"task{i}", float(mean), float(error), float(df))
        else:
            _fill(row, f"task{i}", np.nan, np.nan, np.inf)
    whole = [row[f"task{i}"] for i in range(len(names))]
    errors = [row[f"task{i}_error"] for i in range(len(names))]
    df = min(row[f"task{i}_df"] for i in range(len(names)))
    _fill(row, _AVERAGE, float(np.mean(whole)), float(np.sqrt(np.sum(np.square(errors)))) / len(names), df)
    return row


def _fill(row: dict[str, Any], key: str, value: float, error: float, df: float) -> None:
    half = float(stats.t.ppf((1 + _LEVEL) / 2, df)) * error
    row |= {key: value, f"{key}_low": value - half, f"{key}_high": value + half, f"{key}_error": error, f"{key}_df": df}


def _mark(rows: list[dict[str, Any]], key: str) -> None:
    """Mark the best score, or all that a t test with Bonferroni's correction cannot tell from it."""
    ready = [row for row in rows if np.isfinite(row[key]) and np.isfinite(row[f"{key}_error"])]
    if len(ready) < 2 or len(ready) < sum(np.isfinite(row[key]) for row in rows):
        return
    best = max(ready, key=lambda row: float(row[key]))
    near = []
    for row in ready:
        error = float(np.hypot(row[f"{key}_error"], best[f"{key}_error"]))
        behind = best[key] - row[key]
        t = behind / error if error > 0 else np.inf if behind > 0 else 0.0
        p = 2 * float(stats.t.sf(t, min(row[f"{key}_df"], best[f"{key}_df"])))
        if row is not best and p * (len(ready) - 1) > 1 - _LEVEL:
            near.append(row)
    best[f"{key}_mark"] = "tie" if near else "best"
    for row in near:
        row[f"{key}_mark"] = "tie"
