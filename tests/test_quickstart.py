"""The whole main job on this machine: broken off, gone on with, recognised as finished, opened in MLflow."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import time
from pathlib import Path

import pytest

from scaling import quickstart as module
from scaling.errors import RecordError
from scaling.quickstart import quickstart
from scaling.record import run_folders
from scaling.sweeps.plan import plan
from scaling.sweeps.spec import load_spec
from tests.quickstart import ROOT, Calls, command, environment

slow = pytest.mark.slow


@slow
def test_ctrl_c_leaves_nothing_half_written(quickstart_calls: Calls) -> None:
    said = quickstart_calls.interrupted
    assert said.returncode == 1, said.stderr
    assert "nothing is lost; the same command goes on" in said.stdout
    assert "Traceback" not in said.stderr


@slow
def test_the_next_call_finishes_and_prints_the_findings(quickstart_calls: Calls) -> None:
    said = quickstart_calls.finished
    assert said.returncode == 0, said.stderr
    for text in ("Iso-loss speedup", "Paired seeds", "Noise floor", "proves nothing about the methods", "report.html"):
        assert text in said.stdout
    folders = run_folders(quickstart_calls.out / "runs")
    ends = [folder.end() for folder in folders]
    assert len(folders) == 16 and all(end is not None and end.status == "done" for end in ends)
    assert any(len(folder.attempts()) == 2 for folder in folders), "the run that was broken off was gone on with"
    for folder in folders:
        steps = [point.step for point in folder.points() if "train/loss" in point.metrics]
        assert steps == sorted(set(steps)), "a resumed run has no step twice"
    assert not [path for path in quickstart_calls.out.rglob(".*.*") if path.is_file() and ".tmp" in path.name]


@slow
def test_losses_fall_and_larger_models_end_lower(quickstart_calls: Calls) -> None:
    by_size: dict[str, list[float]] = {}
    for folder in run_folders(quickstart_calls.out / "runs"):
        points = [p.metrics["train/loss"] for p in folder.points() if "train/loss" in p.metrics]
        end = folder.end()
        assert end is not None
        assert end.final["val/loss"] < points[0] - 0.5
        by_size.setdefault(str(folder.config().model.size), []).append(end.final["val/loss"])
    means = [sum(by_size[size]) / len(by_size[size]) for size in ("6k", "12k", "25k", "50k")]
    assert means == sorted(means, reverse=True)


@slow
def test_every_run_is_in_mlflow_with_its_real_end(quickstart_calls: Calls) -> None:
    database = sqlite3.connect(f"file:{quickstart_calls.out / 'mlflow.db'}?mode=ro", uri=True)
    rows = database.execute(
        "select t.value, r.status from runs r join tags t on t.run_uuid = r.run_uuid where t.key = 'run_key'"
    ).fetchall()
    database.close()
    keys = {folder.key for folder in run_folders(quickstart_calls.out / "runs")}
    runs = [(key, status) for key, status in rows if key in keys]  # the sweep's parent has a key of its own
    assert sorted(key for key, _ in runs) == sorted(keys)
    assert {status for _, status in runs} == {"FINISHED"}


@slow
def test_again_trains_nothing_and_is_quick(quickstart_calls: Calls) -> None:
    before = {path: path.stat().st_mtime_ns for path in (quickstart_calls.out / "runs").glob("*/*")}
    begun = time.monotonic()
    again = subprocess.run(
        command(quickstart_calls.out, "--json"), cwd=ROOT, env=environment(), text=True, capture_output=True, check=True
    )
    wall_s = time.monotonic() - begun
    said = json.loads(again.stdout)
    assert (said["trained"], said["finished"], said["unfinished"]) == (0, 16, 0)
    assert said["results"]
    assert {path: path.stat().st_mtime_ns for path in before} == before
    assert wall_s < 10


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x", encoding="utf-8")
    with pytest.raises(RecordError, match=r"cannot be written .*; choose another --out"):
        quickstart(tmp_path / "file")
    if os.geteuid() != 0:  # root may write anywhere
        (tmp_path / "closed").mkdir(mode=0o500)
        with pytest.raises(RecordError, match=r"cannot be written \(Permission denied\); choose another --out"):
            quickstart(tmp_path / "closed")


def test_a_full_disk_is_named_before_anything_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from collections import namedtuple

    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr("shutil.disk_usage", lambda path: usage(10**9, 10**9 - 2**20, 2**20))
    with pytest.raises(RecordError, match="1 MiB free, 256 MiB are needed"):
        quickstart(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_findings_of_other_code_are_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is remembered was found by this very analysis: one of another version may have been wrong."""
    assert len(list(module.ANALYSIS.rglob("*.py"))) > 30
    monkeypatch.setattr(module, "ANALYSIS", tmp_path)
    sweep = plan(load_spec("quickstart"), tmp_path / "runs")
    before = module._state(sweep)
    (tmp_path / "speedup.py").write_text("half = 2\n", encoding="utf-8")
    assert module._state(sweep) != before
