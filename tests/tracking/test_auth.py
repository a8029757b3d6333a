"""Servers that ask for a password or a token: with it all goes on as without, without it one clear line says so."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pandas as pd
import pytest
import requests

from scaling.analysis.ingest import read_runs
from scaling.errors import StoreError, UsageError
from scaling.tracking import passwords, sync
from scaling.tracking.server import serve
from tests.conftest import ROOT
from tests.tracking.folders import make_run
from tests.tracking.servers import MlflowServer, Proxy

PASSWORD = "a long pass:word %20"
REFUSED = r"refused the credentials \(401\); set MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACK"

Log = Callable[..., None]


@pytest.fixture
def log_in(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Log:
    """``log_in(user, password)``, ``log_in(token=...)``, ``log_in()``: nobody, not even whoever runs the tests."""

    def become(user: str = "", password: str = "", *, token: str = "") -> None:
        monkeypatch.setenv("HOME", str(tmp_path))
        given = {"USERNAME": user, "PASSWORD": password, "TOKEN": token}
        for name, value in given.items():
            monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", value)

    become()
    return become


@pytest.fixture(scope="module")
def asking(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Iterator[MlflowServer]:
    """``scaling runs serve --auth``, its first password given."""
    folder = tmp_path_factory.mktemp("auth")
    shutil.copy(empty_database, folder / "mlflow.db")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(passwords.PASSWORD, PASSWORD)
        running = MlflowServer(f"sqlite:///{folder / 'mlflow.db'}", folder, auth=True).start()
    yield running
    running.kill()


def test_the_first_password_is_asked_for_before_anything_is_made(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    options: Any = {"artifacts": tmp_path / "a" / "files", "auth": True}
    for wrong in ("", "too short", "déjà vu, déjà vu"):
        monkeypatch.setenv(passwords.PASSWORD, wrong)
        with pytest.raises(UsageError, match="no users yet; set MLFLOW_AUTH_ADMIN_PASSWORD to a password of 12 ASCII"):
            serve("sqlite:///x.db", **options)
    assert not list(tmp_path.iterdir())
    monkeypatch.setenv(passwords.PASSWORD, PASSWORD)
    command = serve("sqlite:///x.db", **options)
    assert command.arguments[-2:] == ("--app-name", "basic-auth")
    settings = Path(command.environment["MLFLOW_AUTH_CONFIG_PATH"])
    assert settings.parent == tmp_path / "a" and PASSWORD not in settings.read_text(encoding="utf-8")
    assert settings.stat().st_mode & 0o077 == 0 and (settings.parent / passwords.USERS).stat().st_mode & 0o077 == 0
    assert len(command.environment["MLFLOW_FLASK_SERVER_SECRET_KEY"]) == 64
    monkeypatch.setattr(passwords, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match=r"needs Flask-WTF, .* pip install 'isoloss\[auth\]'"):
        serve("sqlite:///x.db", **options)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_with_passwords(tmp_path: Path, asking: MlflowServer, log_in: Log) -> None:
    out = tmp_path / "runs"
    make_run(out, seed=1)
    for user, password in (("", ""), ("admin", "a wrong password")):
        log_in(user, password)
        with pytest.raises(StoreError, match=REFUSED):
            sync(out, store_uri=asking.url)
        with pytest.raises(StoreError, match=REFUSED):
            read_runs(asking.url)
    log_in("admin", PASSWORD)
    assert sync(out, store_uri=asking.url).ok
    expected = read_runs(out, histories=True)
    got = read_runs(asking.url, histories=True)
    pd.testing.assert_frame_equal(got.table, expected.table)
    assert got.histories is not None and expected.histories is not None
    pd.testing.assert_frame_equal(got.histories, expected.histories)

    log_in()  # nobody, but MLflow's credentials file
    file = tmp_path / ".mlflow" / "credentials"
    file.parent.mkdir()
    text = f"[mlflow]\nmlflow_tracking_username = admin\nmlflow_tracking_password = {PASSWORD}\n"
    file.write_text(text, encoding="utf-8")
    assert len(read_runs(asking.url).table) == 1
    file.unlink()

    guest = {"username": "guest", "password": "just here to look"}
    made = requests.post(f"{asking.url}/api/2.0/mlflow/users/create", json=guest, auth=("admin", PASSWORD), timeout=20)
    assert made.status_code == 200, made.text
    log_in(guest["username"], guest["password"])
    assert len(read_runs(asking.url).table) == 1  # may look
    make_run(out, seed=2)
    report = sync(out, store_uri=asking.url, state_folder=tmp_path / "guest")
    assert "refused (403" in report.problems[0].reason and "check the permissions" in report.problems[0].reason


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_command_line_says_it_in_one_line(tmp_path: Path, asking: MlflowServer, log_in: Log) -> None:
    make_run(tmp_path / "runs")
    table = str(tmp_path / "runs.parquet")
    for words in (["sync", str(tmp_path / "runs"), "--store", asking.url], ["ingest", asking.url, "--out", table]):
        command = [sys.executable, "-m", "scaling", "runs", *words]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 1 and done.stdout == ""
        (line,) = done.stderr.splitlines()
        assert line.startswith(f"error: {asking.url}: refused the credentials (401)")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_server_with_tokens(tmp_path: Path, server: MlflowServer, log_in: Log) -> None:
    gate = Proxy(server.url, authorization="Bearer abc-123")
    out = tmp_path / "runs"
    make_run(out)
    (tmp_path / ".netrc").write_text("machine 127.0.0.1 login somebody password else\n", encoding="utf-8")
    try:
        for token in ("", "another"):
            log_in(token=token)
            with pytest.raises(StoreError, match=REFUSED):
                sync(out, store_uri=gate.url, experiment="token")
            with pytest.raises(StoreError, match=REFUSED):
                read_runs(gate.url)
        log_in(token="abc-123")
        assert sync(out, store_uri=gate.url, experiment="token").ok
        assert len(read_runs(gate.url, sweep="token", histories=True).table) == 1
        gate.fault = lambda path: (0.0, 0.0, 403)
        with pytest.raises(StoreError, match="--allowed-hosts"):
            sync(out, store_uri=gate.url, experiment="token")
    finally:
        gate.close()
