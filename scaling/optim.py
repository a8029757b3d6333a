"""AdamW over the local shards of a model's parameters, with decay groups, clipping, a moving average of the weights.

Between ``distributed``, which may have sharded the model, and ``train``, which asks for one update a step. Everything
here works on plain tensors, the part of each parameter that this process holds, so that one path serves one process,
DDP and FSDP2: updates and averages are element-wise, only the gradient's norm needs a sum over processes. Nothing waits
for the device; what the host must know is read by the trainer once a logging interval.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor, nn
from torch.optim.adamw import adamw

from scaling.config.training import OptimizerConfig
from scaling.distributed import World, as_sharded, local_part

MOMENTS: Final = ("exp_avg", "exp_avg_sq")  # torch's names of AdamW's state


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One parameter and the part of it that this process updates (``local`` shares the parameter's memory)."""

    name: str
    parameter: nn.Parameter
    local: Tensor
    decayed: bool


def is_decayed(name: str, parameter: Tensor, config: OptimizerConfig, connections: Iterable[str]) -> bool:
    """Whether weight decay applies to a parameter.

    ``decay="all"`` (the papers' recipe) decays everything; ``"matrices"`` those with two dimensions or more, the
    embedding included. The residual method's own parameters follow ``decay_connections`` under ``"matrices"``.
    """
    if config.decay == "all":
        return True
    if name in connections:
        return config.decay_connections
    return parameter.ndim >= 2


class Optimizer:
    """AdamW (Loshchilov and Hutter, arXiv 1711.05101), through the function behind ``torch.optim.AdamW``, fused.

    The class itself would import the compiler, which costs every process seconds.

    Parameters
    ----------
    parameters
        Name -> parameter, plain or sharded (``DTensor``).
    config
        Rates and groups.
    connections
        Names of the residual method's own parameters.
    world
        The processes that hold the other shards.
    """

    def __init__(
        self, parameters: Mapping[str, nn.Parameter], config: OptimizerConfig, connections: Iterable[str], world: World
    ) -> None:
        named = set(connections)
        self._config = config
        self._world = world
        self.shards = [
            Shard(
                name=name,
                parameter=parameter,
                local=local_part(parameter),
                decayed=is_decayed(name, parameter, config, named),
            )
            for name, parameter in parameters.items()
        ]
        self._held = [shard for shard in self.shards if shard.local.numel()]  # a shard may be empty on some processes
        self._sharded = any(as_sharded(shard.parameter) is not None for shard in self.shards)
        self._moments = {
            shard.name: {moment: torch.zeros_like(shard.local) for moment in MOMENTS} for shard in self.shards
        }
        # the number of updates lives on the device, where a skipped one is not counted
        self._updates = {
            shard.name: torch.zeros((), dtype=torch.float32, device=shard.local.device) for shard in self._held
        }
        self.ema: dict[str, Tensor] = {}
        if config.ema_decay is not None:
            self.ema = {shard.name: shard.local.float().clone() for shard in self.shards}

    def update(self, lr: float) -> Tensor:
        """Clip the gradients, make one update, move the average; return the gradients' norm before clipping.

        A gradient that is not finite leaves weights and moments as they are where ``skip_nonfinite`` is set. The norm
        is a tensor on the device.
        """
        grads: dict[str, Tensor] = {}
        for shard in self._held:
            gradient = shard.parameter.grad
            assert gradient is not None, f"{shard.name} has no gradient"
            grads[shard.name] = local_part(gradient)
        norm = self._norm(list(grads.values()))
        if self._config.grad_clip is not None:
            factor = (self._config.grad_clip / (norm + 1e-6)).clamp_max(1.0)  # as torch.nn.utils.clip_grad_norm_
            torch._foreach_mul_(list(grads.values()), factor)
        # the fused update reads this flag on the device, as it does for torch.amp.GradScaler
        skip = (~norm.isfinite()).float() if self._config.skip_nonfinite else None
        for decayed in (True, False):
            group = [shard for shard in self._held if shard.decayed is decayed]
            if group:
                self._adamw(group, [grads[shard.name] for shard in group], lr, decayed=decayed, skip=skip)
        self._move_average()
        for shard in self.shards:
            shard.parameter.grad = None
        return norm

    def moment(self, shard: Shard, name: str) -> Tensor:
        """AdamW's state of a shard: ``exp_avg`` or ``exp_avg_sq``."""
        return self._moments[shard.name][name]

    @property
    def updates(self) -> float:
        """Updates made, skipped ones left out (waits for the device)."""
        return float(self._updates[self._held[0].name]) if self._held else 0.0

    @updates.setter
    def updates(self, number: float) -> None:
        for counter in self._updates.values():
            counter.fill_(number)

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """Within, the parameters hold the moving average; afterwards the weights again, to the bit."""
        weights = [shard.local.clone() for shard in self.shards]
        try:
            for shard in self.shards:
                shard.local.copy_(self.ema[shard.name])
            yield
        finally:
            for shard, own in zip(self.shards, weights, strict=True):
                shard.local.copy_(own)

    def _adamw(self, group: list[Shard], grads: list[Tensor], lr: float, *, decayed: bool, skip: Tensor | None) -> None:
        config = self._config
        with torch.no_grad():
            adamw(
                [shard.local for shard in group],
                grads,
                [self._moments[shard.name]["exp_avg"] for shard in group],
                [self._moments[shard.name]["exp_avg_sq"] for shard in group],
                [],
                [self._updates[shard.name] for shard in group],
                fused=True,
                found_inf=skip,
                amsgrad=False,
                beta1=config.beta1,
                beta2=config.beta2,
                lr=lr,
                weight_decay=config.weight_decay if decayed else 0.0,
                eps=config.eps,
                maximize=False,
            )

    def _norm(self, grads: list[Tensor]) -> Tensor:
        """2-norm of all gradients, in fp32, over all processes where they hold shards."""
        device = self.shards[0].local.device
        norms = list(torch._foreach_norm(grads, 2, dtype=torch.float32)) if grads else []
        square = torch.stack(norms).square().sum() if norms else torch.zeros((), device=device)
        if self._sharded:
            self._world.sum_(square)
        return square.sqrt()

    def _move_average(self) -> None:
        if self._config.ema_decay is None or not self._held:
            return
        averages = [self.ema[shard.name] for shard in self._held]
        weights = [shard.local.float() for shard in self._held]
        torch._foreach_lerp_(averages, weights, 1.0 - self._config.ema_decay)
