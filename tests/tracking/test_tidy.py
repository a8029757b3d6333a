"""One table from run folders and from a database, and what is left out of it."""

from __future__ import annotations

from pathlib import Path

import pandas as pd
import pytest

from scaling.analysis.ingest import read_runs
from scaling.analysis.schema import COLUMNS
from scaling.errors import StoreError, TableError
from scaling.record import RunFolder
from scaling.tracking import sync
from tests.tracking.folders import begin, finish, make_config, make_run


def test_folders_and_database_give_the_same(both: tuple[Path, str]) -> None:
    folders, database = (read_runs(source, histories=True, keep=["all"]) for source in both)
    assert len(folders.table) == 8 and list(folders.table) == list(COLUMNS)
    pd.testing.assert_frame_equal(folders.table, database.table)
    assert folders.histories is not None and database.histories is not None
    pd.testing.assert_frame_equal(folders.histories, database.histories)
    assert {name: str(folders.table[name].dtype) for name in COLUMNS} == {
        name: dtype.replace("string", "string") for name, dtype in COLUMNS.items()
    }


def test_a_diverged_run_is_nan_and_never_the_best(both: tuple[Path, str]) -> None:
    for source in both:
        table = read_runs(source, keep=["all"]).table
        row = table[table["seed"] == 10].iloc[0]
        assert row["status"] == "diverged" and pd.isna(row["val_loss"]) and pd.isna(row["train_loss"])
        assert table["val_loss"].min() > 1
        histories = read_runs(source, keep=["all"], histories=["mem/x", "train/loss"]).histories
        assert histories is not None
        assert histories.loc[histories["metric"] == "mem/x", "value"].tolist() == [float("inf")]
        assert histories["value"].isna().sum() == 1


def test_the_reason_of_a_run_is_a_column(tmp_path: Path) -> None:
    """From folders and from a store, in which a reason that is none any more is an empty tag."""
    out, store = tmp_path / "runs", f"sqlite:///{tmp_path}/mlflow.db"
    folder = make_run(out, status="failed", seed=1)
    make_run(out, seed=2)
    sync(out, store_uri=store)
    for source in (out, store):
        told = read_runs(source, keep=["all"]).table.set_index("seed")["reason"]
        assert told[1] == "failed for a test" and pd.isna(told[2])
    folder.reopen()
    begin(folder, attempt=2)
    finish(folder, attempt=2)
    sync(out, store_uri=store)
    for source in (out, store):
        assert read_runs(source, keep=["all"]).table["reason"].isna().all()


def test_unusable_runs_are_dropped_with_reasons(both: tuple[Path, str]) -> None:
    for source in both:
        got = read_runs(source)
        assert sorted(got.table["seed"]) == [0, 1, 2, 13]
        assert sorted(drop.reason for drop in got.dropped) == ["diverged", "failed", "unfinished schedule", "unknown"]
        assert len(read_runs(source, keep=["diverged", "failed"]).table) == 6
    with pytest.raises(TableError, match="--keep 'divergd' is no reason to drop a run; did you mean 'diverged'"):
        read_runs(both[0], keep=["divergd"])


def test_sweep_and_where_are_pushed_down(both: tuple[Path, str]) -> None:
    for source in both:
        assert read_runs(source, sweep="other", keep=["all"]).table["seed"].tolist() == [14]
        where = "method == 'mhar' and seed >= 2 and lr == 1e-3 and val_loss < 9"
        assert read_runs(source, where=where).table["seed"].tolist() == [2]
        assert read_runs(source, where=["status == 'diverged'"], keep=["all"]).table["seed"].tolist() == [10]
        with pytest.raises(TableError, match="leaves no row"):
            read_runs(source, where="val_loss < 0")


def test_an_older_attempt_and_a_copy_are_dropped(tmp_path: Path, database: Path) -> None:
    make_run(tmp_path / "a", seed=1)
    uri = f"sqlite:///{database}"
    sync(tmp_path / "a", store_uri=uri, experiment="first")
    sync(tmp_path / "a", store_uri=uri, experiment="second")
    got = read_runs(uri)
    assert len(got.table) == 1
    assert "a newer one has the same run key" in got.dropped[0].reason
    copy = RunFolder.create(tmp_path / "b", make_config(seed=2))
    original = RunFolder.create(tmp_path / "a", make_config(seed=1))
    for name in ("attempts.jsonl", "metrics-0001.jsonl", "end.json"):
        (copy.path / name).write_text((original.path / name).read_text())
    sync(tmp_path / "b", store_uri=uri, experiment="second")
    reasons = sorted(drop.reason for drop in read_runs(uri).dropped)
    assert len(read_runs(uri).table) == 1 and "same loss curve" in reasons[0], reasons


def test_runs_of_other_tools_come_in_through_a_map(database: Path) -> None:
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{database}", registry_uri=f"sqlite:///{database}")
    experiment = client.create_experiment("transformers", artifact_location=str(database.parent / "artifacts"))
    for seed in range(2):
        run = client.create_run(experiment, run_name=f"hf-{seed}").info.run_id
        for name, value in {"learning_rate": 3e-4, "seed": seed, "max_steps": 20, "hidden": 64, "arch": "gpt"}.items():
            client.log_param(run, name, value)
        for step in (10, 20):
            client.log_metric(run, "loss", 5 - step / 10, step=step)
            client.log_metric(run, "eval_loss", float("nan") if seed and step == 20 else 5.1 - step / 10, step=step)
        client.log_metric(run, "total_flos", 1e15, step=20)
        client.set_terminated(run)
    got = read_runs(f"sqlite:///{database}", columns={"method": "param:arch", "n_params": "hidden"}, keep=["all"])
    first, second = (got.table.iloc[i] for i in range(2))
    assert (first["lr"], first["seed"], first["steps"], first["steps_planned"]) == (3e-4, 0, 20, 20)
    assert (first["method"], first["n_params"], first["flops"], first["sweep"]) == ("gpt", 64, 1e15, "transformers")
    assert first["val_loss"] == pytest.approx(3.1) and first["train_loss"] == 3.0 and first["status"] == "done"
    assert bool(first["schedule_finished"]) and second["status"] == "diverged" and pd.isna(second["val_loss"])
    with pytest.raises(TableError, match="column 'metod' is not of the run table; did you mean 'method'"):
        read_runs(f"sqlite:///{database}", columns={"metod": "arch"})
    with pytest.raises(TableError, match="column 'n_params' holds 'gpt', which is not a number"):
        read_runs(f"sqlite:///{database}", columns={"n_params": "arch"})


def test_a_missing_or_foreign_database_is_refused(tmp_path: Path) -> None:
    import sqlite3

    with pytest.raises(StoreError, match="no such database"):
        read_runs(f"sqlite:///{tmp_path}/none.db")
    sqlite3.connect(tmp_path / "other.db").execute("CREATE TABLE runs (x)").connection.commit()
    with pytest.raises(StoreError, match="not an MLflow database that can be read"):
        read_runs(tmp_path / "other.db")
