"""Planted sweeps that several report tests read."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest


@pytest.fixture(scope="session")
def planted() -> ModuleType:
    """The module of made-up sweeps beside this file (tests are not a package)."""
    spec = importlib.util.spec_from_file_location("planted", Path(__file__).with_name("planted.py"))
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
