"""Comparisons at their edges: noise that is none, arms that are one, counts without a total, wanted precision."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scaling.analysis.curve_noise import evaluation_noise, tail_noise
from scaling.analysis.designs import noise_power
from scaling.analysis.envelope import best_settings, envelope_frontier
from scaling.analysis.heads import head_optimum, learning_rate_robustness, width_contrast
from scaling.analysis.items import compare_items, difference_interval
from scaling.analysis.power import Design, detectable, precision, simulated_power
from scaling.analysis.readings import read_deltas
from scaling.analysis.result import Result
from scaling.analysis.seeds import compare_seeds
from scaling.analysis.speedup import compare_speedup
from scaling.cli.judging import describe
from scaling.errors import FitError, TableError, UsageError
from tests.analysis.synthetic import sweep


def codes(result: Result) -> set[str]:
    return {w.code for w in result.warnings}


def table(**options: Any) -> pd.DataFrame:
    return sweep(np.random.default_rng(0), **options)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("decimals", [16, 0])
def test_seeds_that_change_nothing_are_no_noise(decimals: int) -> None:
    """An interval of width 0 would be a claim of certainty; rounded to whole nats the sweep divides by 0."""
    equal = table(sd=0.0).assign(loss=lambda t: t["loss"].round(decimals))
    speedup = compare_speedup(equal, baseline="baseline", draws=50)["new"]
    assert speedup.interval is None and not speedup.standard_error and "identical-losses" in codes(speedup)
    assert "trend" not in codes(speedup) and "one-seed" not in codes(speedup)
    for pairing in ("auto", "paired", "unpaired"):
        seeds = compare_seeds(equal, baseline="baseline", pairing=pairing)["new"]
        assert seeds.interval is None and "identical-losses" in codes(seeds) and "one-seed" not in codes(seeds)
    given = compare_speedup(equal, baseline="baseline", draws=0, noise_sd=0.002)["new"]
    assert given.interval is not None and "identical-losses" not in codes(given)
    assert compare_seeds(equal, baseline="baseline", noise_sd=0.002)["new"].interval is not None


def test_equal_losses_have_no_correlation_no_signs_and_no_test() -> None:
    """What varies among them are errors of rounding, and copies of one pair are one pair."""
    result = compare_seeds(table(sd=0.0), baseline="baseline")["new"]
    assert {"pairing-not-used", "unequal-variances"} & codes(result) == set()
    details = result.details
    assert np.isnan(details["pairing"]["rho"]) and np.isnan(details["sign_flip"]["p"])
    assert not details["mixed_model"]["fitted"] and "differ by one amount" in details["mixed_model"]["reason"]
    assert all(row["paired"] is row["unpaired"] is row["pooled"] is None for row in details["scales"])
    text = describe(result)
    assert " t over all scales" not in text and "t interval" not in text and "unpaired test is used" not in text
    assert np.isnan(compare_speedup(table(sd=0.0), baseline="baseline", draws=0)["new"].details["pairing"]["rho"])


def message(result: Result, code: str) -> str:
    (found,) = (w.message for w in result.warnings if w.code == code)
    assert "\n" not in found
    return found


def test_a_seed_that_was_run_twice_is_told() -> None:
    """As repeats, or as settings that are mixed; of another method it does not matter."""
    runs = table(speedups={"new": 1.25, "other": 1.1}).assign(lr=1e-3)
    twice = runs[(runs["method"] == "new") & runs["size"].isin(["s0", "s2"]) & (runs["seed"] == 1)]
    repeats = pd.concat([runs, twice.assign(loss=twice["loss"] + 1e-3)])
    found = compare_seeds(repeats, baseline="baseline")
    end = ": each counts in the means, none is paired; keep one of them with --where"
    assert message(found["new"], "repeated-seeds") == (
        f"2 runs of new at s0 share seed 1 and one configuration (and 1 more such){end}"
    )
    assert "repeated-seeds" not in codes(found["other"])
    mixed = pd.concat([runs, twice.assign(loss=twice["loss"] + 1e-3, lr=2e-3)])
    text = message(compare_seeds(mixed, baseline="baseline")["new"], "repeated-seeds")
    assert text == f"2 runs of new at s0 share seed 1 but differ in lr (and 1 more such){end}"
    for whole in (runs, repeats.drop(columns="seed"), repeats.assign(seed=np.nan)):
        assert "repeated-seeds" not in codes(compare_seeds(whole, baseline="baseline")["new"])


def test_one_run_in_both_arms_is_told() -> None:
    runs = table()
    same = (runs["method"] == "new") & runs["size"].isin(["s1", "s3"]) & (runs["seed"] != 0)
    base = runs[runs["method"] == "baseline"].set_index(["size", "seed"])["loss"]
    runs.loc[same, "loss"] = [base[key] for key in zip(runs[same]["size"], runs[same]["seed"], strict=True)]
    text = message(compare_seeds(runs, baseline="baseline")["new"], "same-runs")
    assert text.startswith(
        "new and baseline have equal losses at s1 (seed 1, 2), s3 (seed 1, 2): one configuration under two names"
    )
    assert "same-runs" not in codes(compare_seeds(table(), baseline="baseline")["new"])


def test_one_scale_of_equal_pairs_has_no_interval_of_its_own() -> None:
    """The others have theirs; an interval of width 0 would decide that scale."""
    paired = table(rho=0.95)
    first = (paired["size"] == "s0") & (paired["method"] == "new")
    same = paired[(paired["size"] == "s0") & (paired["method"] == "baseline")]["loss"].to_numpy() - 0.1
    paired.loc[first, "loss"] = same
    result = compare_seeds(paired, baseline="baseline", pairing="paired")["new"]
    assert result.interval is not None and set(result.interval.low) == {"delta", *(f"delta[s{k}]" for k in range(1, 5))}
    text = next(w.message for w in result.warnings if w.code == "identical-losses")
    assert text.startswith("at s0 pairs of one seed all differ by the same amount")
    delta = next(delta for delta in read_deltas("new", result) if delta.size == "s0")
    assert delta.low is None and delta.p is None and delta.verdict == "undecided" and "same amount" in delta.why
    assert delta.smallest_sign_flip_p is None and result.details["sign_flip"]["pairs"] == 4 * 3 + 1
    assert result.details["sign_flip"]["smallest_possible_p"] == 2.0**-12


def test_pairs_that_differ_by_a_constant_are_no_certainty() -> None:
    shifted = table(speedups={}).assign(method="baseline")
    both = pd.concat([shifted, shifted.assign(method="new", loss=shifted["loss"] - 0.5)])
    result = compare_seeds(both, baseline="baseline")["new"]
    assert result.estimate["delta"] == pytest.approx(-0.5) and result.interval is None
    text = next(w.message for w in result.warnings if w.code == "identical-losses")
    assert text.startswith("pairs of one seed all differ by the same amount")
    assert np.isnan(result.details["sign_flip"]["p"]) and "sign flips" not in describe(result)
    assert all(np.isnan(row["sign_flip_p"]) for row in result.details["scales"])
    assert all(delta.smallest_sign_flip_p is None for delta in read_deltas("new", result))


def test_a_constant_difference_narrows_no_speedup() -> None:
    """Its correlation of 1 would; the interval is that of arms without a common seed, and says so."""
    shifted = table(speedups={}).assign(method="baseline")
    both = pd.concat([shifted, shifted.assign(method="new", loss=shifted["loss"] - 0.02)], ignore_index=True)
    result = compare_speedup(both, baseline="baseline", draws=0)["new"]
    alone = compare_speedup(
        both.assign(seed=both["seed"] + 10 * (both["method"] == "new")), baseline="baseline", draws=0
    )["new"]
    assert result.interval is not None and alone.interval is not None
    assert result.interval.low == alone.interval.low and result.interval.high == alone.interval.high
    text = next(w.message for w in result.warnings if w.code == "constant-pairs")
    assert text.startswith("at s0, s1, s2, s3, s4 pairs of one seed all differ by the same amount")
    assert "constant-pairs" not in codes(alone)
    assert not result.details["pairing"]["used"]


def test_a_method_is_not_compared_with_itself() -> None:
    for compare in (compare_speedup, compare_seeds):
        with pytest.raises(UsageError, match="method 'baseline' is the baseline itself; name another"):
            compare(table(), baseline="baseline", method="baseline")


def test_paired_without_common_seeds() -> None:
    runs = table().assign(seed=lambda t: t["seed"] + 10 * (t["method"] == "new"))
    result = compare_seeds(runs, baseline="baseline", pairing="paired")["new"]
    assert result.interval is None and codes(result) & {"no-common-seeds", "one-seed"} == {"no-common-seeds"}
    assert compare_seeds(runs, baseline="baseline")["new"].conventions["pairing"] == "unpaired"


def test_opposed_seeds_are_paired() -> None:
    """A negative correlation makes unpaired intervals too narrow: it counts where it is likely."""
    runs = table(sd=0.0)
    own = np.random.default_rng(3).normal(0, 0.004, 15)
    runs["loss"] += np.concatenate([own, -own]) + np.random.default_rng(4).normal(0, 0.001, 30)
    speedup = compare_speedup(runs, baseline="baseline", draws=0)["new"]
    seeds = compare_seeds(runs, baseline="baseline")["new"]
    assert speedup.details["pairing"]["used"] and speedup.details["pairing"]["rho"] < -0.5 and speedup.df == 10
    assert seeds.conventions["pairing"] == "paired" and "pairing-not-used" not in codes(seeds)
    unpaired = compare_seeds(runs, baseline="baseline", pairing="unpaired")["new"]
    assert seeds.standard_error["delta"] > 1.2 * unpaired.standard_error["delta"]


def test_counts_of_items_without_their_number() -> None:
    """27 and 13 of how many? Of the discordant ones alone there is no difference of shares."""
    odds = compare_items(gains=27, losses=13)["method"]
    assert set(odds.estimate) == {"odds_ratio"} and "items-not-counted" in codes(odds)
    whole = compare_items(gains=27, losses=13, items=448)["method"]
    assert whole.estimate["difference"] == pytest.approx(14 / 448) and whole.n == 448
    assert whole.interval is not None and "items-not-counted" not in codes(whole)
    assert whole.interval.low["difference"] < 14 / 448 < whole.interval.high["difference"]
    with pytest.raises(UsageError, match=r"items must be 40 or more \(--gains plus --losses\), got 30"):
        compare_items(gains=27, losses=13, items=30)


def test_interval_of_a_difference_of_shares() -> None:
    assert difference_interval(0, 0, 20, 0.95)[0] < 0 < difference_interval(0, 0, 20, 0.95)[1]
    assert difference_interval(20, 0, 20, 0.95)[1] == 1.0
    rng = np.random.default_rng(0)
    for items, more, less in ((60, 0.15, 0.05), (200, 0.08, 0.08), (30, 0.3, 0.1)):
        counts = rng.multinomial(items, [more, less, 1 - more - less], size=3000)
        limits = np.array([difference_interval(int(g), int(b), items, 0.95) for g, b, _ in counts])
        covered = np.mean((limits[:, 0] <= more - less) & (limits[:, 1] >= more - less))
        assert 0.935 <= covered <= 0.98, (items, covered)


def test_tables_of_items_that_compare_nothing() -> None:
    rows = [(i, m, int((i + k) % 3 == 0)) for k, m in enumerate(("base", "new")) for i in range(30)]
    items = pd.DataFrame(rows, columns=["item", "method", "correct"])
    with pytest.raises(UsageError, match="compare items: name the baseline; methods: base, new"):
        compare_items(items)
    with pytest.raises(UsageError, match="'base' is the baseline itself"):
        compare_items(items, baseline="base", method="base")
    with pytest.raises(TableError, match="method 'nwe' is not in the table; did you mean 'new'"):
        compare_items(items, baseline="base", method="nwe")
    with pytest.raises(TableError, match="holds only the baseline 'base'"):
        compare_items(items[items["method"] == "base"], baseline="base")
    one = compare_items(items.assign(cluster="passage"), baseline="base")["new"]
    assert one.interval is not None and "difference" not in one.interval.low and "difference" not in one.standard_error
    several = compare_items(items.assign(cluster=items["item"] // 3), baseline="base")["new"]
    assert several.interval is not None and several.interval.method.endswith("t, by cluster")


def test_seeds_and_scales_that_a_precision_takes() -> None:
    result = noise_power(sd=0.002, difference=0.0015, half_width=0.001, seeds=(1, 3, 5), scales=(1, 4))
    at = result.estimate
    for k in (1, 4):
        found, width = at[f"seeds_to_find_difference[{k} scales]"], at[f"seeds_for_half_width[{k} scales]"]
        assert (
            detectable(Design(seeds=int(found), scales=k)) <= 0.75 < detectable(Design(seeds=int(found) - 1, scales=k))
        )
        assert precision(Design(seeds=int(width), scales=k)) <= 0.5 < precision(Design(seeds=int(width) - 1, scales=k))
    for s in (3, 5):
        found, width = at[f"scales_to_find_difference[{s} seeds]"], at[f"scales_for_half_width[{s} seeds]"]
        assert (
            detectable(Design(seeds=s, scales=int(found))) <= 0.75 < detectable(Design(seeds=s, scales=int(found) - 1))
        )
        assert precision(Design(seeds=s, scales=int(width))) <= 0.5 < precision(Design(seeds=s, scales=int(width) - 1))
    assert "scales_for_half_width[1 seeds]" not in at and result.details["needed_scales"][0]["seeds"] == 1
    json.loads(result.to_json())


def test_precision_of_a_speedup() -> None:
    """A half-width of 2% at 5.6 a nat is one of 0.02/5.6 nats."""
    by_loss = noise_power(sd=0.002, half_width=0.02 / 5.6, difference=0.05 / 5.6)
    by_speedup = noise_power(sd=0.002, log_speedup_per_loss=5.6, log_speedup_half_width=0.02, log_speedup=0.05)
    assert by_speedup.estimate == by_loss.estimate
    with pytest.raises(UsageError, match="log_speedup needs log_speedup_per_loss"):
        noise_power(sd=0.002, log_speedup=0.05)
    with pytest.raises(UsageError, match="give half_width or log_speedup_half_width, not both"):
        noise_power(sd=0.002, half_width=0.1, log_speedup_half_width=0.05, log_speedup_per_loss=5.6)


def test_designs_out_of_reach_or_out_of_sense() -> None:
    with pytest.raises(FitError, match="out-of-reach: 10000 seeds do not give a half-width of 1e-06 SDs"):
        noise_power(sd=0.001, half_width=1e-9)
    with pytest.raises(FitError, match="out-of-reach: 10000 seeds do not find a difference of 1e-06 SDs"):
        noise_power(sd=0.001, difference=1e-9)
    for options in ({"sd": np.inf}, {"sd": np.nan}, {"difference": np.inf}, {"log_speedup_per_loss": -3.0}):
        with pytest.raises(UsageError, match="must be positive and finite"):
            noise_power(**({"sd": 0.001} | options))  # type: ignore[arg-type]
    for counts in ([], [0], [3, -1]):
        with pytest.raises(UsageError, match="seeds must be whole numbers from 1"):
            noise_power(sd=0.001, seeds=counts)


@pytest.mark.parametrize("rho", [-0.5, 0.0, 0.5, 0.9])
def test_paired_power_by_simulation(rho: float) -> None:
    design = Design(seeds=4, scales=3, rho=rho, paired=True)
    effect = detectable(design)
    assert simulated_power(design, effect, np.random.default_rng(0), runs=20_000) == pytest.approx(0.8, abs=0.012)
    assert simulated_power(design, 0.0, np.random.default_rng(1), runs=20_000) == pytest.approx(0.05, abs=0.006)


def test_head_counts_by_simulation() -> None:
    """The set holds the true best in at least 95% of experiments, and a flat loss seldom shows a U."""
    rng = np.random.default_rng(0)
    heads = np.repeat([1, 2, 4, 8, 16], 3)
    holds, shaped = [], []
    for _ in range(60):
        noise = rng.normal(0, 0.002, 15)
        bowl = 3.0 + 0.001 * (np.log2(heads) - 3) ** 2
        found = head_optimum(pd.DataFrame({"H": heads, "loss": bowl + noise}))["all"]
        holds.append(8 in found.details["indistinguishable"])
        flat = head_optimum(pd.DataFrame({"H": heads, "loss": 3.0 + noise}))["all"]
        shaped.append("no-u-shape" not in codes(flat))
    assert np.mean(holds) >= 0.95
    # Size 2.5% (a U is the upper half of a two-sided 95% interval), standard error 2%.
    assert np.mean(shaped) <= 0.07
    # Not by calling everything alike: the ends of the bowl are told from its floor.
    sharp = head_optimum(pd.DataFrame({"H": heads, "loss": bowl + 0.1 * noise}))["all"]
    assert set(sharp.details["indistinguishable"]) <= {8, 16, 4} and 1 not in sharp.details["indistinguishable"]


def test_options_of_head_counts_and_sweeps() -> None:
    runs = table().assign(H=lambda t: 2 ** (t["seed"] + 1), lr=1e-3)
    width: dict[str, Any] = {"baseline": "baseline", "method": "new", "narrow": "s0", "wide": "s4"}
    with pytest.raises(UsageError, match="level must lie between 0 and 1, got 95"):
        head_optimum(runs, level=95)
    with pytest.raises(UsageError, match="noise_sd must be a positive number of nats, got -1"):
        head_optimum(runs, noise_sd=-1)
    with pytest.raises(UsageError, match="level must lie between 0 and 1"):
        learning_rate_robustness(runs, baseline="baseline", noise_sd=0.01, level=95)
    with pytest.raises(UsageError, match="noise_sd must be a positive number of nats, got inf"):
        learning_rate_robustness(runs, baseline="baseline", noise_sd=np.inf)
    with pytest.raises(UsageError, match="level must lie between 0 and 1"):
        width_contrast(runs, **width, level=7)
    with pytest.raises(UsageError, match="'s0' is both narrow and wide; a contrast needs two"):
        width_contrast(runs, **{**width, "wide": "s0"})
    with pytest.raises(TableError, match="best settings: column 'variant' missing; the table has: method, size"):
        best_settings(runs, by=("variant",))
    with pytest.raises(UsageError, match="noise_sd must be a positive number of nats, got -1"):
        best_settings(runs, noise_sd=-1)


def curves() -> pd.DataFrame:
    rows = []
    for n in 1e6 * 2.0 ** np.arange(8):
        for c in np.geomspace(1e13, 1e18, 40):
            rows.append({"run": f"{n:g}", "N": n, "C": c, "loss": 2 + 50 * n**-0.3 + 50 * (c / (6 * n)) ** -0.3})
    return pd.DataFrame(rows)


def test_envelope_of_curves() -> None:
    """Both exponents are 0.3: N* grows as the square root of compute."""
    result = envelope_frontier(curves(), draws=200)
    assert result.estimate["N_exponent"] == pytest.approx(0.5, abs=0.03) and "unfinished-curves" in codes(result)
    assert result.interval is not None and result.interval.low["N_exponent"] < 0.5 < result.interval.high["N_exponent"]
    for options, message in (
        ({"draws": 0}, "draws must be 2 or more"),
        ({"level": 95}, "level must lie between 0 and 1"),
        ({"rng": -1}, "the random seed must be 0 or more"),
    ):
        with pytest.raises(UsageError, match=message):
            envelope_frontier(curves(), **options)


def test_curves_and_documents_that_cannot_be_read() -> None:
    tails = pd.DataFrame([(r, k, 3 - k / 100 + r / 1000 + (r * k % 5) / 1e4) for r in range(3) for k in range(10)],
                         columns=["run", "step", "loss"])  # fmt: skip
    with pytest.raises(TableError, match="tail noise: column 'loss' holds text where numbers are needed"):
        tail_noise(tails.assign(loss="low"))
    with pytest.raises(TableError, match=r"tail noise: no usable row of 30 \(loss is missing\)"):
        tail_noise(tails.assign(loss=np.nan))
    cut = tail_noise(tails.assign(loss=tails["loss"].where(tails["step"] != 9, np.inf)))
    assert len(cut.dropped) == 3 and np.isfinite(cut.estimate["seed_sd"]) and "unusable-rows" in codes(cut)
    # A column that is the same in all rows of a run does not make them copies.
    assert tail_noise(tails.assign(curve_hash=tails["run"].astype(str))).n == 3
    documents = pd.DataFrame({"loss": [3.0, 2.0, 4.0], "tokens": [10, 20, 30]})
    for bad, message in (
        (documents.assign(loss="x"), "column 'loss' holds text"),
        (documents.assign(tokens=0), r"no usable row of 3 \(tokens is not positive\)"),
    ):
        with pytest.raises(TableError, match=f"evaluation noise: .*{message}"):
            evaluation_noise(bad)
    some = evaluation_noise(documents.assign(loss=[np.nan, 2.0, 3.0]))
    assert [d.row for d in some.dropped] == [0] and np.isfinite(some.estimate["evaluation_se"])


def test_documents_are_paired_by_name() -> None:
    rng = np.random.default_rng(0)
    names, tokens = [f"d{k}" for k in range(40)], rng.integers(50, 500, 40)
    hard = rng.normal(3, 0.5, 40)
    first = pd.DataFrame({"run": "a", "document": names, "tokens": tokens, "loss": hard})
    second = first.assign(run="b", loss=hard - 0.02 + rng.normal(0, 0.01, 40))
    ordered = evaluation_noise(pd.concat([first, second]))
    shuffled = evaluation_noise(pd.concat([first, second.sample(frac=1, random_state=1)]))
    assert shuffled.estimate["paired_se"] == pytest.approx(ordered.estimate["paired_se"], rel=1e-12)
    assert ordered.estimate["paired_se"] < 0.1 * ordered.estimate["evaluation_se"]
    with pytest.raises(TableError, match="share fewer than two documents"):
        evaluation_noise(pd.concat([first, second.assign(document=[f"e{k}" for k in range(40)])]))
    with pytest.raises(TableError, match="document d0 of run 'b' occurs twice"):
        evaluation_noise(pd.concat([first, second.assign(document="d0")]))
    bare = pd.concat([first, second.iloc[:30]]).drop(columns="document")
    with pytest.raises(TableError, match="evaluated on 40 and 30 documents; a column 'document' tells"):
        evaluation_noise(bare)


def test_level_of_a_comparison_is_its_quantile() -> None:
    runs = table()
    half = {}
    for level in (0.95, 0.999):
        speedup = compare_speedup(runs, baseline="baseline", draws=0, level=level)["new"]
        seeds = compare_seeds(runs, baseline="baseline", level=level)["new"]
        for name, result, key in (("speedup", speedup, "log_speedup"), ("seeds", seeds, "delta")):
            assert result.interval is not None and result.df is not None and result.interval.level == level
            half[name, level] = (
                0.5 * (result.interval.high[key] - result.interval.low[key]) / stats.t.ppf((1 + level) / 2, result.df)
            )
    for name in ("speedup", "seeds"):
        assert half[name, 0.999] == pytest.approx(half[name, 0.95], rel=1e-12)


def test_luck_of_the_best_of_five() -> None:
    """Five methods equal to the baseline, 3 seeds of SD 0.00116: the best seems to gain 0.0008 by luck."""
    runs = table(scales=1, sd=0.00116, speedups=dict.fromkeys("abcde", 1.0))
    results = compare_seeds(runs, baseline="baseline", noise_sd=0.00116)
    best = min(results, key=lambda name: results[name].estimate["delta"])
    for name, result in results.items():
        found = result.details["multiplicity"]
        assert found["expected_luck_of_best"] == pytest.approx(0.0008, abs=6e-5) and found["methods"] == 5
        gain = found["delta_corrected_for_selection"] - result.estimate["delta"]
        assert gain == pytest.approx(found["expected_luck_of_best"] if name == best else 0.0, abs=1e-15)
        assert ("best-of-k" in codes(result)) == found["best"] == (name == best)
