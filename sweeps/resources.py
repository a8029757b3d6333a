"""What a run asks of the machine: time, GPUs, memory, packing; and the notations Slurm users write them in.

Read by ``spec`` from the sweep's file, by ``plan`` to check and price, by ``batch`` to write sbatch options.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from scaling.errors import GridError, nearest

_UNITS_S: Final = {"s": 1, "m": 60, "h": 3600, "d": 86_400}
_UNITS_MIB: Final = {"K": 1 / 1024, "M": 1, "G": 1024, "T": 1024**2}

START_MARGIN_S: Final = 90  # Slurm sends the signal up to a minute early, and Python must have its handler by then


@dataclass(frozen=True, kw_only=True, slots=True)
class Resources:
    """What one job asks for, and how runs are packed into it.

    ``runs_per_gpu`` runs share a GPU at the same time, ``runs_per_job`` runs in all go into one job, one after
    another where they do not fit beside each other. Memory and CPUs are those of the job's node. ``signal_s`` is how
    long before the time limit a run is asked to save itself; ``max_requeues`` bounds how often Slurm may start the
    job again.
    """

    time_s: int = 3600
    gpus: int = 0
    nodes: int = 1
    cpus: int = 1
    memory_mib: int | None = None
    runs_per_gpu: int = 1
    runs_per_job: int | None = None
    signal_s: int = 120
    max_requeues: int = 20
    sbatch: Mapping[str, str] = field(default_factory=dict)

    @property
    def devices(self) -> int:
        """GPUs of a run over all nodes; 1 where it has none (the CPU counts as one place)."""
        return max(1, self.gpus) * self.nodes

    @property
    def distributed(self) -> bool:
        """Whether one run spans several processes."""
        return self.nodes > 1 or self.gpus > 1

    @property
    def concurrent(self) -> int:
        """Runs of one job that train at the same time."""
        return 1 if self.distributed else self.runs_per_gpu

    @property
    def per_job(self) -> int:
        """Runs in one job: as given, else as many as run at the same time."""
        return self.runs_per_job if self.runs_per_job is not None else self.concurrent


KEYS: Final = (
    "time",
    "gpus",
    "nodes",
    "cpus",
    "memory",
    "runs_per_gpu",
    "runs_per_job",
    "signal",
    "max_requeues",
    "sbatch",
)
# Options of sbatch that the sweep sets itself, and what to use instead.
RESERVED: Final[Mapping[str, str]] = {
    "array": "throttle",
    "dependency": "sweep submit --after",
    "job-name": "name",
    "no-requeue": "resources.max_requeues: 0",
    "open-mode": "nothing; logs are appended to",
    "output": "sweep logs",
    "signal": "resources.signal",
    "test-only": "sweep plan",
    "time": "resources.time",
    "wait": "sweep watch",
}
_FIELD: Final = {"time": "time_s", "memory": "memory_mib", "signal": "signal_s"}


def update(old: Resources, tree: Mapping[str, Any], *, where: str) -> Resources:
    """``old`` with what ``tree`` says, in the notations of a sweep's file.

    Raises
    ------
    GridError
        On an unknown key or a value that makes no sense.
    """
    changes: dict[str, Any] = {}
    for key, value in tree.items():
        if key not in KEYS:
            raise GridError(f"{where}: unknown key {key!r} in resources; {nearest(str(key), KEYS)}")
        name = _FIELD.get(key, key)
        if key in ("time", "signal"):
            changes[name] = seconds(value, unit_s=60 if key == "time" else 1, where=f"{where}: {key}")
        elif key == "memory":
            changes[name] = None if value is None else mebibytes(value, where=f"{where}: {key}")
        elif key == "sbatch":
            if not isinstance(value, Mapping):
                raise GridError(
                    f"{where}: sbatch={value!r} must be a section of options, e.g. sbatch: {{constraint: a100}}"
                )
            changes[name] = {**old.sbatch, **flags(value, where=where)}
        elif key == "runs_per_job" and value is None:
            changes[name] = None
        else:
            least = 0 if key in ("gpus", "max_requeues") else 1
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise GridError(f"{where}: {key}={value!r} must be a whole number of at least {least}")
            changes[name] = value
    new = replace(old, **changes)
    if new.distributed and (new.runs_per_gpu > 1):
        raise GridError(f"{where}: runs_per_gpu={new.runs_per_gpu} packs runs that fit one GPU, "
                        f"but a run has gpus={new.gpus} nodes={new.nodes}; set one of them to 1")  # fmt: skip
    if new.time_s <= new.signal_s + START_MARGIN_S:
        raise GridError(f"{where}: time={clock(new.time_s)} must exceed signal={new.signal_s}s by more than "
                        f"{START_MARGIN_S}s (Slurm signals up to a minute early); allowed: "
                        f"time above {clock(new.signal_s + START_MARGIN_S)}, or a smaller signal")  # fmt: skip
    return new


def flags(tree: Mapping[str, Any], *, where: str) -> dict[str, str]:
    """Options of sbatch without their dashes; one without a value is ``""``.

    Raises
    ------
    GridError
        If the sweep sets one of them itself.
    """
    found = {str(key).lstrip("-"): "" if value is True or value is None else str(value) for key, value in tree.items()}
    for name in found:
        if name in RESERVED:
            raise GridError(f"{where}: sbatch: {name} is set by the sweep itself; use {RESERVED[name]}")
    return found


def seconds(value: Any, *, unit_s: int = 60, where: str = "time") -> int:
    """Seconds of Slurm's notations, of ``90m``, ``4h``, ``2d``, or of a bare number (of ``unit_s``).

    >>> seconds("1-02:03:04"), seconds("4:00:00"), seconds("10:30"), seconds(30), seconds("90m")
    (93784, 14400, 630, 1800, 5400)
    """
    if isinstance(value, (int, float)) and not isinstance(value, bool) and value > 0:
        return round(value * unit_s)
    text = str(value).strip()
    if match := re.fullmatch(r"(\d+(?:\.\d+)?)\s*([smhd])", text):
        return round(float(match[1]) * _UNITS_S[match[2]])
    if match := re.fullmatch(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?", text):
        days, parts = match[1], [int(part) for part in match.groups()[1:] if part is not None]
        if days is not None:  # D-HH[:MM[:SS]]
            hours, minutes, secs = (*parts, 0, 0)[:3]
            total = int(days) * 86_400 + hours * 3600 + minutes * 60 + secs
        elif len(parts) == 3:
            total = parts[0] * 3600 + parts[1] * 60 + parts[2]
        elif len(parts) == 2:
            total = parts[0] * 60 + parts[1]
        else:
            total = parts[0] * unit_s
        if total > 0:
            return total
    raise GridError(f"{where}={value!r} is not a time; write minutes, HH:MM:SS, D-HH:MM:SS, or 30m, 4h, 2d")


def mebibytes(value: Any, *, where: str = "memory") -> int:
    """MiB of ``16G``, ``500M`` or a bare number of MiB, as in sbatch.

    >>> mebibytes("16G"), mebibytes(500)
    (16384, 500)
    """
    if isinstance(value, int) and not isinstance(value, bool) and value > 0:
        return value
    match = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT])(?:i?B)?", str(value).strip())
    if not match or float(match[1]) <= 0:
        raise GridError(f"{where}={value!r} is not an amount of memory; write 500M, 16G or 1T")
    return max(1, round(float(match[1]) * _UNITS_MIB[match[2]]))


def clock(total_s: float) -> str:
    """Slurm's notation of a time: ``4:00:00`` or ``1-02:03:04``.

    >>> clock(93784)
    '1-02:03:04'
    """
    total = round(total_s)
    days, rest = divmod(total, 86_400)
    text = f"{rest // 3600}:{rest % 3600 // 60:02d}:{rest % 60:02d}"
    return f"{days}-{rest // 3600:02d}:{rest % 3600 // 60:02d}:{rest % 60:02d}" if days else text


assert {_FIELD.get(key, key) for key in KEYS} == {item.name for item in fields(Resources)}
