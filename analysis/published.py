"""Numbers that two papers published, each with its source: facts to set beside a user's own runs, never mixed.

Stands apart from the computing modules: nothing here enters a fit. ``facts`` selects by topic;
``analysis.tables.beside`` puts them into columns of their own, headed with the paper's name.

References
----------
MHAR: Luo, Cai and Hu, Multi-Head Attention Residuals, arXiv:2607.27230v2.
MSAR: Multi-Stream Attention Residuals; values as in the abstract, tables and ablations of the paper.
HC, AttnRes, mHC as those papers trained them: methods are called by this project's names, ``hc-mhar`` being the static
variant of hyper-connections that MHAR's comparison used.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal

from scaling.errors import UsageError, nearest

Paper = Literal["MHAR", "MSAR"]

SOURCES: Final[dict[Paper, str]] = {
    "MHAR": "Luo, Cai, Hu: Multi-Head Attention Residuals, arXiv:2607.27230v2",
    "MSAR": "Multi-Stream Attention Residuals (18B and 28B MoE; 10B ablations)",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One published number.

    Parameters
    ----------
    topic
        What it belongs to, e.g. ``"main"``; see ``TOPICS``.
    method, size, setting
        What was trained or measured; ``setting`` holds what else tells it apart (``"H=8"``, ``"m=4"``, ``"MMLU"``).
    quantity, value, unit
        What is given: ``"loss"`` in nats, ``"delta"`` to the baseline, ``"speedup"``...
    where
        Part of the paper.
    note
        What a reader must know before comparing.
    run_method, variant, heads
        What a run must be to stand beside it: its method here where that is not ``method``, its options off the
        defaults (``scaling.identity.variant``; ``None``: any) and its routing heads (``None``: any).
    """

    paper: Paper
    topic: str
    method: str
    size: str
    setting: str = ""
    quantity: str
    value: float
    unit: str
    where: str
    note: str = ""
    run_method: str = ""
    variant: str | None = None
    heads: int | None = None


_ONE_SEED: Final = "one seed; validation not held out from the training corpus"
_MHAR_SIZES: Final = ("100m", "350m", "1b")


def _row(
    topic: str,
    method: str,
    quantity: str,
    values: tuple[float, ...],
    where: str,
    *,
    unit: str = "nats",
    setting: str = "",
    note: str = "",
    sizes: tuple[str, ...] = _MHAR_SIZES,
    paper: Paper = "MHAR",
    run_method: str = "",
    variant: str | None = None,
    heads: int | None = None,
) -> list[Fact]:
    return [
        Fact(
            paper=paper,
            topic=topic,
            method=method,
            size=size,
            setting=setting,
            quantity=quantity,
            value=value,
            unit=unit,
            where=where,
            note=note,
            run_method=run_method,
            variant=variant,
            heads=heads,
        )
        for size, value in zip(sizes, values, strict=True)
    ]


def _one(
    topic: str,
    method: str,
    size: str,
    quantity: str,
    value: float,
    where: str,
    *,
    unit: str = "nats",
    setting: str = "",
    note: str = "",
    paper: Paper = "MSAR",
    variant: str | None = None,
    heads: int | None = None,
) -> Fact:
    return Fact(
        paper=paper,
        topic=topic,
        method=method,
        size=size,
        setting=setting,
        quantity=quantity,
        value=value,
        unit=unit,
        where=where,
        note=note,
        variant=variant,
        heads=heads,
    )


