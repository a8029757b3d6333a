"""Tables: digits follow intervals, marks follow the noise, every language is escaped."""

from __future__ import annotations

import io
import json
import math
from html.parser import HTMLParser
from types import ModuleType

import pandas as pd
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.analysis import digits
from scaling.analysis.readings import Delta, Speedup
from scaling.analysis.tables import core, render
from scaling.analysis.tables.table import Column, Table
from scaling.errors import UsageError

EVIL = '<script>alert("x")</script> | **b** _i_ $m^2$ & 50% #1 {y} \\n ~ ünïcödé 数'


def _one(text: str, **extra: object) -> Table:
    frame = pd.DataFrame([{"a": text, "b": 1.25, **extra}])
    return Table(
        name="one",
        title=text,
        caption=text,
        columns=(Column(key="a", label=text), Column(key="b", label="b", kind="estimate")),
        frame=frame,
        notes=(text,),
    )


@given(st.floats(-1e4, 1e4), st.floats(1e-5, 1e3))
def test_an_estimate_shows_two_digits_of_its_half_width(value: float, half: float) -> None:
    text = digits.estimate(value, value - half, value + half)
    shown = [
        float(part.replace(digits.MINUS, "-"))
        for part in text.replace("[", "").replace("]", "").replace(",", "").split()
    ]
    assert len(shown) == 3
    assert abs(shown[0] - value) <= max(0.05 * half, 0.5)  # to a tenth of the leading digit, never coarser than a unit
    assert shown[1] <= shown[0] <= shown[2]


@given(st.floats(allow_nan=True, allow_infinity=True))
def test_every_number_has_a_text_without_a_hyphen(value: float) -> None:
    for text in (digits.number(value), digits.general(value), digits.speedup(value), digits.fixed(value, 3)):
        assert text and "-" not in text and "nan" not in text and "inf" not in text


def test_html_escapes_everything_and_keeps_the_text() -> None:
    seen: list[str] = []

    class Reader(HTMLParser):
        def handle_starttag(self, tag: str, attrs: object) -> None:
            seen.append(f"<{tag}>")

        def handle_data(self, data: str) -> None:
            seen.append(data)

    text = render.html(_one(EVIL))
    Reader().feed(text)
    assert "<script>" not in seen
    assert sum(EVIL in piece for piece in seen) >= 3


def test_markdown_keeps_a_row_on_one_line_with_its_number_of_cells() -> None:
    table = _one("a|b\n| c `d` <img>")
    rows = [line for line in render.markdown(table).splitlines() if line.startswith("|")]
    assert len(rows) == 3
    assert all(line.replace(r"\|", "").count("|") == 3 for line in rows)
    assert "<img>" not in rows[2].replace(r"\<", "")


def test_latex_escapes_specials() -> None:
    text = render.latex(_one("a_b & 50% of $x$ #1 {y} \\z ^ ~"))
    assert r"a\_b \& 50\% of \$x\$ \#1 \{y\} \textbackslash{}z \textasciicircum{} \textasciitilde{}" in text
    assert r"\toprule" in text and r"\bottomrule" in text


def test_csv_keeps_numbers_unrounded() -> None:
    back = pd.read_csv(io.StringIO(render.csv(_one("x", b_low=0.123456789012345, b_high=2.0))))
    assert back["b_low"][0] == 0.123456789012345


def test_json_keeps_numbers_unrounded_and_missing_ones_null() -> None:
    told = render.to_json(_one("x", b_low=0.123456789012345, b_high=math.nan))
    assert json.loads(json.dumps(told, allow_nan=False)) == told
    row = told["rows"][0]  # type: ignore[index]
    assert (row["b_low"], row["b_high"]) == (0.123456789012345, None)
    assert [column["key"] for column in told["columns"]] == ["a", "b"]  # type: ignore[attr-defined]


def test_an_unknown_format_names_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"table format 'htm' is unknown; did you mean 'html'\?"):
        render.write(_one("x"), "htm")


def _speedup(method: str, mean: float, low: float | None, high: float | None) -> Speedup:
    return Speedup(
        method=method, mean=mean, low=low, high=high, level=0.95, scales=(), trend=None, trend_p=None, n=8, df=6,
        currency="flops", status="converged", interval_method="t",
    )  # fmt: skip


def test_the_best_is_bold_only_where_the_intervals_part() -> None:
    apart = core.speedups([_speedup("a", 1.6, 1.5, 1.7), _speedup("b", 1.2, 1.1, 1.3)], baseline="base", conventions={})
    near = core.speedups([_speedup("a", 1.6, 1.2, 2.0), _speedup("b", 1.5, 1.1, 1.9)], baseline="base", conventions={})
    assert "**1.60× \\[1.50, 1.70\\]**" in render.markdown(apart)
    assert "**1.60×" not in render.markdown(near)
    assert "1.60× \\[1.20, 2.00\\] (=)" in render.markdown(near) and "1.50× \\[1.10, 1.90\\] (=)" in render.markdown(
        near
    )


def test_a_speedup_without_interval_is_said_to_have_none() -> None:
    table = core.speedups([_speedup("a", 1.6, None, None)], baseline="base", conventions={})
    assert table.frame["verdict"][0] == "no interval: too few degrees of freedom"


def test_deltas_say_how_many_pairs_and_what_sign_flips_can_show(planted: ModuleType) -> None:
    found = planted.findings(planted.table())
    text = render.markdown(core.seed_deltas(found.deltas, baseline="baseline", dropped=1))
    assert "2 pairs a cell" in text and "1 run left out" in text and "smallest p by sign flips" in text


def test_a_delta_is_decided_only_by_its_interval() -> None:
    fields = dict(method="m", size="s", seeds=(1,), deltas=(-1.0,), mean=-1.0, level=0.95, n=1, df=None, p=None)
    rest = dict(p_adjusted=None, rho=None, paired=True, smallest_sign_flip_p=None)
    verdicts = [
        Delta(**fields, **rest, low=low, high=high).verdict  # type: ignore[arg-type]
        for low, high in ((-2.0, -0.5), (0.5, 2.0), (-2.0, 0.5), (None, None))
    ]
    assert verdicts == ["lower", "higher", "undecided", "undecided"]


def test_the_run_table_leaves_out_columns_no_run_fills(planted: ModuleType) -> None:
    runs = planted.table(methods=("baseline",))
    keys = [column.key for column in core.runs(runs).columns]
    assert "heads" not in keys and "val_loss" in keys
