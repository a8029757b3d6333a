"""What a run folder, a store and a configuration can have wrong with them: named in one line, and nothing is lost."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from scaling.checkpoint import Checkpoints, damage, load_weights
from scaling.cli.training import run_and_show
from scaling.config.strict import build
from scaling.config.tree import RunConfig
from scaling.distributed import World, join
from scaling.errors import CheckpointError, ConfigError, DataError, RecordError
from scaling.identity import run_key
from scaling.lease import Lease
from scaling.memory import remedy
from scaling.record import Attempt, RunFolder, append_line
from scaling.resolve import resolve
from scaling.tokens import TOKENS
from scaling.train import train
from tests.train.conftest import VOCAB, write_store

Make = Callable[..., RunConfig]


def folder_of(config: RunConfig, out: Path) -> RunFolder:
    return RunFolder(out / run_key(resolve(config)))


@pytest.mark.parametrize("keep", [1, 2, 3, 5, 8])
def test_the_latest_checkpoints_are_kept(keep: int, tmp_path: Path) -> None:
    """As many as asked for, once there are as many; while there are fewer, all."""
    checkpoints = Checkpoints(tmp_path / "checkpoints", World(), keep=keep)
    for step in range(1, 7):
        checkpoints.save(step, {}, {"value": step})
        checkpoints.finish(required=True)
        found = sorted(path.name for path in (tmp_path / "checkpoints").glob("step-*"))
        assert len(found) in (min(step, keep), min(step, keep + 1))
        assert found[-1] == f"step-{step:08d}"


def test_a_torn_line_takes_no_other_with_it(tmp_path: Path) -> None:
    """What is appended after one stands in a line of its own; numbers of attempts are not used again."""
    path = tmp_path / "attempts.jsonl"
    attempt = {"attempt": 1, "host": "a", "pid": 1, "started_ms": 1}
    append_line(path, attempt)
    with path.open("ab") as file:
        file.write(b'{"attempt": 2, "ho')
    append_line(path, {**attempt, "attempt": 3})
    folder = RunFolder(tmp_path)
    assert [item.attempt for item in folder.attempts()] == [1, 3]
    assert folder.next_attempt() == 4
    append_line(folder.journal(7), {"step": 1, "time_ms": 1, "metrics": {}})
    assert folder.next_attempt() == 8


def test_a_run_goes_on_after_a_torn_start(store: Path, make_config: Make, tmp_path: Path) -> None:
    """The curve of the attempt that follows is there."""
    config = make_config(store)
    folder = RunFolder.create(tmp_path, resolve(config))
    folder.begin(Attempt(attempt=1, host="a", pid=1, started_ms=1))
    with (folder.path / "attempts.jsonl").open("ab") as file:
        file.write(b'{"attempt": 2')
    train(config, out=tmp_path)
    assert [attempt.attempt for attempt in folder.attempts()] == [1, 2]
    weights, config_file = folder.path / "checkpoints" / "final" / "model.safetensors", folder.path / "config.json"
    assert weights.stat().st_mode == config_file.stat().st_mode  # who may read the run may read its weights
    assert [point.step for point in folder.points() if "train/loss" in point.metrics] == [2, 4, 6, 8, 10, 12]


def test_token_ids_beyond_the_vocabulary_are_named(make_config: Make, tmp_path: Path) -> None:
    """With the file, the position and what to do."""
    store = write_store(tmp_path / "store")
    tokens = np.memmap(store / TOKENS, dtype="<u2", mode="r+")
    tokens[:] = np.where((np.arange(len(tokens)) % 97 == 5) & (tokens != 0), 60_000, tokens)
    tokens.flush()
    with pytest.raises(DataError, match=rf"bin: token id 60000 at position [\d,]+, beyond the vocabulary of {VOCAB}"):
        train(make_config(store), out=tmp_path / "runs")


def test_tokens_of_another_store_are_named(make_config: Make, tmp_path: Path) -> None:
    """Same size, ids that exist, other content: documents no longer end where they did."""
    store = write_store(tmp_path / "store")
    tokens = np.memmap(store / TOKENS, dtype="<u2", mode="r+")
    quarter = len(tokens) // 4
    tokens[: 2 * quarter] = np.concatenate([tokens[quarter : 2 * quarter], tokens[:quarter]])
    tokens.flush()
    with pytest.raises(DataError, match=r"tokens.bin: document [\d,]+ does not end where offsets.npy says"):
        train(make_config(store), out=tmp_path / "runs")


def test_damaged_files_of_a_run_are_named(store: Path, make_config: Make, tmp_path: Path) -> None:
    """End records, attempts and weights that are not what they should be; files that are nobody's are left alone."""
    config = make_config(store)
    folder = RunFolder.create(tmp_path, resolve(config))
    for text in ("{}", "[]", '{"final": 3}', "{"):
        (folder.path / "end.json").write_text(text, encoding="utf-8")
        with pytest.raises(RecordError, match="end.json: damaged; remove it"):
            train(config, out=tmp_path)
    (folder.path / "end.json").unlink()
    (folder.path / "attempts.jsonl").write_text('{"foo": 1}\n', encoding="utf-8")
    with pytest.raises(RecordError, match="attempts.jsonl: a line is no attempt .*foo"):
        folder.attempts()
    (folder.path / "attempts.jsonl").unlink()
    (folder.path / "leases").mkdir(exist_ok=True)
    (folder.path / "leases" / "0001 copy.json").touch()
    Lease.take(folder.path).release()
    weights = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(3)}, weights)
    weights.write_bytes(weights.read_bytes()[:40])
    with pytest.raises(CheckpointError, match="model.safetensors: damaged"):
        load_weights(weights)


