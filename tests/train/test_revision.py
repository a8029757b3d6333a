"""The commit of the code that runs: of a checkout, of a sweep's copy, or nobody's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from scaling.identity import run_key
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.revision import SNAPSHOT, Revision, recorded, revision
from scaling.sweeps import snapshot
from scaling.train import train

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(autouse=True)
def _ask_again() -> Iterator[None]:
    revision.cache_clear()
    yield
    revision.cache_clear()


def git(root: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=Somebody", "-c", "user.email=somebody@example.org")
    command = ["git", "-C", str(root), *identity, *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    root = tmp_path / "code"
    (root / "scaling").mkdir(parents=True)
    (root / "scaling" / "__init__.py").write_text("x = 1\n", encoding="utf-8")
    git(root, "init", "-q")
    git(root, "add", ".")
    git(root, "commit", "-q", "-m", "first")
    git(root, "tag", "v1")
    return root


def test_a_checkout_is_asked_and_changes_are_noticed(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    head = git(checkout, "rev-parse", "HEAD")
    monkeypatch.setenv("GIT_DIR", str(ROOT / ".git"))  # as inside a hook
    assert revision(checkout) == Revision(commit=head, dirty=False)
    (checkout / "scaling" / "__init__.py").write_text("x = 2\n", encoding="utf-8")
    assert revision(checkout) == Revision(commit=head, dirty=False)  # asked once a process
    revision.cache_clear()
    assert revision(checkout) == Revision(commit=head, dirty=True)


def test_where_nobody_can_say_there_is_none(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed = checkout / "venv" / "lib"
    installed.mkdir(parents=True)
    assert revision(installed) is None  # below a checkout of something else
    empty = tmp_path / "empty"
    empty.mkdir()
    git(empty, "init", "-q")
    assert revision(empty) is None  # no commit yet
    broken = tmp_path / "broken"
    broken.mkdir()
    for text in ("", "[]", '{"commit": null, "dirty": false}'):
        (broken / SNAPSHOT).write_text(text, encoding="utf-8")
        revision.cache_clear()
        assert revision(broken) is None
    monkeypatch.setenv("PATH", str(empty))
    assert revision(checkout) is None  # no git
    monkeypatch.setattr("scaling.__file__", str(empty / "scaling" / "__init__.py"))
    assert recorded() == {}


def test_a_copy_for_jobs_says_its_commit_without_git(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (checkout / "scaling" / "__init__.py").write_text("x = 3\n", encoding="utf-8")
    head = git(checkout, "rev-parse", "HEAD")
    copy = snapshot.take(tmp_path / "sweep", checkout)
    git(checkout, "commit", "-q", "-a", "-m", "second")  # the copy stays what it was
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: pytest.fail("git was started"))
    assert revision(copy.path) == Revision(commit=head, dirty=True)


def test_jobs_in_a_copy_record_the_copys_commit(tmp_path: Path) -> None:
    """As a job does it: the copy first on PYTHONPATH, no git on the node."""
    copy = snapshot.take(tmp_path / "sweep", ROOT)
    code = "import scaling, scaling.revision as r, json; print(json.dumps([scaling.__file__, r.recorded()]))"
    environment = {**os.environ, "PYTHONPATH": str(copy.path), "PYTHONSAFEPATH": "1", "PATH": "/nowhere"}
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environment, capture_output=True, text=True, check=True
    )
    place, said = json.loads(done.stdout)
    assert place.startswith(str(copy.path))
    assert said == {"git_commit": copy.commit, "git_dirty": "true" if copy.dirty else "false"}


def test_an_attempt_records_it(store: Path, tmp_path: Path, make_config: Any) -> None:
    config = make_config(store, schedule={"steps": 3})
    train(config, out=tmp_path)
    (attempt,) = RunFolder(tmp_path / run_key(resolve(config))).attempts()
    asked = subprocess.run(["git", "-C", str(ROOT), "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if not (ROOT / ".git").exists() or asked.returncode:
        assert "git_commit" not in attempt.environment  # the tests run on an unpacked archive
    else:
        assert attempt.environment["git_commit"] == asked.stdout.strip()
        assert attempt.environment["git_dirty"] in ("true", "false")
