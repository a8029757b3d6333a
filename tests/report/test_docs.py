"""The guides tell the truth: links exist, every command of every guide runs."""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path
from types import ModuleType

import pandas as pd
import pytest
from typer.testing import CliRunner

from scaling.cli.main import app
from tests.conftest import ROOT

DOCS = sorted((ROOT / "docs").glob("*.md"))
PREPARE = "scaling data prepare python-library --vocab-size 1024 --out store"  # half a minute; two guides begin with it


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


def run(line: str) -> None:
    """A guide's line works and says something."""
    program, *words = shlex.split(line)
    assert program == "scaling"
    called = CliRunner().invoke(app, words, catch_exceptions=False)
    assert called.exit_code == 0, f"{line}\n{called.output}"
    assert called.stdout.strip(), line


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which ``PREPARE`` was run, once for all guides that have this very line."""
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        run(PREPARE)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("path", DOCS, ids=lambda path: path.name)
def test_every_command_runs(
    path: Path, planted: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    runs = planted.table(seeds=3)
    runs.to_parquet(tmp_path / "runs.parquet")
    names = {"n_params_non_embedding": "params", "val_loss": "final_loss", "method": "optimizer"}
    foreign = runs[["method", "n_params_non_embedding", "tokens", "val_loss", "seed"]].rename(columns=names)
    foreign.replace({"baseline": "adam"}).to_csv(tmp_path / "runs.csv", index=False)
    shutil.copy(ROOT / "README.md", tmp_path)
    shutil.copy(ROOT / "kernels" / "results.csv", tmp_path / "timings.csv")
    scores = [("baseline", "MMLU", 50.1), ("baseline", "BBH", 31.2), ("mhar", "MMLU", 52.0), ("mhar", "BBH", 33.5)]
    pd.DataFrame(scores, columns=["method", "task", "score"]).assign(se=0.4).to_csv(
        tmp_path / "scores.csv", index=False
    )
    answers = [
        {"item": i, "method": m, "correct": i % k > 0} for i in range(60) for m, k in (("baseline", 2), ("mhar", 3))
    ]
    pd.DataFrame(answers).to_csv(tmp_path / "answers.csv", index=False)
    monkeypatch.chdir(tmp_path)
    for kind, block in re.findall(r"```(sh|yaml)\n(.*?)```", path.read_text(encoding="utf-8"), flags=re.DOTALL):
        if kind == "yaml":
            if block.startswith("# ") and block.split()[1].endswith(".yaml"):
                (tmp_path / block.split()[1]).write_text(block, encoding="utf-8")
            continue
        for line in filter(None, block.splitlines()):
            if line == PREPARE:
                shutil.copytree(request.getfixturevalue("prepared") / "store", tmp_path / "store")
            else:
                run(line)
