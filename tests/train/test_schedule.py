"""Learning-rate shapes: their ends, their order, their independence of history."""

from __future__ import annotations

from typing import Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.config.training import ScheduleConfig
from scaling.schedule import learning_rate

Kind = Literal["cosine", "wsd", "constant"]
KINDS: tuple[Kind, ...] = ("cosine", "wsd", "constant")


@pytest.mark.parametrize("kind", KINDS)
def test_warm_up_rises_linearly_to_the_peak(kind: Kind) -> None:
    schedule = ScheduleConfig(kind=kind, steps=100, warmup_steps=10)
    assert [learning_rate(schedule, 2.0, step) for step in range(10)] == pytest.approx([0.2 * n for n in range(1, 11)])


@pytest.mark.parametrize(("kind", "last"), [("cosine", 0.2), ("wsd", 0.2), ("constant", 2.0)])
def test_last_step(kind: Kind, last: float) -> None:
    schedule = ScheduleConfig(kind=kind, steps=100, warmup_steps=10, min_lr_ratio=0.1)
    assert learning_rate(schedule, 2.0, 99) == pytest.approx(last)


def test_wsd_holds_the_peak_until_the_decay() -> None:
    schedule = ScheduleConfig(kind="wsd", steps=100, warmup_steps=10, decay_fraction=0.2, min_lr_ratio=0.0)
    assert {learning_rate(schedule, 1.0, step) for step in range(9, 80)} == {1.0}
    assert learning_rate(schedule, 1.0, 89) == pytest.approx(0.5)


@given(
    kind=st.sampled_from(KINDS),
    steps=st.integers(1, 50),
    warmup=st.integers(0, 50),
    ratio=st.floats(0, 1),
    fraction=st.floats(0, 1),
)
def test_never_above_the_peak_never_rising_after_warm_up(
    kind: Kind, steps: int, warmup: int, ratio: float, fraction: float
) -> None:
    warmup = min(warmup, steps)
    schedule = ScheduleConfig(
        kind=kind,
        steps=steps,
        warmup_steps=warmup,
        min_lr_ratio=ratio,
        decay_fraction=fraction,
    )
    rates = [learning_rate(schedule, 1.0, step) for step in range(steps)]
    assert all(0 <= rate <= 1 + 1e-12 for rate in rates)
    assert all(later <= earlier + 1e-12 for earlier, later in zip(rates[warmup:], rates[warmup + 1 :], strict=False))
