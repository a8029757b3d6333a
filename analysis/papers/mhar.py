"""What Luo, Cai and Hu published: Multi-Head Attention Residuals, arXiv:2607.27230v2.

One of ``papers``; the values are those of the paper's second version. Hyper-connections are the static variant of its
comparison, and single-head routing stands under ``attnres``.
"""

from __future__ import annotations

from functools import partial
from typing import Final

from scaling.analysis.papers.fact import Fact, row

SOURCE: Final = "Luo, Cai, Hu: Multi-Head Attention Residuals, arXiv:2607.27230v2"

_ONE_SEED: Final = "one seed; validation not held out from the training corpus"
_SIZES: Final = ("100m", "350m", "1b")
_WIDTHS: Final = ("d512", "d768")
_row = partial(row, "MHAR")

# From-scratch comparison on the anneal corpus, lr 5e-4, 20,000 steps; H=8 of the main table is the head count's too.
_MAIN: Final = (
    *_row("main", "baseline", "loss", _SIZES, (3.031, 2.997, 2.894), "main comparison", note=_ONE_SEED),
    *_row("main", "hc", "delta", _SIZES, (-0.032, -0.066, -0.086), "section 3", setting="static, n=4", note=_ONE_SEED,
          variant="variant=mhar_comparison"),
    *_row("main", "attnres", "delta", _SIZES, (-0.060, -0.121, -0.134), "main comparison", setting="H=1",
          note=_ONE_SEED),
    *_row("main", "mhar", "delta", _SIZES, (-0.061, -0.149, -0.140), "abstract; main comparison", setting="H=8",
          note=_ONE_SEED, heads=8),
)  # fmt: skip

_HEADS: Final = (
    *(
        fact
        for heads, values in (
            (1, (-0.060, -0.121, -0.134)), (8, (-0.061, -0.149, -0.140)), (16, (-0.035, -0.102, -0.069)),
        )
        for fact in _row("heads", "mhar", "delta", _SIZES, values, "head-count ablation", setting=f"H={heads}",
                         note=_ONE_SEED, heads=heads)
    ),
    *(
        fact
        for heads, value in ((4, 3.132), (8, 3.129), (16, 3.173))
        for fact in _row("heads", "mhar", "loss", ("1b",), (value,), "section 4, KV=8", setting=f"H={heads}, KV=8",
                         note="tail mean, about ±0.02; single pass about ±0.07", heads=heads)
    ),
    # 5,000 steps.
    *_row("undertrained", "mhar", "loss drop", ("100m",), (0.028,), "section 4; appendix C",
          setting="KV=1, H=1 to H=8", note="monotone in H; other KV rows within the noise"),
    *_row("undertrained", "baseline", "seed noise", ("100m",), (0.006,), "section 4", note="single seed"),
)  # fmt: skip

_ROBUSTNESS: Final = (
    # FineWeb-Edu.
    *_row("web", "attnres", "delta", ("100m",), (-0.039,), "section 4", setting="H=1"),
    *_row("web", "attnres", "delta", ("350m",), (0.038,), "section 4", setting="H=1",
          note="random initial queries; zero queries change this result"),
    # Three paired seeds, lr 5e-4.
    *_row("seeds", "mhar", "delta", _SIZES, (-0.045, -0.090, -0.071), "appendix H, three seeds", setting="H=8",
          note="paired data order; each beyond ten standard errors", heads=8),
    # Width at 12 layers, KV=4.
    *_row("width", "attnres", "delta", _WIDTHS, (-0.041, -0.033), "appendix G", setting="L12, KV=4"),
    *_row("width", "mhar", "delta", _WIDTHS, (-0.050, -0.053), "appendix G", setting="L12, KV=4"),
    *_row("width", "mhar", "disagreement", _WIDTHS, (0.235, 0.281), "appendix G", unit="", setting="L12, KV=4"),
)  # fmt: skip

# Disagreement of trained queries, and less that of random ones; and how noisy their losses are.
_PROBES: Final = (
    *_row("disagreement", "mhar", "learned excess", ("100m", "1b"), (0.235, 0.606), "appendix D", unit=""),
    *(
        fact
        for quantity, setting, value in (
            ("trained queries", "least", 0.27), ("trained queries", "greatest", 0.70),
            ("random queries", "least", 0.03), ("random queries", "greatest", 0.10),
        )
        for fact in _row("disagreement", "mhar", quantity, ("100m to 1b",), (value,), "appendix D", unit="",
                         setting=setting, note="read off a range")
    ),
    *_row("noise", "mhar", "single pass", ("1b",), (0.07,), "appendix C", setting="±", note="of one validation pass"),
    *_row("noise", "mhar", "tail mean", ("1b",), (0.02,), "section 4", setting="±", note="last evaluations averaged"),
)  # fmt: skip

# With fused kernels on one H100.
_COSTS: Final = (
    *_row("throughput", "mhar", "throughput", _SIZES, (0.88, 0.71, 0.55), "abstract; Table 8", unit="of baseline",
          note="H100; a ratio depends on the baseline's own speed"),
    *_row("throughput", "mhar", "parameters added", ("1b",), (0.0002,), "section 3", unit="of all"),
    *(
        fact
        for setting, value in (("before fused kernels, least", 0.2), ("before fused kernels, greatest", 0.5))
        for fact in _row("throughput", "mhar", "throughput", ("100m to 1b",), (value,), "abstract",
                         unit="of baseline", setting=setting)
    ),
    *_row("kernels", "mhar", "routing time", _SIZES, (5.7, 11.4, 42.4), "kernel timings", unit="ms a microbatch",
          setting="fused"),
    *_row("kernels", "mhar", "routing time", _SIZES, (30.2, 53.1, 153.2), "kernel timings", unit="ms a microbatch",
          setting="torch.compile"),
    *(
        fact
        for over, value in (("torch.compile", 2.0), ("eager", 6.4))
        for fact in _row("kernels", "mhar", "speedup of the fused kernels", ("all",), (value,), "section 2", unit="×",
                         setting=f"over {over}", note="routing time of a microbatch")
    ),
)  # fmt: skip

_MIDTRAINING: Final = (
    *_row("midtraining", "delta", "gain", ("8b",), (3.2,), "section 3", unit="points", setting="GSM8K",
          note="123 against 81 discordant items: exact McNemar p 0.0040"),
    *_row("midtraining", "delta", "gain", ("8b",), (3.1,), "section 3", unit="points", setting="GPQA",
          note="27 against 13 discordant items: exact McNemar p 0.038, before correction for several tests"),
)  # fmt: skip

FACTS: Final[tuple[Fact, ...]] = (*_MAIN, *_HEADS, *_ROBUSTNESS, *_PROBES, *_COSTS, *_MIDTRAINING)
