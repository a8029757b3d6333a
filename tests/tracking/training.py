"""A stand-in for a training process: writes its run folder at a steady rate and says how long its steps took.

Run as ``python training.py OUT SEED STEPS STEP_S``; prints the longest time a step's writing took, in seconds.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from scaling.record import Attempt, RunFolder, append_line, now_ms
from tests.tracking.folders import finish, make_config


def main(out: Path, seed: int, steps: int, step_s: float) -> None:
    folder = RunFolder.create(out, make_config(seed=seed))
    folder.begin(Attempt(attempt=1, host="node-1", pid=1, started_ms=now_ms()))
    longest_s = 0.0
    for step in range(steps):
        time.sleep(step_s)
        started_s = time.perf_counter()
        metrics = {f"train/m{i}": step + i / 8 + seed for i in range(7)} | {"train/loss": 1 / (1 + step) + seed}
        append_line(folder.journal(1), {"step": step, "time_ms": now_ms(), "metrics": metrics})
        longest_s = max(longest_s, time.perf_counter() - started_s)
    finish(folder, step=steps - 1, ended_ms=now_ms())
    print(longest_s)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4]))
