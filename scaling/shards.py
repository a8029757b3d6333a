"""Tensors of many processes in one folder of safetensors files, through ``torch.distributed.checkpoint``.

Below ``checkpoint``, which imports this module only when it saves or loads: the libraries take seconds to import. Each
process writes what it holds; names and offsets are in the files' headers, so that any number of processes can read them
back. No pickle is written or read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor


class ShardError(Exception):
    """Tensors could not be written or read; the text is the cause on the first process that failed."""


def staged(local: Tensor, layout: Tensor) -> Tensor:
    """A copy of ``local`` on the host, with the layout over processes that ``layout`` has."""
    copy = local.detach().to("cpu", copy=True)
    if not isinstance(layout, DTensor):
        return copy
    mesh = layout.device_mesh
    if mesh.device_type != "cpu":
        mesh = init_device_mesh("cpu", tuple(mesh.shape))
    return DTensor.from_local(
        copy, mesh, layout.placements, run_check=False, shape=layout.shape, stride=layout.stride()
    )


def write(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Write this process's part of the tensors; all processes of the group call it together.

    Raises
    ------
    ShardError
        If a process could not write.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    try:
        save(dict(tensors), storage_writer=writer, process_group=group, no_dist=group is None)
    except (CheckpointException, Exception) as error:  # CheckpointException is none
        raise ShardError(_cause(error)) from error


def read(folder: Path, tensors: Mapping[str, Tensor], group: dist.ProcessGroup | None) -> None:
    """Fill the tensors, by name, from a folder that any number of processes wrote.

    Raises
    ------
    ShardError
        If one is not there, or has another shape.
    """
    reader = HuggingFaceStorageReader(str(folder))
    try:
        load(dict(tensors), storage_reader=reader, process_group=group, no_dist=group is None)
    except (CheckpointException, Exception) as error:
        raise ShardError(_cause(error)) from error


def read_whole(folder: Path, prefix: str) -> dict[str, Tensor]:
    """Every tensor whose name begins with ``prefix``, whole, on this process; names without the prefix."""
    metadata = HuggingFaceStorageReader(str(folder)).read_metadata().state_dict_metadata
    tensors: dict[str, Tensor] = {
        name: torch.empty(item.size, dtype=item.properties.dtype)
        for name, item in metadata.items()
        if name.startswith(prefix) and isinstance(item, TensorStorageMetadata)
    }
    if tensors:
        read(folder, tensors, None)
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items()}


def _cause(error: BaseException) -> str:
    causes: list[Any] = [error]
    if isinstance(error, CheckpointException):
        causes = [item[0] if isinstance(item, tuple) else item for item in error.failures.values()] or causes
    cause = causes[0]
    if isinstance(cause, OSError) and cause.strerror:
        return cause.strerror
    text = str(cause).strip().splitlines()
    return f"{type(cause).__name__}: {text[0] if text else ''}"
