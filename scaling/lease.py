"""The right to write a run folder: one process at a time, taken over only after proof that its holder is dead.

Taken by ``scaling.train`` before anything is written. Each holder has a file ``leases/0001.json``, ``0002.json``, ...
in the run folder; the highest number is the lease in force. A file is created exclusively (``link``, which is atomic on
network file systems too), and only by somebody who has shown that the holder of the number below is gone: of two that
try, one fails. Proof of death is

- the holder's own word (it released the lease on leaving);
- on the same host, boot and process namespace: no process with its id and start time;
- on another host: Slurm knows its job as ended in a way that ends processes, or its heartbeat is older than ``TTL_S``.

A lost node may still run its process. So the holder touches its file every ``HEARTBEAT_S``, and before each write makes
sure that its last touch is fresh or that nobody has come after it; else it stops.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import shutil
import socket
import subprocess
import threading
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Final

from scaling.errors import LeaseError

logger = logging.getLogger(__name__)

LEASES: Final = "leases"
HEARTBEAT_S: Final = 10.0
TTL_S: Final = 60.0  # six missed heartbeats; a holder that cannot touch its file for half of it checks before it writes

# Slurm's final states in which slurmd has ended every process of the job. NODE_FAIL and BOOT_FAIL are not among them:
# the node may be out of touch and still computing.
_ENDED: Final = frozenset({"COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "OUT_OF_MEMORY", "DEADLINE"})


@dataclass(frozen=True, kw_only=True, slots=True)
class Holder:
    """Who holds, or held, a run folder. ``process_start`` tells a process from a later one with the same id."""

    number: int
    host: str
    namespace: str
    pid: int
    process_start: str
    token: str
    job_id: str | None = None
    restart_count: int = 0
    released: bool = False

    def __str__(self) -> str:
        job = f", job {self.job_id}" if self.job_id else ""
        return f"process {self.pid} on {self.host}{job}"


def holder(run: Path) -> Holder | None:
    """Who holds the run folder now; ``None`` where nobody does. A dead holder that nobody followed is still named."""
    current = _current(run / LEASES)
    return None if current is None or current.released else current


class Lease:
    """The lease of this process on a run folder; a context manager that releases it."""

    def __init__(self, folder: Path, own: Holder) -> None:
        self._folder = folder
        self._own = own
        self._touched_s = _clock_s()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._beat, name="lease", daemon=True)
        self._thread.start()

    @property
    def number(self) -> int:
        return self._own.number

    @classmethod
    def take(cls, run: Path, *, wait_s: float = 0.0) -> Lease:
        """Take the lease of a run folder, waiting up to ``wait_s`` for a holder whose death is not proven yet.

        Raises
        ------
        LeaseError
            If another process holds it, or the folder cannot be written.
        """
        folder = run / LEASES
        deadline_s = time.monotonic() + wait_s
        while True:
            current = _current(folder)
            alive = None if current is None else _alive(folder, current)
            if alive is None:
                own = _create(folder, 1 if current is None else current.number + 1)
                if own is not None:
                    return cls(folder, own)
                continue  # somebody else was first; look again
            if time.monotonic() >= deadline_s:
                raise LeaseError(
                    f"{run}: is being written by {current} ({alive}); wait for it, stop it, or choose another --out"
                )
            time.sleep(min(1.0, max(0.01, deadline_s - time.monotonic())))

    def check(self) -> None:
        """Make sure that this process still holds the lease; cheap unless the heartbeat is late.

        Raises
        ------
        LeaseError
            If another process has taken the run over; this one must not write any more.
        """
        if _clock_s() - self._touched_s > TTL_S / 2:
            self._touch()
        if self._over.is_set():
            raise LeaseError(
                f"{self._folder.parent}: was taken over by another process; this one stops without writing"
            )

    def release(self) -> None:
        """Say that this process is done with the folder."""
        if not self._over.is_set():
            self._over.set()
            with contextlib.suppress(OSError):
                _write(self._path(), replace(self._own, released=True))

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()

    def _path(self) -> Path:
        return self._folder / _name(self._own.number)

    def _beat(self) -> None:
        while not self._over.wait(HEARTBEAT_S):
            self._touch()

    def _touch(self) -> None:
        try:
            if (self._folder / _name(self._own.number + 1)).exists():
                self._over.set()
                return
            os.utime(self._path())
            self._touched_s = _clock_s()
        except FileNotFoundError:
            self._over.set()  # the folder was removed
        except OSError as error:
            logger.warning("%s: no heartbeat (%s)", self._path(), error.strerror)


def _name(number: int) -> str:
    return f"{number:04d}.json"


def _current(folder: Path) -> Holder | None:
    numbers = [int(path.stem) for path in folder.glob("[0-9]*.json") if path.stem.isdigit()]
    if not numbers:
        return None
    path = folder / _name(max(numbers))
    try:
        return Holder(**json.loads(path.read_text(encoding="utf-8")))
    except FileNotFoundError:
        return _current(folder)
    except (ValueError, TypeError):
        raise LeaseError(f"{path}: damaged; make sure that no process writes this run, then remove the file") from None


def _create(folder: Path, number: int) -> Holder | None:
    """Create the lease with this number, or ``None`` where somebody was first."""
    own = Holder(
        number=number,
        host=socket.gethostname(),
        namespace=_namespace(),
        pid=os.getpid(),
        process_start=_process_start(os.getpid()) or "",
        token=uuid.uuid4().hex,
        job_id=os.environ.get("SLURM_JOB_ID"),
        restart_count=int(os.environ.get("SLURM_RESTART_COUNT", "0")),
    )
    beside = folder / f".{own.token}"
    try:
        folder.mkdir(exist_ok=True)
        _write(beside, own)
        try:
            os.link(beside, folder / _name(number))
        except FileExistsError:
            return None
    except OSError as error:
        raise LeaseError(
            f"{folder}: cannot be written ({error.strerror}); free space or choose another --out"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            beside.unlink()
    return own


def _write(path: Path, lease: Holder) -> None:
    beside = path.with_name(f".{lease.token}.new")
    beside.write_text(json.dumps(asdict(lease)), encoding="utf-8")
    os.replace(beside, path)


def _alive(folder: Path, current: Holder) -> str | None:
    """Why the holder must be taken for alive; ``None`` where its death is proven."""
    if current.released:
        return None
    if current.host == socket.gethostname() and current.namespace == _namespace():
        return "it is running" if _process_start(current.pid) == current.process_start else None
    if current.job_id is not None and _job_ended(current):
        return None
    age_s = _age_s(folder, folder / _name(current.number))
    return f"its heartbeat is {age_s:.0f} s old, its death is assumed after {TTL_S:.0f} s" if age_s <= TTL_S else None


def _age_s(folder: Path, path: Path) -> float:
    """Seconds since a file was touched, by the file system's own clock: hosts' clocks differ."""
    probe = folder / f".{uuid.uuid4().hex}"
    try:
        probe.touch()
        return probe.stat().st_mtime - path.stat().st_mtime
    except OSError as error:
        raise LeaseError(
            f"{folder}: cannot be written ({error.strerror}); free space or choose another --out"
        ) from None
    finally:
        with contextlib.suppress(OSError):
            probe.unlink()


def _job_ended(current: Holder) -> bool:
    """Whether Slurm says that the holder's job is over, by ``squeue`` first, since ``sacct`` lags."""
    assert current.job_id is not None
    if current.job_id == os.environ.get("SLURM_JOB_ID"):
        return False  # requeued: the states of its earlier start are gone, the heartbeat decides
    queries: tuple[tuple[str, ...], ...] = (
        ("squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={current.job_id}"),
        ("sacct", "--noheader", "--parsable2", "--allocations", "--format=State", f"--jobs={current.job_id}"),
    )
    for query in queries:
        if shutil.which(query[0]) is None:
            continue
        try:
            out = subprocess.run(query, capture_output=True, text=True, timeout=30, check=False)
        except subprocess.TimeoutExpired:
            continue
        states = [line.split()[0] for line in out.stdout.splitlines() if line.strip()]
        if out.returncode == 0 and states:
            return all(state in _ENDED for state in states)
    return False


def _namespace() -> str:
    """Boot and process namespace: within one, a process id means the same process."""
    parts: list[str] = []
    with contextlib.suppress(OSError):
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip())
        parts.append(os.readlink("/proc/self/ns/pid"))
    return " ".join(parts)


def _process_start(pid: int) -> str | None:
    """When a process began, in the system's own unit; ``None`` where there is none (a zombie has ended)."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
        fields = text.rpartition(")")[2].split()
        return None if fields[0] in "ZX" else fields[19]  # field 22 of proc(5): start time in clock ticks since boot
    except (FileNotFoundError, ProcessLookupError):
        if Path("/proc/self/stat").exists():
            return None
    import psutil  # systems without /proc

    try:
        process: Any = psutil.Process(pid)
        return str(process.create_time())
    except psutil.Error:
        return None


def _clock_s() -> float:
    """A clock that goes on while the machine sleeps, where there is one."""
    boottime = getattr(time, "CLOCK_BOOTTIME", None)
    return time.monotonic() if boottime is None else time.clock_gettime(boottime)
