"""Run folders as the trainer leaves them, made without training."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from scaling.config.model import ModelConfig
from scaling.config.residual import Baseline, Mhar
from scaling.config.training import DataConfig, OptimizerConfig, RunSettings, ScheduleConfig
from scaling.config.tree import RunConfig
from scaling.record import Attempt, EndRecord, RunFolder, append_line, encode

START_MS = 1_790_000_000_000


def make_config(
    *,
    seed: int = 0,
    method: str = "baseline",
    sweep: str | None = "tiny",
    fingerprint: str | None = "f" * 40,
    **run: Any,
) -> RunConfig:
    model = ModelConfig(
        size="50k",
        num_layers=2,
        d_model=48,
        num_heads=3,
        num_kv_heads=1,
        d_ffn=128,
        vocab_size=512,
        residual=Mhar(heads=4) if method == "mhar" else Baseline(),
    )
    return RunConfig(
        model=model,
        data=DataConfig(path="data/tiny", fingerprint=fingerprint, seq_len=64, batch_size=8),
        optimizer=OptimizerConfig(lr=1e-3),
        schedule=ScheduleConfig(steps=100, warmup_steps=2),
        run=RunSettings(seed=seed, sweep=sweep, **run),
    )


def write_points(folder: RunFolder, attempt: int, steps: Sequence[int], *, metrics: int = 4, **also: float) -> None:
    """Journal lines at ``steps``; values depend on run, step and metric alone, so that a resume repeats them."""
    own = int(folder.key[:6], 16) * 1e-8
    for step in steps:
        values: dict[str, float] = {
            "train/loss": own + 6 / (1 + 0.01 * step),
            "val/loss": own + 6.1 / (1 + 0.01 * step),
        }
        names = ("train/lr", "train/grad_norm", "train/tokens", "perf/tokens_per_s", "perf/mfu", "mem/peak_gib")
        values |= {name: float(step * (i + 1)) for i, name in enumerate(names[: metrics - 2])}
        values |= also
        line = {name: encode(value) for name, value in values.items()}
        time_ms = START_MS + 1000 * step + attempt
        append_line(folder.journal(attempt), {"step": step, "time_ms": time_ms, "metrics": line})


def begin(folder: RunFolder, *, attempt: int = 1, resumed: int = 0, job_id: str | None = None, **also: Any) -> None:
    record = Attempt(
        attempt=attempt,
        host=also.pop("host", "node-1"),
        pid=also.pop("pid", 1),
        started_ms=also.pop("started_ms", START_MS + 10_000 * (attempt - 1)),
        resumed_from_step=resumed,
        job_id=job_id,
        environment={"git_commit": "0123abc", "device": "cpu"},
        **also,
    )
    folder.begin(record)


def finish(folder: RunFolder, *, status: str = "done", step: int = 100, attempt: int = 1, **also: Any) -> None:
    own = int(folder.key[:6], 16) * 1e-8
    loss = math.nan if status == "diverged" else own + 6.1 / (1 + 0.01 * step)
    final: Mapping[str, float] = {
        "val/loss": loss,
        "val/loss_se": 0.01,
        "val/bpb": loss / 2,
        "val/loss_tail": loss + 0.001,
        "train/tokens": 512.0 * step,
        "train/flops": 1e9 * step,
        "perf/wall_time_s": 12.5,
        "perf/gpu_seconds": 12.5,
    }
    details = {
        "schedule_finished": status == "done",
        "eval_fingerprint": "e" * 16,
        "n_params": 80_000,
        "n_params_non_embedding": 50_000,
    }
    record = EndRecord(
        status=status,  # type: ignore[arg-type]
        step=step,
        ended_ms=START_MS + 1000 * step + 500,
        attempt=attempt,
        reason="" if status == "done" else f"{status} for a test",
        final=final,
        details=details,
    )
    folder.finish(replace(record, **also))


def make_run(
    out: Path, *, steps: int = 100, every: int = 10, status: str = "done", metrics: int = 4, **config: Any
) -> RunFolder:
    """A whole run of one attempt."""
    folder = RunFolder.create(out, make_config(**config))
    begin(folder)
    write_points(folder, 1, range(0, steps + 1, every), metrics=metrics)
    finish(folder, status=status, step=steps)
    return folder


def awkward(out: Path) -> None:
    """Runs of every kind: two methods, diverged, failed, unfinished, running, resumed, copied."""
    for seed in range(3):
        make_run(out, seed=seed, method="mhar" if seed else "baseline")
    diverged = RunFolder.create(out, make_config(seed=10))
    begin(diverged)
    write_points(diverged, 1, [0, 10])
    append_line(
        diverged.journal(1), {"step": 20, "time_ms": START_MS, "metrics": {"train/loss": "nan", "mem/x": "inf"}}
    )
    finish(diverged, status="diverged", step=20)
    make_run(out, seed=11, status="failed")
    running = RunFolder.create(out, make_config(seed=12))
    begin(running)
    write_points(running, 1, [0, 10])
    resumed = RunFolder.create(out, make_config(seed=13))
    begin(resumed)
    write_points(resumed, 1, range(0, 60, 10))
    begin(resumed, attempt=2, resumed=30)
    write_points(resumed, 2, range(40, 101, 10))
    finish(resumed, attempt=2)
    short = RunFolder.create(out, make_config(seed=14, sweep="other"))
    begin(short)
    write_points(short, 1, [0, 10])
    finish(short, step=10, details={"schedule_finished": False})
