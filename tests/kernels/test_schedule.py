"""The schedule: every plan covers its sites, never overwrites what is still needed, and refuses every other order."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.errors import KernelError
from scaling.kernels.schedule import MAX_GROUP_SOURCES, Ledger, Plan

FULL = st.builds(Plan, num_sites=st.integers(1, 80), block=st.just(1), group=st.integers(1, 15))
BLOCKS = st.builds(Plan, num_sites=st.integers(1, 80), block=st.integers(2, 20), group=st.integers(1, 15))
PLANS = st.builds(Plan, num_sites=st.integers(1, 80), block=st.integers(1, 20), group=st.integers(1, 15))


@given(PLANS)
def test_forward_groups_partition_the_sites(plan: Plan) -> None:
    """Groups are consecutive, whole and at most 16 sites; a partial result's row is not read before it is replaced."""
    site = 0
    while site < plan.num_sites:
        group = plan.forward_group(site)
        assert group.start == site and 1 <= len(group) <= 16
        assert all(plan.forward_group(s) == group for s in group)
        if len(group) > 1:
            slots = [plan.partial_slot(s) for s in group]
            assert slots == list(range(slots[0], slots[0] + len(group)))
            for s in group:
                assert slots[s - group.start] >= plan.rows_before(s), "a partial result in a row that holds a source"
                assert plan.write_row(s) in (None, slots[s - group.start])
        site = group.stop


@given(PLANS)
def test_rows_are_written_in_order(plan: Plan) -> None:
    """The rows written before a site are exactly those it reads."""
    written = 0
    for site in range(plan.num_sites):
        assert plan.rows_before(site) == written
        row = plan.write_row(site)
        if row is not None:
            assert row == written
            written += 1
    assert written <= plan.num_rows <= plan.num_slots


@given(FULL)
def test_gradients_take_dead_rows_only(plan: Plan) -> None:
    """With blocks of 1, G of a site lands in a row whose source group is done, and stays until the last source."""
    live = set(range(plan.num_sites))
    held: dict[int, int] = {}
    for site in reversed(range(plan.num_sites)):
        group = plan.backward_group(site)
        assert site in group and (plan.group == 1 or len(group) <= MAX_GROUP_SOURCES)
        slot = plan.gradient_slot(site)
        assert slot not in live and slot not in held and slot < plan.num_slots
        held[slot] = site
        if plan.group == 1:
            live.discard(site)
        elif site == group.start:
            live -= set(group)


@given(BLOCKS)
def test_blocks_keep_their_gradients(plan: Plan) -> None:
    """With larger blocks, the G of one block have rows of their own, beyond the sources."""
    for site in range(plan.num_sites):
        sites = plan.block_sites(site)
        slots = [plan.gradient_slot(s) for s in sites]
        assert slots == list(range(plan.num_rows, plan.num_rows + len(sites))) and slots[-1] < plan.num_slots


def _ledger(written: int = 3) -> Ledger:
    ledger = Ledger(plan=Plan(num_sites=3, block=1, group=2))
    for site in range(written):
        assert not ledger.enter_site(site, in_backward=False)
    return ledger


def test_two_models_on_one_bank() -> None:
    """A site that runs twice during the forward pass is another model's or another pass's."""
    with pytest.raises(KernelError, match="site 0 ran when site 1 was next; .* open a new bank"):
        _ledger(1).enter_site(0, in_backward=False)


def test_skipped_site() -> None:
    """Sites come in order."""
    with pytest.raises(KernelError, match="site 2 ran when site 1 was next"):
        _ledger(1).enter_site(2, in_backward=False)


def test_backward_before_the_forward_pass_is_complete() -> None:
    """All sites must have run."""
    with pytest.raises(KernelError, match="after a forward pass of 2 of 3 sites"):
        _ledger(2).enter_backward(1)


def test_out_of_order_backward() -> None:
    """Gradients come from the last site down."""
    with pytest.raises(KernelError, match="backward of site 1, but site 2 is next"):
        _ledger().enter_backward(1)


def test_second_backward() -> None:
    """A finished bank has given up its rows."""
    ledger = _ledger()
    for site in (2, 1, 0):
        ledger.enter_backward(site)
    with pytest.raises(KernelError, match="its backward pass is already done; .* retain_graph"):
        ledger.enter_backward(2)


def test_recomputation() -> None:
    """A site may be recomputed until backward has passed it."""
    ledger = _ledger()
    ledger.enter_backward(2)
    assert ledger.enter_site(1, in_backward=True)
    with pytest.raises(KernelError, match="site 2 was recomputed, but backward has passed it"):
        ledger.enter_site(2, in_backward=True)


def test_plan_refuses_impossible_sizes() -> None:
    """Sizes out of range are named."""
    with pytest.raises(KernelError, match="groups of 16: .* groups 1 to 15"):
        Plan(num_sites=3, block=1, group=16)
