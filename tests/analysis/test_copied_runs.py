"""Cells whose runs have equal losses beside cells that vary: each counts as one run, wherever noise is pooled."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scaling.analysis.band import pair_curves
from scaling.analysis.cells import make_cells
from scaling.analysis.fit import fit_law
from scaling.analysis.noise import noise_floor
from scaling.analysis.result import Result
from scaling.analysis.seeds import compare_seeds
from scaling.analysis.speedup import compare_speedup
from tests.analysis.synthetic import codes, sweep

WHERE = {"one arm": ("new", None), "one arm at one scale": ("new", ["s1"]), "both arms at one scale": (None, ["s1"])}


def copied(method: str | None, scales: list[str] | None) -> tuple[pd.DataFrame, pd.DataFrame]:
    """A sweep where all runs of some cells have the loss of the first seed, and the same with that run alone."""
    runs = sweep(np.random.default_rng(0), rho=0.5)
    chosen = runs["method"].isin([method] if method else ["baseline", "new"]) & (
        runs["size"].isin(scales or set(runs["size"]))
    )
    first = runs.groupby(["method", "size"])["loss"].transform("first")
    return runs.assign(loss=runs["loss"].mask(chosen, first)), runs[~chosen | runs["seed"].eq(0)]


def told(result: Result) -> str:
    (message,) = (caution.message for caution in result.warnings if caution.code == "copied-runs")
    assert "\n" not in message and message.endswith("check the runs' seeds, then train with others")
    return message


def bounds(result: Result) -> dict[str, float]:
    assert result.interval is not None
    ends = {"low": result.interval.low, "high": result.interval.high}
    return {f"{name} {end}": value for end, values in ends.items() for name, value in values.items()}


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("pairing", ["auto", "unpaired", "paired"])
def test_copies_add_nothing_to_a_comparison_of_seeds(where: str, pairing: str) -> None:
    """Counted as runs they lent the pooled SD degrees of freedom without a spread."""
    many, once = (compare_seeds(t, baseline="baseline", pairing=pairing)["new"] for t in copied(*WHERE[where]))
    if pairing == "paired" and where == "one arm":
        assert many.interval is once.interval is None and "one-seed" in codes(many)
        return
    assert bounds(many) == pytest.approx(bounds(once)) and many.df == once.df
    assert many.estimate == pytest.approx(once.estimate)
    assert many.details["pooled_sd"]["df"] == once.details["pooled_sd"]["df"]
    assert many.details["sign_flip"] == pytest.approx(once.details["sign_flip"])
    assert many.n == 30 and "copied-runs" not in codes(once)


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("noise_sd", [None, 0.002])
def test_copies_add_nothing_to_a_speedup(where: str, noise_sd: float | None) -> None:
    many, once = (
        compare_speedup(t, baseline="baseline", draws=50, noise_sd=noise_sd)["new"] for t in copied(*WHERE[where])
    )
    assert bounds(many) == pytest.approx(bounds(once)) and many.df == once.df
    assert many.intervals["two-level"].low == pytest.approx(once.intervals["two-level"].low)
    ends = [[(row["low"], row["high"]) for row in result.details["scales"]] for result in (many, once)]
    assert np.array(ends[0]) == pytest.approx(np.array(ends[1]))
    assert many.n == 30 and "copied-runs" in codes(many) and "copied-runs" not in codes(once)


def test_the_caution_names_the_cells_and_what_to_do() -> None:
    runs, _ = copied("new", ["s1", "s3"])
    for compare in (compare_seeds, compare_speedup):
        text = told(compare(runs, baseline="baseline")["new"])
        assert text.startswith("runs that differ by seed have equal losses (new at s1, s3): copies of one run, or")
    both, _ = copied(None, ["s1"])
    texts = {told(compare(both, baseline="baseline")["new"]) for compare in (compare_seeds, compare_speedup)}
    assert len(texts) == 1 and "(baseline at s1; new at s1)" in texts.pop()  # a summary says it once
    every, _ = copied(None, None)
    assert "copied-runs" not in codes(compare_seeds(every, baseline="baseline")["new"])  # identical-losses says it


def test_pairs_without_a_spread_of_their_own_say_why_there_is_no_interval() -> None:
    runs, _ = copied("new", None)
    result = compare_seeds(runs, baseline="baseline", pairing="paired")["new"]
    (text,) = (caution.message for caution in result.warnings if caution.code == "one-seed")
    assert "no scale has two pairs of runs that are no copies" in text and text.endswith("use pairing unpaired")


def test_the_band_of_a_law_counts_them_as_its_speedup_does() -> None:
    options = {"shared": True, "sd": 0.002, "df": 10.0, "level": 0.95}
    curves = []
    for runs in copied("new", None):
        cells = make_cells(runs, cost="C")
        pair = pair_curves(list(cells["baseline"].values()), list(cells["new"].values()), **options)  # type: ignore[arg-type]
        curves.append(pair[1])
    many, once = curves
    assert many is not None and once is not None
    assert many.low == pytest.approx(once.low) and many.high == pytest.approx(once.high)


def test_the_noise_floor_leaves_them_out() -> None:
    runs, once = copied("new", None)
    many, bare = noise_floor(runs), noise_floor(once)
    assert many.estimate == pytest.approx(bare.estimate) and many.df == bare.df == 10 and many.n == bare.n == 15
    (text,) = (caution.message for caution in many.warnings if caution.code == "identical-losses")
    assert text.startswith("5 of 10 configurations have runs with equal losses") and "left out of the SD" in text


@pytest.mark.parametrize("where", WHERE)
@pytest.mark.parametrize("interval", ["delta", "two-level", "parametric", "pairs"])
def test_copies_add_nothing_to_a_law(where: str, interval: str) -> None:
    """Neither to its estimate nor to its intervals; the caution says how many there are."""
    many, once = (fit_law(t, form="power", by="method", interval=interval, draws=40) for t in copied(*WHERE[where]))
    assert many.estimate == pytest.approx(once.estimate) and many.df == once.df
    assert bounds(many) == pytest.approx(bounds(once))
    (message,) = (caution.message for caution in many.warnings if caution.code == "copied-rows")
    assert f"each counts as one run, {many_rows(where)} rows fewer; check the runs' seeds" in message
    assert many.n == once.n and not many.dropped  # as in comparisons: a run that counts once is not left out
    assert "copied-rows" not in codes(once)


def many_rows(where: str) -> int:
    full, alone = copied(*WHERE[where])
    return len(full) - len(alone)
