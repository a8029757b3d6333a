"""``scaling model info``: what it prints, and the line a wrong option gets."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

from scaling.accounting.summary import render, summarise
from scaling.config.ladder import shape
from scaling.config.model import ModelConfig
from scaling.config.residual import METHODS, Mhar
from scaling.config.strict import build
from scaling.config.tree import RunConfig


def run(*options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "scaling", "model", "info", *options], capture_output=True, text=True, check=False
    )


def test_json_is_one_object_with_unrounded_numbers() -> None:
    done = run("--size", "1b", "--method", "mhar", "--set", "model.residual.heads=4", "--json")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert told["model"]["residual"]["heads"] == 4
    assert told["parameters"]["total"] == 1_079_313_280 + 73 * 2 * 1280
    assert told["flops_per_token"]["forward"] == sum(told["flops_per_token"]["forward_groups"].values())


def test_text_names_every_group() -> None:
    fields: dict[str, Any] = {**shape("50k"), "size": "50k", "residual": Mhar(heads=8)}
    text = render(summarise(RunConfig(model=ModelConfig(**fields))))
    assert "residual: mhar (heads 8, query_init zero, key_norm full, source output, align slices)" in text
    for row in ("embedding", "attention scores", "logits", "routing", "6 N (total)", "optimizer"):
        assert f"  {row} " in text


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "moe"])
@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_is_told_at_1b_on_both_backbones(method: str, moe: bool) -> None:
    tree: dict[str, Any] = {"model": {"size": "1b", "residual": {"method": method}} | ({"moe": {}} if moe else {})}
    config = build(RunConfig, tree)
    told = json.loads(json.dumps(summarise(config)))
    assert told["parameters"]["total"] == sum(told["parameters"]["groups"].values())
    assert (told["parameters"]["activated"] < told["parameters"]["total"]) is moe
    assert told["bytes"]["activations"] > 0
    assert f"residual: {method}" in render(told)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (("--size", "7b"), "model.size='7b' is unknown; allowed: "),
        (("--size", "1b", "--method", "mhra"), "method='mhra' is unknown; did you mean 'mhar'?"),
        (("--size", "1b", "--method", "mhar", "--set", "model.residual.heads=7"), "heads=7 does not divide"),
        (
            ("--size", "1b", "--set", "model.num_kv_heads=5"),
            "num_kv_heads=5 does not divide num_heads=16; allowed: 1, 2",
        ),
        (("--set", "model.d_model=64"), "'model.num_layers' is missing; or name a size"),
    ],
)
def test_wrong_options_get_one_line(options: tuple[str, ...], text: str) -> None:
    done = run(*options)
    assert done.returncode == 2
    assert done.stdout == ""
    assert text in done.stderr
    assert done.stderr.count("\n") == 1
