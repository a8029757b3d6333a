"""What the syncer needs of an MLflow store, and which of the two implementations an address gets.

``sql`` opens sqlite files and PostgreSQL through MLflow itself; ``rest`` speaks to a server over HTTP without importing
MLflow. Both raise ``StoreUnavailable`` for what may pass (down, slow, full) and ``StoreError`` for what will not.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from scaling.errors import StoreError

MAX_METRICS: Final = 1_000  # a request; MLflow 3.17's limits
MAX_PARAMS: Final = 100
MAX_TAGS: Final = 100


class Sample(NamedTuple):
    """One metric value as MLflow keeps it."""

    name: str
    value: float
    time_ms: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoredRun:
    """A run that a store has already."""

    run_id: str
    key: str
    status: str
    deleted: bool
    started_ms: int
    folder: str = ""


class Store(Protocol):
    """An MLflow store, as far as the syncer writes to it."""

    uri: str
    deletes: bool  # whether ``supersede`` works

    def experiment(self, name: str) -> str:
        """Id of the experiment, made where there is none."""

    def find(self, experiment_id: str, keys: Sequence[str]) -> list[StoredRun]:
        """Runs with one of these ``run_key`` tags, deleted ones included."""

    def create(self, experiment_id: str, *, name: str, started_ms: int, tags: Mapping[str, str]) -> str:
        """Make a run; never sent twice by this call. Returns its id."""

    def log(
        self,
        run_id: str,
        *,
        samples: Sequence[Sample] = (),
        params: Mapping[str, str] | None = None,
        tags: Mapping[str, str] | None = None,
    ) -> None:
        """Add samples, parameters and tags, in as many requests as it takes; sending again changes nothing."""

    def params(self, run_id: str) -> dict[str, str] | None:
        """Parameters that a run has; ``None`` where there is no such run."""

    def dataset(self, run_id: str, dataset: Mapping[str, str]) -> None:
        """Attach a dataset (``name``, ``digest``, ``source``, ``fingerprint``) as training input."""

    def status(self, run_id: str, status: str, ended_ms: int | None) -> None:
        """Set MLflow's status, and the end time with a terminal one."""

    def upload(self, run_id: str, path: Path, folder: str = "") -> None:
        """Copy a file into the run's artifacts."""

    def supersede(self, run_id: str, names: Sequence[str], after_step: int) -> None:
        """Delete these metrics' samples beyond a step."""

    def delete(self, run_id: str) -> None:
        """Move a run to MLflow's bin."""

    def tidy(self) -> None:
        """What a store that we own wants after a round of writing (statistics for its query planner)."""

    def close(self) -> None: ...


def requests_of(
    samples: Sequence[Sample], params: Mapping[str, str], tags: Mapping[str, str]
) -> Iterator[tuple[Sequence[Sample], Sequence[tuple[str, str]], Sequence[tuple[str, str]]]]:
    """Cut what is to be logged into requests within MLflow's limits (1,000 things each)."""
    param_list, tag_list = list(params.items()), list(tags.items())
    while samples or param_list or tag_list:
        first, second = param_list[:MAX_PARAMS], tag_list[:MAX_TAGS]
        room = MAX_METRICS - len(first) - len(second)
        yield samples[:room], first, second
        samples, param_list, tag_list = samples[room:], param_list[MAX_PARAMS:], tag_list[MAX_TAGS:]


def normalise(uri: str) -> str:
    """The address in one spelling: absolute sqlite paths, psycopg's driver named, no trailing slash.

    >>> normalise("http://127.0.0.1:5000/")
    'http://127.0.0.1:5000'
    >>> normalise("postgresql://host/db")
    'postgresql+psycopg://host/db'

    Raises
    ------
    StoreError
        If no store is meant by it; the message lists the forms.
    """
    text = str(uri).strip()
    if re.match(r"https?://", text):
        return text.rstrip("/")
    if re.match(r"postgres(ql)?(\+\w+)?://", text):
        return re.sub(r"^postgres(ql)?(\+\w+)?://", "postgresql+psycopg://", text)
    if text.startswith("sqlite:///"):
        return f"sqlite:///{Path(text.removeprefix('sqlite:///')).expanduser().absolute()}"
    if "://" not in text and Path(text).suffix in (".db", ".sqlite", ".sqlite3"):
        return f"sqlite:///{Path(text).expanduser().absolute()}"
    raise StoreError(
        f"{text!r} is not an MLflow store; give sqlite:///PATH.db, a path ending in .db, http(s)://HOST:PORT, or "
        "postgresql://USER@HOST/DB (MLflow's file store ended: `mlflow migrate-filestore` turns one into sqlite)"
    )


def is_store(text: str) -> bool:
    """Whether ``normalise`` would take it as a store's address (a run folder root or a table file is not)."""
    try:
        normalise(text)
    except StoreError:
        return False
    return True


def sqlite_path(uri: str) -> Path | None:
    """The database file of a sqlite address, ``None`` for any other."""
    return Path(uri.removeprefix("sqlite:///")) if uri.startswith("sqlite:///") else None


def redact(uri: str) -> str:
    """The address without a password, for messages and logs.

    >>> redact("postgresql+psycopg://me:secret@host/db")
    'postgresql+psycopg://me:***@host/db'
    """
    return re.sub(r"(//[^/:@]*):[^/@]*@", r"\1:***@", uri)


def open_store(uri: str, *, artifacts: Path, timeout_s: float = 20.0, light: bool = False) -> Store:
    """Open (sqlite: make) a store for writing; ``artifacts`` is where a database's new experiments keep files.

    A server is spoken to without MLflow; ``light`` leaves out even the uploads that would need it.
    """
    address = normalise(uri)
    if address.startswith("http"):
        from scaling.tracking.rest import RestStore

        return RestStore(address, timeout_s=timeout_s, light=light)
    from scaling.tracking.sql import SqlStore

    return SqlStore(address, artifacts=artifacts)
