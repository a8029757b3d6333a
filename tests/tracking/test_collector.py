"""Metric rows read in slices by several readers: the same rows, bounded memory, writers neither waited for nor kept."""

from __future__ import annotations

import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pytest

from scaling.analysis import collector as module
from scaling.analysis import database as database_module
from scaling.analysis.collector import Collector
from scaling.analysis.database import Database
from scaling.analysis.ingest import read_runs
from scaling.analysis.raw import Points
from scaling.errors import StoreError

OTHER_PROCESS = """
import sqlite3, sys, time
connection = sqlite3.connect(sys.argv[1], timeout=0)
connection.execute("BEGIN EXCLUSIVE")
connection.execute("UPDATE runs SET name = 'renamed'")
print("locked", flush=True)
time.sleep(float(sys.argv[2]))
connection.commit()
"""


@pytest.mark.parametrize("adbc", [True, False])
@pytest.mark.parametrize("sweep", [None, "tiny", "other"])  # all runs, most, one of eight
def test_slices_and_readers_give_the_same(
    both: tuple[Path, str], monkeypatch: pytest.MonkeyPatch, sweep: str | None, adbc: bool
) -> None:
    if not adbc:
        monkeypatch.setattr(database_module, "find_spec", lambda name: None)
    monkeypatch.setattr(module, "SLICE_ROWS", 7)
    monkeypatch.setattr(module, "READERS", 3)
    slices: list[str] = []
    original = Collector.read

    def read(self: Collector, source: Database, queries: list[str], part: int = 0) -> None:
        slices.extend(queries)
        original(self, source, queries, part)

    monkeypatch.setattr(Collector, "read", read)
    for histories in (True, ["train/loss", "val/loss"]):
        folders, stored = (read_runs(one, sweep=sweep, histories=histories, keep=["all"]) for one in both)
        assert stored.histories is not None and len(stored.histories) and folders.histories is not None
        pd.testing.assert_frame_equal(stored.histories, folders.histories)
        pd.testing.assert_frame_equal(stored.table, folders.table)
    assert len(set(slices)) >= (3 if sweep == "other" else 20)


class _Source:
    """A database that is always faster than who reads it; notes how much memory its batches hold."""

    def __init__(self, batches: int, rows: int) -> None:
        self.held: list[int] = []
        self._batches, self._rows = batches, rows

    def batches(self, query: str) -> Iterator[pa.RecordBatch]:
        numbers = np.arange(self._rows)
        before = pa.total_allocated_bytes()
        for i in range(self._batches):
            self.held.append(pa.total_allocated_bytes() - before)
            columns: list[Any] = [
                pa.array([f"{i:032x}{module.NUMBER}train/loss"] * self._rows),
                pa.array(numbers.tolist()),
                pa.array(numbers.tolist()),
                pa.array(numbers.astype(float).tolist()),
            ]
            yield pa.record_batch(columns, names=["name", "step", "timestamp", "value"])


def test_run_metric_and_nan_come_as_one_cell() -> None:
    """Cells are what reading costs; the marks are told apart whatever the metric's name holds."""
    names = [f"0a{module.NUMBER}loss", f"0a{module.NAN}loss", f"0b{module.NAN}x{module.NUMBER}y"]

    class Source:
        def batches(self, query: str) -> Iterator[pa.RecordBatch]:
            assert query.split(" FROM ")[0].count(",") == 3
            columns: list[Any] = [pa.array(names), pa.array([1, 2, 3]), pa.array([4, 5, 6]), pa.array([0.5, 0.0, 0.0])]
            yield pa.record_batch(columns, names=["name", "step", "timestamp", "value"])

    collector = Collector(1)
    collector.read(Source(), [module.SELECT])  # type: ignore[arg-type]
    points = collector.points()
    assert points.runs == ["0a", "0b"] and points.metrics == ["loss", f"x{module.NUMBER}y"]
    assert points.run.tolist() == [0, 0, 1] and points.metric.tolist() == [0, 0, 1]
    assert points.value[0] == 0.5 and np.isnan(points.value[1:]).all()


def test_rows_of_folders_and_of_databases_are_put_together_alike() -> None:
    collector = Collector()
    collector.extend("b", ["loss", "lr"], [1, 1], [10, 10], [0.5, 0.1])
    collector.extend("a", ["lr", "loss"], [2, 3], [20, 30], [0.2, float("nan")])
    points = collector.points()
    assert points.runs == ["b", "a"] and points.metrics == ["loss", "lr"]
    assert points.run.tolist() == [0, 0, 1, 1] and points.metric.tolist() == [0, 1, 1, 0]
    assert points.step.tolist() == [1, 1, 2, 3] and points.time_ms.tolist() == [10, 10, 20, 30]
    assert points.value[:3].tolist() == [0.5, 0.1, 0.2] and np.isnan(points.value[3])
    assert points.run.dtype == points.metric.dtype == np.int32 and points.step.dtype == np.int64
    assert len(Collector().points().run) == 0


