"""Where a run stands whose process is gone: killed, asked to leave, or silent on another machine."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from scaling.analysis.ingest import read_runs
from scaling.lease import Lease
from scaling.record import RunFolder
from scaling.tracking.standing import standing
from tests.tracking.folders import begin, make_config

HOLDER = """
import sys, time
from pathlib import Path
from scaling.lease import Lease
from scaling.stop import STOP
STOP.listen()
with Lease.take(Path(sys.argv[1])):
    print("held", flush=True)
    while not STOP.requested:
        time.sleep(0.01)
"""


@pytest.mark.parametrize(
    ("number", "status", "reason"),
    [
        (signal.SIGKILL, "failed", "was killed or crashed: gone without an end record"),
        (signal.SIGTERM, "cancelled", "left without an end record"),
    ],
)
def test_a_killed_process_has_failed_and_one_that_was_asked_to_leave_is_cancelled(
    tmp_path: Path, number: signal.Signals, status: str, reason: str
) -> None:
    """By its lease, which it releases on leaving; the run folder has no end record in either case."""
    folder = RunFolder.create(tmp_path, make_config())
    with subprocess.Popen([sys.executable, "-c", HOLDER, folder.path], stdout=subprocess.PIPE, text=True) as holder:
        assert holder.stdout is not None and holder.stdout.readline() == "held\n"
        begin(folder, host=socket.gethostname(), pid=holder.pid, started_ms=int(time.time() * 1000))
        assert standing(folder, folder.attempts(), None, None).status == "running"
        holder.send_signal(number)
    found = standing(folder, folder.attempts(), None, None)
    assert (found.status, found.reason) == (status, f"process {holder.pid} on {socket.gethostname()} {reason}")
    assert read_runs(tmp_path, keep=("all",)).table["status"].tolist() == [status]


def test_a_process_that_is_silent_elsewhere_has_failed(tmp_path: Path) -> None:
    folder = RunFolder.create(tmp_path, make_config())
    begin(folder, host="node-5")
    with Lease.take(folder.path) as lease:
        path = folder.path / "leases" / f"{lease.number:04d}.json"
        assert standing(folder, folder.attempts(), None, None).status == "running"
        os.utime(path, (time.time() - 1_200,) * 2)
        found = standing(folder, folder.attempts(), None, None)
    assert found.status == "failed" and found.reason == "process 1 on node-5 gave no sign of life for 20 min"
