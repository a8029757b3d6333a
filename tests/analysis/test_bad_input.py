"""Tables and options an analysis cannot use, or only with a warning: each has a name."""

from __future__ import annotations

import json

import numpy as np
import pandas as pd
import pytest

from scaling.analysis.backtest import backtest
from scaling.analysis.designs import noise_power
from scaling.analysis.fit import fit_law
from scaling.analysis.heads import learning_rate_robustness
from scaling.analysis.items import compare_items
from scaling.analysis.noise import noise_floor
from scaling.analysis.seeds import compare_seeds
from scaling.analysis.speedup import compare_speedup
from scaling.errors import FitError, TableError, UsageError
from tests.analysis.synthetic import codes, sweep, table


@pytest.mark.parametrize(
    ("value", "reason"),
    [(np.nan, "is missing"), (np.inf, "is infinite"), (-1.0, "is not positive"), (0.0, "is not positive")],
)
@pytest.mark.parametrize("column", ["loss", "C"])
def test_unusable_numbers_are_dropped_with_a_reason(column: str, value: float, reason: str) -> None:
    bad = table()
    bad.loc[3, column] = value
    result = fit_law(bad, form="power", interval="delta")
    assert [(d.row, d.reason) for d in result.dropped] == [(3, f"{column} {reason}")]
    assert "unusable-rows" in codes(result) and result.n == 29
    assert "1: " in result.checklist["dropped"]


def test_nothing_usable() -> None:
    with pytest.raises(TableError, match=r"no usable row of 30 \(loss is missing\)"):
        fit_law(table().assign(loss=np.nan), form="power")
    with pytest.raises(TableError, match="holds text where numbers are needed"):
        fit_law(table().assign(loss="low"), form="power")


def test_one_scale() -> None:
    with pytest.raises(TableError, match=r"C takes 1 distinct value \(C = 1e\+17 in every row\), needs 2 or more"):
        fit_law(table(scales=1), form="power")
    result = compare_speedup(table(scales=1), baseline="baseline")["new"]
    assert result.status == "refused" and codes(result) == {"too-few-scales"} and not result.estimate
    assert json.loads(result.to_json())["status"] == "refused"
    assert compare_seeds(table(scales=1), baseline="baseline")["new"].interval is not None


def test_too_few_points_for_the_law() -> None:
    with pytest.raises(FitError, match="power .* has 3 parameters, but the rows hold 2 distinct points"):
        fit_law(table(scales=2), form="power")


def test_zero_degrees_of_freedom() -> None:
    """Three points, three parameters: an exact fit has no interval and says so."""
    three = pd.DataFrame({"C": [1e18, 1e19, 1e20], "loss": [3.4, 3.15, 2.98]})
    result = fit_law(three, form="power")
    assert result.interval is None and not result.intervals and not result.standard_error
    assert result.df == 0 and result.status == "undetermined"
    assert "no-degrees-of-freedom" in codes(result)
    assert result.details["rows"]["residual"] == pytest.approx([0, 0, 0], abs=1e-9)


