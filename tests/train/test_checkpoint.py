"""Damage is found, the checkpoint before is used, nothing is half there, nothing is a pickle."""

from __future__ import annotations

import logging
import os
import threading
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from scaling import checkpoint as checkpoint_module
from scaling.checkpoint import COMPLETE, Checkpoints, Entry, load_weights
from scaling.distributed import World
from scaling.errors import CheckpointError, LeaseError


def entries(value: float) -> dict[str, Entry]:
    return {
        "model/weight": Entry.whole(torch.full((4, 3), value)),
        "model/norm": Entry.whole(torch.full((3,), value, dtype=torch.bfloat16)),
        "ema/weight": Entry.whole(torch.full((4, 3), -value)),
    }


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """A folder with checkpoints of steps 1, 2, 3; the first is permanent."""
    checkpoints = Checkpoints(tmp_path, World(), keep=2)
    for step in (1, 2, 3):
        checkpoints.save(step, entries(float(step)), {"step_was": step}, permanent=step == 1)
    checkpoints.finish(required=True)
    return tmp_path


def reopened(folder: Path) -> Checkpoints:
    return Checkpoints(folder, World(), keep=2)


def flip_a_byte(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-7])


def test_what_was_saved_comes_back(saved: Path) -> None:
    checkpoints = reopened(saved)
    latest = checkpoints.latest()
    assert latest is not None and latest.step == 3 and latest.progress == {"step_was": 3} and not latest.permanent
    fresh = entries(0.0)
    checkpoints.load(latest, fresh)
    for name, entry in entries(3.0).items():
        assert torch.equal(fresh[name].local, entry.local) and fresh[name].local.dtype == entry.local.dtype


def test_saving_copies_the_state_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = entries(1.0)
    checkpoints = Checkpoints(tmp_path, World(), keep=1)
    progress: dict[str, Any] = {"values": [1.0]}
    written = checkpoint_module._write_record

    def late(path: Path, record: dict[str, Any]) -> None:
        changed.wait(10)
        written(path, record)

    changed = threading.Event()
    monkeypatch.setattr(checkpoint_module, "_write_record", late)
    checkpoints.save(1, state, progress)
    for entry in state.values():
        entry.local.zero_()  # training goes on while the thread writes
    progress["values"].append(2.0)
    changed.set()
    checkpoints.finish(required=True)
    latest = reopened(tmp_path).latest()
    assert latest is not None and latest.progress == {"values": [1.0]}
    assert torch.equal(load_weights(tmp_path / "step-00000001")["weight"], torch.ones(4, 3))


def test_the_latest_and_the_permanent_are_kept(saved: Path) -> None:
    checkpoints = reopened(saved)
    checkpoints.save(4, entries(4.0), {})
    checkpoints.finish(required=True)
    assert sorted(path.name for path in saved.iterdir()) == ["step-00000001", "step-00000003", "step-00000004"]
    checkpoints.prune(keep=0)
    assert [path.name for path in saved.iterdir()] == ["step-00000001"]


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (lambda folder: flip_a_byte(next(folder.glob("*.safetensors"))), "does not match its checksum"),
        (lambda folder: cut(next(folder.glob("*.safetensors"))), "is missing or cut short"),
        (lambda folder: next(folder.glob("*.safetensors")).unlink(), "is missing or cut short"),
        (lambda folder: (folder / COMPLETE).unlink(), "complete.json is missing or damaged"),
        (lambda folder: cut(folder / COMPLETE), "complete.json is missing or damaged"),
        (
            lambda folder: (folder / COMPLETE).write_text(
                (folder / COMPLETE).read_text("utf-8").replace('"step_was": 3', '"step_was": 9'), "utf-8"
            ),
            "complete.json is missing or damaged",
        ),
    ],
    ids=["bit", "cut", "gone", "no record", "cut record", "changed record"],
)
def test_damage_is_said_and_the_one_before_used(
    saved: Path, damage: Callable[[Path], None], said: str, caplog: pytest.LogCaptureFixture
) -> None:
    damage(saved / "step-00000003")
    latest = reopened(saved).latest()
    assert latest is not None and latest.step == 2
    (message,) = caplog.messages
    assert "step-00000003" in message and said in message
    assert "going back to the checkpoint before" in caplog.text


