"""One writer a run folder, with real processes: exclusion, proof of death, takeover, a writer that was taken over."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from scaling import lease as module
from scaling.errors import LeaseError
from scaling.lease import LEASES, TTL_S, Lease, holder

HOLD = "import sys, time; from pathlib import Path; from scaling.lease import Lease; "
HOLD += "lease = Lease.take(Path(sys.argv[1])); print('held', flush=True); time.sleep(120)"
RACE = """
import sys
from pathlib import Path
from scaling.errors import LeaseError
from scaling.lease import Lease
print('ready', flush=True); sys.stdin.readline()
try:
    lease = Lease.take(Path(sys.argv[1])); print('won', flush=True); sys.stdin.readline()
except LeaseError:
    print('lost', flush=True)
"""


def start(code: str, folder: Path) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-c", code, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )


@pytest.fixture
def other(tmp_path: Path) -> Iterator[subprocess.Popen[str]]:
    """A process that holds the lease of ``tmp_path``."""
    with start(HOLD, tmp_path) as process:
        assert process.stdout is not None and process.stdout.readline() == "held\n"
        yield process
        process.kill()


def pretend(folder: Path, **changes: object) -> Path:
    """Make the newest lease look as if it came from elsewhere."""
    path = max((folder / LEASES).glob("[0-9]*.json"))
    path.write_text(json.dumps({**json.loads(path.read_text("utf-8")), **changes}), "utf-8")
    return path


def test_a_live_holder_excludes_others(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    with pytest.raises(LeaseError, match=rf"is being written by process {other.pid} on .* \(it is running\); wait for"):
        Lease.take(tmp_path)
    found = holder(tmp_path)
    assert found is not None and found.pid == other.pid


def test_a_killed_holder_is_followed_at_once(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    with Lease.take(tmp_path) as lease:
        assert lease.number == 2
    assert holder(tmp_path) is None


def test_a_zombie_is_dead(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    os.kill(other.pid, signal.SIGKILL)
    os.waitid(os.P_PID, other.pid, os.WEXITED | os.WNOWAIT)  # dead, and not yet reaped
    Lease.take(tmp_path).release()


def test_a_stopped_process_is_not_dead(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.send_signal(signal.SIGSTOP)
    with pytest.raises(LeaseError, match="it is running"):
        Lease.take(tmp_path)
    other.send_signal(signal.SIGCONT)


def test_a_process_id_used_again_is_not_the_holder(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    pretend(tmp_path, process_start="1")
    Lease.take(tmp_path).release()


def test_released_means_free(tmp_path: Path) -> None:
    Lease.take(tmp_path).release()
    with Lease.take(tmp_path) as lease:
        assert lease.number == 2


def test_one_process_cannot_take_it_twice(tmp_path: Path) -> None:
    with Lease.take(tmp_path), pytest.raises(LeaseError, match="it is running"):
        Lease.take(tmp_path)


def test_of_many_that_race_for_a_dead_holders_lease_one_wins(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    racers = [start(RACE, tmp_path) for _ in range(6)]
    try:
        for racer in racers:
            assert racer.stdout is not None and racer.stdout.readline() == "ready\n"
        for racer in racers:
            assert racer.stdin is not None
            racer.stdin.write("\n")
            racer.stdin.flush()
        words = [racer.stdout.readline().strip() for racer in racers if racer.stdout is not None]
    finally:
        for racer in racers:
            racer.kill()
            racer.communicate()
    assert sorted(words) == ["lost"] * 5 + ["won"]


def test_another_hosts_silence_has_to_last(tmp_path: Path, other: subprocess.Popen[str]) -> None:
    other.kill()
    other.wait()
    path = pretend(tmp_path, host="elsewhere", namespace="x")
    with pytest.raises(LeaseError, match=r"on elsewhere.*its heartbeat is \d+ s old, its death is assumed after 60 s"):
        Lease.take(tmp_path)
    old = time.time() - TTL_S - 1
    os.utime(path, (old, old))
    Lease.take(tmp_path).release()


@pytest.mark.parametrize(("state", "free"), [("COMPLETED", True), ("RUNNING", False), ("NODE_FAIL", False)])
def test_slurm_can_prove_a_death(
    tmp_path: Path, other: subprocess.Popen[str], monkeypatch: pytest.MonkeyPatch, state: str, free: bool
) -> None:
    """A node that is out of touch may still compute, so NODE_FAIL proves nothing."""
    commands = tmp_path / "bin"
    commands.mkdir()
    squeue = commands / "squeue"
    squeue.write_text(f"#!/bin/sh\necho {state}\n", "utf-8")
    squeue.chmod(0o755)
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    pretend(tmp_path, host="elsewhere", namespace="x", job_id="77")
    if free:
        Lease.take(tmp_path).release()
    else:
        with pytest.raises(LeaseError, match="job 77"):
            Lease.take(tmp_path)


def test_a_writer_that_was_taken_over_stops(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its node was out of touch, somebody proved it dead by its silence, and it comes back."""
    late = Lease.take(tmp_path)
    late.check()
    own = pretend(tmp_path, host="elsewhere", namespace="x")
    old = time.time() - TTL_S - 1
    os.utime(own, (old, old))
    with Lease.take(tmp_path):
        monkeypatch.setattr(module, "_clock_s", lambda: 1e12)  # its clock went on while it was out of touch
        with pytest.raises(LeaseError, match="was taken over by another process; this one stops"):
            late.check()
        late.release()
    assert json.loads(own.read_text("utf-8"))["released"] is False


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / LEASES).write_text("a file in the way", "utf-8")
    with pytest.raises(LeaseError, match="cannot be written"):
        Lease.take(tmp_path)
