"""Fixtures for all tests: where the shared developer material is, and hypothesis profiles."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

from tests.quickstart import Calls, make

ROOT = Path(__file__).resolve().parent.parent

os.environ.setdefault("OMP_NUM_THREADS", "1")
# Triton reads this when it is first imported, which a test module of another area may do before tests/kernels is read.
if not Path("/dev/nvidiactl").exists():
    os.environ["TRITON_INTERPRET"] = "1"
# A shell that starts pytest in the background ignores SIGINT, which children inherit; the tests of Ctrl-C need it.
signal.signal(signal.SIGINT, signal.default_int_handler)
settings.register_profile("local", deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("ci", parent=settings.get_profile("local"), derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") == "true" else "local")

OWN = {name: value for name, value in os.environ.items() if name.startswith(("ISOLOSS_", "TRITON_"))}


def pytest_collection_finish() -> None:
    """Importing a module must not change how others run: all tests share one process and hand on its environment."""
    now = {name: value for name, value in os.environ.items() if name.startswith(("ISOLOSS_", "TRITON_"))}
    if now != OWN:
        raise pytest.UsageError(
            f"a module that was collected changed the environment: {set(now.items()) ^ set(OWN.items())}"
        )


def missing(what: str) -> None:
    """Skip on a developer's machine, fail in CI: a part that CI must have is absent."""
    if os.environ.get("CI") == "true":
        pytest.fail(f"{what} is required when CI=true")
    pytest.skip(f"{what} is not here")


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder of developer material (public data, seeds, corpus), from ISOLOSS_SHARED, default ``../shared``."""
    path = Path(os.environ.get("ISOLOSS_SHARED", ROOT.parent / "shared"))
    if not path.is_dir():
        missing(f"the shared folder {path}")
    return path


@pytest.fixture(scope="session")
def quickstart_calls(tmp_path_factory: pytest.TempPathFactory) -> Calls:
    """A quickstart that was broken off once and then finished; minutes, so only for tests marked slow."""
    return make(tmp_path_factory.mktemp("quickstart") / "out")
