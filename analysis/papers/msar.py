"""What the paper on Multi-Stream Attention Residuals published: mixtures of experts of 18B and 28B, ablations at 10B.

One of ``papers``; values as in its abstract, tables and ablations. Methods are called by this project's names.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from scaling.analysis.papers.fact import Fact, row

SOURCE: Final = "Multi-Stream Attention Residuals (18B and 28B MoE; 10B ablations)"

_row = partial(row, "MSAR")

_RESULTS: Final = (
    *(
        fact
        for method, value in (("baseline", 1.799), ("mhc", 1.776), ("attnres", 1.769), ("msar", 1.750))
        for fact in _row("loss", method, "training loss", ("18b",), (value,), "main results")
    ),
    *(
        fact
        for method, value in (("msar", 1.58), ("attnres", 1.35), ("mhc", 1.30))
        for fact in _row("speedup", method, "speedup", ("four scales",), (value,), "abstract; scaling laws", unit="×",
                         note="average of four scales")
    ),
    *(
        fact
        for method, value in (("msar", 0.027), ("attnres", 0.018), ("mhc", 0.016))
        for fact in _row("speedup", method, "loss reduction", ("largest",), (value,), "scaling laws",
                         unit="of the baseline's loss")
    ),
)  # fmt: skip

_TASKS: Final = (
    *(
        fact
        for method, values in (
            ("baseline", (37.5, 44.6)), ("mhc", (41.7, 47.4)), ("attnres", (41.8, 49.4)), ("msar", (45.7, 52.4)),
        )
        for fact in _row("tasks", method, "score", ("18b", "28b"), values, "Table 1", unit="points",
                         setting="average of 12")
    ),
    *(
        fact
        for size, task, old, new in (
            ("18b", "MMLU", 53.0, 56.6), ("18b", "ARC-C", 68.7, 74.9), ("18b", "BBH", 32.1, 38.0),
            ("28b", "GSM8K", 57.2, 65.7), ("28b", "CMMLU", 51.3, 56.4), ("28b", "MMLU", 59.9, 62.5),
        )
        for method, value in (("attnres", old), ("msar", new))
        for fact in _row("tasks", method, "score", (size,), (value,), "Table 1", unit="points", setting=task)
    ),
)  # fmt: skip

# Loss on the Pile of the 10B model.
_ABLATIONS: Final = (
    *(
        fact
        for streams, value, variant in ((2, 1.850, "streams=2"), (4, 1.847, ""), (8, 1.846, "streams=8"))
        for fact in _row("streams", "msar", "Pile loss", ("10b",), (value,), "ablation on streams",
                         setting=f"m={streams}", variant=variant)
    ),
    *(
        fact
        for setting, size, value in (
            ("S=2, N=15", 2, 1.845), ("S=4, N=8", 4, 1.847), ("S=8, N=4", 8, 1.852), ("full", 1, 1.843),
        )
        for fact in _row("blocks", "msar", "Pile loss", ("10b",), (value,), "ablation on blocks", setting=setting,
                         variant=f"block_sublayers={size}")
    ),
    *(
        fact
        for method, setting, value, note, variant in (
            ("msar", "default", 1.847, "", ""),
            ("msar", "no convolution, four equal streams", 1.862, "", "convolution=false"),
            ("msar", "mean instead of mixer", 1.851, "", "mixer=mean"),
            ("attnres_mhc", "hybrid", 1.861, "", None),
            ("attnres", "", 1.867, "from the hybrid's loss and its stated gain of 0.006", None),
        )
        for fact in _row("ablation", method, "Pile loss", ("10b",), (value,), "ablations", setting=setting, note=note,
                         variant=variant)
    ),
)  # fmt: skip

_OVERHEAD: Final = (
    *_row("overhead", "msar", "FLOPs added", ("28b",), (0.005,), "contributions", unit="of training"),
    *_row("overhead", "msar", "activated parameters added", ("28b",), (0.003,), "contributions", unit="of activated"),
)

FACTS: Final[tuple[Fact, ...]] = (*_RESULTS, *_TASKS, *_ABLATIONS, *_OVERHEAD)
