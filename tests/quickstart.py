"""One quickstart for all tests that need real runs: broken off once, then finished."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


@dataclass(frozen=True, kw_only=True)
class Calls:
    """The folder and what the calls said."""

    out: Path
    interrupted: subprocess.CompletedProcess[str]
    finished: subprocess.CompletedProcess[str]


def command(out: Path, *words: str) -> list[str]:
    return [sys.executable, "-m", "scaling", "quickstart", "--out", str(out), *words]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT), "COLUMNS": "120"}


def make(out: Path) -> Calls:
    """Start a quickstart, press Ctrl-C while runs train, call it again until it is done."""
    first = subprocess.Popen(
        command(out), cwd=ROOT, env=environment(), text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    deadline_s = time.monotonic() + 300
    while not list(out.glob("runs/*/metrics-0001.jsonl")):
        assert time.monotonic() < deadline_s and first.poll() is None, "no run began to train"
        time.sleep(0.5)
    time.sleep(3)
    first.send_signal(signal.SIGINT)
    stdout, stderr = first.communicate(timeout=120)
    interrupted = subprocess.CompletedProcess(first.args, first.returncode, stdout, stderr)
    finished = subprocess.run(command(out), cwd=ROOT, env=environment(), text=True, capture_output=True)
    return Calls(out=out, interrupted=interrupted, finished=finished)
