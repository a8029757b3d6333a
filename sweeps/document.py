"""A sweep's file as plain data: read, put over what it extends, with the place every key came from.

Between a YAML file and ``spec``. Merging knows a few rules only: mappings merge key by key, an axis of a grid is
replaced whole, ``exclude`` and ``resources.by`` add up, ``null`` takes a key away, anything else is replaced.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from scaling.config.strict import parse_yaml, read_yaml
from scaling.errors import ConfigError, GridError, nearest
from scaling.sweeps.grid import ALIASES

PRESETS: Final = Path(__file__).resolve().parent / "presets"


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """Plain data and, for dotted paths in it, ``file:line``."""

    tree: dict[str, Any]
    places: dict[str, str] = field(default_factory=dict)
    source: str

    def where(self, *paths: str) -> str:
        """``file:line`` of the first of the paths (or of what holds it) whose place is known, else the file."""
        for path in paths:
            while path:
                if path in self.places:
                    return self.places[path]
                path = path.rpartition(".")[0]
        return self.source


def preset_names() -> list[str]:
    """Names of the shipped presets."""
    return sorted(path.stem for path in PRESETS.glob("*.yaml"))


def locate(name: str, beside: Path | None = None) -> Path:
    """The file of a sweep given as path (from ``beside`` or here) or as a preset's name.

    Raises
    ------
    GridError
        If there is neither.
    """
    for candidate in ([beside / name] if beside else []) + [Path(name)]:
        if candidate.is_file():
            return candidate
    preset = PRESETS / f"{name}.yaml"
    if preset.is_file():
        return preset
    raise GridError(f"{name}: neither a file nor a preset; {nearest(name, preset_names())}")


def read(path: Path, seen: tuple[Path, ...] = ()) -> Document:
    """Read a sweep's file and everything it extends.

    Raises
    ------
    GridError
        If files extend each other in a circle, or one is missing.
    ConfigError
        If a file is no YAML, repeats a key or holds tabs.
    """
    if path.resolve() in seen:
        raise GridError(f"{path}: extends itself, through {' -> '.join(p.name for p in seen)}")
    raw, lines = read_yaml(path)
    document = _canonical(raw, {key: f"{path}:{line}" for key, line in lines.items()}, str(path))
    tree, places = document.tree, document.places
    base = tree.get("base")
    if isinstance(base, str):
        config_path = path.parent / base
        config, config_lines = read_yaml(config_path if config_path.is_file() else Path(base))
        tree["base"] = config
        places.update({f"base.{key}": f"{config_path}:{line}" for key, line in config_lines.items()})
    parent_name = tree.pop("extends", None)
    if parent_name is None:
        return document
    if not isinstance(parent_name, str):
        raise GridError(f"{document.where('extends')}: extends={parent_name!r} must be a preset's name or a file")
    try:
        parent = read(locate(parent_name, path.parent), (*seen, path.resolve()))
    except (GridError, ConfigError) as error:
        raise type(error)(f"{document.where('extends')}: extends: {error}") from None
    inherited = {key: value for key, value in parent.tree.items() if key != "name"}  # else two sweeps share a folder
    return Document(tree=merge(inherited, tree), places={**parent.places, **places}, source=str(path))


def merge(old: Mapping[str, Any], new: Mapping[str, Any], path: str = "") -> dict[str, Any]:
    """``new`` over ``old`` by the rules at the top of this module."""
    merged = dict(old)
    for key, value in new.items():
        inner = f"{path}.{key}" if path else key
        previous = merged.get(key)
        if value is None and path and not _in_config(inner):
            merged.pop(key, None)
        elif (
            isinstance(previous, list)
            and isinstance(value, list)
            and (key == "exclude" or inner.endswith("resources.by"))
        ):
            merged[key] = [*previous, *value]
        elif isinstance(previous, Mapping) and isinstance(value, Mapping) and not _replaced(path, key, previous, value):
            merged[key] = merge(previous, value, inner)
        else:
            merged[key] = value
    return merged


def _in_config(path: str) -> bool:
    return "base" in path.split(".")[:3]


def _replaced(path: str, key: str, previous: Mapping[str, Any], value: Mapping[str, Any]) -> bool:
    """An axis is replaced whole, and so are a residual method's options when the method changes."""
    if path.split(".")[-1] == "grid":
        return True
    return key == "residual" and "method" in value and value["method"] != previous.get("method")


def _canonical(tree: dict[str, Any], places: dict[str, str], source: str) -> Document:
    """Aliases of axes turned into configuration paths, so that ``lr`` and ``optimizer.lr`` are one axis."""
    moved = dict(places)
    sections = [("", tree)]
    if isinstance(tree.get("blocks"), Mapping):
        sections += [(f"blocks.{name}.", block) for name, block in tree["blocks"].items() if isinstance(block, dict)]
    for prefix, section in sections:
        grid = section.get("grid")
        if not isinstance(grid, Mapping):
            continue
        renamed: dict[str, Any] = {}
        for key, value in grid.items():
            path = ALIASES.get(str(key), str(key))
            place = places.get(f"{prefix}grid.{key}", source)
            if path in renamed:
                raise GridError(f"{place}: the axis {path} is there twice, once as {key!r}; keep one")
            renamed[path] = value
            moved[f"{prefix}grid.{path}"] = place
        section["grid"] = renamed
    return Document(tree=tree, places=moved, source=source)


def canonical_paths(tree: Mapping[str, Any]) -> dict[str, Any]:
    """A mapping's keys with aliases turned into configuration paths."""
    return {ALIASES.get(key, key): value for key, value in tree.items()}


def settings_of(settings: Sequence[str]) -> list[tuple[str, Any, str]]:
    """``key=value`` texts as (path, value, the text they came from)."""
    parsed: list[tuple[str, Any, str]] = []
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise GridError(f"--set {setting!r}: write key=value, e.g. --set lr=[1e-3,3e-3] or --set resources.time=30")
        value: Any = parse_yaml(f"value: {text}", source=f"--set {setting}")[0]["value"]
        name = key.strip()
        parsed.append((ALIASES.get(name, name), value, f"--set {setting}"))
    return parsed
