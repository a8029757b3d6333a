"""Which code runs: its git commit, and whether it was changed since; for attempts, provenance and MLflow's git tags.

Before ``train`` in the flow. A sweep's jobs run a copy of the code that says itself which commit it is (``SNAPSHOT``,
written by ``sweeps.snapshot``), so that no job starts git; a checkout is asked once a process. An installed package has
no commit.
"""

from __future__ import annotations

import functools
import json
import os
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import scaling

SNAPSHOT: Final = "SNAPSHOT.json"  # beside the package, in a sweep's copy of the code
ANSWER_S: Final = 10.0  # git on a sick network file system must not hold a training up for longer


@dataclass(frozen=True, kw_only=True, slots=True)
class Revision:
    """A commit; ``dirty``: tracked files differ from it (in a sweep's copy: or new files were taken along)."""

    commit: str
    dirty: bool


@functools.cache
def revision(root: Path | None = None) -> Revision | None:
    """The revision of the code under ``root`` (default: this package's), ``None`` where nobody can say; never raises.

    Only a ``root`` that is itself a checkout counts: a package installed below one is not that project's code.
    """
    root = root or Path(scaling.__file__).resolve().parent.parent
    if (root / SNAPSHOT).is_file():
        return _of_snapshot(root / SNAPSHOT)
    return _of_checkout(root) if (root / ".git").exists() else None


def recorded() -> dict[str, str]:
    """What an attempt's environment says of the code that trains; nothing where nobody can say."""
    code = revision()
    return {} if code is None else {"git_commit": code.commit, "git_dirty": "true" if code.dirty else "false"}


def _of_snapshot(path: Path) -> Revision | None:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
        return Revision(commit=str(tree["commit"]), dirty=bool(tree["dirty"])) if tree["commit"] else None
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _of_checkout(root: Path) -> Revision | None:
    # Inside a hook git says by variables which repository is meant: not this one.
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=ANSWER_S,
            check=True,
            env={**environment, "GIT_OPTIONAL_LOCKS": "0"},
        )
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return None  # no git, no commit yet, somebody else's checkout, or no answer
    commit, _, mark = done.stdout.strip().partition("-")
    return Revision(commit=commit, dirty=bool(mark)) if commit else None
