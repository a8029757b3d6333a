"""Measure training on GPUs: MFU, packing, the loss, memory, equality and speed over processes, resume to the bit.

    python -m tests.gpu.measure_training mfu loss packing resume checkpointing experts corpus --store STORE --out DIR
    torchrun --nproc-per-node 2 -m tests.gpu.measure_training spread --out DIR
    torchrun --nproc-per-node 2 -m tests.gpu.measure_training scale --out DIR

Each part prints a line a figure and writes ``DIR/<part>.json``. ``--tiny`` runs the same code at sizes that a CPU
finishes in seconds, to try it before a device is paid for. ``test_training.py`` beside this asserts what must hold.
The parts are in ``training_parts.py`` and ``training_spread.py``.
"""

from __future__ import annotations

import argparse
import json
import logging
import sys
import time
import traceback
from pathlib import Path

from tests.gpu.training_parts import checkpointing, corpus, experts, loss, mfu, packing, public, resume
from tests.gpu.training_spread import scale, spread

_PARTS = (mfu, corpus, loss, packing, resume, checkpointing, experts, spread, scale, public)
PARTS = {part.__name__: part for part in _PARTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--store", type=Path, help="token store of part corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, help="where runs go (default: OUT/scratch)")
    parser.add_argument("--sizes", nargs="*", default=[])
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch = args.scratch or args.out / "scratch"
    args.scratch.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING)
    failed = 0
    for name in args.parts:
        start_s = time.perf_counter()
        try:
            result = PARTS[name](args)
        except Exception:  # the parts after it are still worth measuring
            traceback.print_exc()
            result, failed = {"error": traceback.format_exc()[-1500:]}, 1
        if result:
            suffix = f"-{'-'.join(args.sizes)}" if args.sizes else ""
            text = json.dumps({**result, "seconds": time.perf_counter() - start_s}, indent=1)
            (args.out / f"{name}{suffix}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
