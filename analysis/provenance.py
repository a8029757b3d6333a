"""Where a report's numbers come from: program versions, source commit, fingerprints of data and table, the command."""

from __future__ import annotations

import hashlib
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version

import pandas as pd

import scaling
from scaling.revision import revision

_PACKAGES = ("numpy", "scipy", "pandas", "statsmodels", "matplotlib", "seaborn", "torch", "mlflow")


def gather(
    table: pd.DataFrame, *, csv_text: str, command: str | None, extra: Mapping[str, str] | None = None
) -> dict[str, str]:
    """Term -> text, in reading order.

    Parameters
    ----------
    csv_text
        The runs as written to ``runs.csv``; its SHA-256 is given, so that a reader can check the file.
    command
        What to type to make the report again, if the caller knows it.
    """
    found = {"isoloss": scaling.__version__}
    if (code := revision()) is not None:
        found["source commit"] = code.commit + (" +changes" if code.dirty else "")
    found["Python"] = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    found["packages"] = ", ".join(f"{name} {number}" for name in _PACKAGES if (number := _version(name)))
    found["made at"] = datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC")
    found["runs.csv SHA-256"] = hashlib.sha256(csv_text.encode("utf-8")).hexdigest()
    for column, label in (
        ("data_fingerprint", "training data"),
        ("eval_fingerprint", "held-out set"),
        ("precision", "precision"),
    ):
        if column in table and table[column].notna().any():
            found[label] = _few(sorted(table[column].dropna().unique()))
    found.update(extra or {})
    if command:
        found["command"] = command
    return found


def _few(values: Sequence[str], most: int = 6) -> str:
    return ", ".join(values[:most]) + (f" and {len(values) - most} more" if len(values) > most else "")


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
