"""A sweep's file: which runs, from which base, with what resources. Strict: errors name file, line and nearest key.

Second in the flow of the sweeps: ``grid`` expands its axes, ``plan`` makes runs of it. The whole grammar::

    name: width_study              # default: the file's name
    description: one line for people
    extends: mhar_main             # a preset or a file; this file is put over it (see below)
    out: runs                      # folder of the run folders (--out overrides it)
    base:                          # the configuration every run starts from (or: base: train.yaml)
      data: {path: store, seq_len: 1024, batch_size: 32}
      schedule: {tokens_per_parameter: 20}
    grid:                          # the product of all axes
      size: [50k, 160k, 500k]              # a list
      method: [baseline, attnres, mhar]
      H: {when: {method: mhar}, values: [1, 2, 4, 8]}       # only where the condition holds
      kv:                                                   # several conditions: a list of them
        - {when: {size: [50k]}, values: [1, 3]}
        - {when: {size: [160k, 500k]}, values: [1]}
      lr: {half_decades: [1e-4, 1e-2]}     # 1e-4, 3e-4, 1e-3, 3e-3, 1e-2
      optimizer.weight_decay: {log: [0.01, 1.0], num: 5}    # evenly in the logarithm, both ends included
      optimizer.beta2: {linear: [0.9, 0.99], num: 4}        # evenly, both ends included
      seed: {range: [0, 2]}                # 0, 1, 2 (whole numbers, last one included; step: 2 for every second)
      optimizer.z_loss: {log_uniform: [1e-5, 1e-3], draws: 4, seed: 7}   # random; also uniform, integers, choice
      zip:                                 # axes that go together, value by value (a list of such for several zips)
        data.batch_size: [32, 64]
        schedule.warmup_steps: [100, 50]
      cases:                               # an axis of named combinations; what a case leaves out stays as in base
        - {model.d_model: 512}
        - {model.d_model: 768, model.num_heads: 12}
    exclude:                       # runs that fulfil all conditions of an entry are left out
      - {size: 500k, method: attnres}
      - {H: [1, 2], seed: [1, 2]}
    blocks:                        # grids beside each other: each takes all above, puts its own keys over it, and is
      paired: {grid: {seed: [0, 1, 2]}}                     # expanded by itself
      wide: {base: {model: {size: 100m, d_model: 768}}, grid: {size: null}, resources: {time: 4h}}
    duplicates: refuse             # one run twice: refuse (default) and show both, or merge
    resources:
      time: 4:00:00                # of a job: minutes, HH:MM:SS, D-HH:MM:SS, 90m, 4h
      gpus: 1                      # of a run, on each node; more than one: the run is trained over all of them
      nodes: 1
      cpus: 8                      # of the job on each node
      memory: 64G                  # of the job on each node
      runs_per_gpu: 1              # small runs that share a GPU at the same time
      runs_per_job: 1              # runs in one job, one after another where they do not fit beside each other
      signal: 120                  # seconds before the limit at which a run is asked to save itself
      max_requeues: 20             # how often Slurm may start a job again
      sbatch: {constraint: h100}   # any other option of sbatch, as it is
      by:                          # other resources where a condition holds; later entries win
        - {when: {size: [350m, 1b]}, gpus: 8, time: 1-00:00:00}
    throttle: 64                   # jobs of this sweep that run at the same time
    price_per_gpu_hour: 2.5        # for the cost in `sweep plan`

Axes are paths of the configuration (``optimizer.lr``) or the short names ``method``, ``size``, ``H``, ``kv``, ``lr``,
``seed``. A condition (``when``, ``exclude``) asks what the run's other axes, or else its base, say; a list allows any
of its values. Where an axis changes the residual method, options of the base that the new method does not have are
left out. Ranges and draws are rounded to four significant digits; draws depend on their ``seed`` and their axis
alone, and asking for more keeps the first ones. With ``extends`` (and for blocks) mappings are merged key by key, an
axis is replaced whole, ``exclude`` and ``resources.by`` add up, ``null`` takes a key away, anything else is replaced.

What belongs to a site and not to an experiment (partition, account, set-up lines) is in the site profile
(``scaling.sweeps.site``).
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, Literal

from scaling.errors import GridError, nearest
from scaling.sweeps.block import Block, build_block
from scaling.sweeps.document import Document, locate, merge, read, settings_of
from scaling.sweeps.grid import short
from scaling.sweeps.paths import check_path, sections
from scaling.sweeps.resources import update

KEYS: Final = (
    "name", "description", "extends", "out", "base", "grid", "exclude", "blocks", "duplicates", "resources", "throttle",
    "price_per_gpu_hour",
)  # fmt: skip
BLOCK_KEYS: Final = ("base", "grid", "exclude", "resources")


@dataclass(frozen=True, kw_only=True, slots=True)
class SweepSpec:
    """A sweep's file, read and checked; ``tree`` is what it amounts to after ``extends`` and ``--set``."""

    name: str
    source: str
    description: str
    blocks: tuple[Block, ...]
    out: str | None
    duplicates: Literal["refuse", "merge"]
    throttle: int | None
    price_per_gpu_hour: float | None
    tree: Mapping[str, Any]


