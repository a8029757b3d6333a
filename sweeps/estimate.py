"""What a plan will take: GPU-hours, cost, wall time at the throttle, and whether runs fit into memory and time.

Shown by ``sweep plan``. An estimate needs a device with a known peak and an assumed utilisation; both are said beside
every figure, and without them there is no figure.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from scaling.errors import UsageError, nearest
from scaling.sweeps.plan import PlannedRun
from scaling.sweeps.resources import clock

# Dense bf16 FLOP/s and GiB of memory, from NVIDIA's data sheets (A100 2021, H100 and H200 2023-2024, L40S and L4 2023).
DEVICES: Final[dict[str, tuple[float, float]]] = {
    "a100": (312e12, 80),
    "a100-40gb": (312e12, 40),
    "h100": (989.5e12, 80),
    "h100-pcie": (756.5e12, 80),
    "h200": (989.5e12, 141),
    "l40s": (362e12, 48),
    "l4": (121e12, 24),
}

ASSUMED_MFU: Final = 0.4  # what a well-fed 350M model reaches on one H100-class GPU; small models reach less
MEMORY_HEADROOM: Final = 0.9  # allocator fragmentation and the CUDA context take the rest


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """The GPU that estimates are for."""

    name: str
    peak_flops_per_s: float
    memory_gib: float
    mfu: float = ASSUMED_MFU

    @classmethod
    def named(cls, name: str, mfu: float | None = None) -> Device:
        """A device of the table; ``UsageError`` lists those there are."""
        if name not in DEVICES:
            raise UsageError(f"--gpu {name}: unknown device; {nearest(name, DEVICES)}")
        if mfu is not None and not 0 < mfu <= 1:
            raise UsageError(f"--mfu {mfu:g}: allowed: above 0 and at most 1")
        peak, memory = DEVICES[name]
        return cls(name=name, peak_flops_per_s=peak, memory_gib=memory, mfu=mfu or ASSUMED_MFU)


def run_s(run: PlannedRun, device: Device) -> float:
    """Seconds that a run trains on its devices at the assumed utilisation; runs that share a GPU share its speed."""
    return run.flops / (device.peak_flops_per_s * device.mfu * run.resources.devices) * run.resources.runs_per_gpu


def gpu_hours(runs: Iterable[PlannedRun], device: Device) -> float:
    """GPU-hours of the runs together."""
    return sum(run_s(run, device) * run.resources.devices / run.resources.runs_per_gpu for run in runs) / 3600


def wall_s(runs: Iterable[PlannedRun], device: Device, throttle: int | None) -> float:
    """Seconds until all are over, at most ``throttle`` jobs at a time, the largest first, no wait in the queue."""
    jobs = sorted((run_s(run, device) / run.resources.concurrent for run in runs), reverse=True)
    if not jobs:
        return 0.0
    free = [0.0] * min(throttle or len(jobs), len(jobs))
    for job in jobs:
        heapq.heappush(free, heapq.heappop(free) + job)
    return max(free)


def concerns(run: PlannedRun, device: Device | None) -> list[str]:
    """What speaks against a run as it is planned: memory, time."""
    found = []
    if device is not None:
        share = 1 if run.config.run.parallel != "fsdp2" else run.resources.devices
        need_gib = run.memory_bytes / share / 2**30 * run.resources.runs_per_gpu
        if need_gib > device.memory_gib * MEMORY_HEADROOM:
            packed = f" with {run.resources.runs_per_gpu} runs a GPU" if run.resources.runs_per_gpu > 1 else ""
            found.append(
                f"needs about {need_gib:.0f} GiB{packed}, {device.name} has {device.memory_gib:.0f}; "
                "lower data.micro_batch_size or runs_per_gpu, or set run.activation_checkpointing"
            )
        if run_s(run, device) > run.resources.time_s:
            found.append(
                f"takes about {clock(run_s(run, device))}, asks for {clock(run.resources.time_s)}: "
                "will be requeued and go on from its checkpoint; raise time to avoid that"
            )
    return found
