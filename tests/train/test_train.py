"""A run's life: its records, its resume to the bit, its ends."""

from __future__ import annotations

import json
import logging
import resource
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from scaling.checkpoint import load_weights
from scaling.config.tree import RunConfig
from scaling.errors import CheckpointError, ConfigError, DataError, MemoryShortage, RecordError
from scaling.identity import run_key
from scaling.kernels import dispatch
from scaling.loop import Loop, Progress
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.stop import STOP
from scaling.train import train

METHODS = [{"method": "baseline"}, {"method": "mhar", "heads": 4}]


def folder_of(config: RunConfig, out: Path) -> RunFolder:
    return RunFolder(out / run_key(resolve(config)))


def curve(folder: RunFolder) -> dict[tuple[int, str], float]:
    """Every journal value that a resume must not change."""
    return {
        (point.step, name): value
        for point in folder.points()
        for name, value in point.metrics.items()
        if not name.startswith(("perf/", "mem/"))
    }


def weights(folder: RunFolder, name: str = "model") -> dict[str, torch.Tensor]:
    return load_file(folder.path / "checkpoints" / "final" / f"{name}.safetensors")


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``stop_after(n)``: ask the run to leave once n updates were made in this attempt."""
    advance = Loop._advance

    def arrange(updates: int) -> None:
        made = 0

        def counted(self: Loop, feed: Any) -> None:
            nonlocal made
            advance(self, feed)
            made += 1
            if made == updates:
                STOP.signal = loop_module_signal

        monkeypatch.setattr(Loop, "_advance", counted)

    import signal

    loop_module_signal = signal.SIGTERM
    yield arrange
    monkeypatch.setattr(Loop, "_advance", advance)
    STOP.signal = None


def test_a_run_leaves_what_the_folder_promises(store: Path, tmp_path: Path, make_config: Any) -> None:
    seen: list[Progress] = []
    config = make_config(store)
    end = train(config, out=tmp_path, progress=seen.append)
    folder = folder_of(config, tmp_path)
    assert end.status == "done" and end.step == 12 and folder.end() == end
    assert [progress.step for progress in seen] == [2, 4, 6, 8, 10, 12]
    points = list(folder.points())
    assert [p.step for p in points if "val/loss" in p.metrics] == [5, 10, 12]
    losses = [p.metrics["train/loss"] for p in points if "train/loss" in p.metrics]
    assert losses[-1] < losses[0] - 0.3, "the successor rule is learnt"
    for name in (
        "val/loss",
        "val/loss_se",
        "val/bpb",
        "val/loss_tail",
        "val/loss/a",
        "val/loss/b",
        "train/tokens",
        "train/flops",
        "perf/wall_time_s",
        "perf/gpu_seconds",
    ):
        assert np.isfinite(end.final[name]), name
    assert end.final["train/tokens"] == 12 * 8 * 32
    assert end.details["schedule_finished"] and len(end.details["eval_fingerprint"]) == 16
    vals = [p.metrics["val/loss"] for p in points if "val/loss" in p.metrics]
    assert end.final["val/loss_tail"] == pytest.approx(np.mean(vals), abs=1e-12)
    (attempt,) = folder.attempts()
    kernels = {f"kernels.{operation}": choice for operation, choice in dispatch.describe().items()}
    assert kernels.items() <= attempt.environment.items(), "which implementations ran, and why"
    stored = np.load(folder.path / "evaluations" / "step-00000012.npz", allow_pickle=False)
    assert stored["sequence_loss"].shape == (12,)
    mean = stored["sequence_loss"].sum() / stored["sequence_tokens"].sum()
    assert mean == pytest.approx(end.final["val/loss"], abs=1e-12)
    assert set(weights(folder)) == set(load_weights(folder.path))
    assert not list(folder.path.rglob("*.pt")) and not list((folder.path / "checkpoints").glob("step-*"))


def test_a_finished_run_is_not_trained_again(
    store: Path, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = make_config(store, schedule={"steps": 3})
    end = train(config, out=tmp_path)
    monkeypatch.setattr(Loop, "__init__", lambda *args, **kwargs: pytest.fail("it trained again"))
    assert train(config, out=tmp_path) == end


@pytest.mark.parametrize("residual", METHODS, ids=lambda residual: str(residual["method"]))
@pytest.mark.parametrize("updates", [1, 5, 7])
def test_resume_is_equal_to_the_bit(
    store: Path, tmp_path: Path, make_config: Any, stop_after: Any, residual: dict[str, Any], updates: int
) -> None:
    """Losses, weights, average and moments after an interruption are those of an uninterrupted run.

    After 5 updates an evaluation is due, after 7 the journal's line is half full.
    """
    options = {"model": {"residual": residual}, "optimizer": {"ema_decay": 0.9, "z_loss": 1e-4}}
    config = make_config(store, **options, run={"permanent_every_steps": 12})
    train(config, out=tmp_path / "whole")
    stop_after(updates)
    left = train(config, out=tmp_path / "parts")
    assert left.status == "cancelled" and left.step == updates
    assert folder_of(config, tmp_path / "parts").end() is None
    end = train(config, out=tmp_path / "parts")
    whole, parts = folder_of(config, tmp_path / "whole"), folder_of(config, tmp_path / "parts")
    assert end.status == "done" and [a.resumed_from_step for a in parts.attempts()] == [0, updates]
    assert curve(whole) == curve(parts)
    for name in ("model", "ema"):
        one, other = weights(whole, name), weights(parts, name)
        assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)
    permanent = [f.path / "checkpoints" / "step-00000012" for f in (whole, parts)]
    files = [load_file(next(path.glob("*.safetensors"))) for path in permanent]
    assert any(name.startswith("optimizer/exp_avg_sq/") for name in files[0])
    assert all(torch.equal(files[0][name], files[1][name]) for name in files[0])


def test_micro_batches_do_not_change_the_result(store: Path, tmp_path: Path, make_config: Any) -> None:
    curves = []
    for rows in (None, 3, 1):
        config = make_config(store, data={"micro_batch_size": rows})
        train(config, out=tmp_path / str(rows))
        curves.append(curve(folder_of(config, tmp_path / str(rows))))
    for other in curves[1:]:
        assert other.keys() == curves[0].keys()
        assert list(other.values()) == pytest.approx(list(curves[0].values()), abs=1e-5)


def test_masked_documents_are_normalised_by_the_targets_that_count(
    store: Path, tmp_path: Path, make_config: Any
) -> None:
    curves = []
    for rows in (None, 3):
        config = make_config(store, data={"micro_batch_size": rows, "document_masking": True})
        train(config, out=tmp_path / str(rows))
        curves.append(list(curve(folder_of(config, tmp_path / str(rows))).values()))
    assert curves[0] == pytest.approx(curves[1], abs=1e-5)


@pytest.mark.parametrize("kind", ["selective", "full"])
def test_activation_checkpointing_does_not_change_the_result(
    store: Path, tmp_path: Path, make_config: Any, kind: str
) -> None:
    plain, lean = make_config(store), make_config(store, run={"activation_checkpointing": kind})
    train(plain, out=tmp_path / "plain")
    train(lean, out=tmp_path / "lean")
    one = curve(folder_of(plain, tmp_path / "plain"))
    assert list(curve(folder_of(lean, tmp_path / "lean")).values()) == pytest.approx(list(one.values()), abs=1e-6)


def test_divergence_is_a_result(store: Path, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    advance = Loop._advance

    def poisoned(self: Loop, feed: Any) -> None:
        if self.step == 6:
            with torch.no_grad():
                self.transformer.get_parameter("norm.weight").fill_(torch.nan)
        advance(self, feed)

    monkeypatch.setattr(Loop, "_advance", poisoned)
    config = make_config(store)
    end = train(config, out=tmp_path)
    assert end.status == "diverged" and end.step == 7 and end.details["diverged_step"] == 7
    assert end.reason.startswith("loss=nan at step 7, on the sequences that start at tokens ")
    assert len(end.details["batch_starts"]) == 8 and not end.details["schedule_finished"]
    assert train(config, out=tmp_path) == end, "a diverged run is over"
    assert not (folder_of(config, tmp_path).path / "checkpoints" / "final").exists()


def test_skipping_goes_on_until_too_many(
    store: Path, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from scaling.optim import Optimizer

    update = Optimizer.update
    bad = {4, 5}

    def poisoned(self: Optimizer, lr: float) -> torch.Tensor:
        poisoned.calls += 1  # type: ignore[attr-defined]
        if poisoned.calls in bad:  # type: ignore[attr-defined]
            for shard in self.shards:
                assert shard.parameter.grad is not None
                shard.parameter.grad.fill_(torch.inf)
        return update(self, lr)

    poisoned.calls = 0  # type: ignore[attr-defined]
    monkeypatch.setattr(Optimizer, "update", poisoned)
    config = make_config(store, optimizer={"skip_nonfinite": True})
    end = train(config, out=tmp_path / "few")
    assert end.status == "done" and end.final["train/skipped_steps"] == 2
    bad |= set(range(1000))
    config = make_config(store, optimizer={"skip_nonfinite": True}, schedule={"steps": 40})
    end = train(config, out=tmp_path / "many")
    assert end.status == "diverged" and end.reason.startswith("gradient norm=inf at step 21")


def test_a_failed_run_is_recorded_and_tried_again(
    store: Path, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Loop._advance

    def broken(self: Loop, feed: Any) -> None:
        if self.step == 6:
            raise RuntimeError("a cable was pulled")
        advance(self, feed)

    config = make_config(store, run={"checkpoint_every_steps": 4})
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "_advance", broken)
        with pytest.raises(RuntimeError, match="cable"):
            train(config, out=tmp_path)
    folder = folder_of(config, tmp_path)
    end = folder.end()
    assert end is not None and end.status == "failed" and end.reason == "RuntimeError: a cable was pulled"
    assert train(config, out=tmp_path).status == "done"
    assert [attempt.resumed_from_step for attempt in folder.attempts()] == [0, 4]
    assert (folder.path / "end-0001.json").exists()


def test_out_of_memory_says_where_it_went_and_what_to_change(
    store: Path, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Loop, feed: Any) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB")

    monkeypatch.setattr(Loop, "_advance", full)
    with pytest.raises(
        MemoryShortage,
        match=r"out of memory with micro-batches of 8 sequences on cpu.*GiB a device: .*activations of 8 sequences.*"
        r"set data.micro_batch_size=4 \(the result stays the same\)",
    ):
        train(make_config(store), out=tmp_path)


def test_a_full_disk_stops_the_run_and_loses_nothing(
    store: Path, tmp_path: Path, make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    """A limit on file sizes makes writes fail as a full disk does: first the checkpoint's, which training survives."""
    config = make_config(store, run={"checkpoint_every_steps": 4})
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, hard))
    try:
        with caplog.at_level(logging.WARNING), pytest.raises(CheckpointError, match="final: cannot be written"):
            train(config, out=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert "step-00000004: checkpoint not written (File too large); training goes on" in caplog.text
    folder = folder_of(config, tmp_path)
    assert not list((folder.path / "checkpoints").glob("step-*"))
    assert train(config, out=tmp_path).status == "done"


def test_a_journal_that_cannot_be_written_stops_the_run(store: Path, tmp_path: Path, make_config: Any) -> None:
    config = make_config(store)
    folder = RunFolder.create(tmp_path, resolve(config))
    folder.journal(1).mkdir()
    with pytest.raises(RecordError, match=r"metrics-0001.jsonl: cannot be written \(Is a directory\)"):
        train(config, out=tmp_path)


def test_pure_bf16_is_warned_about(
    store: Path, tmp_path: Path, make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    end = train(make_config(store, precision={"mode": "bf16"}), out=tmp_path)
    assert end.status == "done" and end.final["train/loss"] < 4.2
    assert "weights and moments are rounded to 8 bits at each update" in caplog.text


def test_the_papers_protocol_is_warned_about(
    store: Path, tmp_path: Path, make_config: Any, caplog: pytest.LogCaptureFixture
) -> None:
    held_out = train(make_config(store, schedule={"steps": 2}), out=tmp_path)
    papers = train(make_config(store, schedule={"steps": 2}, evaluation={"protocol": "papers"}), out=tmp_path)
    assert "losses are not held-out losses" in caplog.text
    assert held_out.details["eval_fingerprint"] != papers.details["eval_fingerprint"]


def test_same_seed_same_run_other_seed_other_run(store: Path, tmp_path: Path, make_config: Any) -> None:
    config = make_config(store)
    train(config, out=tmp_path / "1")
    train(config, out=tmp_path / "2")
    other = make_config(store, run={"seed": 1})
    train(other, out=tmp_path / "1")
    first = curve(folder_of(config, tmp_path / "1"))
    assert first == curve(folder_of(config, tmp_path / "2"))
    assert first != curve(folder_of(other, tmp_path / "1"))


def test_determinism_switch_is_put_back(store: Path, tmp_path: Path, make_config: Any) -> None:
    train(make_config(store, schedule={"steps": 2}, run={"deterministic": True}), out=tmp_path)
    assert torch.are_deterministic_algorithms_enabled()
    train(make_config(store, schedule={"steps": 3}), out=tmp_path)
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.mark.parametrize(
    ("sections", "error", "text"),
    [
        ({"data": {"path": ""}}, ConfigError, "data.path is missing; give the folder of a token store"),
        ({"data": {"path": "nowhere"}}, DataError, "nowhere: no token store here"),
        ({"model": {"vocab_size": 63}}, DataError, "token ids go up to 63 but the model's vocabulary has 63"),
        ({"run": {"device": "cuda"}}, ConfigError, "run.device=cuda but no CUDA device is visible"),
    ],
)
def test_wrong_use(
    store: Path, tmp_path: Path, make_config: Any, sections: dict[str, Any], error: type[Exception], text: str
) -> None:
    if "cuda" in text and torch.cuda.is_available():
        pytest.skip("this machine has a CUDA device")
    with pytest.raises(error, match=text):
        train(make_config(store, **sections), out=tmp_path)


def test_several_processes_need_a_wrapper(
    store: Path, tmp_path: Path, make_config: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match="run.parallel=none but 2 processes were launched; set run.parallel=ddp or fsdp2"
    ):
        train(make_config(store), out=tmp_path)


def test_journal_is_json_lines(store: Path, tmp_path: Path, make_config: Any) -> None:
    config = make_config(store, schedule={"steps": 4})
    train(config, out=tmp_path)
    text = folder_of(config, tmp_path).journal(1).read_text("utf-8")
    lines = [json.loads(line) for line in text.splitlines()]
    assert all(line.keys() == {"step", "time_ms", "metrics"} for line in lines)
