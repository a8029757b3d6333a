"""The code that jobs run: a copy made at submission, so that edits before a job starts (or restarts) change nothing.

Made by ``submit``, kept in the sweep folder under a name that is a hash of its content: the commit, the uncommitted
difference, and files that git does not know yet. Without git, the package as it is installed is copied.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import tarfile
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Final

import scaling
from scaling.errors import ClusterError
from scaling.revision import SNAPSHOT

CODE: Final = "code"
DIFFERENCE: Final = "uncommitted.diff"
NEW_FILE_BYTES: Final = 1_000_000  # a file that git does not know is copied up to this size: code, not data


@dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot:
    """A copy of the code: ``path`` goes first on the jobs' PYTHONPATH."""

    path: Path
    commit: str | None
    dirty: bool


def take(sweep_folder: Path, root: Path | None = None) -> Snapshot:
    """Copy the code into the sweep folder, unless the same code is there already.

    Parameters
    ----------
    root
        The checkout; default: the one that this module was imported from.

    Raises
    ------
    ClusterError
        If the copy cannot be written.
    """
    root = root or Path(scaling.__file__).resolve().parent.parent
    try:
        return _of_git(sweep_folder / CODE, root) if _is_checkout(root) else _of_package(sweep_folder / CODE, root)
    except OSError as error:
        raise ClusterError(f"{sweep_folder / CODE}: cannot be written ({error.strerror}); free space") from None


def _git(root: Path, *arguments: str) -> bytes:
    return subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, check=True).stdout


def _is_checkout(root: Path) -> bool:
    if shutil.which("git") is None or not (root / ".git").exists():
        return False
    done = subprocess.run(
        ["git", "-C", str(root), "rev-parse", "--verify", "-q", "HEAD"], capture_output=True, check=False
    )
    return done.returncode == 0


def _of_git(folder: Path, root: Path) -> Snapshot:
    commit = _git(root, "rev-parse", "HEAD").decode().strip()
    difference = _git(root, "diff", "--binary", "HEAD")
    names = [n for n in _git(root, "ls-files", "-z", "--others", "--exclude-standard").decode().split("\0") if n]
    new = [n for n in names if (root / n).is_file() and (root / n).stat().st_size <= NEW_FILE_BYTES]
    digest = hashlib.sha256(difference)
    for name in new:
        digest.update(name.encode("utf-8") + b"\0" + (root / name).read_bytes())
    dirty = bool(difference or new)
    path = folder / (commit[:12] + (f"-{digest.hexdigest()[:8]}" if dirty else ""))
    made = Snapshot(path=path, commit=commit, dirty=dirty)
    if (path / SNAPSHOT).exists():
        return made
    beside = _fresh(path)
    with tarfile.open(fileobj=BytesIO(_git(root, "archive", "--format=tar", "HEAD"))) as archive:
        # Python before 3.11.4 has no filters; the archive is of our own commit, made by git
        if hasattr(tarfile, "tar_filter"):
            archive.extraction_filter = tarfile.tar_filter
        archive.extractall(beside)
    if difference:
        (beside / DIFFERENCE).write_bytes(difference)
        # --unsafe-paths is not given: git itself refuses a patch that leaves the folder
        subprocess.run(["git", "apply", "--binary", DIFFERENCE], cwd=beside, check=True, capture_output=True,
                       env={**os.environ, "GIT_DIR": str(beside / ".none")})  # fmt: skip
    for name in new:
        (beside / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(root / name, beside / name)
    return _settle(beside, made)


def _of_package(folder: Path, root: Path) -> Snapshot:
    """Without git: the installed package, its links followed."""
    package = root / "scaling"
    digest = hashlib.sha256()
    for file in sorted(package.rglob("*.py")):
        digest.update(str(file.relative_to(root)).encode("utf-8") + b"\0" + file.read_bytes())
    path = folder / f"package-{digest.hexdigest()[:12]}"
    made = Snapshot(path=path, commit=None, dirty=False)
    if (path / SNAPSHOT).exists():
        return made
    beside = _fresh(path)
    shutil.copytree(package, beside / "scaling", ignore=shutil.ignore_patterns("__pycache__"))
    return _settle(beside, made)


def _fresh(path: Path) -> Path:
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    shutil.rmtree(beside, ignore_errors=True)
    beside.mkdir(parents=True)
    return beside


def _settle(beside: Path, made: Snapshot) -> Snapshot:
    """Name the finished copy; a copy that another submit named first is as good."""
    tree = {"commit": made.commit, "dirty": made.dirty}
    (beside / SNAPSHOT).write_text(json.dumps(tree) + "\n", encoding="utf-8")
    try:
        os.rename(beside, made.path)
    except OSError:
        shutil.rmtree(beside, ignore_errors=True)
        if not (made.path / SNAPSHOT).exists():
            raise
    return made