def test_a_record_without_its_fields_is_damage(tmp_path: Path) -> None:
    """A checksum alone does not make a checkpoint."""
    checkpoints = Checkpoints(tmp_path, World(), keep=2)
    checkpoints.save(3, {}, {})
    checkpoints.finish(required=True)
    complete = tmp_path / "step-00000003" / "complete.json"
    stored = json.loads(complete.read_text("utf-8"))
    del stored["record"]["format"]
    from scaling.checkpoint import _record_digest

    stored["sha256"] = _record_digest(stored["record"])
    complete.write_text(json.dumps(stored), encoding="utf-8")
    assert damage(complete.parent) == "complete.json is missing or damaged"


@pytest.mark.parametrize(
    ("section", "key", "value"),
    [
        ("model", "head_dim", 0), ("model", "head_dim", -2), ("model", "init_std", -1.0), ("model", "rope_theta", 0.0),
        ("model", "norm_eps", -1.0), ("optimizer", "weight_decay", float("nan")), ("optimizer", "z_loss", float("inf")),
        ("optimizer", "lr", float("inf")), ("optimizer", "beta1", 1.0),
    ],
)  # fmt: skip
def test_numbers_that_cannot_train_are_refused(section: str, key: str, value: float) -> None:
    """Where they are read, not when the loss is not a number."""
    model = {"num_layers": 1, "d_model": 16, "num_heads": 2, "num_kv_heads": 1, "d_ffn": 16, "vocab_size": VOCAB}
    tree: dict[str, Any] = {"model": model}
    tree[section] = {**tree.get(section, {}), key: value}
    with pytest.raises(ConfigError, match=f"{section}.{key}="):
        build(RunConfig, tree)


def test_a_run_that_only_skips_has_diverged(
    store: Path, make_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Skipped updates are told; where nothing else is left the run is not called done."""
    config = make_config(store, optimizer={"lr": 1e6, "skip_nonfinite": True, "grad_clip": None})
    with caplog.at_level(logging.WARNING):
        end = train(config, out=tmp_path)
    assert end.status == "diverged"
    assert "updates skipped since the last line, loss or gradient not finite" in caplog.text


def test_news_of_a_run_are_shown(
    store: Path, make_config: Make, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """What the trainer tells a person is not below the level that the command shows."""
    logger = logging.getLogger("scaling")
    before = logger.level
    try:
        assert run_and_show(make_config(store), out=tmp_path, as_json=True) == 0
        assert logger.level == logging.INFO
    finally:
        logger.setLevel(before)
    assert "standard error of" in caplog.text


def test_environments_of_no_launcher_are_named(monkeypatch: pytest.MonkeyPatch, make_config: Make, store: Path) -> None:
    """A rank that is no number."""
    monkeypatch.setenv("RANK", "a")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ConfigError, match="RANK='a' in the environment is no number; launch with torchrun or srun"):
        join(make_config(store, run={"parallel": "ddp"}).run)


def test_the_remedy_knows_what_does_not_fit(store: Path, make_config: Make) -> None:
    """Smaller micro-batches do not help where weights alone are too many."""
    small, huge = make_config(store), make_config(store, model={"vocab_size": 10**12})
    assert "micro_batch_size=4" in remedy(small, World(), 8)
    assert "weights and optimizer alone need more" in remedy(huge, World(), 8)
