"""A sweep's file: the whole grammar, what extends and blocks merge, and errors with line and nearest key."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from scaling.errors import ConfigError, GridError
from scaling.sweeps.document import merge, preset_names
from scaling.sweeps.plan import plan
from scaling.sweeps.spec import load_spec

BASE = """\
base:
  model: {size: 50k}
  data: {seq_len: 16, batch_size: 2}
  schedule: {steps: 10}
"""


def write(folder: Path, text: str, name: str = "s.yaml") -> Path:
    path = folder / name
    path.write_text(text, encoding="utf-8")
    return path


def test_the_grammar_of_the_docstring_is_accepted(tmp_path: Path) -> None:
    import scaling.sweeps.spec as module

    assert module.__doc__ is not None
    text = module.__doc__.split("::", 1)[1].split("\nAxes are paths")[0]
    text = "\n".join(line[4:] for line in text.splitlines() if "extends:" not in line)
    spec = load_spec(write(tmp_path, text))
    assert spec.name == "width_study"
    assert [block.name for block in spec.blocks] == ["paired", "wide"]
    assert spec.throttle == 64
    first = next(iter(spec.blocks[1].assignments()))
    assert spec.blocks[1].resources_for(first).time_s == 4 * 3600
    assert {run["model.residual.method"] for run in spec.blocks[0].assignments()} == {"baseline", "attnres", "mhar"}


def test_every_way_to_write_an_axis(tmp_path: Path) -> None:
    text = (
        BASE
        + """\
grid:
  method: [baseline, mhar]
  H: {when: {method: mhar}, values: [1, 2]}
  kv:
    - {when: {method: baseline}, values: [1, 3]}
    - {when: {method: mhar}, values: [1]}
  zip: {seed: [0, 1], lr: [1e-3, 3e-3]}
  cases:
    - {data.batch_size: 4}
    - {data.batch_size: 8, optimizer.weight_decay: 0.0}
exclude:
  - {method: mhar, H: 2, seed: 1}
