"""What is measured while a run trains, gathered on the device and fetched once a logging interval.

Read by ``loop``; names and units are those of the journal. Between fetches nothing waits for the device, so a loss that
is not finite is noticed at the next fetch, and named there by its own step.
"""

from __future__ import annotations

import math
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

from scaling.distributed import World
from scaling.hardware import Arithmetic, peak_flops_per_s, utilisation

MOST_SKIPPED: Final = 20  # updates skipped in a row, after which the run counts as diverged


class Diverged(Exception):
    """The loss or the gradient is not finite."""

    def __init__(self, step: int, what: str, value: float) -> None:
        super().__init__(f"{what}={value} at step {step}")
        self.step = step


@dataclass(frozen=True, kw_only=True, slots=True)
class Rates:
    """What speeds are formed with: tokens of one step, FLOPs of one token."""

    tokens_per_step: int
    flops_per_token: float


class Meter:
    """Per-step losses and gradient norms, and the time they took.

    ``take`` only keeps references; ``fetch`` waits for the device and checks every step. The values since the last
    journal line are part of a checkpoint (``state``), so that a resumed run writes the lines of an uninterrupted one.
    """

    def __init__(self, world: World, rates: Rates, *, arithmetic: Arithmetic, skipping: bool) -> None:
        self._world = world
        self._rates = rates
        self._skipping = skipping
        self._device_losses: list[Tensor] = []
        self._device_norms: list[Tensor] = []
        self._values: list[tuple[float, float]] = []  # (loss, gradient norm) of each step since the last line
        self._skipped = 0
        self._skipped_in_a_row = 0
        self._steps_timed = 0
        self._elapsed_s = 0.0
        self._started_s: float | None = None
        name = torch.cuda.get_device_name(world.device) if world.device.type == "cuda" else "cpu"
        peak = peak_flops_per_s(name, arithmetic)
        self._peak = None if peak is None else peak * world.size

    def start(self) -> None:
        """The clock runs from here; ``fetch`` stops it."""
        if self._started_s is None:
            self._started_s = time.perf_counter()

    def take(self, loss: Tensor, norm: Tensor) -> None:
        """Note a step: this process's part of the mean loss, and the gradient's norm."""
        self._device_losses.append(loss)
        self._device_norms.append(norm)

    def fetch(self, step: int) -> None:
        """Bring what was taken up to ``step`` updates to the host, stop the clock.

        Raises
        ------
        Diverged
            At the first step whose loss or gradient is not finite, or after too many skipped in a row.
        """
        if not self._device_losses:
            return
        losses = torch.stack(self._device_losses).float()
        self._world.sum_(losses)
        pairs = torch.stack([losses, torch.stack(self._device_norms).float()]).tolist()  # waits for the device
        if self._started_s is not None:
            self._elapsed_s += time.perf_counter() - self._started_s
            self._started_s = None
        number = len(self._device_losses)
        self._steps_timed += number
        self._device_losses, self._device_norms = [], []
        for index, (loss, norm) in enumerate(zip(*pairs, strict=True)):
            self._check(step - number + index + 1, loss, norm)
            self._values.append((loss, norm))

    def forget_time(self) -> None:
        """Leave the time so far out of the speeds."""
        self._elapsed_s, self._steps_timed = 0.0, 0

    @property
    def skipped_since_line(self) -> int:
        """Updates fetched since the last line whose loss or gradient is not finite."""
        return sum(not _is_finite(loss, norm) for loss, norm in self._values)

    def line(self, *, waited_s: float) -> dict[str, float]:
        """Metrics of the interval since the last line; begins the next. ``waited_s``: time spent waiting for data."""
        finite = [loss for loss, norm in self._values if _is_finite(loss, norm)]
        metrics = {
            "train/loss": sum(finite) / len(finite) if finite else math.nan,
            "train/grad_norm": self._values[-1][1],
        }
        if self._skipping:
            metrics["train/skipped_steps"] = float(self._skipped)
        if self._steps_timed and self._elapsed_s > 0:
            step_time_s = self._elapsed_s / self._steps_timed
            tokens_per_s = self._rates.tokens_per_step / step_time_s
            metrics["perf/step_time_s"] = step_time_s
            metrics["perf/tokens_per_s"] = tokens_per_s
            metrics["perf/data_wait_s"] = waited_s / self._steps_timed
            if self._peak is not None:
                metrics["perf/mfu"] = utilisation(self._rates.flops_per_token * tokens_per_s, self._peak)
        metrics["mem/peak_gib"] = peak_memory_gib(self._world.device)
        self._values, self._elapsed_s, self._steps_timed = [], 0.0, 0
        return metrics

    def require_progress(self, steps: int) -> None:
        """At the end of ``steps``: ``Diverged`` where skipped updates are all that is left of a short run."""
        if self._skipped_in_a_row >= min(MOST_SKIPPED, max(1, steps - 1)):
            raise Diverged(steps, "loss", math.nan)

    def state(self) -> dict[str, Any]:
        """For a checkpoint; call after ``fetch``."""
        return {"values": self._values, "skipped": self._skipped, "skipped_in_a_row": self._skipped_in_a_row}

    def restore(self, state: Mapping[str, Any]) -> None:
        """From a checkpoint."""
        self._values = [(float(loss), float(norm)) for loss, norm in state["values"]]
        self._skipped, self._skipped_in_a_row = int(state["skipped"]), int(state["skipped_in_a_row"])

    def _check(self, step: int, loss: float, norm: float) -> None:
        if _is_finite(loss, norm):
            self._skipped_in_a_row = 0
            return
        self._skipped += 1
        self._skipped_in_a_row += 1
        if not self._skipping or self._skipped_in_a_row > MOST_SKIPPED:
            raise Diverged(step, *(("loss", loss) if not math.isfinite(loss) else ("gradient norm", norm)))


def _is_finite(loss: float, norm: float) -> bool:
    return math.isfinite(loss) and math.isfinite(norm)


def peak_memory_gib(device: torch.device) -> float:
    """Most memory held so far: allocated on the GPU, or resident in this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**30
    unit = 1 if sys.platform == "darwin" else 1024  # getrusage(2): kilobytes on Linux, bytes on macOS
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30
