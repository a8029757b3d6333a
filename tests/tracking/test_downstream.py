"""Downstream results in a run's folder: metrics and artifacts of its MLflow run, sent again when they change."""

from __future__ import annotations

import json
import sqlite3
from pathlib import Path
from typing import Any

import pytest

from scaling.tracking import sync
from tests.tracking.folders import make_run


def write_results(run: Path, weights: str, value: float | None) -> None:
    folder = run / "downstream" / weights
    folder.mkdir(parents=True, exist_ok=True)
    metrics = {"acc": {"value": value, "stderr": 0.1}, "answer_bpb": {"value": 1.5, "stderr": None}}
    tree: dict[str, Any] = {"pick": {"metrics": metrics, "main": "acc", "items": 2, "shots": 0, "how": {}}}
    (folder / "results.json").write_text(json.dumps(tree), encoding="utf-8")
    (folder / "pick.csv").write_text("task,item,correct\npick,0,1\n", encoding="utf-8")


def shown(sql: sqlite3.Connection) -> dict[str, tuple[float, int]]:
    rows = sql.execute("SELECT key, value, step FROM latest_metrics WHERE key LIKE 'downstream/%'")
    return {key: (value, step) for key, value, step in rows}


def test_results_are_shown_and_follow_the_files(tmp_path: Path, database: Path, sql: sqlite3.Connection) -> None:
    """Metrics at the step of the weights, what is not finite left out; a later evaluation is sent too."""
    out = tmp_path / "runs"
    run = make_run(out)
    sync(out, store_uri=f"sqlite:///{database}")
    assert shown(sql) == {}
    write_results(run.path, "final", 0.25)
    write_results(run.path, "step-00000050", None)
    sync(out, store_uri=f"sqlite:///{database}")
    expected = {
        "downstream/pick/acc": (0.25, 100),
        "downstream/pick/answer_bpb": (1.5, 100),
        "downstream/step-00000050/pick/answer_bpb": (1.5, 50),
    }
    assert shown(sql) == expected
    files = database.parent.glob("mlartifacts/*/*/artifacts/downstream/*/*")
    assert {"final/pick.csv", "final/results.json"} <= {"/".join(path.parts[-2:]) for path in files}
    write_results(run.path, "final", 0.75)
    sync(out, store_uri=f"sqlite:///{database}")
    assert shown(sql)["downstream/pick/acc"] == (0.75, 100)


def test_damaged_results_are_named(
    tmp_path: Path, database: Path, sql: sqlite3.Connection, caplog: pytest.LogCaptureFixture
) -> None:
    """One run's damaged file does not stop the others."""
    out = tmp_path / "runs"
    runs = [make_run(out, seed=seed) for seed in (0, 1)]
    for run in runs:
        write_results(run.path, "final", 0.5)
    (runs[0].path / "downstream" / "final" / "results.json").write_text("{", encoding="utf-8")
    report = sync(out, store_uri=f"sqlite:///{database}")
    assert "results.json: damaged" in str(report) + caplog.text
    assert sql.execute("SELECT count(*) FROM latest_metrics WHERE key = 'downstream/pick/acc'").fetchone() == (1,)