def test_a_run_id_that_holds_a_mark_is_refused(both: tuple[Path, str], sql: sqlite3.Connection) -> None:
    sql.execute("PRAGMA foreign_keys = OFF")
    sql.execute("UPDATE runs SET run_uuid = ? WHERE rowid = (SELECT max(rowid) FROM runs)", (f"a{module.NAN}b",))
    sql.commit()
    with pytest.raises(StoreError, match=r"run id 'a\\x1eb' holds a control character; remove that run"):
        read_runs(both[1], histories=True, keep=["all"])


def test_no_batch_outlives_the_next() -> None:
    source, collector = _Source(batches=12, rows=5_000), Collector(1)
    collector.read(source, ["all"])  # type: ignore[arg-type]
    points = collector.points()
    assert len(points.step) == 60_000 and points.runs[-1] == f"{11:032x}"
    one = source.held[1]  # the batch just given
    assert one > 5_000 * 60 and max(source.held) <= 1.5 * one


def test_columns_take_no_more_room_than_their_rows() -> None:
    columns, others = module.Columns(np.int32, np.float64), module.Columns(np.int32, np.float64)
    for i in range(50):
        for some in (columns, others):
            some.append(np.full(20_000, i), np.full(20_000, i / 2))
    room = len(columns.arrays[0])
    assert 1_000_000 <= room <= 1_000_000 + module.GROWTH_ROWS
    columns.take(others)
    columns.trim()
    assert len(others.arrays[1]) == 0
    for array in columns.arrays:
        assert len(array) == 2_000_000 and array.flags.owndata
    assert (columns.arrays[0] == np.tile(np.repeat(np.arange(50), 20_000), 2)).all()


def test_a_reader_does_not_lock_writers_out_between_queries(both: tuple[Path, str], database: Path) -> None:
    with Database(both[1]) as reading:
        assert reading.scalar("SELECT count(*) AS n FROM runs") > 0
        assert sum(batch.num_rows for batch in reading.batches("SELECT step FROM metrics")) > 0
        # Another process: locks of sqlite files do not count within one.
        command = [sys.executable, "-c", OTHER_PROCESS, str(database), "0"]
        assert subprocess.run(command, capture_output=True, text=True).stderr == ""
        assert reading.scalar("SELECT max(name) AS n FROM runs") == "renamed"


@pytest.mark.parametrize("adbc", [True, False])
def test_a_reader_waits_for_a_writer(
    both: tuple[Path, str], database: Path, monkeypatch: pytest.MonkeyPatch, adbc: bool
) -> None:
    if not adbc:
        monkeypatch.setattr(database_module, "find_spec", lambda name: None)
    command = [sys.executable, "-c", OTHER_PROCESS, str(database), "0.5"]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as writer:
        assert writer.stdout is not None
        writer.stdout.readline()
        got = read_runs(both[1], histories=True, keep=["all"])
    assert set(got.table["name"]) == {"renamed"} and got.histories is not None


def test_a_deleted_run_is_left_out_of_a_sweep_over_the_file(both: tuple[Path, str], sql: sqlite3.Connection) -> None:
    whole = read_runs(both[1], histories=True, keep=["all"])
    assert whole.histories is not None
    gone = next(key for key in whole.table["run_key"] if (whole.histories["run_key"] == key).any())
    sql.execute("UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = ?", (whole.source_ids[gone],))
    sql.commit()
    rest = read_runs(both[1], histories=True, keep=["all"])
    assert rest.histories is not None and gone not in rest.table["run_key"].tolist()
    kept = whole.histories[whole.histories["run_key"] != gone].reset_index(drop=True)
    kept["run_key"] = kept["run_key"].cat.remove_unused_categories()
    pd.testing.assert_frame_equal(rest.histories, kept)


def test_metrics_of_runs_left_out_are_no_categories() -> None:
    """A reader of a whole file meets other sweeps' metrics: the rows kept are of those that a reader of one meets."""
    points = Points(
        runs=["a", "b", "c"], metrics=["val/loss", "mem/x", "train/loss"], run=[0, 1, 0, 2], metric=[2, 1, 0, 1],
        step=[1, 1, 1, 1], time_ms=[5, 5, 5, 5], value=[0.5, 0.25, 0.75, 1.0],
    )  # fmt: skip
    got = points.frame({"a": "one"})
    assert got["metric"].cat.categories.tolist() == ["train/loss", "val/loss"]
    assert got["metric"].tolist() == ["train/loss", "val/loss"] and got["value"].tolist() == [0.5, 0.75]
    points = Points(runs=["a"], metrics=["x", "y"], run=[0], metric=[1], step=[1], time_ms=[5], value=[1.0])
    assert points.frame({"a": "one"})["metric"].cat.categories.tolist() == ["y"]
    assert Points(runs=["a"], metrics=["x"], run=[0], metric=[0], step=[1], time_ms=[5], value=[1.0]).frame({}).empty
