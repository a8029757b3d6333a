"""What tracking costs a training: nothing imported, a line written, host metrics by option."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

from scaling.record import RunFolder, append_line, now_ms
from scaling.tracking.metrics import METRICS, unit
from scaling.tracking.system import SystemMetrics
from tests.tracking.folders import make_config


def test_a_training_imports_no_mlflow() -> None:
    heavy = "{'mlflow', 'sqlalchemy', 'pandas'}"
    code = f"import sys, scaling.train, scaling.tracking.direct; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


def test_writing_a_step_costs_less_than_a_hundredth_of_it(tmp_path: Path) -> None:
    """At 10 steps a second one per cent is 1 ms; processor time, since the disk's queue is not ours."""
    folder = RunFolder.create(tmp_path, make_config())
    metrics = {name: 1.0 / 3 for name in METRICS}
    started_s = time.process_time()
    for step in range(500):
        append_line(folder.journal(1), {"step": step, "time_ms": now_ms(), "metrics": metrics})
    assert (time.process_time() - started_s) / 500 < 0.001


def test_host_metrics_are_numbers_with_known_names() -> None:
    sample = SystemMetrics()
    metrics = sample()
    assert {"system/cpu_percent", "system/process_rss_gib", "system/memory_used_gib"} <= set(metrics)
    assert all(name.startswith("system/") and unit(name) for name in metrics)
    assert 0 < metrics["system/process_rss_gib"] < metrics["system/memory_used_gib"] + 1
