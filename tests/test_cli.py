"""The command line as a contract: start-up time, help, errors in one line, exit statuses."""

from __future__ import annotations

import importlib.util
import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

from scaling.cli.main import NOUNS, VERBS, command

ROOT = Path(__file__).resolve().parent.parent
PRESENT = [name for name in (*VERBS, *NOUNS) if importlib.util.find_spec(f"scaling.cli.{name}")]


def scaling(*words: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}
    return subprocess.run(
        [sys.executable, "-m", "scaling", *words], cwd=cwd or ROOT, env=env, capture_output=True, text=True
    )


@pytest.mark.parametrize("name", PRESENT)
def test_descriptions_are_those_of_the_modules(name: str) -> None:
    made = command(name)
    assert (made.help or "").startswith({**VERBS, **NOUNS}[name])


@pytest.mark.parametrize("name", PRESENT)
def test_every_command_that_ends_takes_json(name: str) -> None:
    made = command(name)
    leaves = made.commands.values() if name in NOUNS else [made]
    lacking = {f"{name} {leaf.name}" for leaf in leaves if not any("--json" in word.opts for word in leaf.params)}
    assert lacking <= {"runs ui", "runs serve"}  # servers, which print no result


@pytest.mark.parametrize("name", PRESENT)
def test_every_command_has_help_with_an_example(name: str) -> None:
    made = command(name)
    leaves = made.commands.values() if name in NOUNS else [made]
    for leaf in leaves:
        assert leaf.help, f"{name} {leaf.name} has no description"
        assert "scaling " in (leaf.epilog or ""), f"{name} {leaf.name} shows no example"


def test_help_lists_every_command_and_loads_none() -> None:
    out = scaling("--help")
    assert out.returncode == 0
    for name in PRESENT:
        assert f"\n  {name} " in out.stdout


BARE = """
import typer
app = typer.Typer(add_completion=False, rich_markup_mode=None)
@app.command()
def hello(number: int = 1) -> None: ...
app(["--help"])
"""


@pytest.mark.parametrize("words", [("--help",), ("sweep", "--help"), ("model", "--help")])
def test_planning_starts_fast(words: tuple[str, ...]) -> None:
    """At most twice the smallest application of typer, timed beside it: a busy machine cancels out."""

    def cpu_s(*command: str) -> float:
        begun = os.times()
        subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
        ended = os.times()
        return (ended.children_user + ended.children_system) - (begun.children_user + begun.children_system)

    pairs = [(cpu_s(sys.executable, "-c", BARE), cpu_s(sys.executable, "-m", "scaling", *words)) for _ in range(5)]
    ratio = statistics.median(ours / bare for bare, ours in pairs)
    assert ratio < 2, f"{ratio:.2f} times a bare start"


def test_version() -> None:
    out = scaling("--version")
    assert out.returncode == 0 and out.stdout.startswith("isoloss ")


def test_the_doctor_fails_only_for_what_every_run_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its help names those parts; another one that is broken is told and leaves the status 0."""
    monkeypatch.setenv("ISOLOSS_KERNELS", "foo")
    out = scaling("doctor", "--json")
    findings = json.loads(out.stdout)["findings"]
    states = {found["part"]: found["state"] for found in findings}
    needed = [found["part"] for found in findings if found["required"]]
    assert states["kernels"] == "broken" and out.returncode == any(states[part] != "ok" for part in needed)
    told = " ".join((command("doctor").help or "").split())
    assert f"0 where what every run needs ({', '.join(needed)}) works, else 1" in told


@pytest.mark.parametrize(
    ("words", "status", "text"),
    [
        (("nonsense",), 2, "No such command 'nonsense'"),
        (("train", "none.yaml"), 2, "none.yaml: no such file"),
        (("model", "info", "--size", "3m"), 2, "model.size='3m' is unknown; did you mean '"),
        (("model", "info", "--size", "50k", "--method", "mhra"), 2, "did you mean 'mhar'?"),
    ],
)
def test_wrong_use_is_one_line(words: tuple[str, ...], status: int, text: str, tmp_path: Path) -> None:
    out = scaling(*words, cwd=tmp_path)
    assert out.returncode == status, out.stderr
    assert text in out.stderr and "Traceback" not in out.stderr and out.stdout == ""
