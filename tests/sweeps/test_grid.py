"""Expansion of axes: the product's laws, conditions, ranges, draws, and every refusal."""

from __future__ import annotations

import math
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.errors import GridError
from scaling.sweeps.grid import Axis, describe, expand, values_of


def axis(path: str, *values: Any, when: dict[str, tuple[Any, ...]] | None = None) -> Axis:
    return Axis(rows=tuple({path: value} for value in values), when=when or {}, where="here:1")


@given(st.lists(st.lists(st.integers(), min_size=1, max_size=4, unique=True), min_size=1, max_size=4))
def test_size_is_the_product_of_the_axes(values: list[list[int]]) -> None:
    axes = [axis(f"p{index}", *column) for index, column in enumerate(values)]
    runs = list(expand(axes))
    assert len(runs) == math.prod(map(len, values))
    assert len({tuple(sorted(run.items())) for run in runs}) == len(runs)


@given(st.integers(1, 4), st.integers(1, 4), st.data())
def test_exclusions_take_out_exactly_what_they_name(rows: int, columns: int, data: st.DataObject) -> None:
    gone = data.draw(st.sets(st.integers(0, rows - 1)))
    axes = [axis("a", *range(rows)), axis("b", *range(columns))]
    left = list(expand(axes, exclude=[{"a": tuple(gone)}] if gone else []))
    assert len(left) == (rows - len(gone)) * columns
    assert not any(run["a"] in gone for run in left)


def test_conditional_axis_counts_only_where_its_condition_holds() -> None:
    axes = [axis("heads", 1, 2, 4, when={"method": ("mhar",)}), axis("method", "baseline", "mhar"), axis("seed", 0, 1)]
    runs = list(expand(axes))
    assert len(runs) == 2 + 3 * 2
    assert all(("heads" in run) == (run["method"] == "mhar") for run in runs)


def test_condition_asks_the_base_where_no_axis_says() -> None:
    conditional = axis("heads", 1, 2, when={"method": ("mhar",)})
    assert len(list(expand([conditional], base={"method": "mhar"}.get))) == 2
    assert list(expand([conditional], base={"method": "baseline"}.get)) == [{}]


def test_condition_looks_into_a_section_that_an_axis_sets_whole() -> None:
    axes = [axis("residual", {"method": "mhar"}, {"method": "x"}), axis("q", 1, 2, when={"residual.method": ("mhar",)})]
    assert [run.get("q") for run in expand(axes)] == [1, 2, None]


def test_two_axes_on_one_path_need_conditions_that_differ() -> None:
    pair = [axis("kv", 1, 3, when={"size": ("a",)}), axis("kv", 2, when={"size": ("b",)})]
    assert len(list(expand([axis("size", "a", "b"), *pair]))) == 3
    with pytest.raises(GridError, match="two axes set kv in one run"):
        list(expand([axis("size", "a"), *pair, axis("kv", 4)]))


def test_circular_conditions_are_refused() -> None:
    circle = [axis("a", 1, when={"b": (1,)}), axis("b", 1, when={"a": (1,)})]
    with pytest.raises(GridError, match="depend on each other in a circle"):
        list(expand(circle))
    with pytest.raises(GridError, match="conditional on itself"):
        list(expand([axis("a", 1, when={"a": (1,)})]))


def test_true_is_not_one_in_conditions() -> None:
    assert list(expand([axis("a", True)], exclude=[{"a": (1,)}])) == [{"a": True}]


@pytest.mark.parametrize(
    ("tree", "expected"),
    [
        (7, (7,)),
        ({"values": ["x"]}, ("x",)),
        ({"range": [1, 5], "step": 2}, (1, 3, 5)),
        ({"linear": [0, 1], "num": 3}, (0.0, 0.5, 1.0)),
        ({"log": [1e-4, 1e-2], "num": 5}, (1e-4, 3.162e-4, 1e-3, 3.162e-3, 1e-2)),
        ({"half_decades": [3e-4, 1e-2]}, (3e-4, 1e-3, 3e-3, 1e-2)),
        ({"half_decades": [10, 100]}, (10.0, 30.0, 100.0)),
    ],
)
def test_values(tree: Any, expected: tuple[Any, ...]) -> None:
    assert values_of(tree, path="optimizer.lr", where="f:1") == expected


@given(st.integers(1, 20), st.integers(0, 5), st.sampled_from(["uniform", "log_uniform", "integers"]))
def test_more_draws_keep_the_first_ones(count: int, seed: int, kind: str) -> None:
    few = values_of({kind: [1, 50], "draws": count, "seed": seed}, path="p", where="f")
    many = values_of({kind: [1, 50], "draws": count + 7, "seed": seed}, path="p", where="f")
    assert many[:count] == few
    assert all(1 <= value <= 50 for value in many)
    assert values_of({kind: [1, 50], "draws": 20, "seed": seed + 1}, path="p", where="f")[:count] != few or count < 3


def test_draws_are_pinned() -> None:
    drawn = values_of({"log_uniform": [1e-4, 1e-2], "draws": 3, "seed": 7}, path="optimizer.lr", where="f")
    assert drawn == (0.0003736, 0.001333, 0.00205)
    assert set(values_of({"choice": ["a", "b"], "draws": 30}, path="p", where="f")) == {"a", "b"}


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        ([], "f:3: axis lr has no values"),
        ({"logg": [1, 2], "num": 3}, "f:3: unknown key 'logg' in axis lr; did you mean 'log'?"),
        ({"values": [1], "log": [1, 2]}, "needs exactly one of"),
        ({"log": [1, 2]}, "log of axis lr needs num"),
        ({"log": [0, 2], "num": 2}, "needs positive bounds, got 0"),
        ({"log": [2, 1], "num": 2}, "goes down from 2 to 1; swap them"),
        ({"range": [1, 2], "num": 2}, "key 'num' does not go with 'range'"),
        ({"range": [0.5, 2]}, "takes whole numbers"),
        ({"linear": [1], "num": 2}, "takes [first, last], two numbers; got [1]"),
        ({"half_decades": [2e-4, 1e-2]}, "1 or 3 times a power of ten"),
        ({"uniform": [1, 2]}, "needs draws"),
        ({"uniform": [1, 2], "draws": 0}, "draws of axis lr must be a positive whole number, got 0"),
        ({"choice": [], "draws": 2}, "choice of axis lr must be a list"),
        ({"values": 3}, "values of axis lr must be a list, got 3"),
        ({"range": [0, 10**12]}, "axis lr has 1,000,000,000,001 values; allowed: up to 100,000"),
        ({"log": [1, 2], "num": 10**9}, "axis lr has 1,000,000,000 values"),
        ({"uniform": [1, 2], "draws": 10**9}, "axis lr has 1,000,000,000 values"),
        ({"uniform": [1, 2], "draws": 2, "seed": {"a": 1}}, "seed of axis lr must be a whole number"),
    ],
)
def test_refusals(tree: Any, message: str) -> None:
    with pytest.raises(GridError, match=re.escape(message)):
        values_of(tree, path="optimizer.lr", where="f:3")


def test_description_uses_short_names() -> None:
    assert describe({"model.residual.method": "mhar", "optimizer.lr": 0.001}) == "method=mhar lr=0.001"
    assert describe({}) == "(no axes)"
