"""Which dotted paths the configuration has, for axes and conditions that name them.

Asked by ``block`` for every axis of a sweep's file; derived from the dataclasses, so that a new option is known at
once.
"""

from __future__ import annotations

import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass
from functools import lru_cache
from typing import Any, Final, Union, get_args, get_origin, get_type_hints

from scaling.config.residual import METHODS, ResidualConfig
from scaling.config.tree import RunConfig
from scaling.errors import GridError, nearest
from scaling.sweeps.grid import ALIASES

METHOD_PATH: Final = "model.residual.method"


def check_path(path: str, place: str) -> None:
    known = _paths()
    if path in known or path in sections() or any(path.startswith(f"{free}.") for free in _free()):
        return
    names = sorted(known | set(ALIASES))
    raise GridError(f"{place}: unknown axis {path!r}; {_shorter(path, names)}")


def _shorter(path: str, names: Sequence[str]) -> str:
    """``nearest``, without listing a hundred paths where one is close."""
    text = nearest(path, names)
    return text.split(" (allowed")[0] if text.startswith("did") else text


@lru_cache(maxsize=1)
def _paths() -> frozenset[str]:
    return frozenset(path for path, leaf in _walk(RunConfig, "") if leaf == "leaf")


@lru_cache(maxsize=1)
def sections() -> frozenset[str]:
    return frozenset(path for path, leaf in _walk(RunConfig, "") if leaf == "section")


@lru_cache(maxsize=1)
def _free() -> frozenset[str]:
    return frozenset(path for path, leaf in _walk(RunConfig, "") if leaf == "free")


def _walk(cls: Any, prefix: str) -> Iterator[tuple[str, str]]:
    """Every path of the configuration with its kind: a leaf, a section, or a mapping with free keys."""
    classes = list(METHODS.values()) if cls is ResidualConfig else [cls]
    if cls is ResidualConfig:
        yield METHOD_PATH, "leaf"
    for each in classes:
        hints = get_type_hints(each)
        for item in fields(each):
            path, hint = f"{prefix}{item.name}", hints[item.name]
            if get_origin(hint) in (Union, types.UnionType):
                hint = next(arg for arg in get_args(hint) if arg is not type(None))
            origin = get_origin(hint)
            if isinstance(hint, type) and is_dataclass(hint):
                yield path, "section"
                yield from _walk(hint, f"{path}.")
            elif isinstance(origin, type) and issubclass(origin, Mapping):
                yield path, "section"
                yield path, "free"
            else:
                yield path, "leaf"


@lru_cache(maxsize=1)
def defaults() -> dict[str, Any]:
    """Default values of configuration paths that have one, as far as conditions can ask for them."""
    found: dict[str, Any] = {METHOD_PATH: "baseline"}

    def walk(cls: Any, prefix: str) -> None:
        hints = get_type_hints(cls)
        for item in fields(cls):
            hint, path = hints[item.name], f"{prefix}{item.name}"
            if isinstance(hint, type) and is_dataclass(hint):
                if hint is not ResidualConfig:
                    walk(hint, f"{path}.")
            elif isinstance(item.default, (int, float, str, bool)):
                found[path] = item.default

    walk(RunConfig, "")
    return found