"""
    )
    runs = list(load_spec(write(tmp_path, text)).blocks[0].assignments())
    assert len(runs) == (2 + 2) * 2 * 2 - 2
    assert {(run["run.seed"], run["optimizer.lr"]) for run in runs} == {(0, 1e-3), (1, 3e-3)}
    assert all(("optimizer.weight_decay" in run) == (run["data.batch_size"] == 8) for run in runs)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gird: {}\n", "s.yaml:1: unknown key 'gird'; did you mean 'grid'?"),
        (BASE + "grid:\n  learning_rate: [1]\n", "s.yaml:6: unknown axis 'learning_rate'; "),
        (
            BASE + "grid:\n  optimizer.lrr: [1]\n",
            "s.yaml:6: unknown axis 'optimizer.lrr'; did you mean 'optimizer.lr'?",
        ),
        (BASE + "grid:\n  lr: [1]\n  optimizer.lr: [2]\n", "s.yaml:7: the axis optimizer.lr is there twice"),
        (BASE + "grid:\n  lr: {when: {metod: mhar}, values: [1]}\n", "s.yaml:6: unknown axis 'metod'"),
        (BASE + "grid:\n  lr: {when: mhar, values: [1]}\n", "s.yaml:6: a condition is a section of axes"),
        (BASE + "grid:\n  zip: {lr: [1, 2], seed: [1]}\n", "s.yaml:6: zip needs axes of equal length"),
        (BASE + "grid:\n  cases: [{lr: [1, 2]}]\n", "lr has a list in a case"),
        (BASE + "grid: [1]\n", "grid must be a section of axes"),
        (BASE + "exclude: {lr: 1}\n", "exclude must be a list of conditions"),
        (BASE + "blocks: {a: {grdi: {}}}\n", "s.yaml:5: unknown key 'grdi' in block 'a'; did you mean 'grid'?"),
        (BASE + "duplicates: maybe\n", "duplicates='maybe'; allowed: refuse, merge"),
        (BASE + "throttle: 0\n", "throttle=0 must be a positive whole number"),
        (BASE + "name: a/b\n", "name='a/b'; allowed: letters"),
        (BASE + "resources: {tiem: 3}\n", "s.yaml:5: unknown key 'tiem' in resources; did you mean 'time'?"),
        (BASE + "resources: {time: 2}\n", "time=0:02:00 must exceed signal=120s by more than 90s"),
        (BASE + "resources: {gpus: -1}\n", "gpus=-1 must be a whole number of at least 0"),
        (BASE + "resources: {memory: lots}\n", "memory='lots' is not an amount of memory"),
        (BASE + "resources: {time: soon}\n", "time='soon' is not a time"),
        (BASE + "resources: {gpus: 8, runs_per_gpu: 2}\n", "runs_per_gpu=2 packs runs that fit one GPU"),
        (BASE + "resources: {by: [{gpus: 1}]}\n", "resources.by[0] needs when"),
        (
            BASE + "resources: {sbatch: {signal: KILL@5}}\n",
            "s.yaml:5: sbatch: signal is set by the sweep itself; use resources.signal",
        ),
        (BASE + "resources: {sbatch: {--array: 0-5}}\n", "sbatch: array is set by the sweep itself; use throttle"),
        (BASE + "grid:\n  lr: [1]\n  lr: [2]\n", "s.yaml:7: key 'grid.lr' appears twice (first on line 6)"),
        ("grid:\n\tlr: [1]\n", "s.yaml:2: a tab character"),
        ("extends: nothing_like_it\n", "s.yaml:1: extends: nothing_like_it: neither a file nor a preset"),
    ],
)
def test_refusals_name_line_and_nearest_key(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((GridError, ConfigError), match=re.escape(message)):
        load_spec(write(tmp_path, text))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (BASE.replace("seq_len", "sqe_len"), "s.yaml:3: unknown key 'data.sqe_len'; did you mean 'seq_len'?"),
        (BASE + "grid:\n  H: [2]\n", "s.yaml:6: unknown key 'model.residual.heads'; allowed: none"),
        (
            BASE + "grid:\n  method: [baseline, mhar]\n  H: [2]\n",
            "(run: method=baseline H=2); give the axis a condition: H: {when: {method: ...}, values: [...]}",
        ),
        (
            BASE + "grid:\n  method: [mharr]\n",
            "s.yaml:6: model.residual.method='mharr' is unknown; did you mean 'mhar'?",
        ),
        (BASE + "grid:\n  size: [50q]\n", "model.size='50q' is unknown; did you mean"),
        (BASE + "grid:\n  method: [mhar]\n  H: [5]\n", "heads=5 does not divide model.d_model=48"),
        (BASE + "grid:\n  kv: [2]\n", "num_kv_heads=2 does not divide num_heads=3; allowed: 1, 3"),
        (BASE.replace("schedule", "scheduel"), "unknown key 'scheduel'; did you mean 'schedule'?"),
        (BASE + "exclude: [{size: 50k}]\n", "no run is left after exclusions"),
        (BASE + "resources: {gpus: 4}\n", "run.parallel=none; set base.run.parallel to ddp or fsdp2"),
    ],
)
def test_planning_refusals_name_line_and_run(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises((GridError, ConfigError), match=re.escape(message)):
        plan(load_spec(write(tmp_path, text)), tmp_path / "runs")


def test_error_says_which_run(tmp_path: Path) -> None:
    text = BASE + "grid:\n  method: [baseline, mhar]\n  H: [2]\n"
    with pytest.raises(GridError, match=re.escape("(run: method=baseline H=2)")):
        plan(load_spec(write(tmp_path, text)), tmp_path / "runs")


def test_extends_puts_a_file_over_another(tmp_path: Path) -> None:
    grid = "grid:\n  lr: [1e-3]\n  seed: [0, 1]\nexclude: [{lr: 1e-2}]\nthrottle: 4\nname: parents\n"
    write(tmp_path, BASE + grid, "parent.yaml")
    child = write(
        tmp_path,
        "extends: parent.yaml\nbase: {schedule: {steps: 20}}\ngrid:\n  optimizer.lr: [3e-3, 1e-2]\n  seed: null\n"
        "exclude: [{lr: 5}]\n",
        "child.yaml",
    )
    spec = load_spec(child)
    assert spec.name == "child" and spec.throttle == 4
    assert [run["optimizer.lr"] for run in spec.blocks[0].assignments()] == [3e-3]
    assert spec.blocks[0].base_value("schedule.steps") == 20
    assert spec.blocks[0].base_value("data.seq_len") == 16


def test_error_in_an_extended_file_names_that_file(tmp_path: Path) -> None:
    write(tmp_path, BASE.replace("seq_len", "sqe_len"), "parent.yaml")
    child = write(tmp_path, "extends: parent.yaml\n", "child.yaml")
    with pytest.raises(GridError, match=r"parent\.yaml:3: unknown key 'data\.sqe_len'"):
        plan(load_spec(child), tmp_path)


def test_extends_in_a_circle_is_refused(tmp_path: Path) -> None:
    write(tmp_path, "extends: b.yaml\n", "a.yaml")
    write(tmp_path, "extends: a.yaml\n", "b.yaml")
    with pytest.raises(GridError, match="extends itself, through"):
        load_spec(tmp_path / "a.yaml")


def test_base_may_be_a_file(tmp_path: Path) -> None:
    write(tmp_path, "model: {size: 50k}\nschedule: {steps: 3}\ndata: {sqe_len: 3}\n", "train.yaml")
    with pytest.raises(GridError, match=r"train\.yaml:3: unknown key 'data\.sqe_len'"):
        plan(load_spec(write(tmp_path, "base: train.yaml\n")), tmp_path)


def test_merge_rules() -> None:
    old = {"base": {"model": {"residual": {"method": "mhar", "heads": 8}}, "optimizer": {"lr": 1}}, "exclude": [1]}
    new = {"base": {"model": {"residual": {"method": "baseline"}}, "optimizer": {"grad_clip": None}}, "exclude": [2]}
    merged = merge(old, new)
    assert merged["base"]["model"]["residual"] == {"method": "baseline"}
    assert merged["base"]["optimizer"] == {"lr": 1, "grad_clip": None}
    assert merged["exclude"] == [1, 2]


def test_blocks_take_what_is_above_and_put_their_own_over_it(tmp_path: Path) -> None:
    text = (
        BASE
        + """\
