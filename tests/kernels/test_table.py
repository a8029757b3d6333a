"""``scaling bench`` without a GPU: rows as they are measured, the table that holds them, wrong use."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scaling.cli import bench
from scaling.cli.main import main
from scaling.errors import UsageError
from scaling.kernels import benchmark
from scaling.kernels.decoder import SHAPES
from scaling.kernels.joining import IMPLEMENTATIONS, METHODS
from scaling.kernels.table import KERNELS, STEPS, Table
from scaling.kernels.timed import OPERATIONS
from tests.conftest import ROOT
from tests.gpu import measure_kernels

VERSIONS = {"gpu": "a GPU", "torch": "2", "triton": "3", "cuda": "13"}
RESULTS = ROOT / "kernels" / "results.csv"
KERNEL_RESULTS = ROOT / "kernels" / "kernels.csv"
Scaling = Callable[..., tuple[int, str, str]]


def read(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


@pytest.fixture
def scaling(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Scaling:
    """The command: exit status, standard output, standard error."""

    def call(*words: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["scaling", *words])
        with pytest.raises(SystemExit) as ended:
            main()
        told = capsys.readouterr()
        return int(ended.value.code or 0), told.out, told.err

    return call


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A bench that measures nothing: what is in the list is done after that many rows; every method is 10 ms slower."""
    plan: list[Any] = []

    def step_rows(shape: Any, vocabulary: int, method: str, implementation: str, _: int) -> Iterator[dict[str, Any]]:
        row = {"shape": shape.name, "vocabulary": vocabulary, "method": method, "implementation": implementation}
        ms = 20.0 + 10.0 * (method != "baseline")
        for launch in ("eager", "graph"):
            if plan:
                plan.pop(0)()
            yield {
                **row, "dtype": "bfloat16", "pass": "forward+backward", "launch": launch, "ms": [ms - 1, ms, ms + 1],
                "peak_bytes": int(ms) * 100, "loss": 1.0,
            }  # fmt: skip

    def cases(shape: Any) -> Iterator[tuple[str, str, int, Callable[[], None]]]:
        for name in ("pull over 3 rows", "pull_group of 8 over 3 rows", "receive"):
            yield name, "forward", 1000, lambda: plan.pop(0)() if plan else None

    def time(run: Callable[[], None]) -> list[float]:
        run()
        return [0.01, 0.0125, 0.02]

    for name, stub in (
        ("_need_gpu", lambda: None), ("_versions", lambda: VERSIONS), ("_step_rows", step_rows), ("cases", cases),
        ("_time_alone", time), ("_copy_rate", lambda: 1e8),
    ):  # fmt: skip
        monkeypatch.setattr(benchmark, name, stub)
    return plan


BASELINE = ("baseline", "compiled")
TRAIN = ("bench", "train", "--shape", "d512", "--vocabulary", "32768", "--method", "mhar")


def test_every_row_of_the_committed_table_can_be_checked() -> None:
    rows = read(RESULTS)
    assert tuple(rows[0]) == STEPS.columns
    assert len({tuple(row[name] for name in STEPS.key) for row in rows}) == len(rows)
    for row in rows:
        assert not row["failed"] and row["gpu"]
        assert float(row["ms_20"]) <= float(row["ms_50"]) <= float(row["ms_80"])
        assert float(row["ratio"]) == pytest.approx(float(row["baseline_ms"]) / float(row["ms_50"]), abs=1e-3)
        peaks = int(row["peak_bytes"]) / int(row["baseline_peak_bytes"])
        assert float(row["peak_ratio"]) == pytest.approx(peaks, abs=1e-3)


