"""Starting values: each parameter's is a function of (seed, parameter name) alone.

First in ``scaling.models``. Methods that share a parameter therefore share its start, and neither the world size, the
wrapper (compiled, checkpointed, sharded) nor the order of construction changes it. Values are drawn by NumPy's Philox
in float32 on the CPU, so they do not depend on torch's version or the device either.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

# Parts that wrappers put into parameter names: torch.compile, activation checkpointing, FSDP1.
_WRAPPERS: Final = ("_orig_mod.", "_checkpoint_wrapped_module.", "_fsdp_wrapped_module.")


@dataclass(frozen=True, kw_only=True, slots=True)
class Normal:
    """Independent draws from N(mean, std^2); ``mean`` is one number, or a tensor in the parameter's shape."""

    std: float
    mean: float | Tensor = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Constant:
    """The same value everywhere."""

    value: float


@dataclass(frozen=True, slots=True)
class Values:
    """Given values (an identity matrix, a one-hot row), in the parameter's shape."""

    array: Tensor


Rule = Normal | Constant | Values


@runtime_checkable
class HasInitialValues(Protocol):
    """A module that says how its own parameters (not its children's) start."""

    def initial_values(self) -> Mapping[str, Rule]: ...


def bare_name(name: str) -> str:
    """The parameter's name without what wrappers put in.

    >>> bare_name("layers.0._orig_mod.attention.query.weight")
    'layers.0.attention.query.weight'
    """
    for part in _WRAPPERS:
        name = name.replace(part, "")
    return name


def draw(rule: Rule, *, seed: int, name: str, shape: torch.Size) -> Tensor:
    """Starting value of the parameter ``name``, float32 (``Values`` keep their type) on the CPU."""
    if isinstance(rule, Values):
        assert rule.array.shape == shape, f"{name}: starting value {tuple(rule.array.shape)}, parameter {tuple(shape)}"
        return rule.array
    if isinstance(rule, Constant):
        return torch.full(shape, rule.value)
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    values = generator.standard_normal(tuple(shape), dtype=np.float32)
    return torch.from_numpy(np.multiply(values, np.float32(rule.std))) + rule.mean


@torch.no_grad()
def initialise(model: nn.Module, seed: int) -> None:
    """Fill every parameter of ``model`` in place, whatever its device, type or sharding.

    Every module that owns parameters must say how they start (``HasInitialValues``).
    """
    for prefix, module in model.named_modules():
        own = dict(module.named_parameters(recurse=False))
        if not own:
            continue
        assert isinstance(module, HasInitialValues), f"{prefix}: {type(module).__name__} does not say how it starts"
        rules = module.initial_values()
        for key, parameter in own.items():
            name = bare_name(f"{prefix}.{key}" if prefix else key)
            _copy(parameter, draw(rules[key], seed=seed, name=name, shape=parameter.shape))


def _copy(parameter: Tensor, values: Tensor) -> None:
    if hasattr(parameter, "placements"):  # a DTensor: every process draws the same whole and keeps its part
        from torch.distributed.tensor import DTensor, distribute_tensor

        assert isinstance(parameter, DTensor)
        whole = values.to(device=parameter.device_mesh.device_type, dtype=parameter.dtype)
        parameter.copy_(distribute_tensor(whole, parameter.device_mesh, parameter.placements, src_data_rank=None))
    else:
        parameter.copy_(values)
