"""Strict loading: YAML and ``--set key=value`` into the frozen tree, or one line saying what is wrong and where.

Unknown keys name the nearest valid one; duplicate keys and tabs are refused with their line; numbers are not guessed
from strings, except that ``1e-3`` is a number (YAML 1.1 calls it text).
"""

from __future__ import annotations

import re
import types
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

import yaml

from scaling.config import ladder
from scaling.config.model import ModelConfig
from scaling.config.residual import METHODS, ResidualConfig
from scaling.config.tree import RunConfig
from scaling.errors import ConfigError, nearest

T = TypeVar("T")
Lines = Mapping[str, int | str]  # dotted path -> line in the source, or "file:line" where several files were merged


class _Loader(yaml.SafeLoader):
    """SafeLoader that refuses duplicate keys and reads ``1e-3`` as a number."""


_Loader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(
        r"^[-+]?(?:[0-9][0-9_]*\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[0-9][0-9_]*[eE][-+]?[0-9]+|\.[0-9]+(?:[eE][-+]?[0-9]+)?"
        r"|\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN))$"
    ),
    list("-+0123456789."),
)


# YAML 1.1 reads 4:00:00 as the number 14400; a time or an address is text here.
for _first, _resolvers in list(_Loader.yaml_implicit_resolvers.items()):
    _Loader.yaml_implicit_resolvers[_first] = [
        (tag, re.compile(r"^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+)$"))
        if tag == "tag:yaml.org,2002:int"
        else (tag, pattern)
        for tag, pattern in _resolvers
        if not (tag == "tag:yaml.org,2002:float" and ":" in pattern.pattern.replace("(?:", ""))
    ]


def parse_yaml(text: str, *, source: str) -> tuple[dict[str, Any], dict[str, int]]:
    """Parse YAML into plain data and a map from dotted key path to line number (from 1).

    Raises
    ------
    ConfigError
        On a syntax error, a tab, a duplicate key, or a top level that is not a mapping.
    """
    loader = _Loader(text)
    try:
        node = loader.get_single_node()
        lines: dict[str, int] = {}
        data = _construct(loader, node, "", lines, source) if node is not None else {}
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        where = f"{source}:{mark.line + 1}" if mark else source
        tab = mark is not None and "\t" in text.splitlines()[mark.line] if mark and text.splitlines() else False
        problem = "a tab character; indent with spaces" if tab else str(getattr(error, "problem", error))
        raise ConfigError(f"{where}: {problem}") from None
    finally:
        loader.dispose()
    if not isinstance(data, dict):
        raise ConfigError(f"{source}: the top level must be a mapping of keys, got {type(data).__name__}")
    return data, lines


def _construct(loader: yaml.SafeLoader, node: yaml.Node, path: str, lines: dict[str, int], source: str) -> Any:
    if isinstance(node, yaml.MappingNode):
        mapping: dict[str, Any] = {}
        for key_node, value_node in node.value:
            key = loader.construct_object(key_node, deep=True)
            line = key_node.start_mark.line + 1
            name = str(key)
            inner = f"{path}.{name}" if path else name
            if name in mapping:
                raise ConfigError(
                    f"{source}:{line}: key {inner!r} appears twice (first on line {lines[inner]}); keep one"
                )
            lines[inner] = line
            mapping[name] = _construct(loader, value_node, inner, lines, source)
        return mapping
    if isinstance(node, yaml.SequenceNode):
        return [_construct(loader, item, f"{path}[{i}]", lines, source) for i, item in enumerate(node.value)]
    return loader.construct_object(node, deep=True)


def read_yaml(path: Path) -> tuple[dict[str, Any], dict[str, int]]:
    """Read a YAML file; ``ConfigError`` names the file where it is missing or not UTF-8."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such file; give the path of a YAML configuration") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: not UTF-8 text (byte {error.start})") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    return parse_yaml(text, source=str(path))


def apply_settings(tree: dict[str, Any], settings: Sequence[str]) -> dict[str, Any]:
    """Return ``tree`` with each ``dotted.key=value`` applied; values are YAML scalars or flow collections."""
    merged: dict[str, Any] = _copy(tree)
    for setting in settings:
        key, sign, text = setting.partition("=")
        if not sign or not key.strip():
            raise ConfigError(f"--set {setting!r}: write key=value, e.g. --set optimizer.lr=1e-3")
        value = parse_yaml(f"value: {text}", source=f"--set {setting}")[0]["value"]
        *parents, leaf = key.strip().split(".")
        node = merged
        for parent in parents:
            child = node.get(parent)
            if child is None:
                child = node[parent] = {}
            if not isinstance(child, dict):
                raise ConfigError(f"--set {setting!r}: {parent!r} is a value, not a section")
            node = child
        node[leaf] = value
    return merged


def _copy(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _copy(item) for key, item in value.items()}
    return [_copy(item) for item in value] if isinstance(value, list) else value


def load_config(path: Path, settings: Sequence[str] = ()) -> RunConfig:
    """Load one run's configuration; order: defaults < named size < file < ``--set``."""
    tree, lines = read_yaml(path)
    places = {setting.partition("=")[0].strip(): f"--set {setting}" for setting in settings}
    return build(RunConfig, apply_settings(tree, settings), source=str(path), lines={**lines, **places})