def test_all_damaged_means_the_beginning(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    for folder in saved.iterdir():
        cut(folder / COMPLETE)
    assert reopened(saved).latest() is None
    assert "no checkpoint is usable; starting from the beginning" in caplog.text


def test_a_damaged_one_is_replaced_when_its_step_comes_again(saved: Path) -> None:
    cut(saved / "step-00000003" / COMPLETE)
    checkpoints = reopened(saved)
    checkpoints.save(3, entries(3.5), {"step_was": 3})
    checkpoints.finish(required=True)
    latest = reopened(saved).latest()
    assert latest is not None and latest.step == 3


def test_what_a_dead_process_left_is_removed(saved: Path) -> None:
    (saved / ".step-00000004").mkdir()
    (saved / ".step-00000004" / "half.safetensors").write_bytes(b"x")
    reopened(saved)
    assert not (saved / ".step-00000004").exists()


def test_no_file_is_a_pickle(saved: Path) -> None:
    for path in saved.rglob("*"):
        if path.is_file():
            assert path.suffix in (".safetensors", ".json") and not zipfile.is_zipfile(path)
            assert path.read_bytes()[:2] != b"\x80\x04"


@pytest.mark.skipif(os.geteuid() == 0, reason="root writes everywhere")
def test_a_folder_without_write_permission(saved: Path) -> None:
    saved.chmod(0o500)
    checkpoints = reopened(saved)
    checkpoints.save(4, entries(4.0), {})
    with pytest.raises(CheckpointError, match="step-00000004: checkpoint not written"):
        checkpoints.finish(required=True)


def test_a_failed_write_leaves_the_others(saved: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpoints = reopened(saved)
    (saved / ".step-00000004").write_text("a file in the way", "utf-8")
    checkpoints.save(4, entries(4.0), {})
    checkpoints.finish()
    assert "step-00000004: checkpoint not written (File exists); training goes on" in caplog.text
    checkpoints.save(5, entries(5.0), {})
    checkpoints.finish(required=True)
    latest = reopened(saved).latest()
    assert latest is not None and latest.step == 5


def test_a_run_taken_over_names_no_checkpoint(tmp_path: Path) -> None:
    def gone() -> None:
        raise LeaseError("was taken over")

    checkpoints = Checkpoints(tmp_path, World(), keep=2, guard=gone)
    checkpoints.save(1, entries(1.0), {})
    with pytest.raises(CheckpointError, match="was taken over"):
        checkpoints.finish(required=True)
    assert not list(tmp_path.glob("step-*"))


def test_another_model_does_not_fit(saved: Path) -> None:
    checkpoints = reopened(saved)
    latest = checkpoints.latest()
    assert latest is not None
    with pytest.raises(CheckpointError, match="does not fit this run"):
        checkpoints.load(latest, {"model/other": Entry.whole(torch.zeros(2))})
    with pytest.raises(CheckpointError, match="does not fit this run"):
        checkpoints.load(latest, {"model/weight": Entry.whole(torch.zeros(5, 3))})


def test_weights_for_others(saved: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert set(load_weights(saved / "step-00000002")) == {"weight", "norm"}
        assert torch.equal(load_weights(saved, average=True)["weight"], torch.full((4, 3), -3.0))
        flip_a_byte(next((saved / "step-00000003").glob("*.safetensors")))
        assert torch.equal(load_weights(saved)["weight"], torch.full((4, 3), 2.0))
    with pytest.raises(CheckpointError, match="no usable checkpoint; give a run folder"):
        load_weights(tmp_path / "nothing")
