"""How many sequences fit in one forward pass, and what to say when memory ran out anyway.

Between ``accounting``, whose byte counts it reads, and ``train``. The size of a micro-batch never changes what a run
computes, so it may depend on the machine.
"""

from __future__ import annotations

import os
import re
from dataclasses import replace
from typing import Final

import torch

from scaling.accounting import estimate_memory
from scaling.config.tree import RunConfig
from scaling.distributed import World
from scaling.loss import CHUNK_BYTES

# Parts of the memory that the estimate may fill: allocators round and fragment, libraries take workspaces.
USABLE: Final = 0.8
HOST_BYTES: Final = 2**30  # activations on a CPU: several runs share a machine, and more rows are not faster there

# What activation checkpointing keeps of what the estimate counts: all; about the products; about sublayers' inputs.
_KEPT_PART: Final = {"none": 1.0, "selective": 0.6, "full": 0.25}


def micro_batch_rows(config: RunConfig, world: World) -> int:
    """Sequences of one forward pass on this process: what the configuration says, else the most that fit."""
    share = -(-config.data.batch_size // world.size)
    if config.data.micro_batch_size is not None:
        return min(share, config.data.micro_batch_size)
    rows = share
    if world.device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(world.device)
        room = USABLE * free - sum(_fixed(config, world).values())
    else:
        room = HOST_BYTES
    while rows > 1 and _activations(config, rows) > room:
        rows = -(-rows // 2)
    return rows


def plan(config: RunConfig, world: World, rows: int) -> str:
    """Where the memory of one device goes, in GiB, largest first."""
    parts = {**_fixed(config, world), f"activations of {rows} sequences": _activations(config, rows)}
    ordered = sorted(parts.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {size / 2**30:.2f}" for name, size in ordered)


def remedy(config: RunConfig, world: World, rows: int) -> str:
    """What to change when memory ran out, cheapest first."""
    if sum(_fixed(config, world).values()) > _whole(world):
        spread = "" if config.run.parallel == "fsdp2" else "set run.parallel=fsdp2 and "
        return f"weights and optimizer alone need more than that: {spread}launch more processes, or shrink the model"
    if rows > 1:
        return f"set data.micro_batch_size={rows // 2} (the result stays the same)"
    if config.run.activation_checkpointing != "full":
        return "set run.activation_checkpointing=full (the result stays the same)"
    if config.run.parallel != "fsdp2":
        return "set run.parallel=fsdp2 and launch more processes"
    return "launch more processes, or lower data.seq_len or the model's size"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an exception says that memory could not be had, on the device or the host."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and re.search(r"can't allocate memory|out of memory", str(error)) is not None


def _whole(world: World) -> int:
    """Bytes of the device, or of the host."""
    if world.device.type == "cuda":
        return torch.cuda.mem_get_info(world.device)[1]
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _fixed(config: RunConfig, world: World) -> dict[str, float]:
    estimate = estimate_memory(config)
    shards = world.size if config.run.parallel == "fsdp2" else 1
    return {
        "parameters": estimate.parameters / shards,
        "gradients": estimate.gradients / shards,
        "optimizer": estimate.optimizer / shards,
        # a chunk's logits, their fp32 copy and gradient, and the output matrix's gradient
        "logits of a chunk": 3.0 * CHUNK_BYTES[world.device.type]
        + 4.0 * config.model.vocab_size * config.model.d_model,
    }


def _activations(config: RunConfig, rows: int) -> float:
    estimate = estimate_memory(replace(config, data=replace(config.data, micro_batch_size=rows)))
    return estimate.activations * _KEPT_PART[config.run.activation_checkpointing]
