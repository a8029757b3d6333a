"""What must hold on a GPU: ``pytest -m gpu tests/gpu``. Figures come from ``measure_training.py``."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

SCRIPT = Path(__file__).with_name("measure_training.py")
ROOT = SCRIPT.parents[2]

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


def measure(part: str, out: Path, *options: str, processes: int = 1) -> dict[str, Any]:
    launcher = [sys.executable]
    if processes > 1:
        launcher += ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(processes)]
    command = [*launcher, str(SCRIPT), part, "--out", str(out), *options]
    subprocess.run(command, cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, check=True)
    result: dict[str, Any] = json.loads(next(out.glob(f"{part}*.json")).read_text("utf-8"))
    return result


def test_resume_is_equal_to_the_bit_in_deterministic_mode(tmp_path: Path) -> None:
    result = measure("resume", tmp_path)
    assert result["baseline"]["equal_to_the_bit"] and result["mhar"]["equal_to_the_bit"]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_one_gpu_is_two_with_ddp_is_two_with_fsdp2(tmp_path: Path) -> None:
    result = measure("spread", tmp_path, processes=2)
    assert result["fp32 ddp"]["largest_difference"] < 1e-4 and result["fp32 fsdp2"]["largest_difference"] < 1e-4


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_name() != "NVIDIA H200", reason="targets are stated for an H200"
)
@pytest.mark.parametrize(("size", "target"), [("100m", 0.38), ("350m", 0.45), ("1b", 0.50)])
def test_utilisation(tmp_path: Path, size: str, target: float) -> None:
    assert measure("mfu", tmp_path, "--sizes", size)[size]["perf/mfu"] >= target


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_name() != "NVIDIA H200", reason="targets are stated for an H200"
)
def test_small_runs_packed_on_one_gpu(tmp_path: Path) -> None:
    result = measure("packing", tmp_path)
    assert max(part["times_one_after_another"] for part in result.values() if isinstance(part, dict)) >= 3
