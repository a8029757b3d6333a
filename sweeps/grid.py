"""From axes to assignments: the product of lists, ranges and draws, with conditions and exclusions.

First module of the sweeps: ``spec`` reads a file into ``Axis`` objects, this expands them, ``plan`` turns each
assignment into a run. Pure functions of their arguments; standard library only.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from scaling.errors import GridError, nearest

ALIASES: Final[dict[str, str]] = {
    "method": "model.residual.method",
    "size": "model.size",
    "H": "model.residual.heads",
    "kv": "model.num_kv_heads",
    "lr": "optimizer.lr",
    "seed": "run.seed",
}
SHORT: Final[dict[str, str]] = {path: alias for alias, path in ALIASES.items()}

SIGNIFICANT_DIGITS: Final = 4  # of ranges and draws: enough for any sweep, and names stay readable
MAX_VALUES: Final = 100_000  # of an axis; more is a slip of the keyboard, and would fill the memory

_GENERATORS: Final = (
    "values",
    "range",
    "linear",
    "log",
    "half_decades",
    "uniform",
    "log_uniform",
    "integers",
    "choice",
)
_DRAWS: Final = ("uniform", "log_uniform", "integers", "choice")

Assignment = dict[str, Any]
Condition = Mapping[str, tuple[Any, ...]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Axis:
    """One axis: each row sets some configuration paths (one for a plain axis, several for a zip or for cases).

    The axis counts only where ``when`` holds; elsewhere its paths keep what the base says. ``where`` is file and line.
    """

    rows: tuple[Mapping[str, Any], ...]
    when: Condition = field(default_factory=dict)
    where: str = ""

    @property
    def paths(self) -> tuple[str, ...]:
        """Every path that some row sets, in the order they were written."""
        return tuple(dict.fromkeys(path for row in self.rows for path in row))


def expand(
    axes: Sequence[Axis], *, exclude: Sequence[Condition] = (), base: Callable[[str], Any] = lambda path: None
) -> Iterator[Assignment]:
    """Every assignment of the axes' product, in the order of the axes (the last one varies fastest).

    Parameters
    ----------
    axes
        Axes in the order they were written; a conditional axis is moved behind those that its condition names.
    exclude
        Assignments that fulfil any of these are left out.
    base
        Value of a configuration path that no axis sets, for conditions on it.

    Raises
    ------
    GridError
        If two axes set the same path under the same condition, or conditions go round in a circle.
    """
    ordered = _order(axes)

    def walk(position: int, chosen: Assignment) -> Iterator[Assignment]:
        if position == len(ordered):
            if not any(holds(condition, chosen, base) for condition in exclude):
                yield chosen
            return
        axis = ordered[position]
        if axis.when and not holds(axis.when, chosen, base):
            yield from walk(position + 1, chosen)
            return
        for row in axis.rows:
            for path in row:
                if path in chosen:
                    raise GridError(
                        f"{axis.where}: two axes set {short(path)} in one run; give them differing conditions"
                    )
            yield from walk(position + 1, {**chosen, **row})

    yield from walk(0, {})


def holds(condition: Condition, chosen: Mapping[str, Any], base: Callable[[str], Any]) -> bool:
    """Whether every path of the condition has one of the values named for it."""
    for path, allowed in condition.items():
        value = _lookup(path, chosen, base)
        if not any(_same(value, item) for item in allowed):
            return False
    return True


def _lookup(path: str, chosen: Mapping[str, Any], base: Callable[[str], Any]) -> Any:
    """The value of a path: set by an axis, inside a section that an axis sets whole, or the base's."""
    if path in chosen:
        return chosen[path]
    section, _, leaf = path.rpartition(".")
    if isinstance(chosen.get(section), Mapping):
        return chosen[section].get(leaf)
    return base(path)


def _same(value: Any, wanted: Any) -> bool:
    return bool(value == wanted) and isinstance(value, bool) is isinstance(wanted, bool)


