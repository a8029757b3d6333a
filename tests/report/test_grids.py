"""Grids of ablations: tie sets hold the truth, single heads count as H=1, a given spread is used where needed."""

from __future__ import annotations

import math
from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from scaling.analysis.grids import gather, with_single_head
from scaling.analysis.tables import ablations, render
from scaling.errors import TableError

OPTIMUM = {1: 0.03, 2: 0.01, 4: 0.0, 8: 0.0, 16: 0.03}


@pytest.fixture
def heads(planted: ModuleType) -> pd.DataFrame:
    return grid(planted, seeds=4)


def grid(planted: ModuleType, *, seeds: int, kvs: tuple[int, ...] = (1, 4)) -> pd.DataFrame:
    base: pd.DataFrame = planted.table(sizes=2, methods=("mhar",), seeds=1)
    rng = np.random.default_rng(6)
    parts = []
    for count, above in OPTIMUM.items():
        for kv in kvs:
            for seed in range(seeds):
                part = base.assign(heads=count, kv=kv, seed=seed, run_key=base["run_key"] + f"{count}-{kv}-{seed}")
                parts.append(part.assign(val_loss=part["val_loss"] + above + rng.normal(0, 0.002, len(part))))
    return pd.concat(parts, ignore_index=True)


def test_the_tie_set_holds_the_planted_optimum_and_not_the_far_ends(heads: pd.DataFrame) -> None:
    found = gather(heads, ["size", "heads"], within=["size"]).frame
    for _, part in found.groupby("size"):
        tied = set(part[part["mark"] != ""]["heads"])
        assert {4, 8} <= tied and not tied & {1, 16}


def test_means_are_plain_means_and_the_spread_is_pooled(heads: pd.DataFrame) -> None:
    found = gather(heads, ["size", "kv", "heads"])
    cells = heads.groupby(["size", "kv", "heads"])["val_loss"]
    assert found.frame["mean"].to_numpy() == pytest.approx(cells.mean().to_numpy(), rel=1e-12)
    assert found.sd == pytest.approx(math.sqrt(float(cells.var(ddof=1).mean())), rel=1e-9)
    assert found.df == 2 * 2 * 5 * 3


def test_one_run_a_cell_has_no_interval_unless_a_spread_is_given(planted: ModuleType) -> None:
    runs = grid(planted, seeds=1, kvs=(1,))
    bare = gather(runs, ["size", "heads"], within=["size"])
    assert bare.df == 0 and bare.frame["mean_low"].isna().all() and set(bare.frame["mark"]) == {""}
    given = gather(runs, ["size", "heads"], within=["size"], sd=0.002)
    assert given.source == "given" and given.frame["mean_low"].notna().all() and set(given.frame["mark"]) != {""}


def test_attention_residuals_count_as_one_head(planted: ModuleType) -> None:
    runs = planted.table(methods=("baseline", "attnres", "mhar"))
    routed = with_single_head(runs)
    assert sorted(set(routed["heads"])) == [1, 8] and set(routed["method"]) == {"mhar"}


def test_a_grid_without_its_axis_is_refused(planted: ModuleType) -> None:
    with pytest.raises(TableError, match="no run has a finite val_loss and all of size, heads"):
        gather(planted.table(methods=("baseline",)), ["size", "heads"])


def test_the_h_by_kv_table_marks_each_row_s_optimum(heads: pd.DataFrame) -> None:
    text = render.markdown(ablations.heads_by_kv(heads))
    rows = [line for line in text.splitlines() if line.startswith("| 0.")]
    assert len(rows) == 4
    assert all("(=)" in row or "**" in row for row in rows)
    header = next(line for line in text.splitlines() if "KV" in line and line.startswith("|"))
    assert [f"H={count}" in header for count in OPTIMUM] == [True] * 5


def test_each_method_stands_at_its_own_best_rate(planted: ModuleType) -> None:
    runs = planted.table(seeds=3)
    parts = []
    for rate in (5e-4, 1e-3, 2e-3):
        best = {"baseline": 5e-4, "mhar": 1e-3}
        extra = runs["method"].map(best).map(lambda own, rate=rate: 0.1 * math.log(rate / own) ** 2)
        parts.append(runs.assign(lr=rate, val_loss=runs["val_loss"] + extra, run_key=runs["run_key"] + f"{rate}"))
    table = ablations.learning_rates(pd.concat(parts, ignore_index=True)).frame
    assert set(table[table["method"] == "baseline"]["lr"]) == {5e-4} and set(table["edge"][table["lr"] == 5e-4]) == {
        "yes"
    }
    assert set(table[table["method"] == "mhar"]["lr"]) == {1e-3} and set(table["edge"][table["lr"] == 1e-3]) == {"no"}


def test_methods_without_sizes_are_compared_at_scales(planted: ModuleType) -> None:
    """The spread between model sizes is no spread of a run: with it no method was apart from another."""
    sized = ablations.main(planted.table(seeds=3), baseline="baseline")
    table = ablations.main(planted.table(seeds=3).assign(size=pd.NA), baseline="baseline")
    columns = ["mean", "mean_low", "mean_high", "n", "delta"]
    assert table.frame[columns].to_numpy() == pytest.approx(sized.frame[columns].to_numpy())
    assert table.frame["mean_mark"].tolist() == sized.frame["mean_mark"].tolist()
    assert table.caption == sized.caption and table.title == "Methods by scale"
    assert table.columns[0].label == "scale" and table.frame["size"].tolist()[:3] == ["N=5e+04"] * 2 + ["N=1.581e+05"]


def test_equal_losses_without_sizes_have_no_interval(planted: ModuleType) -> None:
    runs = planted.table(seeds=3, sigma=0.0).assign(size=pd.NA)
    table = ablations.main(runs, baseline="baseline")
    assert table.frame["mean_low"].isna().all() and "no intervals, and no best method" in table.caption


def test_methods_of_which_no_two_runs_share_a_scale_have_means_alone(planted: ModuleType) -> None:
    runs = planted.table(sizes=6, seeds=1).assign(size=pd.NA)
    each = runs[[(place // 2 + place) % 2 == 0 for place in range(len(runs))]]  # the methods take turns
    for sd in (None, 0.002):
        table = ablations.main(each, baseline="baseline", sd=sd)
        assert table.frame["n"].tolist() == [3, 3] and table.frame["mean_low"].isna().all()
        assert not table.frame["mean_mark"].any() and "size" not in {column.key for column in table.columns}
        assert "no intervals, and no best method: no two runs are of one scale." in table.caption


def test_methods_at_one_scale_stand_without_it(planted: ModuleType) -> None:
    table = ablations.main(planted.table(sizes=1, seeds=3).assign(size=pd.NA), baseline="baseline")
    assert table.title == "Methods" and [column.key for column in table.columns][0] == "method"
    assert table.frame["mean_low"].notna().all()
