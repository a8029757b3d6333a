"""PostgreSQL as the store: written directly and behind a server, read, and restarted in the middle."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pandas as pd
import pytest

from scaling.analysis import database as database_module
from scaling.analysis.ingest import read_runs
from scaling.record import RunFolder
from scaling.tracking import sync
from tests.tracking.folders import awkward, begin, finish, make_config, write_points
from tests.tracking.servers import MlflowServer, Postgres

pytestmark = [pytest.mark.slow, pytest.mark.postgres, pytest.mark.timeout(600)]


def test_postgres_directly_behind_a_server_and_restarted(
    cluster: Postgres, empty_postgres: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    uri = cluster.create("mlflow", template=empty_postgres)
    out = tmp_path / "runs"
    awkward(out)
    assert sync(out, store_uri=uri).ok
    folders = read_runs(out, histories=True, keep=["all"])
    database = read_runs(uri, histories=True, keep=["all"])
    pd.testing.assert_frame_equal(database.table, folders.table)
    assert database.histories is not None and folders.histories is not None
    pd.testing.assert_frame_equal(database.histories, folders.histories)
    with monkeypatch.context() as patch:  # without ADBC: psycopg, by a cursor on the server
        patch.setattr(database_module, "find_spec", lambda name: None if "adbc" in name else find_spec(name))
        plain = read_runs(uri, histories=True, keep=["all"])
    pd.testing.assert_frame_equal(plain.table, folders.table)
    assert plain.histories is not None
    pd.testing.assert_frame_equal(plain.histories, folders.histories)
    where = "method == 'mhar' and seed >= 2 and lr == 1e-3 and val_loss < 9"
    assert read_runs(uri, where=where).table["seed"].tolist() == [2]

    folder = RunFolder.create(out, make_config(seed=77))
    begin(folder)
    write_points(folder, 1, range(0, 50, 10))
    assert sync(out, store_uri=uri).points == 20
    begin(folder, attempt=2, resumed=20)
    write_points(folder, 2, range(30, 60, 10))
    cluster.stop()
    report = sync(out, store_uri=uri)
    assert not report.ok and "sync again" in report.unavailable
    cluster.start()
    assert sync(out, store_uri=uri).points == 12

    server = MlflowServer(uri, tmp_path).start()
    try:
        stored = read_runs(server.url, where="seed == 77", keep=["all"], histories=["train/loss"]).histories
        assert stored is not None and stored["step"].tolist() == [0, 10, 20, 30, 40, 50]
        assert sync(out, store_uri=server.url).ok  # the same runs, found by their keys
        cluster.stop()
        write_points(folder, 2, [60])
        finish(folder, step=60, attempt=2)
        report = sync(out, store_uri=server.url, timeout_s=10)
        assert not report.ok
        cluster.start()
        for _ in range(3):  # the server's pool meets its cut connections one by one
            report = sync(out, store_uri=server.url)
        assert report.ok, (report.unavailable, report.problems)
    finally:
        server.kill()
    table = read_runs(uri, where="seed == 77").table
    assert len(table) == 1 and table["steps"].tolist() == [60]
