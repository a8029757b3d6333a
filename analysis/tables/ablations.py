"""Tables over the axes of a grid: methods by size, head counts, heads by key-value heads, learning rates."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pandas as pd

from scaling.analysis import digits
from scaling.analysis.cells import order_scales, scale_labels
from scaling.analysis.columns import map_columns
from scaling.analysis.grids import Grid, gather, with_single_head
from scaling.analysis.tables.core import dropped_text
from scaling.analysis.tables.table import Column, Table


def main(runs: pd.DataFrame, *, baseline: str | None, sd: float | None = None, dropped: int = 0) -> Table:
    """Mean loss of each method at each size, and its difference to the baseline.

    Without sizes the scales of comparisons stand in their place (`scale_labels`): a spread between model sizes is no
    spread of a run. Where no two runs are of one scale, a method's row is the mean of all its runs.
    """
    sized = bool(runs["size"].notna().any())
    alone, scales = False, ["all runs"]
    if not sized:
        short = map_columns(runs)
        labels = scale_labels(short)
        scales = list(order_scales(short, labels))
        alone = 1 < len(scales) == len(runs)
        scales = ["all runs"] if alone else scales
        runs = runs.assign(size="all runs" if alone else labels)
    by_size = sized or len(scales) > 1
    grid = gather(runs, ["size", "method"], within=["size"], sd=sd)
    if alone:
        frame = grid.frame.assign(mean_low=math.nan, mean_high=math.nan, mark="")
        grid = replace(grid, frame=frame, sd=math.nan, df=0.0, source="no two runs are of one scale")
    if sized:
        frame = _by_size(grid.frame, runs)
    else:
        frame = grid.frame.assign(mean_mark=grid.frame["mark"], size_sort=grid.frame["size"].map(scales.index))
        frame = frame.sort_values("size_sort" if by_size else "mean", kind="stable").reset_index(drop=True)
    place = "size" if sized else "scale"
    columns = [Column(key="size", label=place)] if by_size else []
    columns += [Column(key="method", label="method"), *_means(grid)]
    if not sized and (runs.groupby("size")["tokens"].nunique() > 1).any():
        tokens = runs.groupby(["size", "method"])["tokens"].agg(fewest="min", most="max").astype(float)
        frame = frame.join(tokens, on=["size", "method"])
        columns.append(Column(key="fewest", label="fewest tokens", kind="integer"))
        columns.append(Column(key="most", label="most tokens", kind="integer"))
    if baseline is not None:
        base = frame[frame["method"] == baseline].set_index("size")["mean"]
        frame = frame.assign(delta=frame["mean"] - frame["size"].map(base))
        columns.append(Column(key="delta", label=f"minus {baseline}", kind="number", digits=3))
    title = f"Methods by {place}" if by_size else "Methods"
    return _table("main", title, grid, frame, columns, "method", dropped)


def heads(runs: pd.DataFrame, *, sd: float | None = None, dropped: int = 0) -> Table:
    """Mean loss for each number of routing heads at each size."""
    grid = gather(with_single_head(runs), ["size", "method", "heads"], within=["size", "method"], sd=sd)
    columns = [
        Column(key="size", label="size"),
        Column(key="method", label="method"),
        Column(key="heads", label="H", kind="integer"),
        *_means(grid),
        Column(key="gap", label="above the best", kind="number", digits=2),
    ]
    return _table("heads", "Routing heads", grid, _by_size(grid.frame, runs), columns, "number of heads", dropped)


def variants(runs: pd.DataFrame, *, sd: float | None = None, dropped: int = 0) -> Table | None:
    """Mean loss of methods that were run with several options (streams, blocks, without a part), beside the others.

    ``None`` where no size has two variants of one method.
    """
    named = runs.assign(variant=runs["variant"].fillna("defaults"))
    several = named.dropna(subset=["size"]).groupby(["size", "method"])["variant"].nunique()
    sizes = set(several.index[several > 1].get_level_values(0))
    if not sizes:
        return None
    grid = gather(named[named["size"].isin(sizes)], ["size", "method", "variant"], within=["size"], sd=sd)
    columns = [
        Column(key="size", label="size"),
        Column(key="method", label="method"),
        Column(key="variant", label="options"),
        *_means(grid),
        Column(key="gap", label="above the best", kind="number", digits=2),
    ]
    return _table("variants", "Options of a method", grid, _by_size(grid.frame, runs), columns, "variant", dropped)


def heads_by_kv(runs: pd.DataFrame, *, sd: float | None = None, dropped: int = 0) -> Table:
    """Mean loss over heads (columns) and key-value heads (rows), each row's optimum marked."""
    routed = with_single_head(runs)
    grid = gather(routed, ["size", "kv", "heads"], within=["size", "kv"], sd=sd)
    counts = sorted(int(count) for count in grid.frame["heads"].unique())
    rows = []
    for (size, _), part in grid.frame.groupby(["size", "kv"], sort=False):
        row: dict[str, Any] = {"size": size, "kv": int(part["kv"].iloc[0])}
        for cell in part.to_dict(orient="records"):
            key = f"h{int(cell['heads'])}"
            row |= {key: cell["mean"], f"{key}_low": cell["mean_low"], f"{key}_high": cell["mean_high"]}
            row[f"{key}_mark"] = cell["mark"]
        rows.append(row)
    frame = pd.DataFrame(rows)
    for count in counts:
        for key in (f"h{count}", f"h{count}_mark"):
            if key not in frame:
                frame[key] = None
    columns = [
        Column(key="size", label="size"),
        Column(key="kv", label="KV", kind="integer"),
        *(Column(key=f"h{count}", label=f"H={count}", kind="estimate") for count in counts),
    ]
    return _table(
        "heads-kv", "Routing heads by key-value heads", grid, _by_size(frame, runs), columns, "H in a row", dropped
    )


