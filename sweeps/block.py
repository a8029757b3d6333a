"""One grid of a sweep with its base, exclusions and resources: from plain data to assignments and configurations.

Between ``document`` and ``spec``; the grammar is described in ``spec``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from scaling.config.residual import METHODS
from scaling.config.tree import RunConfig
from scaling.errors import GridError
from scaling.sweeps.document import Document, canonical_paths
from scaling.sweeps.grid import Assignment, Axis, Condition, expand, holds, short, values_of
from scaling.sweeps.paths import METHOD_PATH, check_path, defaults
from scaling.sweeps.resources import Resources, update


@dataclass(frozen=True, kw_only=True, slots=True)
class Block:
    """A grid that is expanded by itself: base configuration, axes, exclusions, resources."""

    name: str
    base: Mapping[str, Any]
    axes: tuple[Axis, ...]
    exclude: tuple[Condition, ...] = ()
    resources: Resources = field(default_factory=Resources)
    resources_by: tuple[tuple[Condition, Mapping[str, Any], str], ...] = ()
    resources_last: tuple[tuple[Mapping[str, Any], str], ...] = ()
    places: Mapping[str, str] = field(default_factory=dict)

    def base_value(self, path: str) -> Any:
        """What the base (or the configuration's default) says for a path."""
        node: Any = self.base
        for part in path.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return defaults().get(path)
            node = node[part]
        return node

    def assignments(self) -> Iterator[Assignment]:
        """Every run of the block as configuration paths and values."""
        return expand(self.axes, exclude=self.exclude, base=self.base_value)

    def resources_for(self, chosen: Assignment) -> Resources:
        """Resources of one run: the block's, then each rule that applies, then what the command line said."""
        asked = self.resources
        for condition, changes, where in self.resources_by:
            if holds(condition, chosen, self.base_value):
                asked = update(asked, changes, where=where)
        for changes, where in self.resources_last:
            asked = update(asked, changes, where=where)
        return asked


def config_tree(block: Block, chosen: Assignment) -> tuple[dict[str, Any], dict[str, str]]:
    """The configuration of one run as plain data, and the places its keys came from."""
    tree = deep_copy(block.base)
    places = {path[len("base.") :]: place for path, place in block.places.items() if path.startswith("base.")}
    axis_places = {path: axis.where for axis in block.axes for path in axis.paths}
    for path, value in chosen.items():
        places[path] = axis_places[path]
        *parents, leaf = path.split(".")
        node = tree
        for part in parents:
            node = node.setdefault(part, {})
        if path == METHOD_PATH and node.get("method", "baseline") != value:
            _drop_foreign_options(node, str(value))
        node[leaf] = deep_copy(value)
    return tree, places


def _drop_foreign_options(residual: dict[str, Any], method: str) -> None:
    """Leave out options that only the base's method has; a misspelt one stays, to be refused."""
    every = {item.name for cls in METHODS.values() for item in fields(cls)}
    own = {item.name for item in fields(METHODS[method])} if method in METHODS else every
    for option in [key for key in residual if key in every - own]:
        del residual[option]


def build_block(
    name: str, tree: Mapping[str, Any], document: Document, prefix: str, settings: Sequence[tuple[str, Any, str]]
) -> Block:
    def where(path: str) -> str:
        return document.where(
            *([prefix + path] if prefix and _known(document, prefix + path) else []), path, prefix[:-1]
        )

    base = tree.get("base", {})
    if not isinstance(base, Mapping):
        raise GridError(f"{where('base')}: base must be a section of the configuration or the path of a YAML file")
    grid = tree.get("grid", {})
    if not isinstance(grid, Mapping):
        raise GridError(f"{where('grid')}: grid must be a section of axes, e.g. grid: {{lr: [1e-3, 3e-3]}}")
    base = deep_copy(base)
    axes = _axes(grid, where)
    last: list[tuple[Mapping[str, Any], str]] = []
    for path, value, text in settings:
        if path.startswith("resources."):
            last.append(({path.removeprefix("resources."): value}, text))
        elif path.split(".")[0] in RunConfig.__dataclass_fields__ and not _vary(axes, path, value, text):
            *parents, leaf = path.split(".")
            node = base
            for part in parents:
                node = node.setdefault(part, {})
            node[leaf] = value
    resources = dict(tree.get("resources") or {})
    rules = resources.pop("by", None) or []
    if not isinstance(rules, list):
        raise GridError(f"{where('resources.by')}: resources.by must be a list of {{when: ..., time: ...}}")
    by = []
    for index, rule in enumerate(rules):
        place = where(f"resources.by[{index}].when")
        if not isinstance(rule, Mapping) or "when" not in rule:
            raise GridError(f"{place}: resources.by[{index}] needs when, e.g. {{when: {{size: 1b}}, gpus: 8}}")
        rest = {key: value for key, value in rule.items() if key != "when"}
        by.append((_condition(rule["when"], place), rest, place))
    excluded = tree.get("exclude") or []
    if not isinstance(excluded, list):
        raise GridError(
            f"{where('exclude')}: exclude must be a list of conditions, e.g. [{{size: 1b, method: attnres}}]"
        )
    places = dict(document.places)
    places.update(
        {path[len(prefix) :]: at for path, at in document.places.items() if prefix and path.startswith(prefix)}
    )
    return Block(
        name=name,
        base=base,
        axes=tuple(axes),
        exclude=tuple(_condition(item, where("exclude")) for item in excluded),
        resources=update(Resources(), resources, where=where("resources")),
        resources_by=tuple(by),
        resources_last=tuple(last),
        places=places,
    )


def _known(document: Document, path: str) -> bool:
    while path:
        if path in document.places:
            return path.count(".") > 1
        path = path.rpartition(".")[0]
    return False


def _axes(grid: Mapping[str, Any], where: Callable[[str], str]) -> list[Axis]:
    axes: list[Axis] = []
    for path, tree in grid.items():
        place = where(f"grid.{path}")
        if path == "zip":
            for item in tree if isinstance(tree, list) else [tree]:
                axes.append(_zip(item, place))
        elif path == "cases":
            axes.append(_cases(tree, place))
        else:
            check_path(path, place)
            conditional = isinstance(tree, list) and tree and all(isinstance(t, Mapping) and "when" in t for t in tree)
            for item in tree if conditional else [tree]:
                condition = item.get("when") if isinstance(item, Mapping) else None
                values = values_of(item, path=path, where=place)
                axes.append(
                    Axis(
                        rows=tuple({path: value} for value in values),
                        when=_condition(condition, place) if condition is not None else {},
                        where=place,
                    )
                )
    return axes


def _zip(tree: Any, place: str) -> Axis:
    if not isinstance(tree, Mapping) or not set(tree) - {"when"}:
        raise GridError(f"{place}: zip must be a section of axes of equal length, e.g. zip: {{lr: [..], seed: [..]}}")
    columns = canonical_paths({key: value for key, value in tree.items() if key != "when"})
    values = {}
    for path, column in columns.items():
        check_path(path, place)
        values[path] = values_of(column, path=path, where=place)
    lengths = {short(path): len(column) for path, column in values.items()}
    if len(set(lengths.values())) != 1:
        raise GridError(f"{place}: zip needs axes of equal length, got {lengths}")
    rows = tuple(dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True))
    return Axis(rows=rows, when=_condition(tree["when"], place) if "when" in tree else {}, where=place)


