"""The kernels run on a GPU where there is one, else in Triton's interpreter (tests/conftest.py)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
import triton.language as tl
from triton.runtime import interpreter

from scaling.kernels import tile


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


@pytest.fixture(autouse=True, scope="session")
def patched_once() -> Iterator[None]:
    """Let Triton's interpreter put its own functions in place once a launch, not again at each call inside a kernel.

    Replacing the language's functions a second time changes nothing and takes more than half of the interpreter's time.
    A module of the language whose functions are still the compiler's is patched as ever.
    """
    if not tile.INTERPRETED:
        yield
        return
    patch = interpreter._patch_lang
    languages: dict[Callable[..., Any], list[ModuleType]] = {}

    def patch_what_is_not(function: Callable[..., Any]) -> Any:
        if function not in languages:
            values = function.__globals__.values()
            languages[function] = [value for value in values if value is tl or value is tl.core]
        if any(tl.core.is_builtin(language.arange) for language in languages[function]):
            return patch(function)
        return interpreter._LangPatchScope()  # nothing to put back

    with pytest.MonkeyPatch.context() as context:
        context.setattr(interpreter, "_patch_lang", patch_what_is_not)
        yield