def learning_rates(runs: pd.DataFrame, *, sd: float | None = None, dropped: int = 0) -> Table:
    """Each method at its own best learning rate."""
    grid = gather(runs, ["size", "method", "lr"], within=["size", "method"], sd=sd)
    ordered = grid.frame.sort_values("mean")
    best = ordered.groupby(["size", "method"], sort=False).head(1).copy()
    tied = (
        grid.frame[grid.frame["mark"] != ""]
        .groupby(["size", "method"])["lr"]
        .agg(lambda v: ", ".join(f"{x:g}" for x in v))
    )
    tried = grid.frame.groupby(["size", "method"])["lr"].agg(["min", "max", "size"])
    keys = list(zip(best["size"], best["method"], strict=True))
    best["near"] = [tied.get(key) for key in keys]
    best["tried"] = [int(tried.loc[key, "size"]) for key in keys]
    best["edge"] = [
        "yes" if lr in (tried.loc[key, "min"], tried.loc[key, "max"]) and tried.loc[key, "size"] > 1 else "no"
        for key, lr in zip(keys, best["lr"], strict=True)
    ]
    best["mark"] = ""
    columns = [
        Column(key="size", label="size"),
        Column(key="method", label="method"),
        Column(key="lr", label="best peak LR", kind="general"),
        *_means(grid),
        Column(key="near", label="not distinguishable"),
        Column(key="tried", label="rates tried", kind="integer"),
        Column(key="edge", label="at the edge of the grid"),
    ]
    return _table(
        "lr", "Each method at its own learning rate", grid, _by_size(best, runs), columns, "learning rate", dropped
    )


def _means(grid: Grid) -> list[Column]:
    interval = " [interval]" if grid.df > 0 else ""
    return [Column(key="mean", label=f"held-out loss{interval} (nats)", kind="estimate"),
            Column(key="n", label="runs", kind="integer")]  # fmt: skip


def _by_size(frame: pd.DataFrame, runs: pd.DataFrame) -> pd.DataFrame:
    """Rows by size, smallest first, the order within a size kept."""
    place = runs.groupby("size")["n_params"].median()
    order = frame["size"].map(place).astype(float)
    marked = frame.assign(mean_mark=frame["mark"]) if "mark" in frame else frame
    return marked.assign(size_sort=order).sort_values("size_sort", kind="stable").reset_index(drop=True)


def _table(
    name: str, title: str, grid: Grid, frame: pd.DataFrame, columns: Sequence[Column], axis: str, dropped: int
) -> Table:
    seeds = grid.frame["n"]
    counted = f"{int(seeds.min())}" if seeds.min() == seeds.max() else f"{int(seeds.min())} to {int(seeds.max())}"
    counted += " run" if counted == "1" else " runs"
    spread = (
        f"{digits.share(grid.level)} t intervals, spread of one run {grid.source}, {grid.df:g} degrees of freedom. "
        f"Bold: the best {axis}, apart from all others by more than the noise; = the best and what is not "
        "distinguishable from it."
        if grid.df > 0
        else f"no intervals, and no best {axis}: {grid.source}."
    )
    caption = f"Mean held-out loss at the last step, {counted} a cell; {spread}{dropped_text(dropped)}"
    return Table(name=name, title=title, caption=caption, columns=tuple(columns), frame=frame)
