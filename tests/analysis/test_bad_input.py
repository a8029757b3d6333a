"""Tables an analysis cannot use, or only with a warning: each has a name."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scaling.analysis.backtest import backtest
from scaling.analysis.columns import filter_rows, load_table, map_columns
from scaling.analysis.designs import noise_power
from scaling.analysis.fit import fit_law
from scaling.analysis.frontier import compute_frontier
from scaling.analysis.heads import head_optimum, learning_rate_robustness, width_contrast
from scaling.analysis.isoflop import fit_isoflop
from scaling.analysis.items import compare_items
from scaling.analysis.noise import noise_floor
from scaling.analysis.result import Result
from scaling.analysis.seeds import compare_seeds
from scaling.analysis.speedup import compare_speedup
from scaling.cli.main import main
from scaling.errors import FitError, TableError, UsageError
from tests.analysis.synthetic import sweep
from tests.analysis.test_laws_properties import grid


def codes(result: Result) -> set[str]:
    return {w.code for w in result.warnings}


def table(**options: float) -> pd.DataFrame:
    return sweep(np.random.default_rng(0), **options)  # type: ignore[arg-type]


def test_missing_columns_are_listed() -> None:
    with pytest.raises(TableError, match="column 'D' missing; the table has: N, loss; map it with --columns D="):
        fit_law(pd.DataFrame({"N": [1.0, 2.0], "loss": [3.0, 2.0]}))


def test_misnamed_column_says_what_is_meant() -> None:
    with pytest.raises(TableError, match="column 'Model Sise' is not in the table; did you mean 'Model Size'"):
        map_columns(pd.DataFrame({"Model Size": [1.0]}), "N=Model Sise")


def test_expressions() -> None:
    raw = pd.DataFrame({"Model Size": [10.0], "Training FLOP": [600.0], "loss": [3.0]})
    mapped = map_columns(raw, "N=Model Size,C=Training FLOP,D=C/(6*N)")
    assert mapped["D"].tolist() == [10.0]
    assert map_columns(raw, "N=2*Model Size**2")["N"].tolist() == [200.0]
    assert len(filter_rows(mapped, ["loss<4.9", "N>=10 and C<1e3"])) == 1


@pytest.mark.parametrize(
    "text", ["N=__import__('os').system('true')", "N=loss.values", "N=[1]", "N=loss[0]", "N=f(loss)"]
)
def test_only_arithmetic_is_evaluated(text: str) -> None:
    with pytest.raises((UsageError, TableError), match="not allowed|cannot parse|is not in the table"):
        map_columns(pd.DataFrame({"loss": [3.0]}), text)


@pytest.mark.parametrize(
    ("text", "message"), [("N", "is not NAME=COLUMN"), ("N=(1+", "cannot parse"), ("=x", "is not NAME=COLUMN")]
)
def test_mapping_that_cannot_be_parsed(text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        map_columns(pd.DataFrame({"loss": [3.0]}), text)


def test_filters() -> None:
    with pytest.raises(TableError, match="leaves no row of 1"):
        filter_rows(pd.DataFrame({"loss": [3.0]}), "loss<1")
    with pytest.raises(UsageError, match="is not a comparison"):
        filter_rows(pd.DataFrame({"loss": [3.0]}), "loss+1")


def test_files(tmp_path: Path) -> None:
    with pytest.raises(TableError, match="no such file"):
        load_table(tmp_path / "absent.csv")
    (tmp_path / "runs.txt").write_text("x")
    with pytest.raises(TableError, match=r"unknown kind of table '.txt'; allowed: .parquet, .csv"):
        load_table(tmp_path / "runs.txt")
    table().to_parquet(tmp_path / "runs.parquet")
    assert len(load_table(tmp_path / "runs.parquet")) == 30


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


ARMS = ("--baseline", "baseline")
NONSENSE = [
    (("fit", "law", "--form", "power", "--draws", "0"), "draws must be 2 or more, got 0"),
    (("fit", "law", "--form", "power", "--random-seed", "-1"), "the random seed must be 0 or more, got -1"),
    (("fit", "law", "--form", "power", "--cluster", "nope"), "cluster column 'nope' is not in the table; it has: "),
    (("fit", "law", "--form", "power", "--cluster", "same"), "cluster column 'same' has one value"),
    (("fit", "law", "--form", "power", "--weights", "below"), "weights in column 'below' must be numbers of 0 or more"),
    (("fit", "backtest", "--form", "power", "--level", "7"), "level must lie between 0 and 1, got 7.0; write 95% as"),
    (("fit", "isoflop", "--level", "1"), "level must lie between 0 and 1, got 1.0"),
    (("fit", "isoflop", "--noise-sd", "-1"), "noise_sd must be a positive number of nats, got -1.0"),
    (("fit", "frontier", "--budgets", "1e21", "--draws", "1"), "draws must be 2 or more, got 1"),
    (("compare", "speedup", *ARMS, "--level", "95"), "level must lie between 0 and 1, got 95.0"),
    (("compare", "speedup", *ARMS, "--draws", "-1"), "draws must be 0 or more, got -1"),
    (("compare", "speedup", *ARMS, "--noise-sd", "0"), "noise_sd must be a positive number of nats, got 0.0"),
    (("compare", "seeds", *ARMS, "--level", "0"), "level must lie between 0 and 1, got 0.0"),
    (("compare", "seeds", *ARMS, "--noise-sd", "-1"), "noise_sd must be a positive number of nats, got -1.0"),
    (("noise", "floor", "--level", "2"), "level must lie between 0 and 1, got 2.0"),
]


@pytest.mark.parametrize(("arguments", "message"), NONSENSE, ids=[" ".join(a[:2] + a[-2:]) for a, _ in NONSENSE])
def test_nonsense_is_refused_in_one_line(
    arguments: tuple[str, ...], message: str, tmp_path: Path, run: Callable[..., tuple[int, str, str]]
) -> None:
    path = tmp_path / "runs.csv"
    table().assign(same="x", below=-1.0).to_csv(path, index=False)
    status, out, err = run(*arguments[:2], "--runs", str(path), *arguments[2:])
    assert status in (1, 2) and not out and err.count("\n") == 1 and message in err, err


def test_other_nonsense(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    status, out, err = run("noise", "power", "--sd", "0.001", "--power", "2")
    assert status == 2 and not out and "power must lie between 0 and 1, got 2.0" in err
    status, _, err = run("compare", "items", "--gains", "1", "--losses", "2", "--level", "95")
    assert status == 2 and "level must lie between 0 and 1" in err
    for name in ("empty.csv", "empty.parquet"):
        (tmp_path / name).touch()
        with pytest.raises(TableError, match=rf"{name}: cannot be read as \.(csv|parquet) \("):
            load_table(tmp_path / name)


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


def heads_table(sd: float = 0.001) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {"H": h, "kv": kv, "seed": s, "loss": 3.1 + 0.01 * (np.log2(h) - 2.5) ** 2 + 0.01 / kv + rng.normal(0, sd)}
        for h in (1, 2, 4, 8, 16) for kv in (1, 8) for s in range(3)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_head_count() -> None:
    for name, result in head_optimum(heads_table(), by="kv").items():
        assert name in ("1", "8")
        assert {int(result.estimate["best_heads"])} <= set(result.details["indistinguishable"]) <= {4, 8}
        assert result.interval is not None and result.interval.low["curvature"] > 0
        assert result.estimate["vertex_heads"] == pytest.approx(2**2.5, rel=0.1)
    flat = head_optimum(heads_table(0.2), by="kv")["1"]
    assert "no-u-shape" in codes(flat) and len(flat.details["indistinguishable"]) > 1
    with pytest.raises(FitError, match="only H = 4 was run"):
        head_optimum(heads_table().query("H == 4"))


def test_learning_rate_robustness() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"method": m, "size": "s", "lr": lr,
         "loss": 3.0 - gain + 0.05 * (np.log10(lr) + centre) ** 2 + rng.normal(0, 0.001)}
        for m, centre, gain in (("base", 3.0, 0.0), ("new", 3.3, 0.02)) for lr in np.geomspace(1e-4, 1e-2, 9)
    ]  # fmt: skip
    result = learning_rate_robustness(pd.DataFrame(rows), baseline="base", noise_sd=0.001)["new"]
    assert result.estimate["delta[s]"] == pytest.approx(-0.02, abs=0.002)
    assert result.details["rows"][0]["best_lr"] == pytest.approx(10**-3.3, rel=0.15)


def test_width_contrast() -> None:
    runs = table()
    runs["size"] = np.where(runs["size"] == "s0", "narrow", np.where(runs["size"] == "s4", "wide", runs["size"]))
    result = width_contrast(runs, baseline="baseline", method="new", narrow="narrow", wide="wide")
    assert result.interval is not None
    assert result.estimate["contrast"] == pytest.approx(
        result.estimate["delta[wide]"] - result.estimate["delta[narrow]"]
    )
    with pytest.raises(TableError, match="no run of 'baseline' at size 'huge'"):
        width_contrast(runs, baseline="baseline", method="new", narrow="narrow", wide="huge")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., tuple[int, str, str]]:
    """The command as a user calls it: exit status, stdout, stderr."""

    def call(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scaling", *arguments])
        with pytest.raises(SystemExit) as stopped:
            main()
        captured = capsys.readouterr()
        return int(stopped.value.code or 0), captured.out, captured.err

    return call


def test_commands(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """One JSON object on stdout, nothing else; one line on stderr and the right exit status otherwise."""
    path = tmp_path / "runs.csv"
    table().to_csv(path, index=False)
    status, out, _ = run("compare", "speedup", "--runs", str(path), "--baseline", "baseline", "--json")
    assert status == 0 and json.loads(out)["new"]["estimate"]["speedup"] == pytest.approx(1.25, rel=0.02)
    _, out, _ = run("fit", "law", "--runs", str(path), "--form", "power", "--interval", "delta", "--json")
    assert {"estimate", "standard_error", "interval", "n", "df", "status", "objective", "conventions", "warnings",
    "dropped",
            "checklist"} <= set(json.loads(out))  # fmt: skip
    status, out, err = run("fit", "law", "--runs", str(path), "--columns", "N=Nn")
    assert (status, out, err.count("\n")) == (1, "", 1) and "is not in the table" in err
    status, out, err = run("fit", "law", "--runs", str(path), "--form", "powr")
    assert (status, out) == (2, "") and "did you mean 'power'" in err
    grid_path, bowls, n = tmp_path / "grid.csv", tmp_path / "bowls.csv", np.geomspace(1e7, 1e9, 7)
    grid(sd=0.003).to_csv(grid_path, index=False)
    profiles = [(n, c, 3 + 0.01 * np.log(n / np.sqrt(c / 120)) ** 2) for c in (1e17, 1e18, 1e19)]
    pd.concat(pd.DataFrame(dict(zip(("N", "C", "loss"), p, strict=True))) for p in profiles).to_csv(bowls, index=False)
    one = tmp_path / "one.csv"
    table(scales=1).to_csv(one, index=False)
    status, out, _ = run("compare", "speedup", "--runs", str(one), "--baseline", "baseline", "--json")
    assert status == 1 and json.loads(out)["new"]["status"] == "refused"
    for arguments in (
        ("compare", "seeds", "--runs", str(path), "--baseline", "baseline"),
        ("compare", "items", "--gains", "123", "--losses", "81"),
        ("noise", "floor", "--runs", str(path)),
        ("noise", "power", "--sd", "0.001", "--difference", "0.002", "--seeds", "2,3", "--scales", "1"),
        ("fit", "backtest", "--runs", str(path), "--form", "power"),
        ("fit", "frontier", "--runs", str(grid_path), "--budgets", "1e20,1e21", "--draws", "200"),
        ("fit", "isoflop", "--runs", str(bowls), "--noise-sd", "0.002", "--draws", "200"),
        ("fit", "isoflop", "--runs", str(bowls), "--curve", "parabola"),
    ):
        status, out, err = run(*arguments)
        assert status == 0 and not err, err
        assert out.count("\n") > 3
        status, out, err = run(*arguments, "--json")
        assert status == 0 and not err and isinstance(json.loads(out), dict), arguments


def test_numbers_of_the_fits_in_json(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    """What the commands print with --json is what the functions return, to the last digit, under the agreed names."""
    grid_path, bowls, n = tmp_path / "grid.csv", tmp_path / "bowls.csv", np.geomspace(1e7, 1e9, 7)
    grid(sd=0.003).to_csv(grid_path, index=False)
    profiles = [(n, c, 3 + 0.01 * np.log(n / np.sqrt(c / 120)) ** 2) for c in (1e17, 1e18, 1e19)]
    pd.concat(pd.DataFrame(dict(zip(("N", "C", "loss"), p, strict=True))) for p in profiles).to_csv(bowls, index=False)
    names = {"estimate", "standard_error", "interval", "n", "df", "status", "conventions", "warnings", "dropped",
             "checklist"}  # fmt: skip
    flags = ("--level", "0.9", "--draws", "100", "--random-seed", "3", "--json")
    options = {"level": 0.9, "draws": 100, "rng": 3}
    _, out, _ = run("fit", "frontier", "--runs", str(grid_path), "--budgets", "1e20,1e21", *flags)
    wanted = compute_frontier(load_table(grid_path), budgets=[1e20, 1e21], **options)  # type: ignore[arg-type]
    assert json.loads(out) == json.loads(wanted.to_json()) and names <= set(json.loads(out))
    assert set(json.loads(out)["interval"]["low"]) == set(wanted.estimate) and "N*[1e+21]" in wanted.estimate
    _, out, _ = run("fit", "isoflop", "--runs", str(bowls), "--noise-sd", "0.002", *flags)
    isoflop = fit_isoflop(load_table(bowls), noise=0.002, **options)  # type: ignore[arg-type]
    assert json.loads(out) == json.loads(isoflop.to_json()) and names <= set(json.loads(out))
    assert isoflop.estimate["N_exponent"] == pytest.approx(0.5, abs=0.02)
    _, out, _ = run("fit", "isoflop", "--runs", str(bowls), "--curve", "parabola", "--json")
    assert json.loads(out)["interval"] is None and json.loads(out)["estimate"]["N_exponent"] == pytest.approx(0.5)
    _, out, _ = run("fit", "backtest", "--runs", str(grid_path), "--level", "0.8", "--json")
    assert json.loads(out) == json.loads(backtest(load_table(grid_path), level=0.8).to_json())
    _, out, _ = run("fit", "law", "--runs", str(grid_path), "--level", "0.999", "--draws", "200")
    assert "  99.9% interval: cluster bootstrap" in out and "warning few-draws: " in out


def test_what_a_person_looks_for_is_on_the_screen(tmp_path: Path, run: Callable[..., tuple[int, str, str]]) -> None:
    path = tmp_path / "runs.csv"
    sweep(np.random.default_rng(0), speedups={"new": 1.25, "other": 1.1}).to_csv(path, index=False)
    _, out, _ = run("compare", "speedup", "--runs", str(path), "--baseline", "baseline", "--draws", "0")
    assert (
        all(f"\n     s{k} " in out for k in range(5)) and "noise floor: SD " in out and "trend over scales: p " in out
    )
    _, out, _ = run("compare", "seeds", "--runs", str(path), "--baseline", "baseline")
    assert "exact sign flips of 15 pairs: p " in out and "smallest possible 6.1e-05" in out
    assert "corrected for 2 methods: Dunnett " in out and "runs of one seed correlate by " in out
    _, out, _ = run("compare", "items", "--gains", "27", "--losses", "13")
    assert "mid-p 0.02753, exact p 0.03848" in out and "converged" not in out
    _, out, _ = run("noise", "floor", "--runs", str(path))
    assert "15 configurations, SD " in out and "Levene p " in out
    _, out, _ = run("noise", "power", "--sd", "0.00116", "--seeds", "3", "--scales", "1")
    assert "power, simulated" in out and "0.00356" in out
    _, out, _ = run("fit", "backtest", "--runs", str(path), "--form", "power")
    assert "extrapolated" in out and "median error" in out