@pytest.mark.parametrize("kind", ["two-level", "parametric", "pairs", "cluster"])
@pytest.mark.filterwarnings("error")
def test_no_interval_from_refits_that_fail(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Six collinear points, five parameters, noise as large as the signal: said, without numpy's warnings."""
    hopeless = table(scales=6, seeds=1, sd=0.3).query("method == 'baseline'")
    result = fit_law(hopeless, interval=kind, draws=20)
    assert (result.interval is None) == ("refits-failed" in codes(result))
    monkeypatch.setattr("scaling.analysis.solver.MAX_ITERATIONS", 1)
    result = fit_law(hopeless, interval=kind, draws=20)
    assert result.interval is None and "refits-failed" in codes(result)
    text = next(w.message for w in result.warnings if w.code == "refits-failed")
    assert text.startswith(f"no {kind} interval: fewer than half of the refits converged")


def test_one_seed() -> None:
    single = table(seeds=1)
    speedup = compare_speedup(single, baseline="baseline")["new"]
    assert "one-seed" in codes(speedup) and speedup.interval is not None and "lack of fit" in speedup.interval.method
    assert compare_speedup(single, baseline="baseline", noise_sd=0.002)["new"].interval is not None
    seeds = compare_seeds(single, baseline="baseline")["new"]
    assert "one-seed" in codes(seeds) and seeds.interval is None
    with pytest.raises(FitError, match="no configuration .* has 2 or more runs; repeat"):
        noise_floor(single)
    nothing = compare_speedup(table(seeds=1, scales=3), baseline="baseline", asymptote="free", draws=0)["new"]
    assert "no-degrees-of-freedom" in codes(nothing) and nothing.interval is None


def test_duplicated_runs() -> None:
    hashed = table()
    hashed["curve_hash"] = [f"h{k}" for k in range(len(hashed))]
    hashed.loc[1, "curve_hash"] = "h0"
    result = noise_floor(hashed)
    assert [(d.row, d.reason) for d in result.dropped] == [(1, "duplicate: same curve hash")]
    copied = pd.concat([table(), table().iloc[[0]]])
    assert [d.reason for d in noise_floor(copied).dropped] == ["duplicate: every column equal"]
    assert "duplicated-runs" in codes(compare_speedup(copied, baseline="baseline", draws=0)["new"])


def test_unfinished_schedules_and_failed_runs() -> None:
    runs = table().assign(schedule_finished=True, status="done", run_key=[f"key{k}" for k in range(30)])
    runs.loc[0, "schedule_finished"] = False
    runs.loc[1, "status"] = "diverged"
    result = fit_law(runs, form="power", interval="delta")
    assert {(d.run, d.reason) for d in result.dropped} == {
        ("key0", "learning-rate schedule unfinished"),
        ("key1", "status is diverged"),
    }
    assert "unfinished-schedules" in codes(result)
    assert fit_law(runs, form="power", interval="delta", keep_unfinished=True).n == 29


def test_mixed_budgets_and_evaluation_sets() -> None:
    runs = table().assign(eval_fingerprint="a")
    runs.loc[runs["method"] == "new", "D"] *= 1.5
    runs.loc[0, "eval_fingerprint"] = "b"
    for result in (
        compare_speedup(runs, baseline="baseline", draws=0)["new"],
        compare_seeds(runs, baseline="baseline")["new"],
    ):
        assert {"mixed-token-budgets", "mixed-evaluation-sets"} <= codes(result)
        text = next(w.message for w in result.warnings if w.code == "mixed-token-budgets")
        assert "different numbers of tokens at s0 (1.50x), s1 (1.50x)" in text


def test_a_scale_drawn_out_by_neighbours_is_named_by_its_ends_and_cautioned_at_them() -> None:
    """Methods 5 % apart in tokens make one scale of all; the outermost pair differs by far more than that."""
    budgets = dict(zip(("base", "a", "b", "c", "d"), 1e9 * 1.05 ** np.arange(5), strict=True))
    noise = np.random.default_rng(1).normal(0, 0.001, size=15)
    rows = [
        (m, 3.0 + x, s, d)
        for x, ((m, d), s) in zip(noise, ((p, s) for p in budgets.items() for s in range(3)), strict=True)
    ]
    runs = pd.DataFrame(rows, columns=["method", "loss", "seed", "D"])
    found = compare_seeds(runs, baseline="base")
    for method, budget in budgets.items():
        if method == "base":
            continue
        result = found[method]
        (scale,) = [row["scale"] for row in result.details["scales"]]
        assert scale == "D=1e+09 to 1.216e+09"
        text = next(w.message for w in result.warnings if w.code == "mixed-token-budgets")
        assert f"({budget / 1e9:.2f}x)" in text
        assert result.details["scales"][0]["token_ratio"] == pytest.approx(budget / 1e9)


def test_too_few_pairs_say_so_instead_of_a_correlation() -> None:
    runs = table()
    two = runs[(runs["size"] == "s0") & (runs["seed"].isin(sorted(runs["seed"].unique())[:2]))]
    result = compare_seeds(two, baseline="baseline")["new"]
    text = next(w.message for w in result.warnings if w.code == "pairing-not-used")
    assert "nan" not in text and "cannot be measured (it takes 3 pairs" in text and "unpaired test is used" in text


def test_refusals_name_the_command_of_an_option_that_reports_lack() -> None:
    runs = table()
    two = runs[runs["size"].isin(["s0", "s1"])]
    refused = compare_speedup(two, baseline="baseline", draws=0)["new"]
    assert "give one with `scaling compare speedup --asymptote`" in refused.warnings[-1].message
    with pytest.raises(FitError, match=r"name the columns that define one with `scaling noise floor --by`"):
        noise_floor(runs.drop_duplicates(["method", "size"]))


def test_baseline_missing() -> None:
    with pytest.raises(TableError, match="method 'base' is not in the table; did you mean 'baseline'"):
        compare_speedup(table(), baseline="base")
    runs = table()
    runs = runs[~((runs["method"] == "baseline") & (runs["size"] == "s2"))]
    result = compare_speedup(runs, baseline="baseline", draws=0)["new"]
    assert "baseline-missing-at-scale" in codes(result)
    assert next(s for s in result.details["scales"] if s["scale"] == "s2")["loss_baseline"] is None
    assert "unmatched-scales" in codes(compare_seeds(runs, baseline="baseline")["new"])
    with pytest.raises(TableError, match="holds only the baseline"):
        compare_speedup(runs[runs["method"] == "baseline"], baseline="baseline")


def test_far_extrapolation() -> None:
    runs = sweep(np.random.default_rng(0), speedups={"new": 40.0}, decades=1.0, sd=0.0005)
    result = compare_speedup(runs, baseline="baseline", draws=0)["new"]
    assert {"extrapolated", "extrapolation-10x"} <= codes(result)


def test_below_the_asymptote() -> None:
    runs = table()
    runs.loc[runs["method"] == "new", "loss"] -= 1.5
    result = compare_speedup(runs, baseline="baseline", asymptote="free", draws=0)["new"]
    assert result.status == "refused" or "below-asymptote" in codes(result)
    assert "below-asymptote" in codes(result)


def test_baseline_that_does_not_fall() -> None:
    runs = table()
    runs.loc[runs["method"] == "baseline", "loss"] = 3.0 + 0.01 * np.arange(15)
    result = compare_speedup(runs, baseline="baseline")["new"]
    assert result.status == "refused" and "baseline-not-falling" in codes(result)


def test_currencies_are_not_mixed() -> None:
    with pytest.raises(UsageError, match="currency 'flop' is unknown; did you mean 'flops'"):
        compare_speedup(table(), baseline="baseline", currency="flop")
    with pytest.raises(TableError, match="column 'wall_time_s' missing"):
        compare_speedup(table(), baseline="baseline", currency="seconds")
    timed = table()
    timed["wall_time_s"] = timed["C"] / 1e15 * np.where(timed["method"] == "new", 2.0, 1.0)
    flops = compare_speedup(timed, baseline="baseline", draws=0)["new"]
    seconds = compare_speedup(timed, baseline="baseline", currency="seconds", draws=0)["new"]
    assert seconds.estimate["speedup"] == pytest.approx(flops.estimate["speedup"] / 2, rel=1e-4)
    assert (flops.conventions["currency"], seconds.conventions["currency"]) == ("flops", "seconds")


def test_trend_is_reported() -> None:
    runs = sweep(np.random.default_rng(0), sd=0.0005)
    new = runs["method"] == "new"
    runs.loc[new, "loss"] -= 0.01 * np.log10(runs.loc[new, "C"] / 1e17)
    result = compare_speedup(runs, baseline="baseline", draws=0)["new"]
    assert "trend" in codes(result) and result.estimate["trend_per_decade"] > 0


def test_backtest_needs_room() -> None:
    with pytest.raises(FitError, match="no cut leaves more distinct points than the 3 parameters"):
        backtest(table(scales=3), form="power")
    result = backtest(table(scales=7), form="power", loss="l2")
    factors = [p["factor"] for p in result.details["predictions"]]
    assert min(factors) > 1 and result.estimate["median_error"] < 0.02
    assert result.details["by_factor"][0]["n"] > 0


def test_options_out_of_range() -> None:
    for options, message in (
        ({"form": "chinchila"}, "did you mean 'chinchilla'"),
        ({"loss": "mse"}, "loss 'mse' is unknown"),
        ({"delta": -1.0}, "delta must be a positive number"),
        ({"residual": "sqrt"}, "allowed: log, raw"),
        ({"interval": "boot"}, "interval 'boot' is unknown"),
        ({"share": "everything"}, "share 'everything' is unknown"),
        ({"level": 95.0}, "level must lie between 0 and 1"),
    ):
        with pytest.raises(UsageError, match=message):
            fit_law(table(), **{"form": "power", **options})  # type: ignore[arg-type]
    with pytest.raises(UsageError, match="sd must be positive"):
        noise_power(sd=0.0)
    with pytest.raises(UsageError, match="rho must lie between"):
        noise_power(sd=0.001, rho=1.5)
    with pytest.raises(UsageError, match="pairing 'yes' is unknown"):
        compare_seeds(table(), baseline="baseline", pairing="yes")


def test_given_noise_leaves_pairs_unused_for_its_own_reason() -> None:
    paired = sweep(np.random.default_rng(0), rho=0.95)
    result = compare_seeds(paired, baseline="baseline", noise_sd=0.002)["new"]
    text = next(w.message for w in result.warnings if w.code == "pairing-not-used")
    assert "the given noise is of single runs" in text


def test_items() -> None:
    with pytest.raises(UsageError, match="give a table, or both counts"):
        compare_items()
    rows = [(i, m, int((i + k) % 3 == 0), i // 5) for k, m in enumerate(("base", "new")) for i in range(30)]
    items = pd.DataFrame(rows, columns=["item", "method", "correct", "cluster"])
    result = compare_items(items, baseline="base")["new"]
    assert "clustered-items" in codes(result) and result.details["p"] == result.details["cluster_sign_flip_p"]
    with pytest.raises(TableError, match="item 0 of 'base' occurs twice"):
        compare_items(pd.concat([items, items.iloc[[0]]]), baseline="base")
    with pytest.raises(TableError, match="must hold 0 and 1"):
        compare_items(items.assign(correct=0.5), baseline="base")


@pytest.mark.parametrize("known", [["N", "D", "C"], ["C"], []], ids=["parameters", "compute", "names alone"])
def test_sizes_are_listed_smallest_first(known: list[str]) -> None:
    """Not 12k, 25k, 50k, 6k, in whatever order the runs come."""
    names = {"s0": "6k", "s1": "12k", "s2": "25k", "s3": "50k", "s4": "0.1M"}
    runs = table().assign(size=lambda t: t["size"].map(names)).sample(frac=1, random_state=0)
    runs["lr"] = np.tile(np.geomspace(1e-4, 1e-2, 3), 10)
    bare = runs[[*known, "method", "size", "seed", "loss"]]
    result = compare_seeds(bare, baseline="baseline")["new"]
    assert [row["scale"] for row in result.details["scales"]] == list(names.values())
    assert list(result.estimate) == ["delta", *(f"delta[{size}]" for size in names.values())]
    floor = noise_floor(bare, by=["method", "size"])
    sizes = [row["configuration"]["size"] for row in floor.details["configurations"]]
    assert sizes == [size for size in names.values() for _ in range(2)]
    some = bare[~((bare["method"] == "new") & bare["size"].isin(["6k", "12k"]))]
    text = next(w.message for w in compare_seeds(some, baseline="baseline")["new"].warnings if "left out" in w.message)
    assert text.endswith("6k, 12k")
    rates = learning_rate_robustness(runs[[*known, "method", "size", "lr", "loss"]], baseline="baseline", noise_sd=0.01)
    assert [row["size"] for row in rates["new"].details["rows"]] == list(names.values())


def test_three_seeds_say_what_they_can_show() -> None:
    result = compare_seeds(table(), baseline="baseline")["new"]
    text = next(w.message for w in result.warnings if w.code == "few-seeds")
    assert "sign-flip p at one scale is 0.25" in text and "3.26 SDs" in text
    assert result.details["mixed_model"]["fitted"] is True
