"""What stands beside runs in a report: probes, timings, answers, scores; each from a file, each refused in words."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pandas as pd
import pytest
from scipy import stats

from scaling.analysis import catalog
from scaling.analysis.figures import style
from scaling.analysis.findings import Findings
from scaling.analysis.source import read_curves
from scaling.analysis.supplements import Supplements, collect, read_probe
from scaling.analysis.tables import beside, costs, render, scores
from scaling.errors import TableError, UsageError
from scaling.record import PROBE
from tests.conftest import ROOT


def probe_file(path: Path, *, method: str = "mhar", size: str = "0.5m", heads: int = 4, excess: float = 0.3) -> Path:
    """A file as ``scaling probe disagreement --out`` writes it: sites 1 to 4, 6 sequences, 3 draws."""
    rng = np.random.default_rng(5)
    weights = rng.dirichlet(np.ones(5), size=(4, heads)).transpose(0, 2, 1)
    site, source = np.indices((4, 5))
    weights[source > site + 1] = np.nan
    random = rng.normal(0.1, 0.01, (6, 4, 3))
    told = {"run_key": "ab", "name": f"{size}-{method}-s0", "method": method, "size": size, "seed": 0}
    learned = random.mean(axis=2) + excess + rng.normal(0, 0.01, (6, 4))
    with path.open("wb") as file:
        np.savez_compressed(
            file, learned=learned, random=random, weights=weights, sites=np.arange(1, 5), run=np.array(json.dumps(told))
        )
    return path


def kernel_json(path: Path) -> Path:
    rows = [
        {"operation": f"pull over {n} rows", "shape": shape, "dtype": "bfloat16", "pass": "forward",
         "ms": [0.1, 0.11, 0.12], "bytes": 3e8, "ceiling_share": share}
        for shape in ("d512", "d1024")
        for n, share in ((4, 0.9), (24, 0.95))
    ]  # fmt: skip
    path.write_text(json.dumps({"versions": {"gpu": "NVIDIA H200"}, "ceiling_bytes_per_s": 4.2e12, "rows": rows}))
    return path


@pytest.fixture
def found(planted: ModuleType) -> Findings:
    findings: Findings = planted.findings(planted.table())
    return findings


def test_probes_in_run_folders_and_files_become_figures_and_a_table(found: Findings, tmp_path: Path) -> None:
    (tmp_path / "runs" / "abcd").mkdir(parents=True)
    probe_file(tmp_path / "runs" / "abcd" / PROBE, size="0.05m")
    alone = probe_file(tmp_path / "large.npz", size="1.58m", excess=0.5)
    given = collect(runs=str(tmp_path / "runs"), probes=[str(alone)])
    assert [probe.size for probe in given.probes] == ["0.05m", "1.58m"]
    found = replace(found, supplements=given)
    table = catalog.table(found, "disagreement").frame
    assert table["excess"].tolist() == pytest.approx([0.3, 0.5], abs=0.02)
    assert (table["excess_low"] < table["excess"]).all()
    weights = catalog.picture(found, "routing-weights")
    assert "1.58m-mhar-s0" in weights.caption and "1 other probed" in weights.caption
    assert len(weights.data) == 4 * (2 + 3 + 4 + 5)  # heads times the sources that each site sees
    assert weights.data.groupby(["site", "head"])["weight"].size().tolist() == [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4
    lines = catalog.picture(found, "disagreement").data
    assert set(lines["run"]) == {"0.05m-mhar-s0", "1.58m-mhar-s0"} and set(lines["site"]) == {1, 2, 3, 4}
    with style.context():
        for name in ("routing-weights", "disagreement"):
            catalog.picture(found, name).draw(style.NARROW_IN).draw_without_rendering()
    own = beside.published("disagreement", found).frame
    assert own["own"].tolist() == pytest.approx([0.5, 0.5, 0.6, 0.6, 0.1, 0.1], abs=0.02)


def test_a_file_that_is_no_probe_is_refused(tmp_path: Path) -> None:
    with pytest.raises(TableError, match=r"none.npz: no such file; make it with `scaling probe disagreement RUN --out"):
        read_probe(tmp_path / "none.npz")
    (tmp_path / "text.npz").write_text("hello")
    with pytest.raises(TableError, match="text.npz: is no file of a probe"):
        read_probe(tmp_path / "text.npz")
    np.savez(tmp_path / "other.npz", a=np.zeros(3))
    with pytest.raises(TableError, match="other.npz: is no file of a probe"):
        read_probe(tmp_path / "other.npz")


def test_timings_come_from_what_the_benchmarks_print(found: Findings, tmp_path: Path) -> None:
    given = collect(benches=[str(kernel_json(tmp_path / "kernels.json")), str(ROOT / "kernels" / "results.csv")])
    found = replace(found, supplements=given)
    kernels = catalog.table(found, "kernels")
    assert kernels.frame["share"].tolist() == pytest.approx([90, 95, 90, 95])
    assert "NVIDIA H200" in kernels.caption and "0.110 [0.100, 0.120]" in render.markdown(kernels).replace("\\", "")
    steps = catalog.table(found, "steps")
    measured = pd.read_csv(ROOT / "kernels" / "results.csv")
    assert len(steps.frame) == len(measured)
    base = steps.frame[steps.frame["method"] == "baseline"]
    assert base["ratio"].tolist() == [1.0] * len(base)
    assert [column.key for column in steps.columns][2:5] == ["method", "implementation", "pass"]
    shown = {cells[3].text for cells in steps.rows()}
    assert shown == set(measured["implementation"]) and {"kernels", "compiled"} <= shown
    assert "timed in the same call of the benchmark (" in steps.caption
    assert "copy rate of the same call of the benchmark" in kernels.caption
    assert not any(" run" in caption for caption in (steps.caption, kernels.caption)), "a call of it is no run"
    assert "same call of the benchmark" in catalog.picture(found, "kernels").caption
    bars = catalog.picture(found, "steps")
    assert set(bars.data["launch"]) == {"graph"} and "Dashed: the compiled pre-norm baseline" in bars.caption
    assert list(dict.fromkeys(bars.data["shape"])) == ["d512", "d1024", "d1280", "d2048"]
    drawn = bars.data.set_index(["shape", "vocabulary", "method"])
    assert drawn.index.is_unique and set(drawn["implementation"]) == {"compiled", "kernels"}
    assert set(drawn.loc[drawn["implementation"] == "compiled"].index.get_level_values("method")) == {"baseline"}
    with style.context():
        for name in ("steps", "kernels"):
            for width in (style.WIDE_IN, style.NARROW_IN):
                catalog.picture(found, name).draw(width).draw_without_rendering()
    without = costs.steps(measured.drop(columns="implementation"))  # a table of an earlier version
    assert [column.key for column in without.columns][2:4] == ["method", "pass"]
    (tmp_path / "other.csv").write_text("a,b\n1,2\n")
    with pytest.raises(TableError, match=r"other.csv: neither timings of steps .* nor of kernels .*; it has: a, b"):
        collect(benches=[str(tmp_path / "other.csv")])
    (tmp_path / "bad.json").write_text("[]")
    with pytest.raises(TableError, match="bad.json: is not what `scaling bench kernels|train --json` prints"):
        collect(benches=[str(tmp_path / "bad.json")])


def test_a_missing_file_is_said_to_be_of_what_it_was_given_for(tmp_path: Path) -> None:
    """Not of runs, which a report has besides."""
    path = str(tmp_path / "none.csv")
    for options, words in (
        (
            {"benches": [path]},
            "timings come from what `scaling bench kernels|train --json` printed, as a .json file, or",
        ),
        ({"items": path}, "answers come from a .csv or .parquet file with columns item, method and correct"),
        ({"scores": path}, "scores come from a .csv or .parquet file with columns method, task and score"),
    ):
        with pytest.raises(TableError, match=re.escape(f"none.csv: no such file; {words}")):
            collect(**options)
    with pytest.raises(TableError, match=r"none.json: no such file; timings come from"):
        collect(benches=[str(tmp_path / "none.json")])
    with pytest.raises(UsageError, match=r": is no file; timings come from"):
        collect(benches=[str(tmp_path)])
    with pytest.raises(TableError, match=r"none.csv: no such file; curves come from a .csv or .parquet file with col"):
        read_curves(path)


def test_paired_answers_become_mcnemar_s_table(found: Findings, tmp_path: Path) -> None:
    rows = []
    for task, gains, losses, items in (
        ("GSM8K", 123, 81, 1319),
        ("GPQA", 27, 13, 448),
    ):  # as the MHAR paper counts them
        for item in range(items):
            base = 0 if item < gains else 1 if item < gains + losses else item % 2
            mine = 1 - base if item < gains + losses else base
            rows += [
                {"item": item, "method": m, "correct": c, "task": task} for m, c in (("std", base), ("delta", mine))
            ]
    pd.DataFrame(rows).to_csv(tmp_path / "items.csv", index=False)
    found = replace(found, supplements=collect(items=str(tmp_path / "items.csv"), baseline="std"))
    first = catalog.table(found, "items").frame.iloc[0]
    assert (first["task"], first["gains"], first["losses"], first["n"]) == ("GSM8K", 123, 81, 1319)
    mid = 2 * stats.binom.cdf(81, 204, 0.5) - stats.binom.pmf(81, 204, 0.5)
    assert first["p"] == pytest.approx(mid) and first["holm"] == pytest.approx(2 * mid)
    own = beside.published("midtraining", found).frame.set_index("setting")["own"]
    assert own.to_dict() == pytest.approx(
        {"GSM8K": 100 * 42 / 1319, "GPQA": 100 * 14 / 448}
    )  # they publish 3.2 and 3.1
    with pytest.raises(TableError, match="method 'adam' is not in the table"):
        collect(items=str(tmp_path / "items.csv"), baseline="adam")


def test_scores_are_laid_out_by_task_and_best_is_beyond_the_noise(found: Findings, tmp_path: Path) -> None:
    rows = [
        {"method": method, "task": task, "score": score, "se": 0.5}
        for method, values in (("baseline", (50.0, 30.0)), ("mhar", (56.0, 30.4)), ("msar", (50.3, 30.1)))
        for task, score in zip(("MMLU", "BBH"), values, strict=True)
    ]
    pd.DataFrame(rows).to_csv(tmp_path / "scores.csv", index=False)
    table = catalog.table(replace(found, supplements=collect(scores=str(tmp_path / "scores.csv"))), "tasks")
    text = render.markdown(table)
    assert "| method | MMLU | BBH | average of 2 |" in text
    assert "| mhar | **56.00** | 30.40 (=) | **43.20** |" in text
    assert "| baseline | 50.00 | 30.00 (=) | 40.00 |" in text
    assert table.frame["average_error"].tolist() == pytest.approx([0.5 / 2**0.5] * 3)
    (tmp_path / "bad.csv").write_text("method,score\na,1\n")
    with pytest.raises(TableError, match="column 'task' missing; it has: method, score; scores need method, task and"):
        collect(scores=str(tmp_path / "bad.csv"))
    with pytest.raises(UsageError, match="is no file; scores come from a .csv or .parquet file"):
        collect(scores=str(tmp_path))


def test_scores_in_columns_of_the_runs_use_the_spread_over_seeds(planted: ModuleType) -> None:
    runs = planted.table(sizes=1, seeds=3)
    better = runs["method"].eq("mhar")
    runs["score/MMLU"] = np.where(better, 60.0, 50.0) + runs["seed"].astype(float)
    runs["score/BBH"] = 30.0 + runs["seed"].astype(float)
    table = catalog.table(planted.findings(runs), "tasks")
    assert table.frame["task0"].tolist() == [51.0, 61.0] and table.frame["task0_mark"].tolist()[1] == "best"
    assert table.frame["task1_mark"].tolist() == ["tie", "tie"]
    half = stats.t.ppf(0.975, 4) * 1.0 / 3**0.5  # SD 1 in each cell, 2 + 2 degrees of freedom
    assert table.frame["task0_high"][0] == pytest.approx(51.0 + half)


def test_without_noise_no_score_is_marked() -> None:
    frame = pd.DataFrame(
        {"method": ["a", "b"], "size": "all", "task": "X", "score": [1.0, 2.0], "se": np.nan, "seed": 0}
    )
    table = scores.tasks(frame)
    assert "task0_mark" not in table.frame and "nothing is marked" in table.caption


def test_equal_scores_without_any_error_are_a_tie() -> None:
    """All items wrong, or right, in both: the standard errors are zero, and neither is better."""
    frame = pd.DataFrame({"method": ["a", "b"], "size": "all", "task": "X", "score": 0.0, "se": 0.0, "seed": 0})
    assert scores.tasks(frame).frame["task0_mark"].tolist() == ["tie", "tie"]
    frame["score"] = [0.0, 1.0]
    assert scores.tasks(frame).frame["task0_mark"].tolist()[1] == "best"


def test_nothing_given_is_said_with_what_to_give(found: Findings) -> None:
    assert found.supplements == Supplements()
    for name, option in (
        ("tasks", "--scores"),
        ("items", "--items"),
        ("kernels", "--bench"),
        ("disagreement", "--probe"),
    ):
        with pytest.raises(TableError, match=f"table '{name}': these runs have nothing for it; it needs {option}"):
            catalog.table(found, name)
    with pytest.raises(TableError, match="figure 'routing-weights': these runs have nothing for it; it needs --probe"):
        catalog.picture(found, "routing-weights")


def test_options_of_a_method_stand_in_a_table_of_their_own(planted: ModuleType) -> None:
    runs = planted.table(sizes=1, methods=("baseline", "msar"), seeds=2)
    streams = runs[runs["method"] == "msar"].assign(variant="streams=2", run_key=lambda part: part["run_key"] + "2")
    streams = streams.assign(val_loss=streams["val_loss"] + 1.0, curve_hash=streams["run_key"])
    found = planted.findings(runs)
    table = catalog.table(replace(found, table=pd.concat([runs, streams], ignore_index=True)), "variants")
    rows = {(row["method"], row["variant"]): row["mean_mark"] for row in table.frame.to_dict(orient="records")}
    assert set(rows) == {("baseline", "defaults"), ("msar", "defaults"), ("msar", "streams=2")}
    assert rows["msar", "streams=2"] == ""
    with pytest.raises(TableError, match="it needs two or more options of a method at a size"):
        catalog.table(found, "variants")


def test_configurations_and_what_methods_added_are_counted_from_the_runs(planted: ModuleType) -> None:
    runs = planted.table(sizes=2, methods=("baseline", "mhar"))
    found = planted.findings(runs.copy())
    runs["layers"], runs["width"] = 4, 96
    more = runs["method"].eq("mhar")
    runs.loc[more, "n_params"] += 1000
    runs.loc[more, "flops"] *= 1.005
    found = replace(found, table=runs)
    shapes = catalog.table(found, "configurations").frame
    assert shapes["size"].tolist() == ["0.05m", "0.158m"] and shapes["layers"].tolist() == [4.0, 4.0]
    assert shapes["ratio"].tolist() == pytest.approx([20.0, 20.0]) and shapes["n"].tolist() == [4, 4]
    added = catalog.table(found, "added").frame
    mine = added[added["method"] == "mhar"]
    assert mine["flops_added"].tolist() == pytest.approx([0.5, 0.5])
    assert mine["n_params_added"].tolist() == pytest.approx([100 * 1000 / 150_000, 100 * 1000 / 258_113], rel=1e-3)