def load_spec(path: str | Path, settings: Sequence[str] = ()) -> SweepSpec:
    """Read a sweep from a file or preset.

    Parameters
    ----------
    path
        A file, or the name of a preset.
    settings
        ``key=value`` texts. A path or short name of an axis gives that axis these values wherever it is varied, any
        other path of the configuration goes into every base, ``resources.time`` and the like win over all rules.

    Raises
    ------
    GridError, ConfigError
        If the file is not a valid sweep; the text names the file, the line, what is wrong and what is allowed.
    """
    file = locate(str(path))
    document = read(file)
    return build_spec(document, default_name=file.stem, settings=settings)


def build_spec(document: Document, *, default_name: str, settings: Sequence[str] = ()) -> SweepSpec:
    """Check plain data and make a ``SweepSpec`` of it; see ``load_spec``."""
    tree = document.tree
    for key in tree:
        if key not in KEYS:
            raise GridError(f"{document.where(key)}: unknown key {key!r}; {nearest(key, KEYS)}")
    name = str(tree.get("name", default_name))
    if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
        raise GridError(f"{document.where('name')}: name={name!r}; allowed: letters, digits, '.', '_', '-'")
    duplicates = tree.get("duplicates", "refuse")
    if duplicates not in ("refuse", "merge"):
        raise GridError(f"{document.where('duplicates')}: duplicates={duplicates!r}; allowed: refuse, merge")
    throttle = tree.get("throttle")
    if throttle is not None and (not isinstance(throttle, int) or isinstance(throttle, bool) or throttle < 1):
        raise GridError(f"{document.where('throttle')}: throttle={throttle!r} must be a positive whole number")
    price = tree.get("price_per_gpu_hour")
    if price is not None and (not isinstance(price, (int, float)) or isinstance(price, bool) or price < 0):
        raise GridError(f"{document.where('price_per_gpu_hour')}: price_per_gpu_hour={price!r} must be a number")
    parsed = settings_of(settings)
    shared = {key: tree[key] for key in BLOCK_KEYS if tree.get(key) is not None}
    named = tree.get("blocks")
    if named is None:
        blocks = [build_block(name, shared, document, "", parsed)]
    elif not isinstance(named, Mapping) or not named:
        raise GridError(
            f"{document.where('blocks')}: blocks must be named sections, e.g. blocks: {{main: {{grid: ...}}}}"
        )
    else:
        blocks = []
        for block_name, own in named.items():
            prefix = f"blocks.{block_name}."
            own = {} if own is None else own
            if not isinstance(own, Mapping):
                raise GridError(f"{document.where(prefix[:-1])}: block {block_name!r} must be a section of keys")
            for key in own:
                if key not in BLOCK_KEYS:
                    place = document.where(prefix + key)
                    raise GridError(f"{place}: unknown key {key!r} in block {block_name!r}; {nearest(key, BLOCK_KEYS)}")
            blocks.append(build_block(str(block_name), merge(shared, own), document, prefix, parsed))
    _check_settings(parsed, blocks)
    out = tree.get("out")
    return SweepSpec(
        name=name,
        source=document.source,
        description=str(tree.get("description", "")),
        blocks=tuple(blocks),
        out=None if out is None else str(out),
        duplicates=duplicates,
        throttle=throttle,
        price_per_gpu_hour=None if price is None else float(price),
        tree={**tree, "name": name},
    )


def _check_settings(settings: Sequence[tuple[str, Any, str]], blocks: Sequence[Block]) -> None:
    for path, value, text in settings:
        if path.startswith("resources."):
            update(blocks[0].resources, {path.removeprefix("resources."): value}, where=text)
            continue
        check_path(path, text)
        varied = any(path in axis.paths for block in blocks for axis in block.axes)
        if isinstance(value, (list, Mapping)) and not varied and path not in sections():
            raise GridError(f"{text}: no axis varies {short(path)}; give one value, or add the axis to grid")
