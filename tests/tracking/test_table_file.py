"""The table file: brought up to date by reading only what is new, and read back as it was written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.analysis import ingest_sql
from scaling.analysis.ingest import ingest, read_runs
from scaling.analysis.raw import Points, Query, Raw
from scaling.analysis.schema import COLUMNS
from scaling.errors import TableError
from scaling.record import RunFolder
from scaling.tracking import sync
from tests.tracking.folders import begin, finish, make_config, make_run, write_points


def same(got: Any, expected: Any) -> None:
    pd.testing.assert_frame_equal(got.table, expected.table)
    pd.testing.assert_frame_equal(got.histories, expected.histories)
    assert {(one.run, one.reason) for one in got.dropped} == {(one.run, one.reason) for one in expected.dropped}


@pytest.mark.parametrize("kind", ["database", "folders"])
def test_a_second_ingest_reads_only_what_is_new(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    out, table = tmp_path / "runs", tmp_path / "runs.parquet"
    source = f"sqlite:///{database}" if kind == "database" else str(out)
    for seed in range(3):
        make_run(out, seed=seed)
    growing = RunFolder.create(out, make_config(seed=9))
    begin(growing)
    write_points(growing, 1, [0, 10])
    sync(out, store_uri=f"sqlite:///{database}")
    same(ingest(source, table, histories=True), read_runs(source, histories=True))
    asked: list[Any] = []
    if kind == "database":
        read = ingest_sql.read_database

        def watched(uri: str, query: Query, **rest: Any) -> Raw:
            asked.append(query.only)
            return read(uri, query, **rest)

        monkeypatch.setattr(ingest_sql, "read_database", watched)
        ingest(source, table, histories=True)
        assert asked == []  # nothing new, nothing read
    make_run(out, seed=4)
    write_points(growing, 1, [20])
    finish(growing, step=20)
    report = sync(out, store_uri=f"sqlite:///{database}")
    got = ingest(source, table, histories=True)
    if kind == "database":
        assert len(asked) == 1 and len(asked[0]) == 2 and report.run_ids[growing.key] in asked[0]
    same(got, read_runs(source, histories=True))
    assert len(got.table) == 5
    same(read_runs(table, histories=True), got)
    assert read_runs(table, where="seed == 4").table["seed"].tolist() == [4]
    # Other options: nothing of the old cache is used.
    assert len(ingest(source, table, where="seed > 1", histories=True).table) == 3


def test_a_run_that_is_gone_is_forgotten(tmp_path: Path, database: Path) -> None:
    import sqlite3

    out, table = tmp_path / "runs", tmp_path / "runs.parquet"
    folder, other = make_run(out, seed=1), make_run(out, seed=2)
    uri = f"sqlite:///{database}"
    ids = sync(out, store_uri=uri).run_ids
    assert len(ingest(uri, table).table) == 2
    connection = sqlite3.connect(database)
    connection.execute(f"UPDATE runs SET lifecycle_stage = 'deleted' WHERE run_uuid = '{ids[folder.key]}'")
    connection.commit()
    connection.close()
    assert ingest(uri, table).table["run_key"].tolist() == [other.key]


def test_csv_and_wrong_files(tmp_path: Path) -> None:
    out = tmp_path / "runs"
    make_run(out, seed=1, method="mhar")
    make_run(out, seed=2)
    expected = read_runs(out).table
    ingest(out, tmp_path / "runs.csv")
    pd.testing.assert_frame_equal(read_runs(tmp_path / "runs.csv").table, expected)
    with pytest.raises(TableError, match=r"unknown kind of table; write to a file ending in .parquet or .csv"):
        ingest(out, tmp_path / "runs.xlsx")
    with pytest.raises(TableError, match="no such file; make it with `scaling runs ingest"):
        read_runs(tmp_path / "none.parquet")
    (tmp_path / "bad.parquet").write_bytes(b"PAR1 no")
    with pytest.raises(TableError, match="cannot be read"):
        read_runs(tmp_path / "bad.parquet")
    expected[["run_key", "lr"]].to_csv(tmp_path / "few.csv")
    with pytest.raises(TableError, match="column 'sweep' is missing"):
        read_runs(tmp_path / "few.csv")
    with pytest.raises(TableError, match="has no histories beside it"):
        read_runs(tmp_path / "runs.csv", histories=True)
    pd.DataFrame({**expected, "n_params": ["many", "few"]}).to_csv(tmp_path / "words.csv", index=False)
    with pytest.raises(TableError, match="values of another type"):
        read_runs(tmp_path / "words.csv")
    assert list(expected) == list(COLUMNS)


@given(
    st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 2), st.integers(-3, 2**40), st.integers(0, 3), st.floats(-1, 1)),
        max_size=30,
    )
)
def test_histories_are_sorted_and_the_later_of_two_measurements_stays(rows: list[tuple[Any, ...]]) -> None:
    columns = [np.array(column) for column in zip(*rows, strict=True)] if rows else [np.empty(0, int)] * 5
    names = ("run", "metric", "step", "time_ms", "value")
    points = Points(runs=["b", "c", "a"], metrics=["y", "z", "x"], **dict(zip(names, columns, strict=True)))
    got = points.frame({"a": "A", "b": "B"})  # run c is left out
    frame = pd.DataFrame(rows, columns=list(names))
    frame["run"], frame["metric"] = (
        frame["run"].map(dict(enumerate("BcA"))),
        frame["metric"].map(dict(enumerate("yzx"))),
    )
    frame = frame[frame["run"] != "c"]
    ordered = frame.sort_values(["run", "metric", "step", "time_ms"], kind="stable")
    expected = ordered.drop_duplicates(["run", "metric", "step"], keep="last")
    kept = ["metric", "step", "time_ms"]
    assert got["run_key"].tolist() == expected["run"].tolist()
    assert got[kept].astype(object).to_numpy().tolist() == expected[kept].astype(object).to_numpy().tolist()
