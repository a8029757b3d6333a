"""What MLflow's password app needs before it starts: users kept in one place, a secret for its forms, a first password.

Used by ``server``. MLflow's own defaults would keep users in whatever folder the server was started from, and stop
with a traceback where the secret or the first password is missing.
"""

from __future__ import annotations

import os
import secrets
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from scaling.errors import UsageError

USERS: Final = "mlflow-users.db"
SETTINGS: Final = "mlflow-users.ini"
ADMIN: Final = "admin"  # who may add users; MLFLOW_AUTH_ADMIN_USERNAME names another
PASSWORD: Final = "MLFLOW_AUTH_ADMIN_PASSWORD"
MIN_CHARACTERS: Final = 12  # of a password: MLflow 3.17, mlflow/utils/validation.py
# A password is checked by a slow hash: remembered, a server answers about three times as many requests (MLflow 3.17,
# mlflow/server/auth/basic_auth.ini); a withdrawn one works for as long at most.
REMEMBERED_S: Final = 60
_CONFIG: Final = "MLFLOW_AUTH_CONFIG_PATH"
_SECRET: Final = "MLFLOW_FLASK_SERVER_SECRET_KEY"
_AUTHORIZE: Final = "mlflow.server.auth:authenticate_request_basic_auth"


def prepare(folder: Path) -> dict[str, str]:
    """Environment of a server that asks for passwords; users are kept in ``folder``, in files for its owner's eyes.

    ``MLFLOW_AUTH_CONFIG_PATH``, where it is set, decides instead.

    Raises
    ------
    UsageError
        If MLflow's extra is not installed, there is no first password, or the folder cannot be written to.
    """
    if find_spec("flask_wtf") is None:
        raise UsageError("--auth needs Flask-WTF, which is not installed; pip install 'isoloss[auth]'")
    environment = {} if os.environ.get(_SECRET) else {_SECRET: secrets.token_hex(32)}
    if os.environ.get(_CONFIG):
        return environment
    users, settings = folder / USERS, folder / SETTINGS
    unused = not users.exists() or not users.stat().st_size
    password = os.environ.get(PASSWORD, "")
    # A part of MLflow 3.17's server (files, mlflow/server/auth/__init__.py) reads passwords as ASCII.
    if unused and (len(password) < MIN_CHARACTERS or not password.isascii()):
        raise UsageError(
            f"--auth: there are no users yet; set {PASSWORD} to a password of {MIN_CHARACTERS} ASCII characters or "
            f"more for the user {ADMIN!r}, who can then add others"
        )
    lines = (
        "[mlflow]",
        "default_permission = READ",  # everybody with a password sees all runs, and changes those of own experiments
        f"database_uri = sqlite:///{users.absolute()}".replace("%", "%%"),  # configparser's own sign
        f"admin_username = {ADMIN}",
        f"authorization_function = {_AUTHORIZE}",
        f"auth_cache_ttl_seconds = {REMEMBERED_S}",
    )
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in (users, settings):
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY, 0o600))
        settings.write_text("\n".join(lines) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"--auth: {folder} cannot be written ({error.strerror}); give another --artifacts") from None
    return {**environment, _CONFIG: str(settings)}
