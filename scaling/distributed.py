"""Processes, devices and wrappers: from a launch (plain, torchrun, srun) to a model that trains over all of them.

Read by ``optim``, ``checkpoint``, ``evaluate`` and ``train``. Initial weights are filled before anything is sharded, so
they are the same for any number of processes and any wrapper. FSDP2 gathers fp32 weights and autocast narrows them, as
on one device: gathering bf16 would halve that traffic but compute norms and the residual stream in bf16, another model.
Gradients are summed in fp32.
"""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from scaling import peers
from scaling.config.training import RunSettings
from scaling.errors import ConfigError
from scaling.stop import STOP

if TYPE_CHECKING:  # sharded tensors take seconds to import, and most runs have none
    from torch.distributed.tensor import DTensor

# Ports that are registered to nobody start at 49152 (RFC 6335); a job's id picks one, so that jobs on a node differ.
_FIRST_PORT: Final = 49152
_PORTS: Final = 16000

# All sublayers share one forward function, which the compiler builds anew for each kind, shape of batch, wrapper and
# mode. Past its own limit of 8 it goes on uncompiled after a warning, at two thirds of the speed.
_MAX_BUILDS: Final = 256

# What selective checkpointing keeps: results of matrix products and attention. The rest is cheap to compute again.
_KEPT: Final = frozenset(
    {
        torch.ops.aten.mm.default,
        torch.ops.aten.addmm.default,
        torch.ops.aten.bmm.default,
        torch.ops.aten._scaled_dot_product_flash_attention.default,
        torch.ops.aten._scaled_dot_product_efficient_attention.default,
        torch.ops.aten._scaled_dot_product_cudnn_attention.default,
        torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


@dataclass(frozen=True, kw_only=True, slots=True)
class World:
    """The processes of this run, and this one's place among them."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    device: torch.device = torch.device("cpu")
    joined: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this process writes the run folder."""
        return self.rank == 0

    def any(self, flag: bool) -> bool:
        """Whether the flag is up on any process; on the host, the device goes on meanwhile."""
        if self.size == 1:
            return flag
        up = torch.tensor(float(flag))
        dist.all_reduce(up, op=dist.ReduceOp.MAX)
        return bool(up)

    def total(self, number: int) -> int:
        """Sum of a number over the processes."""
        if self.size == 1:
            return number
        count = torch.tensor(number, dtype=torch.int64)
        dist.all_reduce(count)
        return int(count)

    def sum_(self, tensor: Tensor) -> None:
        """Sum a tensor over the processes, in place."""
        if self.size > 1:
            dist.all_reduce(tensor)

    def share(self, value: Any) -> Any:
        """The first process's value, on every process."""
        if self.size == 1:
            return value
        box = [value]
        dist.broadcast_object_list(box, src=0, device=torch.device("cpu"))
        return box[0]

    def gather(self, value: Any) -> list[Any]:
        """Every process's value, in order of rank, on every process."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value)
        return values

    def leave(self) -> None:
        """End the process group, where this world made one."""
        if self.joined:
            dist.destroy_process_group()


def join(settings: RunSettings) -> World:
    """Find this process's place from its environment and, where the run is spread out, form the process group.

    ``torchrun`` sets RANK and WORLD_SIZE, ``srun`` SLURM_PROCID and SLURM_NTASKS. With ``run.parallel=none`` Slurm's
    variables are not read: each task may be a run of its own.

    Raises
    ------
    ConfigError
        If several processes are launched for a run that is not parallel, or the device asked for is not here.
    ProcessLost
        If the processes do not meet.
    """
    rank, size, local_rank = _place(settings)
    if size > 1 and settings.parallel == "none":
        raise ConfigError(
            f"run.parallel=none but {size} processes were launched; "
            "set run.parallel=ddp or fsdp2, or launch one process"
        )
    device = _device(settings, local_rank)
    if settings.parallel == "none" or (settings.parallel == "ddp" and size == 1):
        return World(device=device)
    if dist.is_initialized():
        return World(rank=rank, size=size, local_rank=local_rank, device=device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    bound = device if device.type == "cuda" else None
    if size == 1:
        alone = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=alone, rank=0, world_size=1, device_id=bound)
    else:
        address = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        with STOP.at_once(), peers.meeting(rank, size, address):
            dist.init_process_group(backend, rank=rank, world_size=size, device_id=bound)
    return World(rank=rank, size=size, local_rank=local_rank, device=device, joined=True)


def sublayers(transformer: nn.Module) -> Iterator[nn.Module]:
    """The units that repeat: what is compiled, checkpointed and sharded."""
    units: Iterator[nn.Module] = cast(Any, transformer).sublayers()
    return units


def prepare(transformer: nn.Module, settings: RunSettings) -> None:
    """Add activation checkpointing and compilation to each sublayer, the unit that repeats."""
    cast(Any, transformer).residual.recomputed = settings.activation_checkpointing != "none"
    if settings.compile:
        from torch._dynamo import config as compiler  # seconds, which runs without compilation do without

        compiler.recompile_limit = max(compiler.recompile_limit, _MAX_BUILDS)
        compiler.accumulated_recompile_limit = max(compiler.accumulated_recompile_limit, _MAX_BUILDS)
    for sublayer in sublayers(transformer):
        forward: Callable[..., Any] = sublayer.forward
        if settings.activation_checkpointing == "full":
            forward = functools.partial(checkpoint, forward, use_reentrant=False, preserve_rng_state=False)
        elif settings.activation_checkpointing == "selective":
            contexts = functools.partial(create_selective_checkpoint_contexts, _policy)
            forward = functools.partial(
                checkpoint, forward, use_reentrant=False, preserve_rng_state=False, context_fn=contexts
            )
        if settings.compile:
            forward = torch.compile(forward, dynamic=False)
        sublayer.forward = forward


def wrap(module: nn.Module, transformer: nn.Module, settings: RunSettings, world: World) -> nn.Module:
    """Spread a training loss (which contains the transformer) over the processes."""
    if settings.parallel == "ddp" and world.size > 1:
        ids = [world.device] if world.device.type == "cuda" else None
        # torch 2.13 renamed the switch; buffers are equal on all processes from the start and stay so
        known = inspect.signature(DistributedDataParallel.__init__).parameters
        sync = "forward_sync_buffers" if "forward_sync_buffers" in known else "broadcast_buffers"
        options: dict[str, Any] = {"gradient_as_bucket_view": True, sync: False}
        return DistributedDataParallel(module, device_ids=ids, **options)
    if settings.parallel == "fsdp2":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

        mesh = init_device_mesh(world.device.type, (world.size,))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
        for sublayer in sublayers(transformer):
            fully_shard(sublayer, mesh=mesh, mp_policy=policy)
        fully_shard(module, mesh=mesh, mp_policy=policy)
    return module


def synchronise_gradients(module: nn.Module, enabled: bool) -> None:
    """Whether the next backward pass sums gradients over processes: only the last micro-batch of a step does."""
    if isinstance(module, DistributedDataParallel):
        module.require_backward_grad_sync = enabled
    elif hasattr(module, "set_requires_gradient_sync"):  # fully_shard gave the module this method
        cast(Any, module).set_requires_gradient_sync(enabled)


def forget_gathered(module: nn.Module) -> None:
    """Drop whole weights that FSDP2 still holds from an evaluation, after shards were changed under it."""
    if hasattr(module, "reshard"):
        cast(Any, module).reshard()


def as_sharded(tensor: Tensor) -> DTensor | None:
    """The tensor, typed, if it is spread over processes."""
    return cast("DTensor", tensor) if hasattr(tensor, "device_mesh") else None


def local_part(tensor: Tensor) -> Tensor:
    """The part of a tensor that this process holds, without gradient history, in the tensor's own memory."""
    detached = tensor.detach()
    sharded = as_sharded(detached)
    return detached if sharded is None else sharded.to_local()


def _policy(_: object, op: object, *args: object, **kwargs: object) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in _KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def _place(settings: RunSettings) -> tuple[int, int, int]:
    """Rank, number of processes, rank on this host."""
    env = os.environ
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"):
        if not env.get(name, "0").isdigit():
            raise ConfigError(f"{name}={env[name]!r} in the environment is no number; launch with torchrun or srun")
    if "RANK" in env and "WORLD_SIZE" in env:
        return int(env["RANK"]), int(env["WORLD_SIZE"]), int(env.get("LOCAL_RANK", "0"))
    if settings.parallel != "none" and "SLURM_PROCID" in env and int(env.get("SLURM_NTASKS", "1")) > 1:
        env.setdefault("MASTER_ADDR", _first_host())
        job = int(env.get("SLURM_JOB_ID", "0")) * 31 + int(env.get("SLURM_STEP_ID", "0"))
        env.setdefault("MASTER_PORT", str(_FIRST_PORT + job % _PORTS))
        return int(env["SLURM_PROCID"]), int(env["SLURM_NTASKS"]), int(env.get("SLURM_LOCALID", "0"))
    return 0, 1, 0


def _first_host() -> str:
    """The host of rank 0 in this Slurm step."""
    nodes = os.environ.get("SLURM_STEP_NODELIST") or os.environ.get("SLURM_JOB_NODELIST", "")
    if os.environ.get("SLURM_NNODES", "1") == "1" or not nodes:
        return "127.0.0.1"
    if "[" not in nodes:
        return nodes.split(",")[0]
    if shutil.which("scontrol") is None:
        raise ConfigError(
            f"cannot expand SLURM_STEP_NODELIST={nodes} without scontrol; set MASTER_ADDR to its first host"
        )
    command = ["scontrol", "show", "hostnames", nodes]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


def _device(settings: RunSettings, local_rank: int) -> torch.device:
    available = torch.cuda.is_available()
    if settings.device == "cpu" or (settings.device == "auto" and not available):
        return torch.device("cpu")
    if not available:
        raise ConfigError(
            "run.device=cuda but no CUDA device is visible; set run.device=auto or cpu, or see `scaling doctor`"
        )
    count = torch.cuda.device_count()
    index = local_rank if count > 1 else 0  # srun with one GPU bound to each task shows each task one
    if index >= count:
        raise ConfigError(f"process {local_rank} of this host has no GPU: {count} visible; launch one process a GPU")
    torch.cuda.set_device(index)
    return torch.device("cuda", index)