def _cases(tree: Any, place: str) -> Axis:
    if not isinstance(tree, list) or not tree or not all(isinstance(case, Mapping) for case in tree):
        raise GridError(
            f"{place}: cases must be a list of sections, e.g. [{{method: baseline}}, {{method: mhar, H: 8}}]"
        )
    rows = []
    for case in tree:
        row = canonical_paths(case)
        for path, value in row.items():
            check_path(path, place)
            if isinstance(value, list):
                raise GridError(f"{place}: {short(path)} has a list in a case; a case is one combination")
        rows.append(row)
    return Axis(rows=tuple(rows), where=place)


def _condition(tree: Any, place: str) -> Condition:
    if not isinstance(tree, Mapping) or not tree:
        raise GridError(
            f"{place}: a condition is a section of axes and values, e.g. when: {{method: mhar}}; got {tree!r}"
        )
    condition = {}
    for path, allowed in canonical_paths(tree).items():
        check_path(path, place)
        condition[path] = tuple(allowed) if isinstance(allowed, list) else (allowed,)
    return condition


def _vary(axes: list[Axis], path: str, value: Any, text: str) -> bool:
    """Give the axes of ``path`` the values of a setting; ``False`` where no axis varies it."""
    found = False
    for index, axis in enumerate(axes):
        if path not in axis.paths:
            continue
        found = True
        values = values_of(value, path=path, where=text)
        if axis.paths == (path,):
            rows: tuple[Mapping[str, Any], ...] = tuple({path: item} for item in values)
        elif len(values) == 1:
            rows = tuple({**row, path: values[0]} if path in row else row for row in axis.rows)
            rows = tuple(row for position, row in enumerate(rows) if row not in rows[:position])
        else:
            raise GridError(f"{text}: {short(path)} is part of a zip or of cases, give one value or edit the file")
        axes[index] = Axis(rows=rows, when=axis.when, where=text if axis.paths == (path,) else axis.where)
    return found


def deep_copy(tree: Any) -> Any:
    if isinstance(tree, Mapping):
        return {key: deep_copy(value) for key, value in tree.items()}
    return [deep_copy(item) for item in tree] if isinstance(tree, (list, tuple)) else tree
