"""What probes of trained models found: how much routing heads disagree, against random queries."""

from __future__ import annotations

from collections.abc import Sequence

import pandas as pd

from scaling.analysis.disagreement import judge_disagreement
from scaling.analysis.supplements import Probe
from scaling.analysis.tables.table import Column, Table


def disagreement(probes: Sequence[Probe]) -> Table:
    """One row a probe: disagreement of trained and of random queries, and the difference, with intervals."""
    rows = []
    level = 0.95
    for probe in probes:
        result = judge_disagreement(probe)
        row: dict[str, object] = {
            "run": probe.name,
            "method": probe.method or None,
            "size": probe.size or None,
            "heads": probe.heads,
            "n": result.n,
            "draws": probe.random.shape[-1],
        }
        for name, value in result.estimate.items():
            row |= {name: value, f"{name}_low": None, f"{name}_high": None}
            if result.interval is not None:
                level = result.interval.level
                row |= {f"{name}_low": result.interval.low[name], f"{name}_high": result.interval.high[name]}
        rows.append(row)
    columns = (
        Column(key="run", label="run"),
        Column(key="method", label="method"),
        Column(key="size", label="size"),
        Column(key="heads", label="H", kind="integer"),
        Column(key="learned", label="trained queries [interval]", kind="estimate"),
        Column(key="random", label="random queries [interval]", kind="estimate"),
        Column(key="excess", label="difference [interval]", kind="estimate"),
        Column(key="n", label="sequences", kind="integer"),
        Column(key="draws", label="random draws", kind="integer"),
    )
    caption = (
        "Mean over pairs of heads of the total variation distance between their weights over sources: 0, all heads "
        "read "
        "alike; 1, no source in common. Random: directions of the trained queries' norms. Mean over sites; "
        f"{level:.0%} t intervals over sequences, which speak for one trained model and not for other seeds."
    )
    frame = pd.DataFrame(rows)
    kept = tuple(column for column in columns if frame[column.key].notna().any())
    return Table(name="disagreement", title="Disagreement of routing heads", caption=caption, columns=kept, frame=frame)
