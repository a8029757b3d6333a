"""Requests to an MLflow server with short time-outs: what may pass is told from what will not, and retried a little.

Used by ``rest`` (writing) and by the ingester (reading). MLflow's own client would wait 4 minutes for a dead server and
20 for a hanging one at each call, and takes seconds to import.
"""

from __future__ import annotations

import configparser
import json
import os
import random
import time
from base64 import b64encode
from pathlib import Path
from typing import Any, Final

import requests
import requests.auth

from scaling.errors import StoreError, StoreUnavailable
from scaling.tracking.store import redact

CONNECT_S: Final = 5.0
TRIES: Final = 3
PAUSE_S: Final = 0.5
# Answers that a later request may not get. MLflow answers 400 when its database connections are all taken.
_PASSING: Final = frozenset({408, 425, 429, 500, 502, 503, 504})
_BUSY: Final = ("QueuePool limit", "database is locked", "TEMPORARILY_UNAVAILABLE", "database or disk is full")


class Missing(StoreError):
    """The server knows no such run or experiment."""


class _Authorization(requests.auth.AuthBase):
    """The same header with every request."""

    def __init__(self, header: str) -> None:
        self._header = header

    def __call__(self, request: requests.PreparedRequest) -> requests.PreparedRequest:
        request.headers["Authorization"] = self._header
        return request


class Server:
    """A connection that is kept open; credentials come from MLflow's environment variables or its credentials file."""

    def __init__(self, url: str, *, timeout_s: float, tries: int = TRIES) -> None:
        self.url = url
        self.where = redact(url)
        self._timeout_s, self._tries = timeout_s, tries
        self._session = requests.Session()
        token = os.environ.get("MLFLOW_TRACKING_TOKEN")
        user, password = _credentials()
        # Given as authentication, not as a header: a ~/.netrc would replace a header.
        if user and password:
            # UTF-8, as MLflow's client; requests itself would take Latin-1
            self._session.auth = _Authorization("Basic " + b64encode(f"{user}:{password}".encode()).decode())
        elif token:
            self._session.auth = _Authorization(f"Bearer {token}")
        if os.environ.get("MLFLOW_TRACKING_INSECURE_TLS") == "true":
            self._session.verify = False
        elif bundle := os.environ.get("MLFLOW_TRACKING_SERVER_CERT_PATH"):
            self._session.verify = bundle

    def get(self, path: str, **parameters: Any) -> dict[str, Any]:
        """Answer of a GET request."""
        return self._call("GET", path, params=parameters)

    def post(self, path: str, body: dict[str, Any], *, once: bool = False) -> dict[str, Any]:
        """Answer of a POST request; ``once``: never sent a second time."""
        return self._call("POST", path, once=once, data=json.dumps(body, allow_nan=False))

    def put_file(self, path: str, file: Path) -> None:
        """Upload a file."""
        self._call("PUT", path, data=file.read_bytes())

    def close(self) -> None:
        self._session.close()

    def _call(self, method: str, path: str, *, once: bool = False, **request: Any) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"} if method == "POST" else {}
        tries = 1 if once else self._tries
        for number in range(tries):
            if number:
                time.sleep(PAUSE_S * 2 ** (number - 1) * random.uniform(0.5, 1.5))
            try:
                answer = self._session.request(
                    method, f"{self.url}{path}", headers=headers, timeout=(CONNECT_S, self._timeout_s), **request
                )
            except requests.Timeout:
                problem = f"no answer within {self._timeout_s:g} s"
                break  # a hanging server is not worth a second wait
            except requests.RequestException as error:
                problem = f"cannot be reached ({_reason(error)})"
                continue
            if answer.status_code < 400:
                return self._decoded(answer)
            problem = self._refusal(answer)
        raise StoreUnavailable(f"{self.where}: {problem}; nothing is lost, sync again when it is well")

    def _decoded(self, answer: requests.Response) -> dict[str, Any]:
        if not answer.content:
            return {}
        try:
            tree = json.loads(answer.content)
        except ValueError:
            raise StoreError(f"{self.where}: does not answer like an MLflow server; check the address") from None
        return tree if isinstance(tree, dict) else {}

    def _refusal(self, answer: requests.Response) -> str:
        """What a passing refusal says; raises for one that will not pass."""
        try:
            tree = json.loads(answer.content)
            code, message = str(tree.get("error_code", "")), str(tree.get("message", ""))
        except (ValueError, AttributeError):
            code, message = "", answer.text
        text = " ".join(message.split())[:300]
        if answer.status_code in _PASSING or any(word in message or word in code for word in _BUSY):
            return f"answered {answer.status_code} ({text or answer.reason})"
        if code == "RESOURCE_DOES_NOT_EXIST":
            raise Missing(f"{self.where}: {text}")
        if answer.status_code == 401:
            raise StoreError(
                f"{self.where}: refused the credentials (401); set MLFLOW_TRACKING_USERNAME and "
                "MLFLOW_TRACKING_PASSWORD, or MLFLOW_TRACKING_TOKEN"
            )
        if answer.status_code == 403:
            raise StoreError(
                f"{self.where}: refused (403: {text or 'forbidden'}); check the permissions, and that the server was "
                "started with this name among --allowed-hosts (`scaling runs serve --allow NAME`)"
            )
        raise StoreError(f"{self.where}: answered {answer.status_code} ({text or answer.reason})")


def _credentials() -> tuple[str, str]:
    """User and password as MLflow's client finds them: each from its variable, else from the credentials file."""
    found = {name: os.environ.get(f"MLFLOW_TRACKING_{name}", "") for name in ("USERNAME", "PASSWORD")}
    parser = configparser.ConfigParser()
    parser.read(Path("~/.mlflow/credentials").expanduser(), encoding="utf-8")
    for name, value in found.items():
        key = f"mlflow_tracking_{name.lower()}"
        if not value and parser.has_option("mlflow", key):
            try:
                found[name] = parser.get("mlflow", key)
            except configparser.InterpolationError:  # a percent sign that is meant as such
                found[name] = parser.get("mlflow", key, raw=True)
    return found["USERNAME"], found["PASSWORD"]


def _reason(error: requests.RequestException) -> str:
    text = str(error)
    for word in ("Connection refused", "Name or service not known", "Connection reset", "Remote end closed"):
        if word in text:
            return word.lower()
    return type(error).__name__
