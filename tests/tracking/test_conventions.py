"""Names, addresses, Slurm's answers and the server's settings: what needs no store."""

from __future__ import annotations

import re
import socket
import sqlite3
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs

import pytest
from typer.testing import CliRunner

from scaling.cli.runs import app
from scaling.errors import StoreError, UsageError
from scaling.tracking import METRICS, sync
from scaling.tracking.jobs import Jobs
from scaling.tracking.metrics import PREFIXES, store_name, unit
from scaling.tracking.server import Command, charts, filters, free_port, serve
from scaling.tracking.store import Sample, normalise, redact, requests_of
from tests.tracking.folders import make_run

ROOT = Path(__file__).resolve().parents[2]


def test_every_metric_has_a_unit_and_a_name_that_mlflow_takes() -> None:
    for name, metric in METRICS.items():
        assert metric.unit and metric.meaning and metric.better in ("", "lower", "higher")
        assert store_name(name) == name and unit(name) == metric.unit
    assert all(prefix.endswith("/") for prefix in PREFIXES) and unit("unheard/of") == ""


def test_the_names_that_the_trainer_journals_are_in_the_table() -> None:
    sources = [path for folder in ("scaling", "models") for path in (ROOT / folder).glob("*.py")]
    found = {name for path in sources for name in re.findall(r'"((?:train|val|perf|mem)/\w+)"', path.read_text())}
    assert {"train/loss", "val/loss", "perf/mfu", "perf/eval_time_s", "val/loss_ema"} <= found
    assert sorted(name for name in found if not unit(name)) == []


