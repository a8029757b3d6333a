"""The whole configuration of one run, and its plain-dictionary form.

``RunConfig`` is what ``scaling train`` reads, a sweep expands into, the run folder stores and the run key hashes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields, is_dataclass
from typing import Any

from scaling.config.model import ModelConfig
from scaling.config.residual import ResidualConfig
from scaling.config.training import (
    DataConfig,
    EvaluationConfig,
    OptimizerConfig,
    PrecisionConfig,
    RunSettings,
    ScheduleConfig,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class RunConfig:
    """One training run: model, data, optimiser, schedule, precision, evaluation, run settings."""

    model: ModelConfig
    data: DataConfig = field(default_factory=DataConfig)
    optimizer: OptimizerConfig = field(default_factory=OptimizerConfig)
    schedule: ScheduleConfig = field(default_factory=ScheduleConfig)
    precision: PrecisionConfig = field(default_factory=PrecisionConfig)
    evaluation: EvaluationConfig = field(default_factory=EvaluationConfig)
    run: RunSettings = field(default_factory=RunSettings)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain dictionary of a configuration section, ready for JSON or YAML; inverse of ``strict.build``."""
    plain: dict[str, Any] = {"method": config.method} if isinstance(config, ResidualConfig) else {}
    for item in fields(config):
        plain[item.name] = _plain(getattr(config, item.name))
    return plain


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        return to_dict(value)
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def flatten(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` -> ``{"a.b": 1}``; mappings that are empty or ``None`` stay as leaves."""
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        path = f"{prefix}{key}"
        if isinstance(value, Mapping) and value:
            flat.update(flatten(value, f"{path}."))
        else:
            flat[path] = value
    return flat