grid: {seed: [0, 1]}
resources: {time: 30}
blocks:
  small: {}
  wide: {base: {model: {d_model: 96}}, grid: {seed: [5]}, resources: {time: 60}}
"""
    )
    spec = load_spec(write(tmp_path, text))
    planned = plan(spec, tmp_path / "runs")
    rows = [(run.block, run.config.run.seed, run.config.model.d_model, run.resources.time_s) for run in planned.runs]
    assert sorted(rows) == [("small", 0, 48, 1800), ("small", 1, 48, 1800), ("wide", 5, 96, 3600)]


def test_settings_change_axes_bases_and_resources(tmp_path: Path) -> None:
    text = BASE + "grid:\n  size: [100m, 1b]\n  seed: [0, 1, 2]\nresources:\n  by: [{when: {size: 50k}, time: 60}]\n"
    path = write(tmp_path, text)
    settings = ["size=50k", "seed=[3,4]", "schedule.steps=7", "resources.time=30", "data.batch_size=4"]
    planned = plan(load_spec(path, settings), tmp_path / "runs")
    assert sorted(run.config.run.seed for run in planned.runs) == [3, 4]
    assert all(run.config.schedule.steps == 7 and run.config.data.batch_size == 4 for run in planned.runs)
    assert {run.resources.time_s for run in planned.runs} == {1800}


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ("sead=3", "unknown axis 'sead'; did you mean 'seed'?"),
        ("lr", "--set 'lr': write key=value"),
        ("lr=[1,2]", "no axis varies lr; give one value, or add the axis to grid"),
        ("resources.tme=1", "unknown key 'tme' in resources"),
    ],
)
def test_bad_settings(tmp_path: Path, setting: str, message: str) -> None:
    with pytest.raises(GridError, match=re.escape(message)):
        load_spec(write(tmp_path, BASE), [setting])


def test_options_of_the_base_method_do_not_leak_into_others(tmp_path: Path) -> None:
    base = BASE.replace("{size: 50k}", "{size: 50k, residual: {method: mhar, heads: 4}}")
    text = base + "grid: {method: [baseline, mhar]}\n"
    planned = plan(load_spec(write(tmp_path, text)), tmp_path)
    assert sorted(run.label.split("-kv")[0] for run in planned.runs) == ["50k-baseline", "50k-mhar-h4"]
    with pytest.raises(GridError, match="unknown key 'model.residual.haeds'"):
        plan(load_spec(write(tmp_path, text.replace("heads", "haeds"))), tmp_path)


@pytest.mark.parametrize("name", preset_names())
def test_every_preset_plans_by_name_and_by_extends(tmp_path: Path, name: str) -> None:
    by_name = plan(load_spec(name), tmp_path / "runs")
    by_extends = plan(load_spec(write(tmp_path, f"extends: {name}\nname: mine\n")), tmp_path / "runs")
    assert [run.key for run in by_name.runs] == [run.key for run in by_extends.runs]
    assert by_name.spec.description
