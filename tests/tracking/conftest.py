"""Fixtures of the tracking tests: stores and servers that take seconds to make, made once.

A sqlite store is copied for each test; the MLflow server and the PostgreSQL cluster are shared by the tests, which keep
to experiments or databases of their own.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaling.tracking import sync
from scaling.tracking.sql import SqlStore
from scaling.tracking.store import normalise
from tests.conftest import missing
from tests.tracking.folders import awkward
from tests.tracking.servers import MlflowServer, Postgres, Proxy, program


@pytest.fixture(scope="session")
def empty_database(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("store")
    SqlStore(f"sqlite:///{folder / 'mlflow.db'}", artifacts=folder / "mlartifacts").close()
    return folder / "mlflow.db"


@pytest.fixture
def database(empty_database: Path, tmp_path: Path) -> Path:
    """A fresh sqlite store."""
    path = tmp_path / "mlflow.db"
    shutil.copy(empty_database, path)
    return path


@pytest.fixture
def both(tmp_path: Path, database: Path) -> tuple[Path, str]:
    """The same runs of every kind as folders and in a store."""
    awkward(tmp_path / "runs")
    uri = f"sqlite:///{database}"
    assert sync(tmp_path / "runs", store_uri=uri).ok
    return tmp_path / "runs", uri


@pytest.fixture
def sql(database: Path) -> Iterator[sqlite3.Connection]:
    """A plain connection to the store, for looking at what was written."""
    connection = sqlite3.connect(database)
    yield connection
    connection.close()


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory, empty_database: Path) -> Path:
    """The database behind ``server``."""
    folder = tmp_path_factory.mktemp("server")
    shutil.copy(empty_database, folder / "mlflow.db")
    return folder / "mlflow.db"


@pytest.fixture(scope="session")
def server(store: Path) -> Iterator[MlflowServer]:
    running = MlflowServer(f"sqlite:///{store}", store.parent, allow=("node-7",)).start()
    yield running
    running.kill()


@pytest.fixture
def proxy(server: MlflowServer) -> Iterator[Proxy]:
    between = Proxy(server.url)
    yield between
    between.close()


@pytest.fixture(scope="session")
def cluster() -> Iterator[Postgres]:
    if not program("initdb"):
        missing("PostgreSQL (Debian package postgresql)")
    with tempfile.TemporaryDirectory(prefix="pg") as folder:  # short and reachable: a socket's path has 107 characters
        Path(folder).chmod(0o755)
        running = Postgres(Path(folder)).start()
        yield running
        running.stop()


@pytest.fixture(scope="session")
def empty_postgres(cluster: Postgres) -> str:
    """A database with MLflow's tables, to be copied."""
    SqlStore(normalise(cluster.create("empty")), artifacts=Path("/nonexistent")).close()
    return "empty"


@pytest.fixture(scope="session")
def postgres_store(cluster: Postgres, empty_postgres: str) -> str:
    """Address of the database that tests share."""
    return cluster.create("shared", template=empty_postgres)
