"""What a model costs, from its configuration alone: parameters, FLOPs, bytes. No torch.

After ``config`` in the flow. ``parameters`` counts by group, ``flops`` per token, ``memory`` bytes; ``residual`` holds
the share of each residual method. The counts are checked against the modules of ``scaling.models`` by tests.
"""

from scaling.accounting.flops import FlopCount, count_flops
from scaling.accounting.memory import MemoryEstimate, estimate_memory
from scaling.accounting.parameters import ParameterCount, count_parameters

__all__ = [
    "FlopCount",
    "MemoryEstimate",
    "ParameterCount",
    "count_flops",
    "count_parameters",
    "estimate_memory",
]
