"""The run key: a versioned hash of what determines a run's result.

After ``config`` in the flow. A run folder is named by it, sweeps are reconciled by it, MLflow runs are found by it.
Paths, hardware and labels do not count; they are named one by one in ``EXCLUDED``, so that a new field counts unless
somebody decides otherwise.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import fields
from typing import Any, Final

from scaling.config.model import ModelConfig
from scaling.config.residual import Blocked, ResidualConfig
from scaling.config.tree import RunConfig, flatten, to_dict

VERSION: Final = 1  # raise it whenever the meaning of a key or of a default changes

EXCLUDED: Final = frozenset(
    {
        "model.size",
        "data.path",
        "data.micro_batch_size",
        "schedule.tokens_per_parameter",
        "schedule.parameters",
        "schedule.warmup_fraction",
        "evaluation.batch_size",
        "run.name",
        "run.sweep",
        "run.out",
        "run.log_every_steps",
        "run.system_metrics",
        "run.track",
        "run.checkpoint_every_steps",
        "run.checkpoint_every_minutes",
        "run.keep_checkpoints",
        "run.permanent_every_steps",
        "run.save_weights",
        "run.device",
        "run.threads",
        "run.compile",
        "run.parallel",
        "run.activation_checkpointing",
        "run.deterministic",
    }
)

KEY_HEX: Final = 16


def canonical(config: RunConfig) -> dict[str, Any]:
    """Flat mapping of every value that counts towards identity, dotted key -> JSON-able value, sorted by key."""
    flat = flatten(to_dict(config))
    return {key: flat[key] for key in sorted(flat) if key not in EXCLUDED}


def run_key(config: RunConfig) -> str:
    """Sixteen hex digits of SHA-256 over the format version and the canonical configuration.

    The configuration must be resolved (``scaling.resolve.resolve``): a key of an unresolved one would not be the key of
    the run that it becomes.
    """
    assert config.schedule.steps is not None and config.schedule.warmup_steps is not None, "resolve the config first"
    text = json.dumps([VERSION, canonical(config)], sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(text.encode("ascii")).hexdigest()[:KEY_HEX]


def label(config: RunConfig) -> str:
    """A name that a person can read: size, method with every option that is not at its default, learning rate, seed.

    >>> from scaling.config.residual import Msar
    >>> _method(Msar(streams=2, block_sublayers=4, mixer="mean", convolution=False))
    'msar-S4-m2-no_convolution-mixer_mean'
    """
    model = config.model
    experts = f"-moe{model.moe.num_experts}" if model.moe is not None else ""
    rest = f"kv{model.num_kv_heads}-lr{config.optimizer.lr:g}-s{config.run.seed}"
    return f"{size_label(model)}{experts}-{_method(model.residual)}-{rest}"


# The papers' letters; options without one go by their name.
_LETTERS: Final = {"block_sublayers": "S", "num_blocks": "N", "streams": "m"}


def _method(residual: ResidualConfig) -> str:
    heads = getattr(residual, "heads", None)
    words = [residual.method] + ([f"h{heads}"] if heads is not None else [])
    for option, value in _changed(residual):
        name = _LETTERS.get(option, option)
        if isinstance(value, bool):
            words.append(name if value else f"no_{name}")
        elif isinstance(value, tuple):
            words.append(name + "x".join(map(str, value)))
        else:
            words.append(f"{name}_{value}" if isinstance(value, str) else f"{name}{value}")
    return "-".join(words)


def size_label(model: ModelConfig) -> str:
    """The size's name, or width and depth where a configuration gives the shape without a name."""
    return model.size or f"d{model.d_model}-L{model.num_layers}"


def variant(options: ResidualConfig) -> str:
    """Options of a residual method that differ from its defaults, the number of heads apart; empty where none does.

    >>> from scaling.config.residual import Msar
    >>> variant(Msar(streams=2, mixer="mean")), variant(Msar(num_blocks=8))
    ('streams=2, mixer=mean', '')
    """
    usual = ("num_blocks", options.default_blocks) if isinstance(options, Blocked) else None
    return ", ".join(
        f"{name}={value if isinstance(value, str) else json.dumps(value)}"
        for name, value in _changed(options)
        if (name, value) != usual
    )


def _changed(options: ResidualConfig) -> Iterator[tuple[str, Any]]:
    """Names and values of options that are not at their default, the number of heads apart, in order."""
    for item in fields(options):
        value = getattr(options, item.name)
        if item.name != "heads" and value != item.default:
            yield item.name, value