def test_the_committed_kernels_are_all_and_share_a_copy_rate_by_shape() -> None:
    rows = read(KERNEL_RESULTS)
    assert tuple(rows[0]) == KERNELS.columns
    assert len({tuple(row[name] for name in KERNELS.key) for row in rows}) == len(rows)
    for shape in (shape.name for shape in SHAPES):
        here = [row for row in rows if row["shape"] == shape]
        assert {row["operation"].split()[0] for row in here} == set(OPERATIONS)
        # the rate that every share is of; where the time has three digits and the share two
        rates = [
            int(row["bytes"]) / float(row["ms_50"]) / float(row["ceiling_share"])
            for row in here
            if float(row["ceiling_share"]) >= 0.2 and float(row["ms_50"]) >= 0.02
        ]
        assert len(rates) > 20 and max(rates) == pytest.approx(min(rates), rel=0.01)
        assert 4.0e9 < min(rates) < 4.8e9  # bytes a millisecond that an H200's memory (4.8 TB/s) copies
    for row in rows:
        assert float(row["ms_20"]) <= float(row["ms_50"]) <= float(row["ms_80"])


def test_help_names_what_there_is() -> None:
    assert set(bench.METHODS) == set(METHODS) and len(set(bench.METHODS)) == len(bench.METHODS)
    assert bench.SHAPES == tuple(shape.name for shape in SHAPES)
    assert bench.OPERATIONS == OPERATIONS
    assert all(name in bench.IMPLEMENTATIONS for name in IMPLEMENTATIONS)


def test_help_of_the_methods_names_the_baseline(scaling: Scaling) -> None:
    status, out, _ = scaling("bench", "train", "--help")
    told = " ".join(out.partition("--method")[2].partition("--implementation")[0].split())
    assert status == 0 and f"{', '.join(bench.METHODS)}; may be given again." in told and " baseline, " in told