def build(
    cls: type[T], tree: Mapping[str, Any], *, path: str = "", source: str = "config", lines: Lines | None = None
) -> T:
    """Build a frozen section from plain data; inverse of ``tree.to_dict``.

    Raises
    ------
    ConfigError
        On an unknown or missing key, a wrong type, or values that contradict each other; the text names the file and
        line where they are known, the dotted path, what was given and what is allowed.
    """
    where = _where(path, source, lines)
    if not isinstance(tree, Mapping):
        raise ConfigError(f"{where}{path or 'config'}={tree!r} must be a section of keys")
    if cls is ResidualConfig:
        tree, cls = _residual_class(tree, path, source, lines)
    if cls is ModelConfig and tree.get("size") is not None:
        tree = {**ladder.shape(str(tree["size"])), **tree}
    hints = get_type_hints(cls)
    known = {item.name: item for item in fields(cls) if item.init}  # type: ignore[arg-type]
    for key in tree:
        if key not in known:
            full = f"{path}.{key}" if path else key
            raise ConfigError(f"{_where(full, source, lines)}unknown key {full!r}; {nearest(str(key), known)}")
    values: dict[str, Any] = {}
    for name, item in known.items():
        full = f"{path}.{name}" if path else name
        if name in tree:
            values[name] = _convert(hints[name], tree[name], full, source, lines)
        elif item.default is MISSING and item.default_factory is MISSING:
            hint = "; or name a size: model.size" if cls is ModelConfig else ""
            raise ConfigError(f"{where}{full!r} is missing{hint}")
    try:
        return cls(**values)
    except ConfigError as error:
        raise ConfigError(f"{where}{path + '.' if path else ''}{error}") from None


def _residual_class(
    tree: Mapping[str, Any], path: str, source: str, lines: Lines | None
) -> tuple[Mapping[str, Any], Any]:
    method = str(tree.get("method", "baseline"))
    if method not in METHODS:
        where = _where(f"{path}.method", source, lines)
        raise ConfigError(f"{where}{path}.method={method!r} is unknown; {nearest(method, METHODS)}")
    return {key: value for key, value in tree.items() if key != "method"}, METHODS[method]


def _where(path: str, source: str, lines: Lines | None) -> str:
    line = (lines or {}).get(path)
    if isinstance(line, str):
        return f"{line}: "
    return f"{source}:{line}: " if line else f"{source}: "


def _convert(hint: Any, value: Any, path: str, source: str, lines: Lines | None) -> Any:
    origin, args = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        if value is None and type(None) in args:
            return None
        (inner,) = [arg for arg in args if arg is not type(None)]
        return _convert(inner, value, path, source, lines)
    where = _where(path, source, lines)
    if origin is Literal:
        if value not in args or isinstance(value, bool) is not isinstance(args[0], bool):
            raise ConfigError(f"{where}{path}={value!r} is not allowed; {nearest(str(value), map(str, args))}")
        return value
    if isinstance(hint, type) and is_dataclass(hint):
        return build(hint, value, path=path, source=source, lines=lines)
    if origin is tuple:
        if not isinstance(value, (list, tuple)):
            raise ConfigError(f"{where}{path}={value!r} must be a list")
        return tuple(_convert(args[0], item, f"{path}[{i}]", source, lines) for i, item in enumerate(value))
    if isinstance(origin, type) and issubclass(origin, Mapping):
        if not isinstance(value, Mapping):
            raise ConfigError(f"{where}{path}={value!r} must be a section of keys")
        return {str(key): _convert(args[1], item, f"{path}.{key}", source, lines) for key, item in value.items()}
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
        raise ConfigError(f"{where}{path}={value!r} must be {words.get(hint, hint)}, got {type(value).__name__}")
    return value
