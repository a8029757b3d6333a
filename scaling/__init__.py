"""Iso-loss comparisons of language-model architectures: run sweeps, train, judge.

``scaling/`` holds symbolic links ``models``, ``kernels``, ``sweeps`` and ``analysis`` to the folders at the
repository's root, so that everything is imported as ``scaling.<folder>.<module>``.
"""

from pathlib import Path

__version__ = "0.1.0"

_here = Path(__file__).parent
for _name in ("models", "kernels", "sweeps", "analysis"):
    if not (_here / _name).is_dir():
        raise ImportError(
            f"scaling/{_name} is not a folder: the checkout lost its symbolic links "
            "(git clone with core.symlinks=true, or unpack with a tool that keeps links)"
        )
