"""Faults that no kind of store may lose or double anything by: a sqlite file, a server, PostgreSQL."""

from __future__ import annotations

import json
import sqlite3
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from scaling.record import RunFolder, append_line
from scaling.tracking import sync
from scaling.tracking.report import SyncReport
from tests.tracking.folders import START_MS, begin, finish, make_config, make_run, write_points
from tests.tracking.servers import MlflowServer, Postgres

slow = (pytest.mark.slow, pytest.mark.timeout(600))


@dataclass(frozen=True, kw_only=True)
class Place:
    """A store, an experiment of its own in it, and its rows by plain SQL."""

    uri: str
    experiment: str
    ask: Callable[[str], list[Any]]

    def sync(self, out: Path) -> SyncReport:
        return sync(out, store_uri=self.uri, experiment=self.experiment)

    def runs(self, columns: str) -> list[Any]:
        """Of the experiment's runs, not their parent."""
        return self.ask(
            f"SELECT {columns} FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id "
            f"WHERE e.name = '{self.experiment}' AND r.run_uuid IN "
            "(SELECT run_uuid FROM tags WHERE key = 'kind' AND value = 'run')"
        )

    def metrics(self, columns: str, table: str = "metrics") -> list[Any]:
        """Of the training loss, by step."""
        return self.ask(
            f"SELECT {columns} FROM {table} m JOIN runs r ON r.run_uuid = m.run_uuid "
            "JOIN experiments e ON e.experiment_id = r.experiment_id "
            f"WHERE e.name = '{self.experiment}' AND m.key = 'train/loss' ORDER BY m.step, m.timestamp"
        )


@pytest.fixture(
    params=["sqlite", pytest.param("server", marks=slow), pytest.param("postgres", marks=(*slow, pytest.mark.postgres))]
)
def place(request: pytest.FixtureRequest) -> Place:
    name = f"{request.function.__name__} {request.param}"
    if request.param == "postgres":
        cluster: Postgres = request.getfixturevalue("cluster")
        uri: str = request.getfixturevalue("postgres_store")
        return Place(uri=uri, experiment=name, ask=partial(cluster.ask, uri))
    path: Path = request.getfixturevalue("database" if request.param == "sqlite" else "store")

    def ask(query: str) -> list[Any]:
        connection = sqlite3.connect(path, timeout=30)
        try:
            return connection.execute(query).fetchall()
        finally:
            connection.close()

    if request.param == "sqlite":
        return Place(uri=f"sqlite:///{path}", experiment=name, ask=ask)
    server: MlflowServer = request.getfixturevalue("server")
    return Place(uri=server.url, experiment=name, ask=ask)


def test_a_torn_last_line_waits_until_it_is_whole(tmp_path: Path, place: Place) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    write_points(folder, 1, [0, 10])
    line = json.dumps({"step": 20, "time_ms": START_MS, "metrics": {"train/loss": 1.5}}) + "\n"
    with folder.journal(1).open("a") as file:
        file.write(line[:17])
        file.flush()
        assert place.sync(out).points == 8
        file.write(line[17:])
    assert place.sync(out).points == 1
    assert place.metrics("step")[:2] == [(0,), (10,)]
    assert place.metrics("step, value")[-1] == (20, 1.5)


def test_a_clock_that_jumps_backwards_keeps_all_points(tmp_path: Path, place: Place) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config())
    begin(folder)
    for step in range(5):
        time_ms = START_MS + (1000 * step if step < 3 else -7_200_000 + step)
        append_line(folder.journal(1), {"step": step, "time_ms": time_ms, "metrics": {"train/loss": float(step)}})
    finish(folder, step=4, ended_ms=START_MS - 7_000_000)
    assert place.sync(out).ok
    assert place.metrics("step, value") == [(step, float(step)) for step in range(5)]
    assert place.metrics("value", "latest_metrics") == [(4.0,)]
    assert place.runs("r.end_time") == [(START_MS - 7_000_000,)]


def test_a_changed_parameter_is_an_error_naming_both(tmp_path: Path, place: Place) -> None:
    out = tmp_path / "runs"
    folder = make_run(out)
    other = make_run(out, seed=1)
    assert place.sync(out).ok
    path = folder.path / "config.json"
    path.write_text(path.read_text().replace('"lr": 0.001', '"lr": 0.002'))
    begin(folder, attempt=2, resumed=50)
    begin(other, attempt=2, resumed=50)
    write_points(other, 2, [60])
    report = place.sync(out)
    (problem,) = report.problems
    assert problem.run == folder.key
    assert (
        "parameter 'optimizer.lr' is '0.002', but '0.001' in run" in problem.reason and "config.json" in problem.reason
    )
    assert not report.ok and report.runs == 2
    attempts = f"SELECT value FROM tags WHERE key = 'attempts' AND run_uuid = '{report.run_ids[other.key]}'"
    assert place.ask(attempts) == [("2",)]  # the other run went on


def test_two_syncs_at_once_make_one_run_each(tmp_path: Path, place: Place) -> None:
    out = tmp_path / "runs"
    for seed in range(4):
        make_run(out, seed=seed)
    errors: list[BaseException] = []

    def work() -> None:
        try:
            assert place.sync(out).ok
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(place.runs("r.run_uuid")) == 4
    assert place.ask(f"SELECT count(*) FROM runs r JOIN experiments e ON e.experiment_id = r.experiment_id "
                     f"WHERE e.name = '{place.experiment}'") == [(5,)]  # fmt: skip
    assert len(place.metrics("step")) == 44
