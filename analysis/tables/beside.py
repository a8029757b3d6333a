"""Published numbers with the user's own beside them, in columns of their own: compared by eye, never by arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd

from scaling.analysis.published import SOURCES, TOPICS, Fact, facts
from scaling.analysis.readings import OVER_SIZES, Delta, Speedup
from scaling.analysis.tables.table import Column, Table

TITLES: Final = {
    "main": "Main comparison",
    "heads": "Head count",
    "undertrained": "Under-trained replication",
    "web": "Web corpus",
    "seeds": "Paired seeds",
    "width": "Width control",
    "disagreement": "Disagreement of routing heads",
    "throughput": "Throughput and overhead",
    "kernels": "Routing kernels",
    "midtraining": "Mid-training at 8B",
    "loss": "Training loss at 18B",
    "speedup": "Iso-loss speedup",
    "tasks": "Downstream tasks",
    "streams": "Streams",
    "blocks": "Block granularity",
    "ablation": "Ablations",
    "overhead": "Overhead",
}
assert set(TITLES) == set(TOPICS)


def published(
    topic: str, *, deltas: Sequence[Delta] = (), speedups: Sequence[Speedup] = (), runs: pd.DataFrame | None = None
) -> Table:
    """The published numbers of a topic, with the user's result for the same method (and size, where they agree) beside.

    Raises
    ------
    UsageError
        If there is no such topic.
    """
    rows = []
    for fact in facts(topic):
        value, low, high, where = _own(fact, deltas, speedups, runs)
        rows.append(
            {
                "method": fact.method,
                "size": fact.size,
                "setting": fact.setting,
                "quantity": f"{fact.quantity} ({fact.unit})" if fact.unit else fact.quantity,
                "published": fact.value,
                "own": value,
                "own_low": low,
                "own_high": high,
                "own_where": where,
                "where": f"{fact.paper}, {fact.where}",
                "note": fact.note,
            }
        )
    columns = [
        Column(key="method", label="method"),
        Column(key="size", label="their size"),
        Column(key="setting", label="setting"),
        Column(key="quantity", label="quantity"),
        Column(key="published", label="published", kind="general"),
        Column(key="own", label="these runs [interval]", kind="estimate"),
        Column(key="own_where", label="at size"),
        Column(key="where", label="source"),
        Column(key="note", label="note"),
    ]
    for key in ("setting", "note"):
        if not any(row[key] for row in rows):
            columns = [column for column in columns if column.key != key]
    papers = "; ".join(dict.fromkeys(SOURCES[fact.paper] for fact in facts(topic)))
    caption = (
        f"Published by {papers}. Their corpora, tokenizers, budgets and precisions differ from these runs: the "
        f"columns stand "
        "side by side and are not to be subtracted."
    )
    title = f"Published beside measured: {TITLES[topic]}"
    return Table(
        name=f"published-{topic}", title=title, caption=caption, columns=tuple(columns), frame=pd.DataFrame(rows)
    )


def _own(
    fact: Fact, deltas: Sequence[Delta], speedups: Sequence[Speedup], runs: pd.DataFrame | None
) -> tuple[float | None, float | None, float | None, str | None]:
    if fact.quantity == "speedup":
        for item in speedups:
            if item.method == fact.method and item.mean == item.mean:
                return item.mean, item.low, item.high, f"mean of {len(item.scales)}"
    if fact.quantity == "delta":
        same = [d for d in deltas if d.method == fact.method]
        for size in (fact.size, OVER_SIZES):
            for delta in same:
                if delta.size == size:
                    return delta.mean, delta.low, delta.high, delta.size
    if fact.quantity == "loss" and runs is not None:
        cell = runs[(runs["method"] == fact.method) & (runs["size"] == fact.size)]["val_loss"].dropna()
        if len(cell):
            return float(cell.mean()), None, None, fact.size
    return None, None, None, None


def relevant(methods: Sequence[str]) -> list[str]:
    """Topics whose published numbers concern one of these methods other than the baseline."""
    named = set(methods) - {"baseline"}
    return [topic for topic in TOPICS if topic in _COMPARED and named & {fact.method for fact in facts(topic)}]


_COMPARED: Final = ("main", "heads", "seeds", "speedup", "ablation", "streams", "blocks", "width")
