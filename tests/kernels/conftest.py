"""The kernels run on a GPU where there is one, else in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    """Where the kernels run here."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.fixture(autouse=True)
def poisoned_memory() -> Iterator[None]:
    """Fill every uninitialised tensor with NaN, so that an element that no kernel wrote shows."""
    before = torch.are_deterministic_algorithms_enabled()
    filling = torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
    assert torch.empty(1).isnan().all()
    yield
    torch.use_deterministic_algorithms(before)
    torch.utils.deterministic.fill_uninitialized_memory = filling  # type: ignore[attr-defined]
