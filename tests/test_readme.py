"""The README tells the truth: its commands run, its links exist, its output is what the quickstart prints."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.quickstart import ROOT, Calls, environment

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```sh\n(.*?)```", README, flags=re.DOTALL)


def test_links_and_pictures_exist() -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", README):
        if not target.startswith("http"):
            assert (ROOT / target).exists(), target


def test_the_tree_names_what_exists() -> None:
    for name in re.findall(r"`([a-z_]+(?:/[a-z_]+)*/)`", README):
        assert (ROOT / name).is_dir(), name
    for name in re.findall(r"`([a-z_]+/[a-z_/]+\.py)`", README):
        assert (ROOT / name).exists(), name


def test_make_targets_exist() -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    for target in re.findall(r"^make ([a-z-]+)", README, flags=re.MULTILINE):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), target


@pytest.mark.slow
def test_every_command_runs(quickstart_calls: Calls, tmp_path: Path) -> None:
    (tmp_path / "isoloss-quickstart").symlink_to(quickstart_calls.out)
    commands = [line for block in BLOCKS for line in block.splitlines() if line and not line.startswith("#")]
    assert len(commands) >= 8
    for line in commands:
        program, *words = line.split()
        assert program == "scaling"
        done = subprocess.run(
            [sys.executable, "-m", "scaling", *words], cwd=tmp_path, env=environment(), capture_output=True, text=True
        )
        assert done.returncode == 0, f"{line}\n{done.stderr}"
        assert done.stdout.strip(), line


@pytest.mark.slow
def test_the_output_shown_has_the_shape_of_the_real_one(quickstart_calls: Calls) -> None:
    shown = re.search(r"<!-- output: quickstart -->\n```\n(.*?)```", README, flags=re.DOTALL)
    assert shown is not None

    def shape(text: str) -> list[str]:
        return [re.split(r"  +", line.strip())[0] for line in text.splitlines() if line.strip()]

    assert shape(shown.group(1)) == shape(quickstart_calls.finished.stdout)
