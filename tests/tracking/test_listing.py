"""``scaling runs list``: what it shows of runs, and why those that are over without a result are."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from scaling.analysis.ingest import read_runs
from scaling.cli.listing import SHOWN, listing
from scaling.cli.main import main
from scaling.record import RunFolder
from tests.tracking.folders import begin, finish, make_config, make_run

FULL = "RecordError: end.json: cannot be written (No space left on device); free space or choose another --out"


def shown(out: Path, **options: Any) -> list[str]:
    table = read_runs(out, keep=["all"]).table
    given: dict[str, Any] = {"sort": "seed", "show": None, "limit": 0, "as_json": False} | options
    return listing(table, **given).splitlines()


@pytest.fixture
def out(tmp_path: Path) -> Path:
    """A run that is done and one that failed."""
    make_run(tmp_path, seed=0)
    folder = RunFolder.create(tmp_path, make_config(seed=1))
    begin(folder)
    finish(folder, status="failed", step=10, reason=FULL)
    return tmp_path


def test_why_a_run_failed_stands_behind_it(out: Path) -> None:
    """Without what to do about it; piped, nothing of it is cut."""
    head, done, failed = shown(out)
    assert head.split() == [*SHOWN, "reason"]
    assert done.split()[3] == "done" and done.endswith("  -")
    assert failed.split()[3] == "failed"
    assert failed.endswith("  RecordError: end.json: cannot be written (No space left on device)")
    assert head.index("reason") == failed.index("RecordError") == done.rindex("-")


@pytest.mark.parametrize(("columns", "width"), [(80, 24), (170, None)])
def test_a_reason_takes_what_is_left_of_the_terminal(
    columns: int, width: int | None, out: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """But never less than says something; the kind of error and its cause stay."""
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("COLUMNS", str(columns))
    head, _, failed = shown(out)
    told = failed[head.index("reason") :]
    assert told.startswith("RecordError") and told.endswith("device)") and "…" in told
    assert len(told) == width if width is not None else len(failed) == columns


def test_without_reasons_there_is_no_column_of_them(tmp_path: Path) -> None:
    make_run(tmp_path)
    assert shown(tmp_path)[0].split() == list(SHOWN)


def test_chosen_columns_and_json(
    out: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert shown(out, show="seed,status")[0].split() == ["seed", "status"]
    assert shown(out, show="reason")[0].strip() == "reason"
    monkeypatch.setattr(sys, "argv", ["scaling", "runs", "list", os.fspath(out), "--sort", "seed", "--json"])
    with pytest.raises(SystemExit):
        main()
    runs = json.loads(capsys.readouterr().out)["runs"]
    assert [run["reason"] for run in runs] == [None, FULL], "as it is recorded"
    assert pd.DataFrame(runs)["status"].tolist() == ["done", "failed"]
