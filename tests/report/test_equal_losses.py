"""Runs that differ by seed and have equal losses measure no noise: no interval of width 0, nothing bold, and why."""

from __future__ import annotations

from types import ModuleType

import numpy as np
import pandas as pd
import pytest

from scaling.analysis import catalog
from scaling.analysis.findings import Findings
from scaling.analysis.fit import fit_law
from scaling.analysis.grids import gather
from scaling.analysis.inquiry import inquire
from scaling.analysis.summary import summarize
from scaling.analysis.tables import ablations, render
from scaling.errors import TableError

EQUAL = "runs that differ by seed have equal losses"
CELL = "runs of a cell have equal losses (copies of one run, or seeds that change nothing), which measures no noise"


@pytest.fixture(scope="module")
def found(planted: ModuleType) -> Findings:
    """A sweep of three seeds of which only the names differ."""
    return inquire(off_the_law(planted.table(seeds=3, sigma=0.0)))


def off_the_law(runs: pd.DataFrame) -> pd.DataFrame:
    """By more than rounding, alike for all seeds."""
    return runs.assign(val_loss=runs["val_loss"] + 0.002 * np.sign(np.sin(1.7 * np.log(runs["flops"].astype(float)))))


def test_no_table_has_an_interval_of_width_nought_or_a_best(found: Findings) -> None:
    seen = set()
    for name in catalog.TABLES:
        try:
            table = catalog.table(found, name)
        except TableError:
            continue
        seen.add(name)
        for column in table.columns:
            if f"{column.key}_low" in table.frame and name != "published":
                width = (table.frame[f"{column.key}_high"] - table.frame[f"{column.key}_low"]).astype(float).dropna()
                assert (width > 1e-9).all(), f"{name}: {column.key}"
        assert name == "published" or not any(cell.mark for row in table.rows() for cell in row), name
    assert {"main", "seed-deltas", "speedups", "intervals", "noise"} <= seen


def test_a_law_that_goes_through_every_run_has_no_kinds_of_interval(planted: ModuleType) -> None:
    with pytest.raises(TableError):
        catalog.table(inquire(planted.table(seeds=3, sigma=0.0)), "intervals")


def test_captions_say_why_there_is_none(found: Findings) -> None:
    main, deltas, speedups = (catalog.table(found, name) for name in ("main", "seed-deltas", "speedups"))
    assert f"no intervals, and no best method: {CELL}." in main.caption and "Bold" not in main.caption
    assert [column.label for column in main.columns][2] == "held-out loss (nats)"
    assert f"; no interval: {EQUAL}. Negative is better" in deltas.caption and "t interval" not in deltas.caption
    assert set(deltas.frame["verdict"]) == {"no interval"} and set(deltas.frame["test"]) == {"none"}
    assert not {"p", "smallest_p", "rho"} & {column.key for column in deltas.columns}
    assert "no intervals, and no best" in speedups.caption and "Bold" not in speedups.caption
    assert speedups.frame["verdict"].tolist() == [f"no interval: {EQUAL}"]
    told = {name: catalog.picture(found, name).caption for name in ("seed-deltas", "speedup-by-scale")}
    assert f"no intervals: {EQUAL}." in told["seed-deltas"] and "bars are" not in told["seed-deltas"]
    assert f"no intervals ({EQUAL})." in told["speedup-by-scale"]
    assert "bands" not in catalog.picture(found, "scaling-curves").caption
    unknown = " ".join(summarize(found).not_shown)
    assert f"without an interval, since {EQUAL}." in unknown and f"there is no interval, since {EQUAL}." in unknown


def test_effects_are_not_set_against_a_noise_that_is_unknown(planted: ModuleType) -> None:
    runs = planted.table(seeds=3, sigma=0.0).assign(val_loss_se=np.nan)
    with pytest.raises(TableError):
        catalog.picture(inquire(runs), "noise-floor")


def test_a_given_spread_is_used_and_seeds_that_vary_are_as_before(planted: ModuleType) -> None:
    equal, varied = planted.table(seeds=3, sigma=0.0), planted.table(seeds=3)
    bare = gather(equal, ["size", "method"], within=["size"])
    assert bare.df == 0 and bare.source == CELL and bare.frame["mean_low"].isna().all()
    assert set(bare.frame["mark"]) == {""}
    given = gather(equal, ["size", "method"], within=["size"], sd=0.002)
    assert given.source == "given" and (given.frame["mean_low"] < given.frame["mean"]).all()
    assert "Bold: the best method" in ablations.main(equal, baseline="baseline", sd=0.002).caption
    table = ablations.main(varied, baseline="baseline")
    assert "[interval]" in table.columns[2].label and "**" in render.markdown(table)
    one = ablations.main(equal[equal["seed"] == 0], baseline="baseline")
    assert "no intervals, and no best method: one run a cell and no known noise." in one.caption


def test_a_law_makes_no_interval_of_noise_that_was_not_measured(planted: ModuleType) -> None:
    runs = off_the_law(planted.table(sizes=5, methods=("baseline",), seeds=3, sigma=0.0))
    options = {"form": "power", "loss": "l2", "draws": 40}
    every = fit_law(runs, interval="all", **options)  # type: ignore[arg-type]
    assert {"delta", "cluster", "pairs"} <= set(every.intervals)
    assert not {"two-level", "parametric"} & set(every.intervals)
    asked = fit_law(runs, interval="two-level", **options)  # type: ignore[arg-type]
    assert asked.interval is None
    for result in (every, asked):
        told = {caution.code: caution.message for caution in result.warnings}
        assert EQUAL in told["identical-losses"] and not {"refits-failed", "few-clusters"} & set(told)


def test_copies_beside_cells_that_vary_count_as_one_run(planted: ModuleType) -> None:
    """Their degrees of freedom hold no spread; the table still says how many runs there are."""
    runs = planted.table(seeds=3)
    copied = runs["method"].eq("mhar")
    first = runs.groupby(["method", "size"])["val_loss"].transform("first")
    runs = runs.assign(val_loss=runs["val_loss"].mask(copied, first))
    many, once = (gather(t, ["size", "method"], within=["size"]) for t in (runs, runs[~copied | runs["seed"].eq(0)]))
    assert many.sd == pytest.approx(once.sd) and many.df == once.df and set(many.frame["n"]) == {3}
    columns = ["mean_low", "mean_high", "gap"]
    assert many.frame[columns].to_numpy() == pytest.approx(once.frame[columns].to_numpy())
    assert many.frame["mark"].tolist() == once.frame["mark"].tolist()
    caption = ablations.main(runs, baseline="baseline").caption
    assert "pooled over cells (4 of 8 count as one run each: their runs have equal losses" in caption
    assert "count as one run" not in ablations.main(planted.table(seeds=3), baseline="baseline").caption
    needed = [line for line in summarize(inquire(runs)).needed if "equal losses" in line]
    assert len(needed) == 1 and needed[0].startswith("Runs that differ by seed have equal losses (mhar at 0.05m, ")
