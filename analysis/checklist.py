"""What a reader needs to reproduce a fit, item by item.

Filled by ``fit`` and the comparisons, printed by the report. The items are those of the survey that found most papers
omit several of them: form, variables, conventions, rows used and dropped with reasons, loss, delta, solver, starts,
convergence, interval, seeds.

References
----------
Li et al. (2025), (Mis)Fitting: A Survey of Scaling Laws, appendix "checklist".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from scaling.analysis.result import Dropped

if TYPE_CHECKING:
    import pandas as pd

ITEMS = (
    "form",
    "variables",
    "conventions",
    "rows",
    "dropped",
    "seeds",
    "loss",
    "delta",
    "solver",
    "starts",
    "convergence",
    "interval",
)


def conventions(frame: pd.DataFrame, names: Sequence[str]) -> dict[str, str]:
    """Which column of the table stands behind each short name, where that can be told."""
    from scaling.analysis.schema import CANONICAL

    out = {}
    for name in names:
        column = CANONICAL.get(name, name)
        same = column in frame.columns and name in frame.columns and bool((frame[column] == frame[name]).all())
        out[name] = column if same else name
    return out


def describe_dropped(dropped: Sequence[Dropped]) -> str:
    """``none`` or ``3: status is failed (2), loss is missing (1)``."""
    if not dropped:
        return "none"
    counts = Counter(d.reason for d in dropped)
    return f"{len(dropped)}: " + ", ".join(f"{reason} ({count})" for reason, count in counts.most_common())


def describe_seeds(frame: pd.DataFrame) -> str:
    """How many seeds there are and how they are spread."""
    if "seed" not in frame.columns or frame["seed"].isna().all():
        return "not recorded: replicates are told by equal variables"
    return f"{frame['seed'].nunique()} distinct ({', '.join(str(s) for s in sorted(set(frame['seed'].dropna()))[:10])})"


def make_checklist(entries: Mapping[str, str]) -> dict[str, str]:
    """The items in order; those an analysis does not have are said not to apply."""
    assert set(entries) <= set(ITEMS), set(entries) - set(ITEMS)
    return {item: entries.get(item, "does not apply") for item in ITEMS}
