"""A real Slurm for these tests, a corpus, and ways to make sweeps and wait for them."""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def load(path: Path, name: str) -> Any:
    """Import a module of the tests by its path."""
    spec = importlib.util.spec_from_file_location(name, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


clusters = load(Path(__file__).with_name("cluster.py"), "slurm_test_cluster")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if Path(__file__).parent in item.path.parents:
            item.add_marker(pytest.mark.slurm)


@pytest.fixture(scope="session")
def lab() -> Iterator[Any]:
    """A cluster of 4 nodes, started once."""
    missing = clusters.missing_programs()
    if os.geteuid() != 0:
        missing.append("root")
    if missing:
        if os.environ.get("CI") == "true":
            pytest.fail(f"a real Slurm is required when CI=true; missing: {', '.join(missing)}")
        pytest.skip(f"no Slurm here: {', '.join(missing)} missing")
    folder = Path(tempfile.mkdtemp(prefix="slurm-"))  # short: sockets' paths are limited to 107 characters
    one = clusters.Cluster(folder, max_array=26, enforce="limits,qos")
    try:
        one.start()
        yield one
    finally:
        one.stop()
        shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def cluster(lab: Any) -> Iterator[Any]:
    """The cluster; this process's clients and jobs talk to it for the time of a module."""
    before = dict(os.environ)
    ours = lab.environment
    try:
        os.environ.clear()
        os.environ.update(ours)
        os.environ["PYTHONPATH"] = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "sweeps")])
        os.environ["SCALING_SITE"] = str(lab.folder / "site.yaml")
        (lab.folder / "site.yaml").write_text("partition: main\n", encoding="utf-8")
        yield lab
    finally:
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture(autouse=True)
def empty_queue(cluster: Any) -> Iterator[None]:
    """Nothing of one test is left for the next one."""

    def others() -> list[str]:
        lines = cluster.run("squeue", "-h", "-o", "%A %j", check=False).splitlines()
        return [line.split()[0] for line in lines if not line.split()[1].startswith("limited.")]

    yield
    if jobs := others():
        cluster.run("scancel", *jobs, check=False)
        try:  # a controller that was away ends a job only once a node has answered it again: about a minute
            cluster.wait(lambda: not others(), 120, "an empty queue")
        except TimeoutError:
            raise AssertionError(cluster.run("squeue", "-l", check=False)) from None


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A token store of bytes: this project's own source."""
    from scaling.corpus import prepare
    from scaling.corpus.documents import Document

    folder = tmp_path_factory.mktemp("store") / "store"
    files = sorted((ROOT / "sweeps").glob("*.py"))
    prepare(
        (Document(text=file.read_text(encoding="utf-8"), source="code") for file in files),
        folder,
        held_out_fraction=0.3,
    )
    return folder


@pytest.fixture(scope="module")
def make_in(store: Path, cluster: Any) -> Callable[..., Any]:
    """Make the plan of a sweep of tiny runs in a folder; keyword arguments are sections of its file."""
    import yaml

    from scaling.sweeps.plan import plan
    from scaling.sweeps.spec import load_spec

    def build(folder: Path, name: str, *, steps: int = 12, settings: tuple[str, ...] = (), **rest: Any) -> Any:
        base = {
            "model": {"size": "50k", "vocab_size": 257},
            "data": {"path": str(store), "seq_len": 32, "batch_size": 4},
            "schedule": {"steps": steps},
            "evaluation": {"every_steps": max(1, steps // 2), "num_sequences": 8, "tail": 2},
            "run": {"device": "cpu", "log_every_steps": 2, "checkpoint_every_steps": 10},
        }
        resources = {"time": 10, "signal": 10, "memory": "100M", **rest.pop("resources", {})}
        file = folder / f"{name}.yaml"
        file.write_text(yaml.safe_dump({"base": base, "resources": resources, **rest}), encoding="utf-8")
        return plan(load_spec(file, settings), folder / "runs")

    return build


@pytest.fixture
def make(make_in: Callable[..., Any], tmp_path: Path) -> Callable[..., Any]:
    """Make the plan of a sweep in this test's folder."""
    return partial(make_in, tmp_path)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Set what the stand-in trainer of ``tests/sweeps`` does, by label of the run."""
    import json

    def moods(**by_label: str) -> None:
        monkeypatch.setenv("TOY", json.dumps(by_label))

    return moods


def wait_until(ready: Callable[[], Any], limit_s: float, what: str) -> Any:
    """Poll until ``ready`` gives something true."""
    end_s = time.monotonic() + limit_s
    while True:
        found = ready()
        if found:
            return found
        assert time.monotonic() < end_s, f"{what}: not within {limit_s} s"
        time.sleep(0.3)


@pytest.fixture(scope="session")
def wait() -> Callable[..., Any]:
    return wait_until


@pytest.fixture(scope="session")
def finish() -> Callable[..., Any]:
    """Wait until every run of a plan is over; gives the status."""
    from scaling.sweeps.status import status

    def until_over(planned: Any, limit_s: float = 120) -> Any:
        def over() -> Any:
            now = status(planned)
            return now if now.over else None

        try:
            return wait_until(over, limit_s, planned.spec.name)
        except AssertionError:
            now = status(planned)
            raise AssertionError([(row.run.label, row.state) for row in now.runs] + [now.trouble]) from None

    return until_over


@pytest.fixture(scope="session")
def check_records() -> Callable[..., None]:
    """Assert from the records that no run is lost, doubled or misreported."""
    from scaling.record import RunFolder, run_folders

    def check(planned: Any, now: Any) -> None:
        assert {folder.key for folder in run_folders(planned.out)} == {run.key for run in planned.runs}
        for row in now.runs:
            folder = RunFolder(planned.out / row.run.key)
            record = folder.end()
            assert record is not None and record.status == row.state.state, row.run.label
            steps = [point.step for point in folder.points() if "train/loss" in point.metrics]
            assert steps == sorted(set(steps)), f"{row.run.label}: doubled steps {steps}"
            assert not steps or steps[-1] <= record.step
            attempts = folder.attempts()
            assert [item.attempt for item in attempts] == list(range(1, len(attempts) + 1))
            if record.status == "done":
                assert record.step == row.steps
                assert [path.name for path in folder.path.glob("end*.json")].count("end.json") == 1

    return check