def short(path: str) -> str:
    """The alias of a path where it has one: ``optimizer.lr`` -> ``lr``."""
    return SHORT.get(path, path)


def describe(chosen: Mapping[str, Any]) -> str:
    """``size=50k method=mhar H=4 seed=0``."""
    words = [f"{short(p)}={v:g}" if isinstance(v, float) else f"{short(p)}={v}" for p, v in chosen.items()]
    return " ".join(words) or "(no axes)"


def _order(axes: Sequence[Axis]) -> list[Axis]:
    """Axes with every condition's paths before it; otherwise as written."""
    pending, placed = list(axes), list[Axis]()
    while pending:
        waiting = {path for axis in pending for path in axis.paths}
        ready = next((a for a in pending if not (set(a.when) & (waiting - set(a.paths)))), None)
        if ready is None:
            names = ", ".join(short(path) for axis in pending for path in axis.paths)
            raise GridError(f"{pending[0].where}: the conditions of {names} depend on each other in a circle")
        if set(ready.when) & set(ready.paths):
            raise GridError(f"{ready.where}: the axis {short(ready.paths[0])} is conditional on itself")
        pending.remove(ready)
        placed.append(ready)
    return placed


def values_of(tree: Any, *, path: str, where: str) -> tuple[Any, ...]:
    """The values that an axis's description stands for.

    >>> values_of([1, 2], path="run.seed", where="x")
    (1, 2)
    >>> values_of({"half_decades": [1e-4, 1e-2]}, path="optimizer.lr", where="x")
    (0.0001, 0.0003, 0.001, 0.003, 0.01)
    >>> values_of({"log": [1e-3, 1e-1], "num": 3}, path="optimizer.lr", where="x")
    (0.001, 0.01, 0.1)
    >>> values_of({"range": [0, 2]}, path="run.seed", where="x")
    (0, 1, 2)

    Raises
    ------
    GridError
        If the description is none of those listed in ``scaling.sweeps.spec``.
    """
    if isinstance(tree, list):
        return _checked(tree, where, path)
    if not isinstance(tree, Mapping):
        return (tree,)
    kinds = [key for key in tree if key in _GENERATORS]
    if len(kinds) != 1:
        unknown = next((key for key in tree if key not in (*_GENERATORS, "num", "step", "draws", "seed", "when")), None)
        if unknown is not None:
            raise GridError(f"{where}: unknown key {unknown!r} in axis {short(path)}; {nearest(unknown, _GENERATORS)}")
        raise GridError(f"{where}: axis {short(path)} needs exactly one of {', '.join(_GENERATORS)}")
    kind = kinds[0]
    extra = {"linear": {"num"}, "log": {"num"}, "range": {"step"}}.get(kind, set())
    if kind in _DRAWS:
        extra = {"draws", "seed"}
    for key in tree:
        if key not in (kind, "when", *extra):
            raise GridError(f"{where}: key {key!r} does not go with {kind!r} in axis {short(path)}; "
                            f"{nearest(str(key), {kind, 'when', *extra})}")  # fmt: skip
    if kind == "values":
        if not isinstance(tree["values"], list):
            raise GridError(f"{where}: values of axis {short(path)} must be a list, got {tree['values']!r}")
        return _checked(tree["values"], where, path)
    if kind in _DRAWS:
        return _draw(kind, tree, path, where)
    low, high = _bounds(tree[kind], kind, path, where)
    if kind == "range":
        step = _count(tree.get("step", 1), "step", path, where)
        if not (isinstance(low, int) and isinstance(high, int)):
            raise GridError(f"{where}: range of axis {short(path)} takes whole numbers [first, last]; use linear")
        _few((high - low) // step + 1, path, where)
        return tuple(range(low, high + 1, step))
    if kind != "linear" and low <= 0:
        raise GridError(f"{where}: {kind} of axis {short(path)} needs positive bounds, got {low}")
    if kind == "half_decades":
        return _half_decades(low, high, path, where)
    if "num" not in tree:
        raise GridError(f"{where}: {kind} of axis {short(path)} needs num, how many values from {low} to {high}")
    num = _few(_count(tree["num"], "num", path, where), path, where)
    if num == 1:
        return (_rounded(float(low)),)
    share = [i / (num - 1) for i in range(num)]
    if kind == "linear":
        return tuple(_rounded(low + (high - low) * s) for s in share)
    return tuple(_rounded(math.exp(math.log(low) + math.log(high / low) * s)) for s in share)


def _checked(values: Sequence[Any], where: str, path: str) -> tuple[Any, ...]:
    if not values:
        raise GridError(f"{where}: axis {short(path)} has no values; give some or remove it")
    return tuple(values)


def _draw(kind: str, tree: Mapping[str, Any], path: str, where: str) -> tuple[Any, ...]:
    """Seeded draws: a function of (seed, path) alone, and more draws keep the first ones."""
    if "draws" not in tree:
        raise GridError(f"{where}: {kind} of axis {short(path)} needs draws, how many values to draw")
    count = _few(_count(tree["draws"], "draws", path, where), path, where)
    seed = tree.get("seed", 0)
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise GridError(f"{where}: seed of axis {short(path)} must be a whole number, got {seed!r}")
    stream = random.Random(f"{seed}:{path}")
    if kind == "choice":
        options = tree["choice"]
        if not isinstance(options, list) or not options:
            raise GridError(f"{where}: choice of axis {short(path)} must be a list of values")
        return tuple(options[stream.randrange(len(options))] for _ in range(count))
    low, high = _bounds(tree[kind], kind, path, where)
    if kind == "integers":
        return tuple(stream.randint(int(low), int(high)) for _ in range(count))
    if kind == "uniform":
        return tuple(_rounded(stream.uniform(low, high)) for _ in range(count))
    if low <= 0:
        raise GridError(f"{where}: log_uniform of axis {short(path)} needs positive bounds, got {low}")
    return tuple(_rounded(math.exp(stream.uniform(math.log(low), math.log(high)))) for _ in range(count))


def _bounds(pair: Any, kind: str, path: str, where: str) -> tuple[Any, Any]:
    numbers = isinstance(pair, list) and len(pair) == 2
    if not numbers or not all(isinstance(x, (int, float)) and not isinstance(x, bool) for x in pair):
        raise GridError(f"{where}: {kind} of axis {short(path)} takes [first, last], two numbers; got {pair!r}")
    if pair[0] > pair[1]:
        raise GridError(f"{where}: {kind} of axis {short(path)} goes down from {pair[0]} to {pair[1]}; swap them")
    return pair[0], pair[1]


def _count(value: Any, name: str, path: str, where: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise GridError(f"{where}: {name} of axis {short(path)} must be a positive whole number, got {value!r}")
    return value


def _few(count: int, path: str, where: str) -> int:
    if count > MAX_VALUES:
        raise GridError(f"{where}: axis {short(path)} has {count:,} values; allowed: up to {MAX_VALUES:,}")
    return count


def _half_decades(low: float, high: float, path: str, where: str) -> tuple[float, ...]:
    """1 and 3 times powers of ten from ``low`` to ``high``, both of that form."""
    grid = [_rounded(mantissa * 10.0**power) for power in range(-20, 21) for mantissa in (1, 3)]
    for bound in (low, high):
        if not any(math.isclose(bound, point, rel_tol=1e-9) for point in grid):
            raise GridError(f"{where}: half_decades of axis {short(path)} go from and to 1 or 3 times a power of ten, "
                            f"e.g. [1e-4, 3e-3]; got {bound:g}; or use log with num")  # fmt: skip
    chosen = tuple(point for point in grid if low * (1 - 1e-9) <= point <= high * (1 + 1e-9))
    return chosen


def _rounded(value: float) -> float:
    return float(f"{value:.{SIGNIFICANT_DIGITS}g}")
