"""What works on this machine, what does not, and why: the facts behind ``scaling doctor``.

Near the end of the flow: it asks every part that depends on the machine. Each finding is a row (part, state, detail);
a missing optional part is no failure, a missing required one is.
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

State = Literal["ok", "absent", "broken"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One part of the machine: ``required`` parts must be ``ok``."""

    part: str
    state: State
    detail: str
    required: bool = False


def _python() -> Finding:
    good = sys.version_info >= (3, 11)
    detail = f"{platform.python_version()} ({sys.executable})" + ("" if good else "; 3.11 or newer is needed")
    return Finding(part="python", state="ok" if good else "broken", detail=detail, required=True)


def _torch() -> Finding:
    import torch

    detail = f"{torch.__version__}, {torch.get_num_threads()} threads"
    return Finding(part="torch", state="ok", detail=detail, required=True)


def _cuda() -> Finding:
    import torch

    if not torch.cuda.is_available():
        why = (
            "this torch is a CPU build"
            if torch.version.cuda is None
            else "no device answers (driver? CUDA_VISIBLE_DEVICES?)"
        )
        return Finding(part="cuda", state="absent", detail=f"{why}; training runs on the CPU")
    names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    return Finding(part="cuda", state="ok", detail=f"{torch.version.cuda}: {', '.join(names)}")


def _kernels() -> Finding:
    from scaling.kernels.dispatch import describe

    choices = describe()
    detail = "; ".join(f"{op}: {choice}" for op, choice in choices.items())
    return Finding(part="kernels", state="ok", detail=detail)


def _program(part: str, program: str, *arguments: str, hint: str) -> Finding:
    path = shutil.which(program)
    if path is None:
        return Finding(part=part, state="absent", detail=f"no {program} on the path; {hint}")
    try:
        out = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding(part=part, state="broken", detail=f"{path}: {error}")
    text = (out.stdout or out.stderr).strip().splitlines()
    state: State = "ok" if out.returncode == 0 else "broken"
    return Finding(part=part, state=state, detail=f"{path}: {text[0] if text else 'no answer'}")


def _slurm() -> Finding:
    hint = "sweeps run with --executor local"
    found = _program("slurm", "sbatch", "--version", hint=hint)
    if found.state != "ok":
        return found
    reach = _program("slurm", "squeue", "--noheader", "--me", hint=hint)
    if reach.state != "ok":
        return Finding(
            part="slurm", state="broken", detail=f"{found.detail}, but the controller does not answer: {reach.detail}"
        )
    return found


def _accounting() -> Finding:
    return _program(
        "slurm accounting", "sacct", "--noheader", "-X", hint="states come from run folders and squeue alone"
    )


def _library(name: str, *, required: bool, hint: str) -> Finding:
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        state: State = "broken" if required else "absent"
        return Finding(part=name, state=state, detail=f"not installed; {hint}", required=required)
    return Finding(part=name, state="ok", detail=version, required=required)


def _disk() -> Finding:
    usage = shutil.disk_usage(Path.cwd())
    free_gib = usage.free / 2**30
    return Finding(
        part="disk", state="ok" if free_gib > 1 else "broken", detail=f"{free_gib:.1f} GiB free in {Path.cwd()}"
    )


def _guarded(part: str, check: Callable[[], Finding], *, required: bool = False) -> Finding:
    try:
        return check()
    except Exception as error:  # the doctor's job is to report whatever is broken, also what nobody foresaw
        return Finding(part=part, state="broken", detail=f"{type(error).__name__}: {error}", required=required)


def examine() -> list[Finding]:
    """All findings, in the order in which a user needs them."""
    return [
        _python(),
        _guarded("torch", _torch, required=True),
        _guarded("cuda", _cuda),
        _library("triton", required=False, hint="kernels fall back to PyTorch, which is named in each run's record"),
        _guarded("kernels", _kernels),
        _guarded("slurm", _slurm),
        _guarded("slurm accounting", _accounting),
        _library("submitit", required=False, hint="needed for Slurm: pip install submitit"),
        _library("mlflow", required=True, hint="pip install mlflow"),
        _library("adbc-driver-sqlite", required=False, hint="faster ingestion: pip install 'isoloss[fast]'"),
        _library("psycopg", required=False, hint="PostgreSQL stores: pip install 'isoloss[postgres]'"),
        _library("lm-eval", required=False, hint="downstream evaluation: pip install 'isoloss[eval]'"),
        _guarded("disk", _disk),
    ]
