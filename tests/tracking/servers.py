"""Real MLflow and PostgreSQL servers for tests, and a proxy between client and server that misbehaves on demand."""

from __future__ import annotations

import http.client
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import requests

from scaling.tracking.server import free_port, serve

START_S = 240.0


class MlflowServer:
    """``scaling runs serve`` over a database, on a free loopback port that it keeps over restarts."""

    def __init__(
        self, store: str, folder: Path, *, workers: int = 1, allow: tuple[str, ...] = (), auth: bool = False
    ) -> None:
        self.port = free_port()
        self._folder = folder
        self._command = serve(
            store, port=self.port, workers=workers, artifacts=folder / "artifacts", allow=allow, auth=auth
        )
        self.url = self._command.url
        self._process: subprocess.Popen[bytes] | None = None

    def start(self, *, wait: bool = True) -> MlflowServer:
        environment = {**os.environ, **self._command.environment}
        with (self._folder / "server.log").open("ab") as log:
            self._process = subprocess.Popen(
                self._command.arguments, env=environment, stdout=log, stderr=log, start_new_session=True
            )
        if wait:
            wait_until(self.healthy, START_S)
        return self

    def healthy(self) -> bool:
        try:
            return requests.get(f"{self.url}/health", timeout=2).status_code == 200
        except requests.RequestException:
            return False

    def kill(self) -> None:
        """SIGKILL to the server and its workers."""
        if self._process is not None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
            self._process = None


class Postgres:
    """A cluster in a temporary folder, run as an unprivileged user, its port kept over restarts."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self._folder = folder
        self._prefix = ["runuser", "-u", "postgres", "--"] if os.geteuid() == 0 else []
        if self._prefix:
            shutil.chown(folder, "postgres", "postgres")
        self._process: subprocess.Popen[bytes] | None = None
        command = [program("initdb"), "-D", str(folder / "data"), "-A", "trust", "-U", "mlflow", "--no-sync"]
        subprocess.run([*self._prefix, *command], check=True, capture_output=True, cwd=folder)

    def start(self) -> Postgres:
        settings = [
            "listen_addresses=127.0.0.1",
            "fsync=off",
            "max_connections=300",
            f"unix_socket_directories={self._folder}",
        ]
        options = [part for setting in settings for part in ("-c", setting)]
        command = [program("postgres"), "-D", str(self._folder / "data"), "-p", str(self.port), *options]
        self._process = subprocess.Popen(
            [*self._prefix, *command], cwd=self._folder, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        wait_until(self._answers, 60)
        return self

    def stop(self) -> None:
        """Fast shutdown: open connections are cut."""
        if self._process is not None:
            main = int((self._folder / "data" / "postmaster.pid").read_text().split()[0])
            os.kill(main, signal.SIGINT)
            self._process.wait()
            self._process = None

    def create(self, name: str, *, template: str = "template1") -> str:
        """Make a database, as a copy of another; returns its address."""
        import psycopg

        with psycopg.connect(f"postgresql://mlflow@127.0.0.1:{self.port}/postgres", autocommit=True) as connection:
            connection.execute(f'CREATE DATABASE "{name}" TEMPLATE "{template}"'.encode())
        return f"postgresql://mlflow@127.0.0.1:{self.port}/{name}"

    def ask(self, address: str, query: str) -> list[Any]:
        """Rows of a query."""
        import psycopg

        with psycopg.connect(address) as connection:
            return connection.execute(query.encode()).fetchall()

    def _answers(self) -> bool:
        import psycopg

        try:
            psycopg.connect(f"postgresql://mlflow@127.0.0.1:{self.port}/postgres", connect_timeout=2).close()
        except psycopg.OperationalError:
            return False
        return True


class Proxy:
    """Passes requests on to a server, unless ``fault`` (given the path) answers, waits or both.

    With ``authorization`` requests must carry that header, or are answered 401.
    """

    def __init__(self, target: str, *, authorization: str = "") -> None:
        self.fault: Callable[[str], tuple[float, float, int]] = lambda path: (0.0, 0.0, 0)
        self.requests = 0
        host, _, port = target.removeprefix("http://").partition(":")
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def _any(self) -> None:
                outer.requests += 1
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                before_s, after_s, code = outer.fault(self.path)
                if authorization and self.headers.get("Authorization") != authorization:
                    code = 401
                time.sleep(before_s)
                if code:
                    answer, kind, status = (
                        b'{"error_code": "INTERNAL_ERROR", "message": "broken"}',
                        "application/json",
                        code,
                    )
                else:
                    connection = http.client.HTTPConnection(host, int(port), timeout=60)
                    headers = {"Content-Type": self.headers.get("Content-Type", "application/json")}
                    connection.request(self.command, self.path, body, headers)
                    got = connection.getresponse()
                    answer, kind, status = got.read(), got.getheader("Content-Type") or "", got.status
                    connection.close()
                time.sleep(after_s)
                try:
                    self.send_response(status)
                    self.send_header("Content-Type", kind)
                    self.send_header("Content-Length", str(len(answer)))
                    self.end_headers()
                    self.wfile.write(answer)
                except OSError:
                    self.close_connection = True

            do_GET = do_POST = do_PUT = do_PATCH = _any

            def log_message(self, format: str, *args: object) -> None:
                """Quiet."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


def program(name: str) -> str:
    """A PostgreSQL program: on the path, or where Debian keeps it; empty where there is none."""
    found = shutil.which(name)
    places = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"))
    return found or (str(places[-1]) if places else "")


def wait_until(condition: Callable[[], bool], timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s} s"
        time.sleep(0.1)


def silent_port() -> tuple[socket.socket, int]:
    """A port that takes connections and never says anything."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    return listener, int(listener.getsockname()[1])
