"""The end of a run on a disk that is full: what was trained is not trained again, and one line says so."""

from __future__ import annotations

import errno
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from scaling import checkpoint, ending
from scaling.checkpoint import Checkpoints
from scaling.config.tree import RunConfig
from scaling.errors import CheckpointError, ProcessLost, RecordError
from scaling.identity import run_key
from scaling.loop import Loop
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.train import train

Make = Callable[..., RunConfig]
SAVED = "run again: the state at the end is saved, nothing is trained again"
FULL = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def folder_of(config: RunConfig, out: Path) -> RunFolder:
    return RunFolder(out / run_key(resolve(config)))


def full_disk(monkeypatch: pytest.MonkeyPatch, *, times: int, error: Exception = FULL) -> list[Path]:
    """Weights do not fit on the disk so many times; the paths that were tried."""
    tried: list[Path] = []
    written = save_file

    def full(tensors: Any, path: Path) -> None:
        tried.append(path)
        if len(tried) <= times:
            raise error
        written(tensors, path)

    monkeypatch.setattr(checkpoint, "save_file", full)
    return tried


def no_room_for_checkpoints(monkeypatch: pytest.MonkeyPatch, when: Callable[[int], object]) -> None:
    """Checkpoints of these steps do not fit on the disk."""
    written = checkpoint._write_record

    def write_record(path: Path, record: dict[str, Any]) -> None:
        if when(record["step"]):
            raise FULL
        written(path, record)

    monkeypatch.setattr(checkpoint, "_write_record", write_record)


def no_training(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Loop, "_advance", lambda *_: pytest.fail("trained again"))


def assert_as_uninterrupted(config: RunConfig, out: Path, whole: Path) -> None:
    """The same weights and numbers as a run on a disk that was never full."""
    ends, weights = [], []
    for place in (out, whole):
        folder = folder_of(config, place)
        end = folder.end()
        assert end is not None and end.status == "done" and end.step == 12
        ends.append({name: value for name, value in end.final.items() if not name.startswith(("perf/", "mem/"))})
        weights.append(load_file(folder.path / "checkpoints" / "final" / "model.safetensors"))
        assert not list((folder.path / "checkpoints").glob("step-*"))
    assert ends[0] == ends[1]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[1])


@pytest.mark.parametrize(
    ("error", "cause"),
    [
        (FULL, "No space left on device"),
        (SafetensorError("I/O error: No space left on device (os error 28)"), "I/O error: No space left on device .*"),
    ],
)
def test_weights_that_do_not_fit_are_written_by_the_next_start(
    error: Exception, cause: str, store: Path, make_config: Make, tmp_path: Path
) -> None:
    config = make_config(store, optimizer={"ema_decay": 0.9})
    train(config, out=tmp_path / "whole")
    out = tmp_path / "full"
    with pytest.MonkeyPatch.context() as patch:
        full_disk(patch, times=99, error=error)
        with pytest.raises(
            CheckpointError,
            match=rf"checkpoints/final: cannot be written \({cause}\); free space and run again: the state at the end "
            r"is saved, nothing is trained again$",
        ):
            train(config, out=out)
    folder = folder_of(config, out)
    end = folder.end()
    assert end is not None and end.status == "failed" and end.step == 12 and "nothing is trained again" in end.reason
    with pytest.MonkeyPatch.context() as patch:
        no_training(patch)
        assert train(config, out=out).status == "done"
    assert [attempt.resumed_from_step for attempt in folder.attempts()] == [0, 12]
    assert_as_uninterrupted(config, out, tmp_path / "whole")


