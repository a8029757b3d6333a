"""Comparisons never mix runs of one method with different options, nor rates and head counts of one size."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from typer.testing import CliRunner

from scaling.analysis.arms import at_best_rate, by_condition, by_option, told_apart
from scaling.analysis.whole import complete
from scaling.cli.main import app


def varied(planted: ModuleType, column: str, values: tuple[object, ...], *, only: str | None = None) -> pd.DataFrame:
    """A sweep of two methods in which a column takes several values (for one method, or for both)."""
    base: pd.DataFrame = planted.table(sizes=2, seeds=2)
    moved = base if only is None else base[base["method"] == only]
    rest = base.iloc[:0] if only is None else base[base["method"] != only]
    parts = []
    for value in values:
        filled = pd.Series([value] * len(moved), index=moved.index)
        parts.append(moved.assign(run_key=moved["run_key"] + str(value), **{column: filled}))
    return complete(pd.concat([rest, *parts], ignore_index=True))


def test_head_counts_and_options_become_methods_of_their_own(planted: ModuleType) -> None:
    heads = by_option(varied(planted, "heads", (1, 8), only="mhar"))
    assert set(heads["method"]) == {"baseline", "mhar H=1", "mhar H=8"}
    options = by_option(varied(planted, "variant", (pd.NA, "streams=2"), only="mhar"))
    assert set(options["method"]) == {"baseline", "mhar", "mhar streams=2"}


def test_a_method_run_one_way_at_each_size_keeps_its_name(planted: ModuleType) -> None:
    runs = complete(planted.table(sizes=2))
    small = runs["size"] == runs["size"].iloc[0]
    runs["heads"] = runs["heads"].mask(small & runs["heads"].notna(), 4)
    assert set(by_option(runs)["method"]) == {"baseline", "mhar"}


@pytest.mark.parametrize(("column", "values", "told"), [("kv", (1, 4), " KV=4"), ("lr", (1e-3, 2e-3), " lr=0.002")])
def test_what_all_methods_vary_is_a_condition(
    planted: ModuleType, column: str, values: tuple[object, ...], told: str
) -> None:
    runs = by_condition(varied(planted, column, values))
    assert {size for size in runs["size"] if size.endswith(told)} and runs["size"].nunique() == 4


def test_rates_of_single_runs_are_no_grid(planted: ModuleType) -> None:
    runs = complete(planted.table(sizes=1, seeds=3))
    runs["lr"] = [1e-3 * (1 + i) for i in range(len(runs))]
    assert by_condition(runs)["size"].nunique() == 1


def test_laws_see_each_method_at_its_best_rate(planted: ModuleType) -> None:
    runs = varied(planted, "lr", (5e-4, 1e-3))
    best = {"baseline": 5e-4, "mhar": 1e-3}
    runs["val_loss"] += [0.1 * (lr != best[method]) for lr, method in zip(runs["lr"], runs["method"], strict=True)]
    kept = at_best_rate(runs)
    assert kept.groupby("method")["lr"].unique().map(list).to_dict() == {"baseline": [5e-4], "mhar": [1e-3]}
    one = runs[runs["lr"] == 5e-4]
    assert len(at_best_rate(one)) == len(one)


@pytest.mark.parametrize("command", ["speedup", "seeds"])
def test_commands_compare_options_apart(planted: ModuleType, tmp_path: Path, command: str) -> None:
    table = tmp_path / "runs.parquet"
    runs = varied(planted, "heads", (1, 8), only="mhar")
    runs.assign(curve_hash=runs["run_key"]).to_parquet(table)  # a copy of a run would be left out
    words = ["compare", command, "--runs", str(table), "--baseline", "baseline", "--json"]
    assert set(json.loads(CliRunner().invoke(app, words).stdout)) == {"mhar H=1", "mhar H=8"}


def test_tables_of_other_tools_stay_as_they_are(planted: ModuleType) -> None:
    foreign = varied(planted, "heads", (1, 8), only="mhar").drop(columns="variant")
    assert told_apart(foreign) is foreign
