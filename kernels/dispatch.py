"""The one place that decides whether an operation runs as Triton kernels or as plain PyTorch, and says why.

Models ask here; ``scaling doctor`` and a run's tags print :func:`choices`. On a GPU nothing falls back silently: an
operation that has kernels runs them or raises; one that has none says so in its reason. The environment variable
``ISOLOSS_KERNELS`` (``auto``, ``triton``, ``reference``) overrides the choice for operations that have kernels.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
from typing import TYPE_CHECKING, Any, Literal, Protocol

import torch
from torch import Tensor

from scaling.errors import KernelError, nearest
from scaling.kernels import reference
from scaling.kernels.interpreter import interpreted

if TYPE_CHECKING:
    from scaling.kernels.hyper import Rule
    from scaling.kernels.hyper_streams import HyperStreams
    from scaling.kernels.stream_bank import StreamBank

VARIABLE = "ISOLOSS_KERNELS"
_MODES = ("auto", "triton", "reference")
OPERATIONS = (
    "depth_routing",  # attnres, mhar, delta
    "routed_norm",  # the sublayer's input norm inside depth routing
    "streams",  # msar
    "hyper",  # hc, mhc
    "hybrid",  # attnres_mhc
)
_NO_KERNEL = {"hybrid": "attention residuals over mHC's streams (attnres_mhc) have no Triton kernel; PyTorch"}


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

    def site_with_lse(self, site: int, source_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Mix of a site and the log-sum-exp of its scores."""

    def silent_site(self, site: int, source_BTD: Tensor) -> None:
        """Take the newest source of a site that nothing reads."""

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
    interpreter = interpreted()
    if device.type == "cuda" and interpreter:
        raise KernelError(
            f"{operation} on {device}: TRITON_INTERPRET={os.environ['TRITON_INTERPRET']} would run every kernel in "
            f"Triton's interpreter, on the host; unset it, or set {VARIABLE}=reference"
        )
    if device.type == "cuda" or (mode == "triton" and interpreter):
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


def choose_norm(device: torch.device, *, sharded: bool, recomputed: bool) -> Choice:
    """Decide whether depth routing norms its mixes for the sublayer that reads them; ``reference``: the sublayer does.

    Parameters
    ----------
    device
        Where the model runs.
    sharded
        Whether the sublayers' parameters are sharded (FSDP): a gain is then whole within its sublayer only.
    recomputed
        Whether sublayers are checkpointed: the normed input would be kept beside the mix.
    """
    choice = choose("routed_norm", device)
    if choice.runs == "triton" and (sharded or recomputed):
        why = "gains are sharded with their sublayers" if sharded else "checkpointing would keep one more tensor a site"
        return dataclasses.replace(choice, runs="reference", reason=f"{why}; sublayers norm their input themselves")
    return choice


def choices(
    device: torch.device | None = None, *, sharded: bool = False, recomputed: bool = False
) -> tuple[Choice, ...]:
    """Decide for every operation, by default on the device that training would take; see :func:`choose_norm`."""
    if device is None:
        device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return tuple(
        choose_norm(device, sharded=sharded, recomputed=recomputed)
        if operation == "routed_norm"
        else choose(operation, device)
        for operation in OPERATIONS
    )


def describe(device: torch.device | None = None, *, sharded: bool = False, recomputed: bool = False) -> dict[str, str]:
    """Say in words what :func:`choices` decides: operation -> implementation and reason."""
    found = choices(device, sharded=sharded, recomputed=recomputed)
    return {choice.operation: f"{choice.runs} ({choice.reason})" for choice in found}


def open_bank(
    query_SD: Tensor,
    source_BTD: Tensor,
    *,
    heads: int,
    eps: float,
    block: int = 1,
    readers: int = 1,
    per_head: bool = False,
) -> DepthBank:
    """Open the depth routing of one forward pass; see :class:`scaling.kernels.bank.SourceBank` for the parameters."""
    if choose("depth_routing", source_BTD.device).runs == "reference":
        return ReferenceBank(query_SD, heads=heads, eps=eps, block=block, readers=readers, per_head=per_head)
    from scaling.kernels.bank import SourceBank

    return SourceBank(query_SD, source_BTD, heads=heads, eps=eps, block=block, readers=readers, per_head=per_head)


def open_streams(
    key_SMD: Tensor,
    kernels: list[Tensor],
    mixer: tuple[Tensor, Tensor, Tensor] | None,
    source_BTD: Tensor,
    document_BT: Tensor | None,
    *,
    block: int,
    scope: Literal["source", "global", "site"],
    eps: float,
) -> StreamBank:
    """Open the multi-stream routing of one forward pass, where :func:`choose` says Triton for ``streams``."""
    from scaling.kernels.stream_bank import StreamBank

    return StreamBank(key_SMD, kernels, mixer, source_BTD, document_BT, block=block, scope=scope, eps=eps)


def open_hyper(embedding_BTD: Tensor, streams: int) -> HyperStreams:
    """Open the streams of hyper-connections, where :func:`choose` says Triton for ``hyper``."""
    from scaling.kernels.hyper_streams import HyperStreams

    return HyperStreams(embedding_BTD, streams)


def hyper_rule(**fields: Any) -> Rule:
    """A :class:`scaling.kernels.hyper.Rule`."""
    from scaling.kernels.hyper import Rule

    return Rule(**fields)


class ReferenceBank:
    """Depth routing of one forward pass by :mod:`scaling.kernels.reference`, with autograd's own backward pass."""

    def __init__(
        self, query_SD: Tensor, *, heads: int, eps: float, block: int = 1, readers: int = 1, per_head: bool = False
    ) -> None:
        self._query, self._heads, self._eps, self._block = query_SD, heads, eps, block
        self._readers, self._per_head = readers, per_head
        self._sources: list[Tensor] = []

    def site(self, site: int, source_BTD: Tensor) -> Tensor:
        """Mix of a site, given its newest source."""
        seen = self._hand_in(site, source_BTD)
        mixed = [self._route(seen, site * self._readers + reader)[0] for reader in range(self._readers)]
        found = mixed[0] if self._readers == 1 else torch.stack(mixed)
        return found.view(*found.shape[:-2], *source_BTD.shape)

    def site_with_lse(self, site: int, source_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Mix of a site and the log-sum-exp of its scores."""
        mixed_TD, lse_TH = self._route(self._hand_in(site, source_BTD), site)
        return mixed_TD.view(source_BTD.shape), lse_TH.view(*source_BTD.shape[:-1], -1)

    def normed_site(self, site: int, source_BTD: Tensor, gain_D: Tensor, norm_eps: float) -> Tensor:
        """Normed mix of a site, given its newest source."""
        mixed_BTD = self.site(site, source_BTD)
        return mixed_BTD * reference.rms_factor(mixed_BTD, norm_eps) * gain_D.to(mixed_BTD.dtype)

    def silent_site(self, site: int, source_BTD: Tensor) -> None:
        """Take the newest source of a site that nothing reads."""
        self._hand_in(site, source_BTD)

    def _hand_in(self, site: int, source_BTD: Tensor) -> Tensor:
        seen = [*self._sources, source_BTD.flatten(0, -2)]
        if site % self._block == 0:
            self._sources.append(seen[-1])
        return torch.stack(seen)

    def _route(self, seen_NTD: Tensor, query: int) -> tuple[Tensor, Tensor]:
        return reference.route_with_lse(seen_NTD, self._query[query], self._heads, self._eps, per_head=self._per_head)
