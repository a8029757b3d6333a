"""The run folder: atomic records, journals, what a resume makes void."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.config.strict import build
from scaling.config.tree import RunConfig
from scaling.errors import RecordError
from scaling.identity import run_key
from scaling.record import (
    Attempt,
    EndRecord,
    RunFolder,
    append_line,
    encode,
    read_lines,
    run_folders,
    write_atomically,
)


def config(seed: int = 0) -> RunConfig:
    return build(
        RunConfig,
        {"model": {"size": "50k"}, "schedule": {"steps": 10, "warmup_steps": 1}, "run": {"seed": seed}},
    )


def begin(folder: RunFolder, number: int, resumed: int = 0) -> None:
    folder.begin(Attempt(attempt=number, host="h", pid=1, started_ms=number, resumed_from_step=resumed))


def log(folder: RunFolder, attempt: int, steps: range) -> None:
    for step in steps:
        append_line(folder.journal(attempt), {"step": step, "time_ms": step, "metrics": {"train/loss": attempt}})


def test_create_reopen_and_read_back(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, config())
    assert folder.key == run_key(config())
    assert RunFolder.create(tmp_path, config()).config() == config()
    assert [f.key for f in run_folders(tmp_path)] == [folder.key]
    assert folder.end() is None and folder.attempts() == []


def test_another_runs_config_is_refused(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, config())
    other = RunFolder.create(tmp_path, config(seed=1))
    (folder.path / "config.json").write_text((other.path / "config.json").read_text("utf-8"), encoding="utf-8")
    with pytest.raises(RecordError, match="another run's configuration"):
        RunFolder.create(tmp_path, config())


def test_a_resume_replaces_later_steps(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, config())
    begin(folder, 1)
    log(folder, 1, range(1, 8))
    begin(folder, 2, resumed=4)
    log(folder, 2, range(5, 9))
    points = list(folder.points())
    assert [p.step for p in points] == list(range(1, 9))
    assert [p.attempt for p in points] == [1] * 4 + [2] * 4


def test_a_torn_line_is_left_out_and_the_rest_kept(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    append_line(path, {"step": 1})
    with path.open("ab") as file:
        file.write(b'{"step": 2, "met')
    assert read_lines(path) == [{"step": 1}]
    with path.open("ab") as file:
        file.write(b"\n")
    append_line(path, {"step": 3})
    assert read_lines(path) == [{"step": 1}, {"step": 3}]


@given(st.floats())
def test_any_float_survives_the_journal(value: float) -> None:
    back = float(json.loads(json.dumps(encode(value), allow_nan=False)))
    assert back == value or (math.isnan(back) and math.isnan(value))


def test_end_record_round_trip_and_reopening(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, config())
    record = EndRecord(status="diverged", step=3, ended_ms=9, attempt=1, reason="NaN", final={"val/loss": math.nan})
    folder.finish(record)
    read = folder.end()
    assert read is not None and read.status == "diverged" and math.isnan(read.final["val/loss"])
    folder.reopen()
    assert folder.end() is None and (folder.path / "end-0001.json").exists()


def test_damaged_records_are_named(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, config())
    (folder.path / "end.json").write_text("{", encoding="utf-8")
    with pytest.raises(RecordError, match=r"end\.json: damaged; remove it"):
        folder.end()
    (folder.path / "config.json").write_text("[]", encoding="utf-8")
    with pytest.raises(RecordError, match=r"config\.json: damaged"):
        folder.config()
    with pytest.raises(RecordError, match="not a run folder"):
        RunFolder(tmp_path / "none").config()
    with pytest.raises(RecordError, match="no such folder of runs"):
        run_folders(tmp_path / "none")


def test_a_place_that_cannot_be_written_loses_nothing(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("old", encoding="utf-8")
    with pytest.raises(RecordError, match="cannot be made"):
        RunFolder.create(file, config())
    with pytest.raises(RecordError, match="cannot be written"):
        write_atomically(file / "x", "new")
    assert file.read_text("utf-8") == "old"


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
def test_a_full_disk_is_an_error_not_a_short_line() -> None:
    with pytest.raises(RecordError, match="/dev/full: cannot be written \\(No space left on device\\)"):
        append_line(Path("/dev/full"), {"step": 1})
