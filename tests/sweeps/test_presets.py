"""The shipped presets: each expands to the runs it should, with the shapes and recipes it names."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scaling.accounting import count_parameters
from scaling.config.residual import METHODS
from scaling.sweeps.plan import PlannedRun, plan
from scaling.sweeps.spec import load_spec

# sizes x methods (x heads, learning rates, seeds ...) as in the papers
RUNS = {
    "mhar_main": 3 * 4,
    "mhar_heads": 2 * 3 * (1 + 5),
    "mhar_lr": 3 * 3 * 4,
    "mhar_seeds": 3 * 2 * 3,
    "mhar_width": 2 * 3,
    "mhar_undertrained": 3 * (1 + 4),
    "msar_main": 2 * 4,
    "msar_scaling": 4 * 4,
    "msar_streams": 1 + 3,
    "msar_blocks": 4,
    "msar_ablation": 5,
    "fair": 4 * len(METHODS) * 3,
}


def runs_of(name: str) -> tuple[PlannedRun, ...]:
    return plan(load_spec(name)).runs


def count_by_method(runs: tuple[PlannedRun, ...]) -> Counter[str]:
    return Counter(run.config.model.residual.method for run in runs)


def test_no_preset_is_left_out() -> None:
    folder = Path(__file__).resolve().parents[2] / "sweeps" / "presets"
    assert {path.stem for path in folder.glob("*.yaml")} == {*RUNS, "quickstart"}


@pytest.mark.parametrize("name", sorted(RUNS))
def test_a_preset_expands_to_its_runs(name: str) -> None:
    runs = runs_of(name)
    assert len(runs) == RUNS[name]
    assert len({run.key for run in runs}) == len(runs)
    assert load_spec(name).name == name
    assert load_spec(name).description


def test_the_mhar_recipe_is_the_paper_s() -> None:
    tokens: Counter[int] = Counter()
    for run in runs_of("mhar_main"):
        config = run.config
        assert (config.optimizer.lr, config.optimizer.weight_decay, config.optimizer.decay) == (5e-4, 0.1, "all")
        assert (config.schedule.steps, config.schedule.warmup_steps) == (20_000, 1000)
        assert config.precision.mode == "bf16"
        assert config.evaluation.num_sequences == 50 * config.data.batch_size
        tokens[run.tokens] += 1
    # 64 x 2048 at 100M, 32 x 1024 at 350M and 1B, each 20,000 steps
    assert tokens == {20_000 * 64 * 2048: 4, 20_000 * 32 * 1024: 8}


def test_heads_apply_to_mhar_alone() -> None:
    assert count_by_method(runs_of("mhar_heads")) == {"baseline": 6, "mhar": 30}
    assert count_by_method(runs_of("mhar_undertrained")) == {"baseline": 3, "mhar": 12}
    assert {run.config.schedule.steps for run in runs_of("mhar_undertrained")} == {5000}


def test_widths_differ_in_nothing_else() -> None:
    models = [run.config.model for run in runs_of("mhar_width")]
    assert {(m.d_model, m.num_layers, m.num_kv_heads, m.attention_head_dim) for m in models} == {
        (512, 12, 4, 64),
        (768, 12, 4, 64),
    }
    assert {m.d_ffn / m.d_model for m in models} == {3.0}


def test_msar_totals_are_the_papers() -> None:
    totals = sorted({round(run.parameters / 1e9) for run in runs_of("msar_main")})
    assert totals == [18, 28]
    for name in ("msar_streams", "msar_blocks", "msar_ablation"):
        assert {round(run.parameters / 1e9) for run in runs_of(name)} == {10}
    sizes = [run.config.model.residual.sublayers_per_block(30) for run in runs_of("msar_blocks")]  # type: ignore[attr-defined]
    assert sorted(sizes) == [1, 2, 4, 8]
    assert sorted(-(-30 // size) for size in sizes) == [4, 8, 15, 30]


def test_ablations_are_the_papers() -> None:
    told = {
        (
            run.config.model.residual.method,
            getattr(run.config.model.residual, "convolution", None),
            getattr(run.config.model.residual, "mixer", None),
        )
        for run in runs_of("msar_ablation")
    }
    assert told == {
        ("attnres", None, None),
        ("attnres_mhc", None, None),
        ("msar", True, "sigmoid"),
        ("msar", False, "sigmoid"),
        ("msar", True, "mean"),
    }


@pytest.mark.parametrize(("name", "tokens_per_parameter"), [("fair", 20), ("msar_scaling", 8)])
def test_tokens_per_parameter_are_fixed_and_the_same_for_all_methods(name: str, tokens_per_parameter: int) -> None:
    runs = runs_of(name)
    by_width: dict[int, set[int]] = {}
    for run in runs:
        by_width.setdefault(run.config.model.d_model, set()).add(run.tokens)
        assert run.config.precision.mode == "mixed"
        if run.config.model.residual.method == "baseline":
            parameters = count_parameters(run.config.model).non_embedding
            assert 0 <= run.tokens - tokens_per_parameter * parameters < run.config.data.tokens_per_step
    assert len(by_width) == 4
    assert all(len(tokens) == 1 for tokens in by_width.values())


def test_fair_has_every_method_with_three_seeds() -> None:
    assert count_by_method(runs_of("fair")) == dict.fromkeys(METHODS, 4 * 3)


@pytest.mark.parametrize("name", RUNS)
def test_runs_have_names_of_their_own(name: str) -> None:
    names = [run.label for run in runs_of(name)]
    assert len(set(names)) == len(names)