@pytest.mark.parametrize("name", ["a@b", "x(1)", "a//b", "../up", "/abs", "ü/ä", "a" * 300])
def test_other_names_become_ones_that_mlflow_takes(name: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    check: Any = _validate_metric_name
    check(store_name(name))


def test_requests_stay_within_the_limits_and_lose_nothing() -> None:
    samples = [Sample("a", float(i), i, i) for i in range(2_500)]
    params, tags = {f"p{i}": "v" for i in range(130)}, {f"t{i}": "v" for i in range(20)}
    parts = list(requests_of(samples, params, tags))
    assert [s for part in parts for s in part[0]] == samples
    assert dict(p for part in parts for p in part[1]) == params and dict(t for part in parts for t in part[2]) == tags
    assert all(len(p) <= 100 and len(t) <= 100 and len(s) + len(p) + len(t) <= 1_000 for s, p, t in parts)
    assert list(requests_of([], {}, {})) == []


def test_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert normalise("mlflow.db") == normalise("sqlite:///mlflow.db") == f"sqlite:///{tmp_path}/mlflow.db"
    assert normalise("postgres://u@h/d") == "postgresql+psycopg://u@h/d"
    assert redact("http://me:word@host:5000") == "http://me:***@host:5000"
    with pytest.raises(StoreError, match="is not an MLflow store; give sqlite:///PATH.db, .*file store ended"):
        normalise("file:./mlruns")


def test_slurm_is_asked_once_for_all_and_records_for_what_left_the_queue(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    log = tmp_path / "asked"
    for name, text in {
        "squeue": "echo '11|RUNNING|None'; echo '12|PENDING|Priority'",
        "sacct": "[ $6 = 13 ] && echo 'CANCELLED by 0|None|2026-11-29T12:00:00' || true",
    }.items():
        program = tmp_path / name
        program.write_text(f'#!/bin/sh\necho {name} >> {log}\nset -- "$@"\n{text}\n')
        program.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    monkeypatch.setenv("TZ", "UTC")
    jobs = Jobs()
    assert jobs("11") == ("RUNNING", "None", None)
    assert jobs("12") == ("PENDING", "Priority", None)
    ended = jobs("13")
    assert ended is not None and ended[0] == "CANCELLED by 0" and ended[2] is not None
    assert jobs("13") == ended and jobs("14") is None
    assert log.read_text().split() == ["squeue", "sacct", "sacct"]
    (tmp_path / "squeue").write_text("#!/bin/sh\nexit 1\n")
    assert Jobs()("13") is None  # out of reach: nothing is known, nothing is ended


def test_no_slurm_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert Jobs()("13") is None


def test_the_server_is_started_with_room_and_names() -> None:
    command = serve("sqlite:///x/mlflow.db", port=5123, allow=["login1"])
    text = " ".join(command.arguments)
    assert "--host 127.0.0.1 --port 5123 --workers 2" in text and not command.warnings
    allowed = command.arguments[command.arguments.index("--allowed-hosts") + 1].split(",")
    assert {"login1", "login1:5123", "localhost", "localhost:5123", socket.gethostname()} <= set(allowed)
    assert command.environment["MLFLOW_SQLALCHEMYSTORE_POOL_SIZE"] == "80"
    assert command.environment["MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW"] == "20"
    assert command.environment["MLFLOW_SERVER_ENABLE_JOB_EXECUTION"] == "false"
    assert "max_connections >= 220" in serve("postgresql://u@h/d").warnings[0]
    with pytest.raises(UsageError, match="is a server already"):
        serve("http://127.0.0.1:5000")


def test_only_private_addresses_are_served_and_with_a_warning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for host in ("0.0.0.0", "8.8.8.8"):
        with pytest.raises(UsageError, match="is open to everybody; give 127.0.0.1, or a private address"):
            serve("sqlite:///x.db", host=host)
    with pytest.raises(UsageError, match="no such name or address"):
        serve("sqlite:///x.db", host="no-such-host.invalid")
    warnings = serve("sqlite:///x.db", host="10.1.2.3").warnings
    assert "can be reached by everybody on its network without a password" in warnings[0]
    monkeypatch.setenv("MLFLOW_AUTH_ADMIN_PASSWORD", "a long password")
    command = serve("sqlite:///x.db", host="10.1.2.3", auth=True, artifacts=tmp_path / "files")
    assert "users and passwords are asked for" in command.warnings[0]


def test_the_filters_to_type_are_valid() -> None:
    from mlflow.utils.search_utils import SearchUtils

    for text in filters():
        parse: Any = SearchUtils.parse_search_filter
        assert parse(text)


def test_the_charts_of_an_experiment_show_its_runs_not_their_parents() -> None:
    where, _, asked = charts("http://127.0.0.1:5077", "12").partition("?")
    assert where == "http://127.0.0.1:5077/#/experiments/12/runs"
    fields = parse_qs(asked)
    assert fields["searchFilter"] == ["tags.kind = 'run'"] and fields["workflowType"] == ["machine_learning"]
    # Sorted by date, MLflow would put the runs out of sight below their sweep's.
    assert fields["orderByKey"] == ["metrics.`val/loss`"] and fields["compareRunsMode"] == ["CHART"]


def test_the_ui_points_to_the_charts_and_refuses_a_store_that_is_not_there(
    tmp_path: Path, database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    started: list[Command] = []
    monkeypatch.setattr(Command, "execute", lambda command: started.append(command))
    make_run(tmp_path / "runs", sweep="ladder")
    assert sync(tmp_path / "runs", store_uri=str(database)).ok
    port = free_port()
    done = CliRunner().invoke(app, ["ui", "--store", str(database), "--port", str(port)])
    assert done.exit_code == 0 and done.stdout == f"http://127.0.0.1:{port}\n" and len(started) == 1
    assert f"Charts of all runs of ladder: http://127.0.0.1:{port}/#/experiments/1/runs?" in done.stderr
    assert "Default" not in done.stderr  # has no runs
    done = CliRunner().invoke(app, ["ui", "--store", str(tmp_path / "typo.db"), "--port", str(port)])
    assert isinstance(done.exception, StoreError) and "no such database; give the store that" in str(done.exception)
    assert len(started) == 1 and not (tmp_path / "typo.db").exists()
    (tmp_path / "other.db").touch()
    done = CliRunner().invoke(app, ["ui", "--store", str(tmp_path / "other.db"), "--port", str(port)])
    assert isinstance(done.exception, StoreError) and "not an MLflow database" in str(done.exception)


def test_an_experiment_says_what_it_is(tmp_path: Path, database: Path, sql: sqlite3.Connection) -> None:
    make_run(tmp_path / "runs", sweep="ladder")
    assert sync(tmp_path / "runs", store_uri=str(database)).ok
    tags = dict(sql.execute("SELECT key, value FROM experiment_tags WHERE experiment_id = 1").fetchall())
    assert tags["mlflow.experimentKind"] == "custom_model_development"
    assert "Sort by a metric" in tags["mlflow.note.content"]
