"""The notebooks run from top to bottom on small data, keep no outputs, and define nothing."""

from __future__ import annotations

import ast
from pathlib import Path
from types import ModuleType

import nbformat
import pytest

from tests.conftest import ROOT

FOLDER = ROOT / "notebooks"
NAMES = sorted(path.name for path in FOLDER.glob("*.ipynb"))


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_keeps_no_output_and_defines_nothing(name: str) -> None:
    book = nbformat.read(FOLDER / name, as_version=4)
    nbformat.validate(book)
    for cell in book.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
            for node in ast.walk(ast.parse(cell.source)):
                assert not isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Lambda)), f"{name} defines something"


def _execute(name: str, monkeypatch: pytest.MonkeyPatch, **environment: str) -> None:
    from nbclient import NotebookClient

    for key, value in environment.items():
        monkeypatch.setenv(key, value)
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    book = nbformat.read(FOLDER / name, as_version=4)
    NotebookClient(book, timeout=300, kernel_name="python3", resources={"metadata": {"path": str(FOLDER)}}).execute()


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in NAMES if name.startswith(("02", "03"))])
def test_the_judging_notebooks_run_on_any_table(
    name: str, planted: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    planted.table(seeds=2).to_parquet(tmp_path / "runs.parquet")
    _execute(name, monkeypatch, ISOLOSS_RUNS=str(tmp_path / "runs.parquet"))


@pytest.mark.slow
def test_a_sweep_is_trained_and_looked_into(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (name for name in NAMES if name.startswith(("01", "04"))):
        _execute(name, monkeypatch, ISOLOSS_OUT=str(tmp_path))
