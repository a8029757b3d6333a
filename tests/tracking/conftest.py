"""Fixtures of the tracking tests: one sqlite store made once (its migrations take seconds) and copied for each test."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaling.tracking.sql import SqlStore


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
def sql(database: Path) -> Iterator[sqlite3.Connection]:
    """A plain connection to the store, for looking at what was written."""
    connection = sqlite3.connect(database)
    yield connection
    connection.close()
