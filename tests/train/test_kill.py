"""Killed without warning at random moments: only steps since the last checkpoint are lost, nothing is damaged."""

from __future__ import annotations

import multiprocessing
import random
import signal
import time
from collections.abc import Callable, Iterator
from multiprocessing.context import ForkServerContext
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from scaling.checkpoint import damage
from scaling.config.tree import RunConfig
from scaling.feed import Feed
from scaling.identity import run_key
from scaling.loop import Loop
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.stop import STOP
from scaling.train import train

KILLS = 50
ADVANCE = Loop._advance


@pytest.fixture
def server() -> Iterator[ForkServerContext]:
    """Processes that start in a tenth of a second, since their server has imported the trainer."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["scaling.train", "scaling.shards"])
    yield context


def leave_after(monkeypatch: pytest.MonkeyPatch, updates: int) -> None:
    """Ask the next run in this process to leave once it made a number of updates."""
    made = 0

    def counted(self: Loop, feed: Feed) -> None:
        nonlocal made
        ADVANCE(self, feed)
        made += 1
        if made == updates:
            STOP.signal = signal.SIGTERM

    monkeypatch.setattr(Loop, "_advance", counted)


def complete_steps(folder: RunFolder) -> list[int]:
    """Steps of the checkpoints that carry a complete one's name; each must be whole."""
    found = []
    for path in sorted((folder.path / "checkpoints").glob("step-*")):
        try:
            assert damage(path) is None, f"{path.name} is damaged"
        except FileNotFoundError:
            continue
        found.append(int(path.name.removeprefix("step-")))
    return found


@pytest.mark.slow
def test_killed_fifty_times(
    store: Path,
    tmp_path: Path,
    make_config: Callable[..., RunConfig],
    server: ForkServerContext,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    config = make_config(
        store,
        schedule={"steps": 100_000},
        evaluation={"every_steps": 20},
        optimizer={"ema_decay": 0.99},
        run={"checkpoint_every_steps": 3, "log_every_steps": 4},
    )
    folder = RunFolder(tmp_path / "killed" / run_key(resolve(config)))
    generator = random.Random(0)
    before_save = after_save = 0
    patience_s = 0.0  # twice what a start needs to its first checkpoint on this machine
    for kill in range(KILLS):
        had = complete_steps(folder)
        process = server.Process(target=train, args=(config,), kwargs={"out": tmp_path / "killed"})
        process.start()
        if kill < 2:  # the first start also waits for the server
            start_s = time.monotonic()
            while complete_steps(folder) == had and time.monotonic() < start_s + 120:
                time.sleep(0.01)
            patience_s = 2 * (time.monotonic() - start_s)
        else:
            time.sleep(generator.uniform(0.0, patience_s))
        process.kill()
        process.join()
        assert process.exitcode == -signal.SIGKILL, "the run ended before it was killed often enough"
        assert folder.path.exists() is False or folder.end() is None
        has = complete_steps(folder)
        assert max(has, default=0) >= max(had, default=0), "a checkpoint was lost"
        before_save, after_save = before_save + (has == had), after_save + (has != had)
    assert before_save and after_save, "the moments were not random"
    reached = complete_steps(folder)[-1] + 1
    for out, updates in (("killed", 1), ("whole", reached)):
        leave_after(monkeypatch, updates)
        end = train(config, out=tmp_path / out)
        assert end.status == "cancelled" and end.step == reached
    whole = RunFolder(tmp_path / "whole" / folder.key)
    starts = [attempt.resumed_from_step for attempt in folder.attempts()]
    assert starts == sorted(starts), "an attempt began before the checkpoint that was there"
    curves = [
        {
            (point.step, name): value
            for point in run.points()
            for name, value in point.metrics.items()
            if not name.startswith(("perf/", "mem/"))
        }
        for run in (folder, whole)
    ]
    assert curves[0] == curves[1]
    files = [next((run.path / "checkpoints" / f"step-{reached:08d}").glob("*.safetensors")) for run in (folder, whole)]
    one, other = (load_file(file) for file in files)
    assert one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR2, signal.SIGINT])
@pytest.mark.parametrize("phase", ["step", "evaluation", "first step"])
def test_a_signal_saves_within_one_step(
    store: Path,
    tmp_path: Path,
    make_config: Callable[..., RunConfig],
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
    phase: str,
) -> None:
    """A real signal, in the middle of a step, of an evaluation, of the first step (which may be compiling)."""
    from scaling.evaluate import Evaluator

    take, losses = Feed.take, Evaluator.token_losses
    steps = 0

    def taken(self: Feed) -> object:
        nonlocal steps
        steps += 1
        if (phase == "step" and steps == 4) or (phase == "first step" and steps == 1):
            signal.raise_signal(number)
        return take(self)

    def evaluated(self: Evaluator, *args: object) -> object:
        if phase == "evaluation" and steps == 5:
            signal.raise_signal(number)
            pytest.fail("an evaluation is broken off at once")
        return losses(self, *args)  # type: ignore[arg-type]

    config = make_config(store)
    with monkeypatch.context() as patch:
        patch.setattr(Feed, "take", taken)
        patch.setattr(Evaluator, "token_losses", evaluated)
        end = train(config, out=tmp_path)
    expected = {"step": 4, "evaluation": 5, "first step": 0}[phase]
    assert end.status == "cancelled" and end.step == expected and number.name in end.reason
    assert signal.getsignal(number) not in (None, STOP._handle), "the handlers are put back"
    folder = RunFolder(tmp_path / run_key(resolve(config)))
    assert folder.end() is None and complete_steps(folder) == ([expected] if expected else [])
    assert train(config, out=tmp_path).status == "done"
    steps_evaluated = [point.step for point in folder.points() if "val/loss" in point.metrics]
    assert steps_evaluated == [5, 10, 12], "an evaluation that was broken off is made on resuming"
