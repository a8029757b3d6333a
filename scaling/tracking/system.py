"""What the host and its devices do while a run trains: journal metrics ``system/...``, by ``run.system_metrics``.

Called by the training loop at its logging steps, with numbers since the last call. Devices are asked through torch
where it is loaded and NVIDIA's library answers; what cannot be asked is left out.
"""

from __future__ import annotations

import sys
from typing import Any, Final

GIB: Final = 2**30


class SystemMetrics:
    """Callable: name -> value now (processor use: since the last call)."""

    def __init__(self) -> None:
        import psutil

        self._psutil: Any = psutil
        self._process = psutil.Process()
        self._process.cpu_percent()
        psutil.cpu_percent()

    def __call__(self) -> dict[str, float]:
        memory = self._psutil.virtual_memory()
        metrics = {
            "system/cpu_percent": float(self._psutil.cpu_percent()),
            "system/process_cpu_percent": float(self._process.cpu_percent()),
            "system/process_rss_gib": self._process.memory_info().rss / GIB,
            "system/memory_used_gib": (memory.total - memory.available) / GIB,
        }
        return metrics | _devices()


def _devices() -> dict[str, float]:
    torch: Any = sys.modules.get("torch")
    if torch is None or not torch.cuda.is_available() or not torch.cuda.is_initialized():
        return {}
    device = torch.cuda.current_device()
    free, total = torch.cuda.mem_get_info(device)
    metrics = {"system/gpu_memory_used_gib": (total - free) / GIB}
    for name, ask in (("percent", torch.cuda.utilization), ("power_w", torch.cuda.power_draw)):
        try:
            metrics[f"system/gpu_{name}"] = ask(device) / (1000 if name == "power_w" else 1)
        except (ImportError, ModuleNotFoundError, RuntimeError):
            continue  # nvidia-ml-py is not installed, or the device does not say
    return metrics