def test_older_checkpoints_make_room_for_the_weights(
    store: Path, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(store, run={"checkpoint_every_steps": 4})
    train(config, out=tmp_path / "whole")
    tried = full_disk(monkeypatch, times=1)
    with caplog.at_level(logging.WARNING):
        assert train(config, out=tmp_path / "full").status == "done"
    assert len(tried) == 2 and "No space left on device); older checkpoints were removed to make room" in caplog.text
    assert_as_uninterrupted(config, tmp_path / "full", tmp_path / "whole")


def test_an_end_record_that_does_not_fit_trains_nothing_again(
    store: Path, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = make_config(store, run={"checkpoint_every_steps": 4})
    train(config, out=tmp_path / "whole")
    replace = os.replace
    for name, times, attempts in (("once", 1, [0]), ("often", 3, [0, 12])):  # the third is the failure's own record
        left = [FULL] * times

        def full(source: Any, target: Any, left: list[OSError] = left) -> None:
            if str(target).endswith("/end.json") and left:
                raise left.pop()
            replace(source, target)

        out = tmp_path / name
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", full)
            if times == 1:
                train(config, out=out)
                assert "older checkpoints were removed to make room" in caplog.text
            else:
                with pytest.raises(RecordError, match=rf"end.json: cannot be written \(No .*{SAVED}$"):
                    train(config, out=out)
                assert "no end record: " in caplog.text
        with monkeypatch.context() as patch:
            no_training(patch)
            assert train(config, out=out).status == "done"
        assert [attempt.resumed_from_step for attempt in folder_of(config, out).attempts()] == attempts
        assert_as_uninterrupted(config, out, tmp_path / "whole")


def test_a_long_run_saves_its_end_before_the_weights(
    store: Path, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Killed while it writes them, it has nothing to train again."""
    config = make_config(store)
    train(config, out=tmp_path / "whole")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ending, "WORTH_SAVING_S", 0.0)

        def pulled(*_: object) -> None:
            raise KeyboardInterrupt

        patch.setattr(Checkpoints, "write_final", pulled)
        with pytest.raises(KeyboardInterrupt):
            train(config, out=tmp_path / "killed")
    folder = folder_of(config, tmp_path / "killed")
    assert folder.end() is None and (folder.path / "checkpoints" / "step-00000012" / "complete.json").exists()
    no_training(monkeypatch)
    assert train(config, out=tmp_path / "killed").status == "done"
    assert_as_uninterrupted(config, tmp_path / "killed", tmp_path / "whole")


def test_a_short_run_saves_nothing(
    store: Path, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Checkpoints, "save", lambda *_, **__: pytest.fail("saved"))
    assert train(make_config(store), out=tmp_path).status == "done"


@pytest.mark.parametrize("weights_fit", [True, False])
def test_a_permanent_checkpoint_of_the_end_is_written_once_there_is_room(
    weights_fit: bool,
    store: Path,
    make_config: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The disk has room for one checkpoint of the end only when those that nobody needs any more are gone."""
    config = make_config(store, run={"checkpoint_every_steps": 4, "permanent_every_steps": 12, "keep_checkpoints": 1})
    place = folder_of(config, tmp_path).path / "checkpoints"
    no_room_for_checkpoints(monkeypatch, lambda step: step == 12 and list(place.glob("step-*")))
    full_disk(monkeypatch, times=0 if weights_fit else 99)
    if weights_fit:
        train(config, out=tmp_path)
        assert f"step-00000012: checkpoint not written (No space left on device); {ending.TRIED_AGAIN}" in caplog.text
        assert "training goes on" not in caplog.text
    else:
        with pytest.raises(CheckpointError, match=r"it goes on from its last checkpoint, of step 8$"):
            train(config, out=tmp_path)
        monkeypatch.undo()
        train(config, out=tmp_path)
    end = folder_of(config, tmp_path).end()
    assert end is not None and end.status == "done" and (place / "final" / "model.safetensors").exists()
    assert [path.name for path in place.glob("step-*")] == ["step-00000012"]
    assert checkpoint.damage(place / "step-00000012") is None and checkpoint._is_permanent(place / "step-00000012")


def test_a_permanent_checkpoint_that_never_fits_is_said_to_be_missing_and_how_to_have_it(
    store: Path, make_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The next start of the finished run does nothing; without its end record it trains the last steps again."""
    config = make_config(store, run={"permanent_every_steps": 6})
    folder = folder_of(config, tmp_path)
    place = folder.path / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        no_room_for_checkpoints(patch, lambda step: step == 12)
        assert train(config, out=tmp_path).status == "done"
    told = [line.getMessage() for line in caplog.records if "checkpoint not written" in line.getMessage()]
    assert [line.partition("; ")[2] for line in told] == [
        ending.TRIED_AGAIN,
        "the run is done without it, and its next start does not try again; to have it, free space, remove end.json "
        "and run again: it goes on from its last checkpoint, of step 6",
    ]
    train(config, out=tmp_path)
    assert [path.name for path in place.glob("step-*")] == ["step-00000006"]
    (folder.path / "end.json").unlink()
    assert train(config, out=tmp_path).status == "done"
    assert sorted(path.name for path in place.glob("step-*")) == ["step-00000006", "step-00000012"]
    assert folder.attempts()[-1].resumed_from_step == 6


def test_the_state_at_the_end_is_permanent_where_that_is_due(store: Path, make_config: Make, tmp_path: Path) -> None:
    """Saved because the weights do not fit, it stays when the next start has written them."""
    config = make_config(store, run={"permanent_every_steps": 12})
    place = folder_of(config, tmp_path).path / "checkpoints"
    with pytest.MonkeyPatch.context() as patch:
        left = [True]
        no_room_for_checkpoints(patch, lambda _: left and left.pop())
        full_disk(patch, times=99)
        with pytest.raises(CheckpointError, match=SAVED):
            train(config, out=tmp_path)
    train(config, out=tmp_path)
    assert [path.name for path in place.glob("step-*")] == ["step-00000012"]


def test_a_process_lost_after_the_end_leaves_the_end_as_it_is(
    store: Path, make_config: Make, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(store)

    def lost(*_: object) -> None:
        raise ProcessLost("rank 0 of 2 ends")

    monkeypatch.setattr("scaling.train.leave_permanent", lost)
    with pytest.raises(ProcessLost):
        train(config, out=tmp_path)
    end = folder_of(config, tmp_path).end()
    assert end is not None and end.status == "done"


@pytest.mark.parametrize(("every", "words", "resumed"), [
    (5, r"it goes on from its last checkpoint, of step 10", 10),
    (None, r"it starts over, since no checkpoint was saved yet \(run.checkpoint_every_minutes\)", 0),
])  # fmt: skip
def test_where_nothing_fits_the_line_says_where_it_goes_on(
    every: int | None,
    words: str,
    resumed: int,
    store: Path,
    make_config: Make,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    config = make_config(store, run={"checkpoint_every_steps": every})
    no_room_for_checkpoints(monkeypatch, lambda step: step == 12)
    full_disk(monkeypatch, times=99)
    with pytest.raises(CheckpointError, match=rf"free space and run again: {words}$"):
        train(config, out=tmp_path)
    assert "step-00000012: checkpoint not written (No space left on device)" in caplog.text
    assert "training goes on" not in caplog.text
    monkeypatch.undo()
    assert train(config, out=tmp_path).status == "done"
    assert [attempt.resumed_from_step for attempt in folder_of(config, tmp_path).attempts()] == [0, resumed]
