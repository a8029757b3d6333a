"""A stand-in for the trainer: keeps the run folder's contract and costs milliseconds.

Its behaviour is chosen by ``TOY`` in the environment, a mapping of labels to crash, lost, kill, diverge, oom, slow or
stuck.
"""

from __future__ import annotations

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

from scaling.config.tree import RunConfig
from scaling.errors import ProcessLost
from scaling.identity import label
from scaling.lease import Lease
from scaling.record import Attempt, EndRecord, RunFolder, append_line, now_ms
from scaling.resolve import resolve
from scaling.stop import STOP


def train(config: RunConfig, *, out: Path, progress: Any = None) -> EndRecord | None:
    """Count steps, journal them, checkpoint by writing the step into a file."""
    config = resolve(config)
    folder = RunFolder.create(out, config)
    record = folder.end()
    if record is not None:
        return record
    mood = json.loads(os.environ.get("TOY", "{}")).get(label(config), "")
    saved = folder.path / "checkpoints" / "step"
    with Lease.take(folder.path) as lease:
        first = int(saved.read_text(encoding="utf-8")) if saved.exists() else 0
        number = len(folder.attempts()) + 1
        folder.begin(
            Attempt(
                attempt=number,
                host=os.uname().nodename,
                pid=os.getpid(),
                started_ms=now_ms(),
                resumed_from_step=first,
                job_id=os.environ.get("SLURM_JOB_ID"),
                restart_count=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
            )
        )
        print(f"toy run {label(config)} from step {first}", flush=True)
        assert config.schedule.steps is not None
        for step in range(first + 1, config.schedule.steps + 1):
            if mood == "crash" and step == 2:
                raise RuntimeError("the toy broke")
            if mood == "lost" and step == 2:
                raise ProcessLost("rank 0 of 2 ends: another process of the run was lost") from RuntimeError("gloo")
            if mood == "oom" and step == 2:
                raise MemoryError
            if mood == "kill" and step == 2 and number == 1:
                os.kill(os.getpid(), signal.SIGKILL)
            time.sleep(0.2 if mood == "slow" else 0.002)
            while mood == "stuck" and not STOP.requested:
                time.sleep(0.05)
            lease.check()
            loss = float("nan") if mood == "diverge" else 5.0 / step
            metrics = {"train/loss": loss, "perf/tokens_per_s": 1000.0, "train/tokens": float(step)}
            line = {
                "step": step,
                "time_ms": now_ms(),
                "metrics": {k: v if v == v else "nan" for k, v in metrics.items()},
            }
            append_line(folder.journal(number), line)
            saved.parent.mkdir(exist_ok=True)
            saved.write_text(str(step), encoding="utf-8")
            if mood == "diverge":
                return _finish(folder, "diverged", step, number, "the loss is nan")
            if STOP.requested:
                return None
        return _finish(folder, "done", config.schedule.steps, number, "")


def _finish(folder: RunFolder, status: Any, step: int, number: int, reason: str) -> EndRecord:
    record = EndRecord(
        status=status,
        step=step,
        ended_ms=now_ms(),
        attempt=number,
        reason=reason,
        final={"val/loss": 1.0, "perf/gpu_seconds": 0.0},
        details={"schedule_finished": status == "done"},
    )
    folder.finish(record)
    return record
