"""The guides tell the truth: links exist, every command of every guide runs."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.conftest import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))


@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_links_lead_somewhere(path: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", path.read_text(encoding="utf-8")):
        assert target.startswith("http") or (path.parent / target).exists(), target


def test_every_guide_is_listed() -> None:
    listed = set(re.findall(r"\]\(([a-z-]+\.md)\)", (ROOT / "docs" / "README.md").read_text(encoding="utf-8")))
    assert listed == {path.name for path in DOCS} - {"README.md"}


def test_files_that_guides_name_exist() -> None:
    for path in DOCS:
        for name in re.findall(
            r"`((?:scaling|models|analysis|notebooks|kernels|sweeps)/[\w/.]*)`", path.read_text(encoding="utf-8")
        ):
            assert (ROOT / name).exists(), f"{path.name}: {name}"


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_command_runs(path: Path, planted: ModuleType, tmp_path: Path) -> None:
    runs = planted.table(seeds=3)
    runs.to_parquet(tmp_path / "runs.parquet")
    names = {"n_params_non_embedding": "params", "val_loss": "final_loss", "method": "optimizer"}
    foreign = runs[["method", "n_params_non_embedding", "tokens", "val_loss", "seed"]].rename(columns=names)
    foreign.replace({"baseline": "adam"}).to_csv(tmp_path / "runs.csv", index=False)
    shutil.copy(ROOT / "README.md", tmp_path)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    for block in re.findall(r"```sh\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
        for line in filter(None, block.splitlines()):
            program, *words = shlex.split(line)
            assert program == "scaling"
            command = [sys.executable, "-m", "scaling", *words]
            done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
            assert done.returncode == 0, f"{line}\n{done.stderr}"
            assert done.stdout.strip(), line
