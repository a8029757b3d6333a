"""Laws of the keyed permutation."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.permutation import Permutation

KEYS = st.lists(st.one_of(st.text(max_size=8), st.integers(0, 2**63)), max_size=3)


@given(size=st.integers(1, 3000), key=KEYS)
def test_is_a_bijection(size: int, key: list[str | int]) -> None:
    assert np.array_equal(np.sort(Permutation(size, *key)(np.arange(size))), np.arange(size))


@given(size=st.integers(2**40, 2**62), key=KEYS, first=st.integers(0, 2**39))
def test_stays_inside_and_one_to_one_for_sizes_beyond_memory(size: int, key: list[str | int], first: int) -> None:
    values = Permutation(size, *key)(np.arange(first, first + 500))
    assert values.min() >= 0 and values.max() < size
    assert len(np.unique(values)) == 500


@given(size=st.integers(1, 10**9), index=st.integers(0, 10**9), key=KEYS)
def test_one_index_alone_goes_where_it_goes_among_others(size: int, index: int, key: list[str | int]) -> None:
    index %= size
    around = np.arange(max(0, index - 3), min(size, index + 4))
    together = Permutation(size, *key)(around)
    assert Permutation(size, *key)([index])[0] == together[np.flatnonzero(around == index)[0]]


def test_parts_of_the_key_are_told_apart() -> None:
    index = np.arange(1000)
    orders = [Permutation(1000, *key)(index).tolist() for key in (("a", 1), ("a", 2), ("a1",), ("a", "1"), ("b", 1))]
    assert len({tuple(order) for order in orders}) == len(orders)


def test_order_never_changes() -> None:
    """Stored runs resume by this order: the values are pinned."""
    assert Permutation(10, "pinned", 1)(np.arange(10)).tolist() == [6, 1, 3, 0, 7, 9, 5, 8, 2, 4]
    assert Permutation(10**12, "pinned", 2)([0, 1, 10**12 - 1]).tolist() == [519162374261, 359785524270, 43323758813]


@pytest.mark.parametrize("size", [3, 10, 100])
def test_each_place_is_equally_likely(size: int) -> None:
    """Chi-square of where index 0 goes over 2,000 keys; the bound is mean + 5 standard deviations of chi-square."""
    keys = 2000
    places = np.array([int(Permutation(size, "uniform", key)([0])[0]) for key in range(keys)])
    expected = keys / size
    chi_square = float(((np.bincount(places, minlength=size) - expected) ** 2 / expected).sum())
    assert chi_square < (size - 1) + 5 * np.sqrt(2 * (size - 1))


def test_neighbours_are_not_kept_together() -> None:
    values = Permutation(100_000, "neighbours")(np.arange(100_000))
    assert abs(float(np.corrcoef(values[:-1], values[1:])[0, 1])) < 5 / np.sqrt(100_000)


def test_an_index_outside_is_refused() -> None:
    with pytest.raises(IndexError, match=r"outside 0\.\.9"):
        Permutation(10, "key")([10])
