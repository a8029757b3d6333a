"""One published number with its source, and short ways to write several of them.

First of ``papers``: each paper's module lists its facts with these, ``published`` selects from all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Paper = Literal["MHAR", "MSAR"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """One published number.

    Parameters
    ----------
    topic
        What it belongs to, e.g. ``"main"``; see ``published.TOPICS``.
    method, size, setting
        What was trained or measured; ``setting`` holds what else tells it apart (``"H=8"``, ``"m=4"``, ``"MMLU"``).
    quantity, value, unit
        What is given: ``"loss"`` in nats, ``"delta"`` to the baseline, ``"speedup"``...
    where
        Part of the paper.
    note
        What a reader must know before comparing.
    variant, heads
        What a run of ``method`` must be to stand beside it: its options off the defaults (``scaling.identity.variant``;
        ``None``: any) and its routing heads (``None``: any).
    """

    paper: Paper
    topic: str
    method: str
    size: str
    setting: str = ""
    quantity: str
    value: float
    unit: str = "nats"
    where: str
    note: str = ""
    variant: str | None = None
    heads: int | None = None


def row(
    paper: Paper,
    topic: str,
    method: str,
    quantity: str,
    sizes: Sequence[str],
    values: Sequence[float],
    where: str,
    *,
    unit: str = "nats",
    setting: str = "",
    note: str = "",
    variant: str | None = None,
    heads: int | None = None,
) -> list[Fact]:
    """One quantity of one method at several sizes."""
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
            variant=variant,
            heads=heads,
        )
        for size, value in zip(sizes, values, strict=True)
    ]
