"""Tracking from the training process: what arrives, and that no server can slow or end a training."""

from __future__ import annotations

import json
import os
import sqlite3
import subprocess
import sys
import time
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread

import pytest
import yaml

from scaling.config.tree import RunConfig, to_dict
from scaling.errors import ConfigError, UsageError
from scaling.identity import run_key
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.revision import recorded
from scaling.tracking import direct, sync
from scaling.tracking.direct import Direct
from scaling.tracking.server import free_port
from tests.conftest import ROOT
from tests.tracking.folders import begin, finish, make_config, write_points
from tests.tracking.servers import MlflowServer, Proxy, silent_port, wait_until
from tests.tracking.test_server import POINTS, RUNS, count
from tests.train.conftest import configure, write_store

RARELY = {"every_steps": 60, "num_sequences": 2}
DATABASE = "sqlite:///mlflow.db"


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("tokens"))


@pytest.fixture(params=["absent", "hangs", "answers 500", "answers nonsense"])
def sick(request: pytest.FixtureRequest) -> Iterator[str]:
    """Address of a server that is of no use."""
    if request.param == "absent":
        yield f"http://127.0.0.1:{free_port()}"
    elif request.param == "hangs":
        listener, port = silent_port()
        yield f"http://127.0.0.1:{port}"
        listener.close()
    else:
        status = 500 if request.param == "answers 500" else 200

        class Handler(BaseHTTPRequestHandler):
            def _any(self) -> None:
                self.send_response(status)
                self.end_headers()
                self.wfile.write(b"<html>welcome</html>")

            do_GET = do_POST = _any

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        server.server_close()


def folder_of(config: RunConfig, out: Path) -> RunFolder:
    return RunFolder(out / run_key(resolve(config)))


def timed(tokens: Path, out: Path, **settings: str) -> tuple[float, float]:
    """Train sixty steps; how long that took, and how long from the first step to the last."""
    from scaling.train import train

    config = configure(tokens, schedule={"steps": 60}, run={"log_every_steps": 1, **settings}, evaluation=RARELY)
    started_s = time.monotonic()
    end = train(config, out=out)
    took_s = time.monotonic() - started_s
    assert end.status == "done" and end.step == 60
    times = [point.time_ms for point in folder_of(config, out).points() if "train/loss" in point.metrics]
    assert len(times) == 60
    return took_s, (times[-1] - times[0]) / 1000


@pytest.fixture(scope="module")
def plain(tokens: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[float, float]:
    """The same without tracking."""
    return timed(tokens, tmp_path_factory.mktemp("plain"))


def test_a_sick_server_neither_slows_nor_ends_a_training(
    tokens: Path, plain: tuple[float, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, sick: str
) -> None:
    """A training that waited for it once would take ``TIMEOUT_S`` longer, which the limits do not leave room for."""
    monkeypatch.setattr(direct, "INTERVAL_S", 0.02)
    monkeypatch.setattr(direct, "GRACE_S", 0.5)
    monkeypatch.setattr(direct, "TIMEOUT_S", 30.0)
    took_s, steps_s = timed(tokens, tmp_path, track=sick)
    assert steps_s < 2 * plain[1] + 10 and took_s < 2 * plain[0] + 15


def test_addresses_a_training_cannot_write_to_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be written from a training; give a server's http address"):
        Direct(tmp_path, "key", url=DATABASE)
    for address in (DATABASE, "postgresql://u@h/d", "login1:5000", "http://me:secret@login1:5000"):
        with pytest.raises(ConfigError, match="is no address that a training can write to; give http") as caught:
            configure(tmp_path, run={"track": address})
        assert "secret" not in str(caught.value)
    same = configure(tmp_path, run={"track": "https://mlflow.example.org/team-a"})
    assert run_key(resolve(same)) == run_key(resolve(configure(tmp_path)))  # where it is told changes no result


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_train_track_fills_the_server_without_mlflow(
    tokens: Path, tmp_path: Path, server: MlflowServer, store: Path
) -> None:
    config = configure(tokens, schedule={"steps": 60}, run={"log_every_steps": 1, "sweep": "from the training"})
    (tmp_path / "run.yaml").write_text(yaml.safe_dump(to_dict(config)), encoding="utf-8")
    code = (
        "import sys\nfrom scaling.cli.main import main\nheavy = {'mlflow', 'pandas', 'sqlalchemy'}\n"
        "try:\n    main()\nfinally:\n    print(sorted(heavy & set(sys.modules)), file=sys.stderr)"
    )
    words = ["train", str(tmp_path / "run.yaml"), "--out", str(tmp_path / "runs"), "--track", server.url, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [sys.executable, "-c", code, *words], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.splitlines()[-1] == "[]"  # nothing heavy was imported, first step or last
    assert "not all was sent" not in done.stderr
    folder = RunFolder(Path(json.loads(done.stdout)["folder"]))
    name = "from the training"
    finished = RUNS.replace("AND r.life", "AND r.status = 'FINISHED' AND r.life")
    assert count(store, finished, name) == 1 and count(store, POINTS, name) == 60
    connection = sqlite3.connect(store)
    query = "SELECT t.key, t.value FROM tags t JOIN tags k USING (run_uuid) WHERE k.key = 'run_key' AND k.value = ?"
    tags = dict(connection.execute(query, (folder.key,)).fetchall())
    connection.close()
    (attempt,) = folder.attempts()
    for tag in ("commit", "dirty"):
        assert tags.get(f"mlflow.source.git.{tag}") == recorded().get(f"git_{tag}")
    assert attempt.environment.items() >= recorded().items()


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_a_hanging_server_did_not_take_the_next_sync_sends(tmp_path: Path, proxy: Proxy, store: Path) -> None:
    out = tmp_path / "runs"
    folder = RunFolder.create(out, make_config(seed=5))
    begin(folder)
    with Direct(out, folder.key, url=proxy.url, experiment="direct", interval_s=0.2) as tracking:
        for step in range(0, 50, 10):
            write_points(folder, 1, [step])
        wait_until(lambda: tracking.report is not None and count(store, POINTS, "direct") == 5, 30)
        proxy.fault = lambda path: (60.0, 0.0, 0)  # hangs
        started_s = time.monotonic()
        write_points(folder, 1, range(50, 101, 10))
        assert time.monotonic() - started_s < 1.0
        finish(folder)
        started_s = time.monotonic()
    assert time.monotonic() - started_s < 7.0
    proxy.fault = lambda path: (0.0, 0.0, 0)
    assert sync(out, store_uri=proxy.url, experiment="direct").ok  # the folder has what was not sent
    assert count(store, RUNS, "direct") == 1 and count(store, POINTS, "direct") == 11


def test_a_refusal_is_said_once_and_tried_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    tries: list[str] = []

    def refuse(*_: object, **__: object) -> None:
        from scaling.errors import StoreError

        tries.append("")
        raise StoreError("http://h:1: refused the credentials (401)")

    monkeypatch.setattr(direct, "sync", refuse)
    with Direct(tmp_path, "key", url="http://h:1", interval_s=0.01):
        wait_until(lambda: len(tries) >= 5, 10)
    told = [record.getMessage() for record in caplog.records]
    assert told.count("tracking: http://h:1: refused the credentials (401)") == 1
    assert f"`scaling runs sync {tmp_path} --store http://h:1` sends the rest" in told[-1]
    assert len(tries) >= 6  # once more at the end
