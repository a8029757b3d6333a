"""The run key: pinned literals, and what does and does not count."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.config.strict import apply_settings, build
from scaling.config.tree import RunConfig, flatten, to_dict
from scaling.errors import ConfigError, DataError
from scaling.identity import EXCLUDED, canonical, label, run_key
from scaling.resolve import resolve

BASE: dict[str, Any] = {
    "model": {"size": "500k"},
    "data": {"fingerprint": "f0"},
    "schedule": {"steps": 100, "warmup_steps": 5},
}


def config(*settings: str) -> RunConfig:
    return resolve(build(RunConfig, apply_settings(BASE, settings)))


# Literal keys of format version 1. A change here means that every finished run of every user is no longer recognised:
# raise scaling.identity.VERSION on purpose, never by accident.
PINNED = {
    (): "bf60819813262557",
    ("model.residual.method=mhar",): "c4e43b3033613d1d",
    ("model.residual.method=mhar", "model.residual.heads=4", "run.seed=3"): "c896a0e6475abbfb",
    ("optimizer.lr=3e-4", "precision.mode=fp32"): "7cc60d9b4da10426",
}


@pytest.mark.parametrize(("settings", "key"), PINNED.items())
def test_pinned_keys(settings: tuple[str, ...], key: str) -> None:
    assert run_key(config(*settings)) == key


def test_excluded_names_exist() -> None:
    assert set(flatten(to_dict(config()))) >= EXCLUDED - {"data.weights"}


@pytest.mark.parametrize(
    "setting",
    [
        "run.name=x",
        "run.out=elsewhere",
        "data.micro_batch_size=4",
        "run.device=cpu",
        "run.compile=true",
        "run.threads=3",
    ],
)
def test_labels_paths_and_hardware_do_not_count(setting: str) -> None:
    assert run_key(config(setting)) == run_key(config())


def test_every_other_field_counts() -> None:
    flat = canonical(config())
    keys = {run_key(config())}
    kept = {"model.num_heads", "model.num_kv_heads", "model.d_model"}  # one cannot change without another

    def changed(value: bool | int | float) -> bool | int | float:
        if isinstance(value, bool):
            return not value
        if isinstance(value, int):
            return value + 2 if value % 2 == 0 else value * 2
        return value / 2 if value else 0.5

    counted = {name: value for name, value in flat.items() if isinstance(value, (int, float)) and name not in kept}
    for name, value in counted.items():
        keys.add(run_key(config(f"{name}={str(changed(value)).lower()}")))
    assert len(keys) == 1 + len(counted)


def test_size_by_name_or_by_shape_is_the_same_run() -> None:
    named = config()
    shape = {k: v for k, v in to_dict(named)["model"].items() if k != "size"}
    spelled = resolve(build(RunConfig, {**BASE, "model": shape}))
    assert run_key(named) == run_key(spelled)
    assert label(named) != label(spelled)


def test_order_of_keys_does_not_matter() -> None:
    turned = {key: BASE[key] for key in reversed(BASE)}
    assert run_key(resolve(build(RunConfig, turned))) == run_key(config())


@given(seeds=st.sets(st.integers(0, 10_000), min_size=2, max_size=50))
def test_different_seeds_have_different_keys(seeds: set[int]) -> None:
    base = config()
    keys = {run_key(replace(base, run=replace(base.run, seed=seed))) for seed in seeds}
    assert len(keys) == len(seeds)


def test_resolving_twice_changes_nothing_and_steps_follow_tokens() -> None:
    tree = {**BASE, "schedule": {"tokens_per_parameter": 20, "warmup_fraction": 0.1}}
    once = resolve(build(RunConfig, tree))
    assert resolve(once) == once
    assert once.schedule.steps is not None and once.schedule.warmup_steps == round(0.1 * once.schedule.steps)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        ({}, "give steps or tokens_per_parameter"),
        ({"steps": 5, "tokens_per_parameter": 2.0}, "not both"),
        ({"steps": 5, "warmup_steps": 6}, "warmup_steps=6 exceeds schedule.steps=5"),
    ],
)
def test_schedules_that_contradict_themselves(schedule: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        resolve(build(RunConfig, {**BASE, "schedule": schedule}))


def test_the_store_must_be_the_one_named(tmp_path: Path) -> None:
    (tmp_path / "meta.json").write_text('{"fingerprint": "other"}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"data\.fingerprint=f0 but the store at .* has other"):
        config(f"data.path={tmp_path}")
    (tmp_path / "meta.json").write_text("[]", encoding="utf-8")
    with pytest.raises(DataError, match="not a token store's description"):
        config(f"data.path={tmp_path}")
