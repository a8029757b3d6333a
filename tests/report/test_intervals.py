"""The kinds of interval that a report shows beside each other."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from scaling.analysis import catalog
from scaling.analysis.findings import Findings
from scaling.analysis.inquiry import inquire
from scaling.analysis.result import Interval
from scaling.analysis.sections import sections
from scaling.analysis.tables import uncertainty
from scaling.analysis.tables.render import markdown
from tests.report import planted


@pytest.fixture(scope="module")
def found() -> Findings:
    return inquire(planted.table(sizes=5, seeds=3), baseline="baseline")


def test_every_kind_of_every_quantity_is_shown(found: Findings) -> None:
    table = catalog.table(found, "intervals")
    law, speedup = found.results["law"], found.results["speedup mhar"]
    rows = table.frame.to_dict("records")
    kinds: dict[str, set[str]] = {}
    for row in rows:
        kinds.setdefault(str(row["quantity"]), set()).add(str(row["kind"]))
    assert {len(kinds["E"]), len(kinds["a"])} == {6} and len(kinds["speedup of mhar"]) == 2
    assert not any(name.startswith("A") for name in kinds)
    for row in rows:
        quantity = str(row["quantity"])
        result, name = (speedup, "speedup") if quantity.startswith("speedup") else (law, quantity)
        limits = [(i.low[name], i.high[name]) for i in result.intervals.values()]
        assert (row["value_low"], row["value_high"]) in limits and row["value"] == result.estimate[name]
    same = table.frame[table.frame["kind"] == uncertainty.KINDS["delta"]]
    assert set(same["width"]) == {1.0}
    assert table.frame["width"].between(0.3, 3).all()
    fits = next(part for part in sections(found, [], {}) if part.anchor == "fits")
    assert [t.name for t in fits.tables] == ["intervals"]


def test_limits_that_are_open_and_kinds_that_failed(found: Findings) -> None:
    law = found.results["law"]
    wide = Interval(level=0.95, method="profile, F", low=dict(law.estimate), high={n: math.inf for n in law.estimate})
    some = replace(law, intervals={"delta": law.intervals["delta"], "profile": wide})
    table = uncertainty.kinds(some, {})
    assert table is not None and len(table.frame) == 4 and "∞" in markdown(table)
    assert uncertainty.kinds(replace(law, intervals={"delta": law.intervals["delta"]}), {}) is None
    assert uncertainty.kinds(None, {}) is None
