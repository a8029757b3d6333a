"""From a sweep's file to its runs: configuration, key, cost in parameters, tokens, FLOPs and bytes.

After ``spec`` in the flow; everything later (``local``, ``submit``, ``status``) works on the ``Plan``. No torch: ten
thousand runs are planned in under two seconds, because sections of the configuration that many runs share are built
once.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

from scaling.accounting import count_flops, count_parameters, estimate_memory
from scaling.config.strict import build
from scaling.config.tree import RunConfig, flatten, to_dict
from scaling.errors import ConfigError, GridError
from scaling.identity import EXCLUDED, KEY_HEX, VERSION, label, run_key
from scaling.resolve import resolve
from scaling.sweeps.block import Block, config_tree
from scaling.sweeps.grid import Assignment, describe, short
from scaling.sweeps.resources import Resources
from scaling.sweeps.spec import SweepSpec

DEFAULT_OUT = "runs"
MAX_RUNS = 200_000  # of a sweep: ten times what is planned in seconds; more is a slip of the keyboard


@dataclass(frozen=True, kw_only=True, slots=True)
class PlannedRun:
    """One run of a sweep: what it is (resolved configuration and key) and what it costs."""

    key: str
    label: str
    block: str
    assignment: Mapping[str, Any]
    config: RunConfig
    resources: Resources
    parameters: int
    parameters_non_embedding: int
    tokens: int
    flops: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """All runs of a sweep, the largest first, and the folder their run folders are in."""

    spec: SweepSpec
    out: Path
    runs: tuple[PlannedRun, ...]
    merged: int = 0

    @property
    def by_key(self) -> dict[str, PlannedRun]:
        return {run.key: run for run in self.runs}

    @property
    def sweep_folder(self) -> Path:
        """Where the sweep keeps what belongs to no single run: submissions, scripts, logs, code snapshots."""
        return self.out / "_sweeps" / self.spec.name


def plan(spec: SweepSpec, out: Path | None = None) -> Plan:
    """Expand a sweep into runs.

    Parameters
    ----------
    spec
        The sweep, from ``load_spec``.
    out
        Folder of the run folders; default: what the sweep's file says, else ``runs``.

    Raises
    ------
    GridError
        If a run's configuration is not valid (the text says which run and where its values come from), if one run
        appears twice and ``duplicates`` is ``refuse``, or if no run is left.
    """
    folder = out if out is not None else Path(spec.out or DEFAULT_OUT)
    runs: dict[str, PlannedRun] = {}
    merged = 0
    for block in spec.blocks:
        for run in _runs(block, spec, folder):
            if run.key not in runs:
                runs[run.key] = run
            elif spec.duplicates == "merge":
                merged += 1
            else:
                first = runs[run.key]
                raise GridError(
                    f"{spec.source}: one run appears twice (key {run.key}): {_origin(first)} and {_origin(run)}; "
                    "change or exclude one of them, or say `duplicates: merge`"
                )
            if len(runs) > MAX_RUNS:
                raise GridError(f"{spec.source}: more than {MAX_RUNS:,} runs; take values out of the grid, or split it")
    if not runs:
        raise GridError(f"{spec.source}: no run is left after exclusions; widen the grid")
    ordered = sorted(runs.values(), key=lambda run: -run.flops)
    return Plan(spec=spec, out=folder, runs=tuple(ordered), merged=merged)


def _origin(run: PlannedRun) -> str:
    return f"[{run.block}] {describe(run.assignment)}"


def _runs(block: Block, spec: SweepSpec, out: Path) -> Iterator[PlannedRun]:
    builder = _Builder(block, spec, out)
    for chosen in block.assignments():
        try:
            yield builder.run(chosen)
        except ConfigError as error:
            raise GridError(f"{error} (run: {describe(chosen)}){_advice(str(error), chosen)}") from None


def _advice(error: str, chosen: Assignment) -> str:
    """What to do where an axis gives an option to methods that do not have it."""
    for path in chosen:
        if path.startswith("model.residual.") and f"unknown key {path!r}" in error:
            return f"; give the axis a condition: {short(path)}: {{when: {{method: ...}}, values: [...]}}"
    return ""


class _Builder:
    """Builds the runs of one block; remembers sections, counts and pieces of keys, which many runs share."""

    def __init__(self, block: Block, spec: SweepSpec, out: Path) -> None:
        self.block, self.spec, self.out = block, spec, out
        self.sections: dict[str, Any] = {}
        self.resolved: dict[tuple[int, ...], RunConfig] = {}
        self.costs: dict[Any, Any] = {}
        self.texts: dict[int, str] = {}
        self.kept: list[Any] = []  # objects whose id() is a key above
        self.hints = get_type_hints(RunConfig)
        self.names = [item.name for item in fields(RunConfig)]
        for path in block.base:
            if path not in self.names:  # let the strict loader say what is wrong
                build(RunConfig, dict(block.base), source=spec.source, lines=config_tree(block, {})[1])

    def run(self, chosen: Assignment) -> PlannedRun:
        config = self._config(chosen)
        model, data = config.model, config.data
        counts, flops = self._remember(
            ("counts", id(model), data.seq_len),
            lambda: (count_parameters(model), count_flops(model, data.seq_len)),
        )
        memory = self._remember(
            ("memory", id(model), id(data), id(config.precision), config.optimizer.ema_decay,
             config.run.activation_checkpointing, config.run.parallel),
            lambda: estimate_memory(config),
        )  # fmt: skip
        resources = self.block.resources_for(chosen)
        if resources.distributed and config.run.parallel == "none":
            raise ConfigError(
                f"{self.spec.source}: resources gpus={resources.gpus} nodes={resources.nodes} train one run on several "
                "devices, but run.parallel=none; set base.run.parallel to ddp or fsdp2, or gpus: 1"
            )
        assert config.schedule.steps is not None
        tokens = config.schedule.steps * data.tokens_per_step
        return PlannedRun(
            key=self._key(config),
            label=label(config),
            block=self.block.name,
            assignment=chosen,
            config=config,
            resources=resources,
            parameters=counts.total,
            parameters_non_embedding=counts.non_embedding,
            tokens=tokens,
            flops=float(flops.training) * tokens,
            memory_bytes=int(memory.total),
        )

    def _remember(self, key: Any, make: Any) -> Any:
        if key not in self.costs:
            self.costs[key] = make()
        return self.costs[key]

    def _config(self, chosen: Assignment) -> RunConfig:
        parts = {name: self._section(name, chosen) for name in self.names}
        identity = (id(parts["model"]), id(parts["data"]), id(parts["schedule"]))
        if identity not in self.resolved:
            self.resolved[identity] = resolve(RunConfig(**parts))
        resolved = self.resolved[identity]
        return RunConfig(**{**parts, "data": resolved.data, "schedule": resolved.schedule})

    def _section(self, name: str, chosen: Assignment) -> Any:
        own = {path: value for path, value in chosen.items() if path == name or path.startswith(f"{name}.")}
        key = f"{name} {own!r}"
        if key not in self.sections:
            tree, places = config_tree(self.block, own)
            section = build(self.hints[name], tree.get(name) or {}, path=name, source=self.spec.source, lines=places)
            if name == "run":
                section = replace(section, sweep=self.spec.name, out=str(self.out))
            self.sections[key] = section
        return self.sections[key]

    def _key(self, config: RunConfig) -> str:
        """``identity.run_key``, from remembered pieces: sections sort by name, so their texts can be joined."""
        pieces = [self._text(name, getattr(config, name)) for name in sorted(self.names)]
        text = f"[{VERSION},{{{','.join(piece for piece in pieces if piece)}}}]"
        key = hashlib.sha256(text.encode("ascii")).hexdigest()[:KEY_HEX]
        if not self.kept or len(self.texts) != self.costs.get("checked"):  # a new piece: hold it against the definition
            assert key == run_key(config), "pieces of run keys no longer add up to identity.run_key"
            self.costs["checked"] = len(self.texts)
        return key

    def _text(self, name: str, section: Any) -> str:
        if id(section) not in self.texts:
            flat = flatten({name: to_dict(section)})
            counted = {path: flat[path] for path in sorted(flat) if path not in EXCLUDED}
            self.texts[id(section)] = json.dumps(counted, sort_keys=True, separators=(",", ":"), ensure_ascii=True)[
                1:-1
            ]
            self.kept.append(section)
        return self.texts[id(section)]


def sizes(runs: Sequence[PlannedRun]) -> dict[str, int]:
    """How many runs there are of each size label, largest first."""
    return dict(Counter(run.config.model.size or f"d{run.config.model.d_model}" for run in runs))
