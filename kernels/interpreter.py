"""Whether Triton's interpreter runs the kernels, by the same words as Triton reads. No Triton here, no torch.

Below :mod:`scaling.kernels.dispatch`, which must answer where Triton is not installed, and the kernels.
"""

from __future__ import annotations

import os

VARIABLE = "TRITON_INTERPRET"
_YES = ("1", "true", "on", "yes", "y")  # what Triton takes for true, in any case


def interpreted() -> bool:
    """Whether ``TRITON_INTERPRET`` asks for the interpreter."""
    return os.environ.get(VARIABLE, "0").lower() in _YES
