"""What numbers a run computes in, and whether it repeats to the bit.

Read by ``train``. ``mixed`` keeps fp32 weights, gradients and moments and multiplies in bf16 where the device has
matrix units for it; a CPU computes in fp32 (bf16 would be slower there and change the result for nothing). ``bf16`` is
the papers' recipe, weights and moments included.
"""

from __future__ import annotations

import contextlib
import logging
import os
from typing import Literal

import torch
from torch import nn

from scaling.config.training import PrecisionConfig
from scaling.hardware import Arithmetic

logger = logging.getLogger(__name__)


def compute_arithmetic(precision: PrecisionConfig, device: torch.device) -> Arithmetic:
    """The arithmetic of matrix products: what MFU's peak refers to, and what the attempt records."""
    if precision.mode == "bf16" or (precision.mode == "mixed" and device.type == "cuda"):
        return "bf16"
    return "fp32"


def cast_weights(model: nn.Module, precision: PrecisionConfig) -> None:
    """Give the parameters their type; ``bf16`` says what it costs."""
    if precision.mode == "bf16":
        logger.warning(
            "precision.mode=bf16: weights and moments are rounded to 8 bits at each update; this changes losses by "
            "more than residual methods differ. Use mixed unless you repeat the papers' recipe"
        )
        model.to(torch.bfloat16)


def autocast(precision: PrecisionConfig, device: torch.device) -> contextlib.AbstractContextManager[object]:
    """Context for forward passes."""
    if precision.mode == "mixed" and device.type == "cuda":
        return torch.autocast("cuda", dtype=torch.bfloat16)
    return contextlib.nullcontext()


def set_determinism(enabled: bool) -> Literal["deterministic", "free"]:
    """Choose algorithms that repeat to the bit, or let the libraries choose the fastest.

    cuBLAS reads its workspace setting when CUDA starts in the process, so this comes before any work on the device.
    """
    if enabled:
        # https://docs.nvidia.com/cuda/cublas/#results-reproducibility
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if enabled != torch.are_deterministic_algorithms_enabled():  # the call imports the compiler, which takes seconds
        torch.use_deterministic_algorithms(enabled)
    torch.backends.cudnn.benchmark = False
    # filling fresh memory is only needed by code that reads it uninitialised; ours does not
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    return "deterministic" if enabled else "free"
