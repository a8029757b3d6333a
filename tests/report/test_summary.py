"""The summary and the conventions in words: what noise, tokens and luck allow to be said."""

from __future__ import annotations

import re
from types import ModuleType

import numpy as np
import pandas as pd

from scaling.analysis.inquiry import inquire
from scaling.analysis.sections import sections
from scaling.analysis.summary import summarize


def test_the_summary_says_where_tokens_differ_too(planted: ModuleType) -> None:
    runs = planted.table(sigma=0.001)
    told = summarize(inquire(runs)).not_shown
    assert not any("the tokens of" in line for line in told)
    factor = runs["method"].map({"baseline": 1.0, "mhar": 1.5}).astype(float)
    more = runs.assign(tokens=(runs["tokens"].astype(float) * factor).astype("int64"))
    told = summarize(inquire(more)).not_shown
    assert (
        "Whether a difference of loss is the method's alone: mhar saw 1.50× the tokens of baseline at the same size"
        in told[0]
    )


def test_the_noise_of_single_runs_is_no_verdict_on_means(planted: ModuleType) -> None:
    """Differences far below the spread of single runs are shown, so the summary must not call them meaningless."""
    rng = np.random.default_rng(5)
    runs = planted.table(sizes=4, seeds=6, sigma=0.03)
    shared = runs["seed"].map(dict(enumerate(rng.normal(0, 0.03, 6))))
    low = runs["val_loss"].where(runs["method"] == "baseline")
    per_size = low.groupby(runs["size"]).transform("mean")
    gain = runs["method"].map({"baseline": 0.0, "mhar": 0.004}).astype(float)
    runs = runs.assign(val_loss=per_size + shared - gain + rng.normal(0, 5e-4, len(runs)))
    summary = summarize(inquire(runs.assign(val_loss_tail=runs["val_loss"])))
    assert any("mhar ends with a lower loss than baseline" in line for line in summary.shown)
    noise = next(line for line in summary.shown if "the seed alone" in line)
    assert "Two single runs less than about 0.0" in noise and "pairs of one seed, tell smaller differences" in noise


def test_equal_losses_are_told_as_such(planted: ModuleType) -> None:
    """Seeds that change nothing are not "no method was run twice", nor a noise of 0."""
    runs = planted.table(sizes=4, seeds=3)
    same = runs.groupby(["method", "size"])["val_loss"].transform("first")
    runs = runs.assign(val_loss=same, val_loss_tail=same)
    found = inquire(runs, planted.histories(runs))
    assert not [noise for noise in found.noises if noise.kind in ("seed_sd", "tail_mean_sd")]
    summary = summarize(found)
    line = next(line for line in summary.not_shown if "The noise between seeds is unknown" in line)
    assert "all runs of a configuration have equal losses" in line and "check the runs' seeds" in line
    assert not any("the seed alone" in line for line in summary.shown)
    assert sections(found, [], {})


def test_luck_is_taken_off_where_many_methods_stand_at_one_size(planted: ModuleType) -> None:
    methods = ("baseline", *(f"m{i:02d}" for i in range(30)))
    runs = planted.table(sizes=1, methods=methods, seeds=6, sigma=0.004)
    rng = np.random.default_rng(2)
    better = (runs["method"] == "m07").to_numpy(dtype=float)
    runs = runs.assign(val_loss=3.0 + rng.normal(0, 0.004, len(runs)) - 0.05 * better)
    line = next(line for line in summarize(inquire(runs)).shown if "by luck" in line)
    decided, left = (int(n) for n in re.search(r"leaves (\d+) of these (\d+)", line).groups()[::-1])  # type: ignore[union-attr]
    assert "30 methods were compared" in line and left == 1 <= decided


def test_cautions_of_one_kind_stand_together(planted: ModuleType) -> None:
    methods = ("baseline", *(f"m{i}" for i in range(6)))
    runs = planted.table(sizes=1, methods=methods)
    factor = runs["method"].map({name: 1 + 0.1 * i for i, name in enumerate(methods)}).astype(float)
    found = inquire(runs.assign(tokens=(runs["tokens"].astype(float) * factor).astype("int64")))
    parts = {part.anchor: part for part in sections(found, [], {})}
    lines = [line for line in parts["methods"].intro if "different numbers of tokens" in line]
    assert len(lines) == 2 and all(line.startswith("Caution (seeds m") for line in lines)
    assert (
        "Caution: 4 more like the last; results.json has them under the code mixed-token-budgets."
        in parts["methods"].intro
    )
    codes = [w.code for result in found.results.values() for w in result.warnings]
    assert codes.count("mixed-token-budgets") == 6


def test_methods_of_this_tool_are_explained(planted: ModuleType) -> None:
    def told(runs: pd.DataFrame) -> dict[str, str]:
        parts = {part.anchor: part for part in sections(inquire(runs), [], {})}
        return dict(parts["methods"].entries)

    runs = planted.table()
    assert told(runs)["mhar"].startswith("Multi-head attention residuals, 'heads' queries a site")
    assert "mhar" not in told(runs.assign(data_fingerprint=None))  # another tool's method of that name
    assert "hc" not in told(runs) and "interval" in told(runs)
