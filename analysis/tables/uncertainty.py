"""The kinds of interval beside each other: how much a conclusion leans on the way its uncertainty was made."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

import pandas as pd

from scaling.analysis import digits
from scaling.analysis.laws import get_law
from scaling.analysis.result import Interval, Result
from scaling.analysis.tables.table import Column, Table
from scaling.analysis.verdict import EXACT

# What each kind draws, as it is told to a reader; kinds that are not here are told by their own method.
KINDS: Final = {
    "delta": "delta method, t",
    "two-level": "two-level bootstrap: seeds within sizes",
    "parametric": "parametric bootstrap: noise with the pooled spread",
    "cluster": "bootstrap of runs",
    "pairs": "bootstrap of rows",
    "profile": "profile of the fit, F",
}


def kinds(law: Result | None, speedups: Mapping[str, Result]) -> Table | None:
    """Every interval of the law's asymptotes and exponents and of each speedup; ``None`` where none has two."""
    rows: list[dict[str, Any]] = []
    if law is not None:
        shown = {p.name for p in get_law(str(law.details["form"])).parameters if p.kind != "amplitude"}
        for name in law.estimate:
            if name.partition("[")[0] in shown:
                rows += _rows(name, name, law)
    for method, result in speedups.items():
        rows += _rows(f"speedup of {method}", "speedup", result)
    if not rows:
        return None
    columns = (
        Column(key="quantity", label="quantity"),
        Column(key="kind", label="kind of interval"),
        Column(key="value", label="estimate [interval]", kind="estimate"),
        Column(key="width", label="width over that of the delta method", kind="number", digits=3),
    )
    level = digits.share(float(rows[0]["level"]))
    preferred = any(row["kind"] in (KINDS["two-level"], KINDS["parametric"]) for row in rows)
    better = ", and the two-level and parametric ones are to be preferred" if preferred else ""
    caption = (
        f"{level} intervals of the same estimates by kind. Where they differ much, a conclusion leans on how its "
        f"uncertainty was made: with few sizes the bootstraps of runs and of rows may lose the ends of the "
        f"range{better}. Amplitudes are left out: runs determine them badly, whatever the kind."
    )
    return Table(
        name="intervals", title="Kinds of interval", caption=caption, columns=columns, frame=pd.DataFrame(rows)
    )


def _rows(label: str, name: str, result: Result) -> list[dict[str, Any]]:
    least = EXACT * abs(result.estimate.get(name, 0.0))  # what is narrower comes of errors of rounding, not of noise
    found = {kind: made for kind, made in result.intervals.items() if name in made.low and _width(made, name) > least}
    if len(found) < 2:
        return []
    order = [kind for kind in KINDS if kind in found] + [kind for kind in found if kind not in KINDS]
    delta = _width(found["delta"], name) if "delta" in found else math.nan
    return [
        {
            "quantity": label,
            "kind": KINDS.get(kind, found[kind].method),
            "value": result.estimate[name],
            "value_low": found[kind].low[name],
            "value_high": found[kind].high[name],
            "width": _width(found[kind], name) / delta if delta > 0 else math.nan,
            "level": found[kind].level,
        }
        for kind in order
    ]


def _width(interval: Interval, name: str) -> float:
    return interval.high[name] - interval.low[name]
