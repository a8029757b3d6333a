"""The one place that decides whether an operation runs as Triton kernels or as plain PyTorch, and says why.

Models ask here; ``scaling doctor`` and a run's tags print :func:`choices`. On a GPU nothing falls back silently: an
operation that has kernels runs them or raises, and one that has none says so in its reason. The environment variable
``ISOLOSS_KERNELS`` (``auto``, ``triton``, ``reference``) overrides the choice for operations that have kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import TYPE_CHECKING, Literal, Protocol

import torch
from torch import Tensor

from scaling.errors import KernelError, nearest
from scaling.kernels import reference

if TYPE_CHECKING:
    from scaling.kernels.bank import SourceBank

VARIABLE = "ISOLOSS_KERNELS"
_MODES = ("auto", "triton", "reference")
_NO_KERNEL = {
    "streams": "multi-stream routing (msar) has no Triton kernel; compiled PyTorch",
    "hyper": "hyper-connections (hc, mhc) have no Triton kernel; compiled PyTorch",
}
OPERATIONS = ("depth_routing", *_NO_KERNEL)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """Which implementation runs an operation, and why."""

    operation: str
    runs: Literal["triton", "reference"]
    reason: str


class DepthBank(Protocol):
    """What a residual method needs from a bank; :class:`~scaling.kernels.bank.SourceBank` explains the calls."""

    def site(self, site: int, source_BTD: Tensor) -> Tensor:
        """Mix of a site, given its newest source."""

    def normed_site(self, site: int, source_BTD: Tensor, gain_D: Tensor, norm_eps: float) -> Tensor:
        """Normed mix of a site, given its newest source."""


def choose(operation: str, device: torch.device) -> Choice:
    """Decide for one operation on one device.

    Raises
    ------
    KernelError
        If the operation or the value of ``ISOLOSS_KERNELS`` is unknown, or Triton is demanded where it cannot run.
    """
    if operation not in OPERATIONS:
        raise KernelError(f"kernels: unknown operation {operation!r}; {nearest(operation, OPERATIONS)}")
    mode = os.environ.get(VARIABLE, "auto")
    if mode not in _MODES:
        raise KernelError(f"{VARIABLE}={mode!r}: {nearest(mode, _MODES)}; unset it for the default")
    if operation in _NO_KERNEL:
        return Choice(operation=operation, runs="reference", reason=_NO_KERNEL[operation])
    if mode == "reference":
        return Choice(operation=operation, runs="reference", reason=f"{VARIABLE}=reference")
    installed = importlib.util.find_spec("triton") is not None
    interpreted = os.environ.get("TRITON_INTERPRET", "0") == "1"
    if device.type == "cuda" or (mode == "triton" and interpreted):
        if not installed:
            raise KernelError(
                f"{operation} on {device}: Triton is not installed; install triton, or set {VARIABLE}=reference"
            )
        reason = f"CUDA device {device}" if device.type == "cuda" else f"{VARIABLE}=triton in Triton's interpreter"
        return Choice(operation=operation, runs="triton", reason=reason)
    if mode == "triton":
        raise KernelError(
            f"{operation} on {device}: {VARIABLE}=triton needs a CUDA device, or TRITON_INTERPRET=1; "
            f"use one of them or unset {VARIABLE}"
        )
    return Choice(operation=operation, runs="reference", reason=f"no CUDA device ({device})")


def choices(device: torch.device | None = None) -> tuple[Choice, ...]:
    """Decide for every operation, by default on the device that training would take."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(choose(operation, device) for operation in OPERATIONS)


def describe() -> dict[str, str]:
    """Say in words what :func:`choices` decides: operation -> implementation and reason."""
    return {choice.operation: f"{choice.runs} ({choice.reason})" for choice in choices()}


def open_bank(query_SD: Tensor, source_BTD: Tensor, *, heads: int, eps: float, block: int = 1) -> DepthBank:
    """Open the depth routing of one forward pass; see :class:`scaling.kernels.bank.SourceBank` for the parameters."""
    if choose("depth_routing", source_BTD.device).runs == "reference":
        return ReferenceBank(query_SD, heads=heads, eps=eps, block=block)
    return _triton_bank()(query_SD, source_BTD, heads=heads, eps=eps, block=block)


def _triton_bank() -> type[SourceBank]:
    from scaling.kernels.bank import SourceBank

    return SourceBank


class ReferenceBank:
    """Depth routing of one forward pass by :mod:`scaling.kernels.reference`, with autograd's own backward pass."""

    def __init__(self, query_SD: Tensor, *, heads: int, eps: float, block: int = 1) -> None:
        self._query, self._heads, self._eps, self._block = query_SD, heads, eps, block
        self._sources: list[Tensor] = []

    def site(self, site: int, source_BTD: Tensor) -> Tensor:
        """Mix of a site, given its newest source."""
        seen = [*self._sources, source_BTD.flatten(0, -2)]
        if site % self._block == 0:
            self._sources.append(seen[-1])
        mixed_TD = reference.route(torch.stack(seen), self._query[site], self._heads, self._eps)
        return mixed_TD.view(source_BTD.shape)

    def normed_site(self, site: int, source_BTD: Tensor, gain_D: Tensor, norm_eps: float) -> Tensor:
        """Normed mix of a site, given its newest source."""
        mixed_BTD = self.site(site, source_BTD)
        return mixed_BTD * reference.rms_factor(mixed_BTD, norm_eps) * gain_D.to(mixed_BTD.dtype)