FACTS: Final[tuple[Fact, ...]] = (
    # MHAR, from-scratch comparison on the anneal corpus, lr 5e-4, 20,000 steps.
    *_row("main", "baseline", "loss", (3.031, 2.997, 2.894), "main comparison", note=_ONE_SEED),
    *_row(
        "main",
        "hc-mhar",
        "delta",
        (-0.032, -0.066, -0.086),
        "section 3, n=4",
        note=_ONE_SEED,
        run_method="hc",
        variant="variant=mhar_comparison",
    ),
    *_row("main", "attnres", "delta", (-0.060, -0.121, -0.134), "main comparison, H=1", setting="H=1", note=_ONE_SEED),
    *_row(
        "main",
        "mhar",
        "delta",
        (-0.061, -0.149, -0.140),
        "abstract; main comparison, H=8",
        setting="H=8",
        note=_ONE_SEED,
        heads=8,
    ),
    # Head count.
    *_row(
        "heads",
        "mhar",
        "delta",
        (-0.060, -0.121, -0.134),
        "head-count ablation",
        setting="H=1",
        note=_ONE_SEED,
        heads=1,
    ),
    *_row(
        "heads",
        "mhar",
        "delta",
        (-0.061, -0.149, -0.140),
        "head-count ablation",
        setting="H=8",
        note=_ONE_SEED,
        heads=8,
    ),
    *_row(
        "heads",
        "mhar",
        "delta",
        (-0.035, -0.102, -0.069),
        "head-count ablation",
        setting="H=16",
        note=_ONE_SEED,
        heads=16,
    ),
    *(
        _one(
            "heads",
            "mhar",
            "1b",
            "loss",
            value,
            "section 4, KV=8",
            setting=f"H={heads}, KV=8",
            paper="MHAR",
            heads=heads,
            note="tail mean, about ±0.02; single pass about ±0.07",
        )
        for heads, value in ((4, 3.132), (8, 3.129), (16, 3.173))
    ),
    # Under-trained replication at 100M, 5,000 steps.
    _one(
        "undertrained",
        "mhar",
        "100m",
        "loss drop",
        0.028,
        "section 4; appendix C",
        setting="KV=1, H=1 to H=8",
        paper="MHAR",
        note="monotone in H; other KV rows within the noise",
    ),
    _one("undertrained", "baseline", "100m", "seed noise", 0.006, "section 4", paper="MHAR", note="single seed"),
    # Web corpus (FineWeb-Edu), single head.
    _one("web", "attnres", "100m", "delta", -0.039, "section 4", paper="MHAR", setting="H=1"),
    _one(
        "web",
        "attnres",
        "350m",
        "delta",
        0.038,
        "section 4",
        paper="MHAR",
        setting="H=1",
        note="random initial queries; zero queries change this result",
    ),
    # Three paired seeds, lr 5e-4.
    *_row(
        "seeds",
        "mhar",
        "delta",
        (-0.045, -0.090, -0.071),
        "appendix H, three seeds",
        setting="H=8",
        heads=8,
        note="paired data order; each beyond ten standard errors",
    ),
    # Width control, L=12, KV=4.
    *_row("width", "attnres", "delta", (-0.041, -0.033), "appendix G", sizes=("d512", "d768"), setting="L12, KV=4"),
    *_row("width", "mhar", "delta", (-0.050, -0.053), "appendix G", sizes=("d512", "d768"), setting="L12, KV=4"),
    *_row(
        "width",
        "mhar",
        "disagreement",
        (0.235, 0.281),
        "appendix G",
        sizes=("d512", "d768"),
        unit="",
        setting="L12, KV=4",
    ),
    # Disagreement of trained queries over scale, less that of random ones.
    _one("disagreement", "mhar", "100m", "learned excess", 0.235, "appendix D", unit="", paper="MHAR"),
    _one("disagreement", "mhar", "1b", "learned excess", 0.606, "appendix D", unit="", paper="MHAR"),
    *(
        _one(
            "disagreement",
            "mhar",
            "100m to 1b",
            quantity,
            value,
            "appendix D",
            unit="",
            setting=setting,
            paper="MHAR",
            note="read off a range",
        )
        for quantity, setting, value in (
            ("trained queries", "least", 0.27),
            ("trained queries", "greatest", 0.70),
            ("random queries", "least", 0.03),
            ("random queries", "greatest", 0.10),
        )
    ),
    # How noisy their losses are.
    _one(
        "noise",
        "mhar",
        "1b",
        "single pass",
        0.07,
        "appendix C",
        setting="±",
        paper="MHAR",
        note="of one validation pass",
    ),
    _one(
        "noise",
        "mhar",
        "1b",
        "tail mean",
        0.02,
        "section 4",
        setting="±",
        paper="MHAR",
        note="last evaluations averaged",
    ),
    # Throughput with fused kernels, one H100.
    *_row(
        "throughput",
        "mhar",
        "throughput",
        (0.88, 0.71, 0.55),
        "abstract; Table 8",
        unit="of baseline",
        note="H100; a ratio depends on the baseline's own speed",
    ),
    _one("throughput", "mhar", "1b", "parameters added", 0.0002, "section 3", unit="of all", paper="MHAR"),
    *_row(
        "kernels", "mhar", "routing time", (5.7, 11.4, 42.4), "kernel timings", unit="ms a microbatch", setting="fused"
    ),
    *_row(
        "kernels",
        "mhar",
        "routing time",
        (30.2, 53.1, 153.2),
        "kernel timings",
        unit="ms a microbatch",
        setting="torch.compile",
    ),
    *(
        _one(
            "kernels",
            "mhar",
            "all",
            "speedup of the fused kernels",
            value,
            "section 2",
            unit="×",
            setting=f"over {over}",
            paper="MHAR",
            note="routing time of a microbatch",
        )
        for over, value in (("torch.compile", 2.0), ("eager", 6.4))
    ),
    *(
        _one(
            "throughput",
            "mhar",
            "100m to 1b",
            "throughput",
            value,
            "abstract",
            unit="of baseline",
            setting=setting,
            paper="MHAR",
        )
        for setting, value in (("before fused kernels, least", 0.2), ("before fused kernels, greatest", 0.5))
    ),
    # 8B mid-training.
    _one(
        "midtraining",
        "delta",
        "8b",
        "gain",
        3.2,
        "section 3",
        unit="points",
        setting="GSM8K",
        paper="MHAR",
        note="123 against 81 discordant items: exact McNemar p 0.0040",
    ),
    _one(
        "midtraining",
        "delta",
        "8b",
        "gain",
        3.1,
        "section 3",
        unit="points",
        setting="GPQA",
        paper="MHAR",
        note="27 against 13 discordant items: exact McNemar p 0.038, before correction for several tests",
    ),
    # MSAR: final training loss at 18B, iso-loss speedups, downstream averages and tasks, ablations at 10B.
    *(
        _one("loss", method, "18b", "training loss", value, "main results")
        for method, value in (("baseline", 1.799), ("mhc", 1.776), ("attnres", 1.769), ("msar", 1.750))
    ),
    *(
        _one(
            "speedup",
            method,
            "four scales",
            "speedup",
            value,
            "abstract; scaling laws",
            unit="×",
            note="average of four scales",
        )
        for method, value in (("msar", 1.58), ("attnres", 1.35), ("mhc", 1.30))
    ),
    *(
        _one("speedup", method, "largest", "loss reduction", value, "scaling laws", unit="of the baseline's loss")
        for method, value in (("msar", 0.027), ("attnres", 0.018), ("mhc", 0.016))
    ),
    *(
        _one("tasks", method, size, "score", value, "Table 1", unit="points", setting="average of 12")
        for size, row in (
            ("18b", {"baseline": 37.5, "mhc": 41.7, "attnres": 41.8, "msar": 45.7}),
            ("28b", {"baseline": 44.6, "mhc": 47.4, "attnres": 49.4, "msar": 52.4}),
        )
        for method, value in row.items()
    ),
    *(
        _one("tasks", method, size, "score", value, "Table 1", unit="points", setting=task)
        for size, task, old, new in (
            ("18b", "MMLU", 53.0, 56.6),
            ("18b", "ARC-C", 68.7, 74.9),
            ("18b", "BBH", 32.1, 38.0),
            ("28b", "GSM8K", 57.2, 65.7),
            ("28b", "CMMLU", 51.3, 56.4),
            ("28b", "MMLU", 59.9, 62.5),
        )
        for method, value in (("attnres", old), ("msar", new))
    ),
    *(
        _one("streams", "msar", "10b", "Pile loss", value, "ablation on streams", setting=f"m={m}", variant=variant)
        for m, value, variant in ((2, 1.850, "streams=2"), (4, 1.847, ""), (8, 1.846, "streams=8"))
    ),
    *(
        _one(
            "blocks",
            "msar",
            "10b",
            "Pile loss",
            value,
            "ablation on blocks",
            setting=setting,
            variant=f"block_sublayers={size}",
        )
        for setting, size, value in (
            ("S=2, N=15", 2, 1.845),
            ("S=4, N=8", 4, 1.847),
            ("S=8, N=4", 8, 1.852),
            ("full", 1, 1.843),
        )
    ),
    *(
        _one("ablation", method, "10b", "Pile loss", value, "ablations", setting=setting, note=note, variant=variant)
        for method, setting, value, note, variant in (
            ("msar", "default", 1.847, "", ""),
            ("msar", "no convolution, four equal streams", 1.862, "", "convolution=false"),
            ("msar", "mean instead of mixer", 1.851, "", "mixer=mean"),
            ("attnres_mhc", "hybrid", 1.861, "", None),
            ("attnres", "", 1.867, "from the hybrid's loss and its stated gain of 0.006", None),
        )
    ),
    _one("overhead", "msar", "28b", "FLOPs added", 0.005, "contributions", unit="of training"),
    _one("overhead", "msar", "28b", "activated parameters added", 0.003, "contributions", unit="of activated"),
)

TOPICS: Final = tuple(dict.fromkeys(fact.topic for fact in FACTS))


def facts(topic: str | None = None, *, paper: Paper | None = None) -> Iterator[Fact]:
    """Published numbers of a topic, a paper, or all.

    Raises
    ------
    UsageError
        If there is no such topic.
    """
    if topic is not None and topic not in TOPICS:
        raise UsageError(f"topic {topic!r} is unknown; {nearest(topic, TOPICS)}")
    return (f for f in FACTS if (topic is None or f.topic == topic) and (paper is None or f.paper == paper))