def test_rows_of_steps_are_kept_and_printed_as_they_are_measured(
    scaling: Scaling, measured: list[Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, seen = tmp_path / "mine.csv", []

    def look() -> None:
        seen.append((len(read(path)) if path.exists() else 0, len(capsys.readouterr().out.splitlines())))

    measured += [look] * 4
    status, out, _ = scaling(*TRAIN, "--table", str(path))
    assert status == 0 and seen == [(0, 0), (1, 3), (2, 1), (3, 1)]  # versions and header before the first
    assert out.split("\t")[2:4] == ["mhar", "kernels"] and "29.000/30.000/31.000\t20.000\t0.667\t1.500" in out
    rows = read(path)
    assert tuple(rows[0]) == STEPS.columns and [row["method"] for row in rows] == ["baseline"] * 2 + ["mhar"] * 2
    last = {"ms_20": "29.00", "ms_50": "30.00", "ratio": "0.667", "baseline_ms": "20.00", "baseline_peak_bytes": "2000"}
    assert {**rows[-1], **last, "torch": "2", "failed": ""} == rows[-1]


def test_an_interrupt_loses_nothing(scaling: Scaling, measured: list[Any], tmp_path: Path) -> None:
    def interrupt() -> None:
        raise KeyboardInterrupt

    measured += [lambda: None, lambda: None, interrupt]
    status, out, _ = scaling(*TRAIN, "--table", str(tmp_path / "mine.csv"))
    assert status != 0 and len(out.splitlines()) == 4
    assert [row["launch"] for row in read(tmp_path / "mine.csv")] == ["eager", "graph"]
    measured += [lambda: None, interrupt]
    status, out, _ = scaling("bench", "kernels", "--shape", "d512", "--table", str(tmp_path / "kernels.csv"))
    assert status != 0 and len(out.splitlines()) == 3
    assert [row["operation"] for row in read(tmp_path / "kernels.csv")] == ["pull over 3 rows"]


def test_a_method_of_ours_that_fails_ends_the_command(scaling: Scaling, measured: list[Any], tmp_path: Path) -> None:
    measured += [lambda: None, lambda: None, lambda: 1 / 0]
    with pytest.raises(ZeroDivisionError):
        scaling(*TRAIN, "--table", str(tmp_path / "mine.csv"))
    assert len(read(tmp_path / "mine.csv")) == 2


def test_what_another_project_s_kernel_refuses_is_a_row(
    scaling: Scaling, measured: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    failed = {"method": "mhar", "pass": "forward+backward", "launch": "eager", "failed": "out of memory"}
    monkeypatch.setattr(benchmark, "_step_rows", lambda *_: iter([dict(failed)]))
    status, out, _ = scaling(*TRAIN, "--table", str(tmp_path / "mine.csv"))
    assert status == 0 and out.splitlines()[-1].split("\t")[6:8] == ["out of memory", "-"]
    assert read(tmp_path / "mine.csv")[-1]["failed"] == "out of memory"


def test_kernels_have_a_table_too(scaling: Scaling, measured: list[Any], tmp_path: Path) -> None:
    path = tmp_path / "kernels.csv"
    words = ("bench", "kernels", "--shape", "d512", "--operation", "pull", "--table", str(path))
    status, out, _ = scaling(*words)
    assert status == 0 and out.splitlines()[-1].split("\t") == [
        "pull over 3 rows", "d512", "forward", "0.010/0.013/0.020", "1000", "0.800",
    ]  # fmt: skip
    (row,) = read(path)  # pull_group is an operation of its own
    assert tuple(row) == KERNELS.columns and (row["ms_50"], row["ceiling_share"]) == ("0.0125", "0.800")


def test_json_is_all_that_is_printed(scaling: Scaling, measured: list[Any], tmp_path: Path) -> None:
    status, out, _ = scaling(*TRAIN, "--json", "--table", str(tmp_path / "mine.csv"))
    rows = json.loads(out)["rows"]
    assert status == 0 and len(rows) == len(read(tmp_path / "mine.csv")) == 4
    assert (rows[-1]["baseline_ms"], rows[-1]["baseline_peak_bytes"], rows[0]["ratio"]) == (20.0, 2000, 1.0)
    status, out, _ = scaling("bench", "kernels", "--shape", "d512", "--json")
    assert status == 0 and len(json.loads(out)["rows"]) == 3


@pytest.mark.parametrize("command", ["train", "kernels"])
def test_a_table_that_cannot_be_is_refused_before_anything_is_timed(
    command: str, scaling: Scaling, measured: list[Any], tmp_path: Path
) -> None:
    measured.append(lambda: pytest.fail("timed"))
    (tmp_path / "old.csv").write_text("precious\n", encoding="utf-8")
    for name, text in (
        ("old.csv", "old.csv: there already; give another name, or move it away"),
        ("none/new.csv", f"there is no folder {tmp_path / 'none'}; make it, or give another name"),
    ):
        status, out, err = scaling("bench", command, "--table", str(tmp_path / name))
        assert (status, out, len(err.splitlines())) == (2, "", 1) and text in err
    assert (tmp_path / "old.csv").read_text(encoding="utf-8") == "precious\n"
    table = Table(tmp_path / "new.csv", STEPS)
    (tmp_path / "new.csv").write_text("another's\n", encoding="utf-8")
    with pytest.raises(UsageError, match=r"new.csv: cannot be written \(File exists\); give another name"):
        table.add({}, VERSIONS)


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (("train", "--shape", "d513"), "unknown shape 'd513'; did you mean 'd512'? (allowed: d1024, d1280, d2048"),
        (("train", "--method", "mhra"), "unknown method 'mhra'; did you mean 'mhar'? (allowed: attnres, baseline"),
        (("train", "--implementation", "kernel"), "unknown implementation 'kernel'; did you mean 'kernels'?"),
        (("train", "--vocabulary", "1"), "vocabulary 1; allowed: 2 and above"),
        (("kernels", "--shape", "tiny"), "unknown shape 'tiny'; allowed: d1024, d1280, d2048, d512"),
        (
            ("kernels", "--operation", "nonsense"),
            "unknown operation 'nonsense'; allowed: gather, gather_group, hc, mhc",
        ),
    ],
)
def test_wrong_use_is_refused_without_a_gpu(
    words: tuple[str, ...], text: str, scaling: Scaling, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(benchmark, "_need_gpu", lambda: pytest.fail("asked for a GPU"))
    status, out, err = scaling("bench", *words, "--table", str(tmp_path / "mine.csv"))
    assert (status, out, len(err.splitlines())) == (2, "", 1) and text in err
    assert not (tmp_path / "mine.csv").exists()


@pytest.fixture
def with_fla(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two methods have another project's kernels, whatever is installed here."""
    for name in METHODS:
        runs = {run: function for run, function in METHODS[name].runs.items() if run not in ("fla", "liger")}
        extra = {"fla": runs["eager"]} if name in ("attnres", "block-attnres") else {}
        monkeypatch.setitem(METHODS, name, dataclasses.replace(METHODS[name], runs={**runs, **extra}))


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (
            ("--implementation", "fla", "--method", "msar", "--method", "hc"),
            "bench: no implementation fla of msar, hc (there is one of attnres, block-attnres); give another --method",
        ),
        (
            ("--implementation", "fla", "--method", "baseline"),
            "no implementation fla of baseline (there is one of attn",
        ),
        (
            ("--implementation", "liger"),
            "bench: liger is not installed here (pip install liger-kernel); give another --method or --implementation",
        ),
        (
            ("--implementation", "liger", "--implementation", "fla", "--method", "mhar"),
            "bench: liger is not installed here (pip install liger-kernel); no implementation fla of mhar (there is",
        ),
    ],
)
def test_methods_without_the_implementation_are_refused(
    words: tuple[str, ...], text: str, with_fla: None, scaling: Scaling, measured: list[Any], tmp_path: Path
) -> None:
    """Where nothing that was asked for can be timed, nothing is; rows of the baseline alone would say nothing."""
    measured.append(lambda: pytest.fail("timed"))
    status, out, err = scaling("bench", "train", *words, "--table", str(tmp_path / "mine.csv"))
    assert (status, out, len(err.splitlines())) == (2, "", 1) and text in err
    assert not (tmp_path / "mine.csv").exists()


def test_what_cannot_be_timed_is_said_and_the_rest_timed(
    with_fla: None, scaling: Scaling, measured: list[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def left_out(*words: str) -> tuple[list[str], set[tuple[str, str]]]:
        caplog.clear()
        status, out, _ = scaling("bench", "train", "--shape", "d512", "--vocabulary", "32768", "--json", *words)
        assert status == 0
        timed = {(row["method"], row["implementation"]) for row in json.loads(out)["rows"]}
        return [record.getMessage() for record in caplog.records if record.levelname == "WARNING"], timed - {BASELINE}

    fla = ("--implementation", "fla")
    lines, timed = left_out(*fla, "--method", "msar", "--method", "attnres")
    assert lines == ["bench: left out: no implementation fla of msar (there is one of attnres, block-attnres)"]
    assert timed == {("attnres", "fla")}
    lines, timed = left_out(*fla)
    assert lines == [
        "bench: left out: no implementation fla of mhar, block, delta, msar, hc, mhc (there is one of attnres, "
        "block-attnres)"
    ]
    assert timed == {("attnres", "fla"), ("block-attnres", "fla")}
    lines, timed = left_out(*fla, "--implementation", "liger", "--implementation", "kernels", "--method", "attnres")
    assert lines == ["bench: left out: liger is not installed here (pip install liger-kernel)"]
    assert timed == {("attnres", "fla"), ("attnres", "kernels")}
    assert left_out("--method", "baseline") == ([], set())
    assert left_out("--method", "baseline", "--implementation", "eager") == ([], {("baseline", "eager")})
    assert left_out()[0] == []


def test_tables_of_many_calls_become_one(tmp_path: Path) -> None:
    """Each call times the baseline anew; the first one's rows stand for all."""
    row = {"shape": "d512", "vocabulary": 7, "implementation": "compiled", "ms": [1.0, 2.0, 3.0], "ratio": 1.0}
    for name, method in (("train-a", "mhar"), ("train-b", "hc")):
        rows = [{**row, "method": "baseline"}, {**row, "method": method}]
        (tmp_path / f"{name}.json").write_text(json.dumps({"versions": VERSIONS, "rows": rows}), encoding="utf-8")
    for _ in range(2):
        measure_kernels.table(argparse.Namespace(out=tmp_path))
        assert [found["method"] for found in read(tmp_path / "results.csv")] == ["baseline", "mhar", "hc"]
