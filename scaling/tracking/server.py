"""How to start an MLflow server that survives a job array, and the UI on a store.

Used by ``scaling runs serve`` and ``scaling runs ui``. Figures behind the settings: with MLflow's default pool 32
concurrent writers deadlock (each request holds one connection while it waits for another); one worker answers 60-70
small requests a second.
"""

from __future__ import annotations

import ipaddress
import os
import socket
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from urllib.parse import quote, urlencode

from scaling.errors import UsageError
from scaling.tracking import passwords
from scaling.tracking.store import normalise, redact, sqlite_path

POOL_SIZE: Final = 80
MAX_OVERFLOW: Final = 20
WORKERS: Final = 2
LOOPBACK: Final = ("localhost", "127.0.0.1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What to run, with which additions to the environment, and what the person must know."""

    arguments: tuple[str, ...]
    environment: dict[str, str]
    url: str
    warnings: tuple[str, ...]

    def execute(self) -> None:
        """Become the server (the process is replaced, so that signals reach it)."""
        os.execvpe(self.arguments[0], list(self.arguments), {**os.environ, **self.environment})


def serve(
    store_uri: str,
    *,
    host: str = "127.0.0.1",
    port: int = 5000,
    workers: int = WORKERS,
    allow: Sequence[str] = (),
    artifacts: Path | None = None,
    auth: bool = False,
) -> Command:
    """The command of an MLflow server over a database.

    Parameters
    ----------
    host
        Loopback or private address (or a name that resolves to one) to listen at.
    allow
        Further names under which clients reach the server; each is allowed with and without the port.
    artifacts
        Folder for files; default beside a sqlite file, else ``./mlartifacts``.
    auth
        Whether to ask for a user and password (MLflow's basic-auth app); users are kept beside the artifacts.

    Raises
    ------
    UsageError
        If the store is itself a server, the address is public, or passwords cannot be asked for yet.
    """
    address = normalise(store_uri)
    if address.startswith("http"):
        raise UsageError(f"--store {redact(address)}: is a server already; give a sqlite file or a PostgreSQL database")
    warnings = _check_host(host, auth)
    database = sqlite_path(address)
    folder = artifacts or (database.parent if database is not None else Path()) / "mlartifacts"
    names = dict.fromkeys([*LOOPBACK, host, socket.gethostname(), socket.getfqdn(), *allow])
    allowed = [form for name in names for form in (name, f"{name}:{port}")]
    if database is None:
        needed = workers * (POOL_SIZE + MAX_OVERFLOW) + 20
        warnings.append(f"PostgreSQL must take {needed} connections: max_connections >= {needed}")
    arguments = [
        sys.executable,
        "-m",
        "mlflow",
        "server",
        *("--backend-store-uri", address),
        *("--registry-store-uri", address),
        *("--host", host),
        *("--port", str(port)),
        *("--workers", str(workers)),
        *("--allowed-hosts", ",".join(allowed)),
        *("--artifacts-destination", folder.absolute().as_uri()),
    ]
    variables = environment()
    if auth:
        arguments += ["--app-name", "basic-auth"]
        variables |= passwords.prepare(folder.absolute().parent)
    return Command(
        arguments=tuple(arguments), environment=variables, url=f"http://{host}:{port}", warnings=tuple(warnings)
    )


def environment() -> dict[str, str]:
    """Environment of a server: room for every request thread's two connections, no job runners, no telemetry."""
    return {
        "MLFLOW_SQLALCHEMYSTORE_POOL_SIZE": str(POOL_SIZE),
        "MLFLOW_SQLALCHEMYSTORE_MAX_OVERFLOW": str(MAX_OVERFLOW),
        "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false",
        "MLFLOW_DISABLE_TELEMETRY": "true",
    }


def free_port() -> int:
    """A port that nobody listens at now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def port_taken(host: str, port: int) -> bool:
    """Whether somebody listens there already."""
    with socket.socket() as probe:
        probe.settimeout(1.0)
        return probe.connect_ex((host, port)) == 0


def filters() -> tuple[str, ...]:
    """Filters worth typing into MLflow's search field."""
    return (
        "tags.kind = 'run' and tags.status = 'done'",
        "tags.method = 'mhar' and tags.size = '100m'",
        "metrics.`val/loss` < 3.2",
        "tags.sweep = 'NAME' and params.`optimizer.lr` = '0.001'",
    )


def charts(url: str, experiment_id: str) -> str:
    """Address of MLflow's charts of all runs of an experiment; sorted by date it would show the sweeps' runs alone.

    >>> charts("http://127.0.0.1:5000", "1")[:55]
    'http://127.0.0.1:5000/#/experiments/1/runs?workflowType'
    """
    asked = {
        "workflowType": "machine_learning",
        "searchFilter": "tags.kind = 'run'",
        "orderByKey": "metrics.`val/loss`",
        "orderByAsc": "true",
        "compareRunsMode": "CHART",
    }
    return f"{url}/#/experiments/{experiment_id}/runs?{urlencode(asked, quote_via=quote)}"


def _check_host(host: str, auth: bool) -> list[str]:
    try:
        found = {str(info[4][0]) for info in socket.getaddrinfo(host, None)}
    except OSError:
        raise UsageError(f"--host {host}: no such name or address here; give 127.0.0.1 or a private address") from None
    places = [ipaddress.ip_address(text.split("%")[0]) for text in found]
    if any(place.is_unspecified for place in places) or not all(place.is_private for place in places):
        raise UsageError(
            f"--host {host}: is open to everybody; give 127.0.0.1, or a private address of this machine (10.*, "
            "172.16-31.*, 192.168.*) and reach it through a tunnel: ssh -L 5000:localhost:5000 HOST"
        )
    if all(place.is_loopback for place in places):
        return []
    if auth:
        return [f"{host} can be reached by other machines; users and passwords are asked for"]
    return [
        f"{host} can be reached by everybody on its network without a password: they can read, change and delete runs; "
        "--auth asks for passwords, --host 127.0.0.1 keeps it to this machine"
    ]
