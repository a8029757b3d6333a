"""The configuration tree: strict loading, its errors' texts, round trips."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.config import ladder
from scaling.config.strict import apply_settings, build, load_config, parse_yaml
from scaling.config.tree import RunConfig, flatten, to_dict
from scaling.errors import ConfigError

MINIMAL: dict[str, Any] = {"model": {"size": "500k"}, "schedule": {"steps": 10}}


def load(text: str, tmp_path: Path, *settings: str) -> RunConfig:
    path = tmp_path / "run.yaml"
    path.write_text(text, encoding="utf-8")
    return load_config(path, settings)


def test_file_size_and_settings_in_order(tmp_path: Path) -> None:
    config = load(
        "model:\n  size: 500k\n  num_layers: 5\noptimizer: {lr: 1e-3}\nschedule: {steps: 10}\n",
        tmp_path,
        "model.num_layers=6",
        "model.residual.method=mhar",
        "model.residual.heads=4",
    )
    assert (config.model.num_layers, config.model.d_model) == (6, 96)
    assert config.optimizer.lr == 1e-3
    assert config.model.residual.method == "mhar"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "model: {size: 500k}\nsheduler: {steps: 3}\n",
            r"run\.yaml:2: unknown key 'sheduler'; did you mean 'schedule'\?",
        ),
        ("model: {size: 500k}\noptimizer:\n  lrr: 1\n", r"run\.yaml:3: unknown key 'optimizer\.lrr'; .*lr"),
        ("model: {size: 501k}\n", r"model\.size='501k' is unknown; did you mean '\d+k'\?"),
        ("model: {size: 500k, residual: {method: mhra}}\n", r"model\.residual\.method='mhra' is unknown; did you mean"),
        (
            "model: {size: 500k, residual: {method: mhar, heads: 7}}\n",
            r"heads=7 does not divide model\.d_model=96; allowed",
        ),
        ("model: {size: 500k, num_kv_heads: 4}\n", r"num_kv_heads=4 does not divide num_heads=6; allowed: 1, 2, 3, 6"),
        ("model: {size: 500k}\nmodel: {size: 5m}\n", r"run\.yaml:2: key 'model' appears twice \(first on line 1\)"),
        ("model:\n\tsize: 500k\n", r"run\.yaml:2: a tab character; indent with spaces"),
        ("- model\n", r"the top level must be a mapping"),
        ("model: {num_layers: 2}\n", r"'model\.d_model' is missing; or name a size"),
        ("model: {size: 500k}\nrun: {seed: 1.5}\n", r"run\.seed=1\.5 must be a whole number, got float"),
        ("model: {size: 500k}\nrun: {compile: 1}\n", r"run\.compile=1 must be true or false, got int"),
        ("model: {size: 500k}\nprecision: {mode: fp16}\n", r"precision\.mode='fp16' is not allowed; .*bf16"),
        ("model: {size: 500k}\noptimizer: {lr: -1}\n", r"optimizer\.lr=-1\.0 is not positive"),
        ("model: 3\n", r"model=3 must be a section of keys"),
        ("model: {size: [}\n", r"run\.yaml:1: "),
    ],
)
def test_bad_input_is_one_line_naming_the_place(text: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        load(text, tmp_path)
    assert "\n" not in str(caught.value)


def test_missing_and_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such file"):
        load_config(tmp_path / "none.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"model: \xff\n")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        load_config(tmp_path / "latin.yaml")


@pytest.mark.parametrize(
    ("setting", "message"), [("lr", "write key=value"), ("model.size.x=1", "'size' is a value, not a section")]
)
def test_bad_settings(setting: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        apply_settings(MINIMAL, [setting])


def test_settings_leave_the_original_alone() -> None:
    tree = {"model": {"size": "500k"}}
    apply_settings(tree, ["model.size=5m", "run.seed=3"])
    assert tree == {"model": {"size": "500k"}}


@pytest.mark.parametrize("size", sorted(ladder.SIZES))
def test_round_trip_of_every_size(size: str) -> None:
    config = build(RunConfig, {"model": {"size": size}, "schedule": {"steps": 5}})
    assert build(RunConfig, to_dict(config)) == config


@given(
    lr=st.floats(1e-6, 1.0),
    seed=st.integers(0, 2**31),
    method=st.sampled_from(["baseline", "attnres", "mhar"]),
    weights=st.none() | st.dictionaries(st.text(min_size=1, max_size=8), st.floats(0, 10), max_size=3),
)
def test_config_to_dict_and_back_is_the_identity(lr: float, seed: int, method: str, weights: Any) -> None:
    tree = {
        "model": {"size": "5m", "residual": {"method": method}},
        "optimizer": {"lr": lr},
        "run": {"seed": seed},
        "data": {"weights": weights},
    }
    config = build(RunConfig, tree)
    assert build(RunConfig, to_dict(config)) == config


def test_papers_shapes() -> None:
    # arXiv 2607.27230, training details: d / L / heads / kv / ffn
    expected = {"100m": (512, 12, 8, 4, 1536), "350m": (1024, 24, 16, 8, 4096), "1b": (1280, 36, 16, 8, 5120)}
    for size, numbers in expected.items():
        s = ladder.shape(size)
        assert (s["d_model"], s["num_layers"], s["num_heads"], s["num_kv_heads"], s["d_ffn"]) == numbers
        assert s["vocab_size"] == 151_936


def test_numbers_in_yaml() -> None:
    data, lines = parse_yaml("a: 1e-3\nb: .5\nc: 1.\nd: 3\ne: 1e5\nf: 0.1e1\ng: v1e3\n", source="t")
    assert data == {"a": 1e-3, "b": 0.5, "c": 1.0, "d": 3, "e": 1e5, "f": 1.0, "g": "v1e3"}
    assert lines["g"] == 7


def test_flatten_keeps_empty_sections() -> None:
    assert flatten({"a": {"b": 1, "c": {}}, "d": None}) == {"a.b": 1, "a.c": {}, "d": None}


def test_a_bad_setting_is_blamed_on_the_setting_not_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("optimizer: {lr: 1e-3}\n", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^--set optimizer\.lr=abc: optimizer\.lr='abc' must be a number"):
        load_config(path, ["model.size=6k", "model.vocab_size=512", "data.path=store", "optimizer.lr=abc"])
