"""Which runs a comparison may put together: methods told apart by their options, sizes by what was varied at them.

After ``schema``, before ``inquiry``: a sweep over head counts, streams, key-value heads or learning rates holds runs of
one method at one size that are not repeats of each other. Tables of one axis (``grids``) read the runs as they are;
comparisons of methods read them through here.
"""

from __future__ import annotations

import re
from typing import Final

import pandas as pd

CONDITIONS: Final = {"kv": "KV={:g}", "lr": "lr={:g}"}  # what every method of a size can be given alike


NEEDED: Final = frozenset({"method", "size", "heads", "variant", "kv", "lr", "val_loss", "n_params_non_embedding"})


def told_apart(table: pd.DataFrame, *, best_rate: bool = False) -> pd.DataFrame:
    """A tidy table of runs as comparisons read it; tables of other tools, which lack its columns, as they are.

    Parameters
    ----------
    table
        Runs.
    best_rate
        Keep each method's best learning rate only (for laws), instead of comparing at every rate.
    """
    if not NEEDED <= set(table.columns):
        return table
    named = by_option(table)
    return by_condition(at_best_rate(named) if best_rate else named)


def by_option(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with ``method`` naming the options too, where a size holds runs of one method with several of them.

    ``mhar`` becomes ``mhar H=1``, ``mhar H=8``...; ``msar`` stays where it has its default options, beside
    ``msar streams=2``. A method that was run one way at each size keeps its name.
    """
    size = _sizes(runs)
    heads = runs["heads"].astype("Float64")
    variant = runs["variant"].fillna("").astype(str)
    method = runs["method"].astype("string")
    named = method
    for options, text in ((heads.fillna(0), heads.map(lambda h: "" if pd.isna(h) else f"H={h:g}")), (variant, variant)):
        counted = options.groupby([method, size], dropna=False).nunique()
        several = set(counted.index.get_level_values(0)[counted > 1])
        told = method.isin(several) & (text != "")
        named = named.mask(told, named + " " + text.astype("string"))
    return runs.assign(method=named.astype(runs["method"].dtype))


def by_condition(runs: pd.DataFrame) -> pd.DataFrame:
    """The runs with ``size`` naming key-value heads and learning rate, where methods share several at one size.

    Only values that two methods have count: rates drawn at random for each run are no grid to compare at.
    """
    if runs["method"].nunique() < 2:
        return runs
    named = runs["size"].astype("string")
    for column, text in CONDITIONS.items():
        known = runs.dropna(subset=[column, "size"])
        by = known.groupby(["size", column])["method"].nunique()
        shared = by[by > 1].reset_index().groupby("size")[column].nunique()
        gridded = runs["size"].isin(list(shared.index[shared > 1])) & runs[column].notna()
        label = runs[column].map(lambda value, text=text: "" if pd.isna(value) else " " + text.format(float(value)))
        named = named.mask(gridded, named + label.astype("string"))
    return runs.assign(size=named.astype(runs["size"].dtype))


def at_best_rate(runs: pd.DataFrame) -> pd.DataFrame:
    """Of each method, size and number of key-value heads the runs at the learning rate with the least mean loss.

    Where no cell has several rates, the table itself. Runs without a rate stay.
    """
    keys = [runs["method"].astype("string"), _sizes(runs), runs["kv"].astype("Float64").fillna(0)]
    rate = runs["lr"].astype(float)
    if rate.groupby(keys, dropna=False).nunique().max() < 2:
        return runs
    mean = runs["val_loss"].astype(float).groupby([*keys, rate], dropna=False).transform("mean")
    least = mean.groupby(keys, dropna=False).transform("min")
    return runs[rate.isna() | (mean == least) | mean.isna()]


def natural(name: str) -> tuple[tuple[int, float, str], ...]:
    """Sort key of names in which numbers count as numbers.

    >>> sorted(["mhar H=16", "mhar H=2", "attnres"], key=natural)
    ['attnres', 'mhar H=2', 'mhar H=16']
    """
    pieces = re.split(r"(\d+(?:\.\d+)?)", name)
    return tuple((0, float(piece), "") if piece[:1].isdigit() else (1, 0.0, piece) for piece in pieces)


def _sizes(runs: pd.DataFrame) -> pd.Series:
    """What tells sizes apart: their names, else parameters."""
    parameters = runs["n_params_non_embedding"].astype("string").fillna("")
    return runs["size"].astype("string").fillna(parameters)
