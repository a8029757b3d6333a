"""Plans: keys, duplicates, costs, speed, and what planning may import."""

from __future__ import annotations

import gc
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from scaling.accounting import count_flops, count_parameters, estimate_memory
from scaling.errors import GridError, UsageError
from scaling.identity import run_key
from scaling.sweeps.document import Document
from scaling.sweeps.estimate import Device, concerns, gpu_hours, run_s, wall_s
from scaling.sweeps.plan import Plan, plan
from scaling.sweeps.spec import build_spec

TREE: dict[str, Any] = {
    "name": "t",
    "base": {"model": {"size": "50k"}, "data": {"seq_len": 16, "batch_size": 2}, "schedule": {"steps": 10}},
}


def make(**rest: Any) -> Plan:
    document = Document(tree={**TREE, **rest}, source="t.yaml")
    return plan(build_spec(document, default_name="t"), Path("runs"))


def grid(**axes: Any) -> dict[str, Any]:
    return {"grid": axes}


@given(
    st.sampled_from(["50k", "160k"]),
    st.floats(1e-5, 1e-1),
    st.integers(0, 99),
    st.sampled_from([None, 0.999]),
    st.sampled_from([None, {"a": 1.0}]),
)
def test_keys_are_identity_run_keys(size: str, lr: float, seed: int, ema: float | None, weights: object) -> None:
    axes = {"model.size": [size], "optimizer.lr": [lr, lr * 2], "run.seed": [seed, seed + 1],
            "optimizer.ema_decay": [ema], "data.weights": [weights]}  # fmt: skip
    planned = make(**grid(**axes))
    assert len(planned.runs) == 4
    assert all(run.key == run_key(run.config) for run in planned.runs)


def test_costs_are_the_accounting_s() -> None:
    (run,) = make().runs
    config = run.config
    assert run.tokens == 10 * 16 * 2
    assert run.parameters == count_parameters(config.model).total
    assert run.parameters_non_embedding == count_parameters(config.model).non_embedding
    assert run.flops == pytest.approx(count_flops(config.model, 16).training * run.tokens)
    assert run.memory_bytes == estimate_memory(config).total


def test_largest_run_first() -> None:
    planned = make(**grid(**{"model.size": ["50k", "500k", "160k"]}))
    assert [run.config.model.size for run in planned.runs] == ["500k", "160k", "50k"]


def test_a_run_that_appears_twice_is_refused_showing_both() -> None:
    blocks = {"one": {"grid": {"run.seed": [0, 1]}}, "two": {"grid": {"run.seed": [1, 2]}}}
    with pytest.raises(
        GridError, match=r"one run appears twice \(key [0-9a-f]{16}\): \[one\] seed=1 and \[two\] seed=1"
    ):
        make(blocks=blocks)
    merged = make(blocks=blocks, duplicates="merge")
    assert len(merged.runs) == 3 and merged.merged == 1
    with pytest.raises(GridError, match="one run appears twice"):
        make(**grid(**{"optimizer.lr": [1e-3, 0.001]}))


def test_labels_and_paths_do_not_make_runs_different() -> None:
    with pytest.raises(GridError, match="one run appears twice"):
        make(**grid(**{"data.micro_batch_size": [1, 2]}))


def test_a_grid_without_bounds_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scaling.sweeps.plan.MAX_RUNS", 5)
    with pytest.raises(GridError, match="more than 5 runs; take values out of the grid"):
        make(**grid(**{"run.seed": {"range": [0, 9]}}))


def test_ten_thousand_runs_plan_in_two_seconds() -> None:
    axes = {"model.size": ["50k", "160k", "500k", "1.6m"], "model.residual.method": ["baseline", "attnres", "mhar"],
            "model.residual.heads": {"when": {"method": "mhar"}, "values": [1, 2, 4, 8]},
            "optimizer.lr": {"log": [1e-4, 1e-2], "num": 42}, "run.seed": {"range": [0, 9]}}  # fmt: skip
    took_s = []
    gc.collect()
    gc.freeze()  # a user's process does not hold what two thousand tests have left, to be searched for garbage
    try:
        for _ in range(2):  # the machine is shared: the better of two
            begun_s = time.process_time()
            planned = make(**grid(**axes))
            took_s.append(time.process_time() - begun_s)
            assert len(planned.runs) == 10_080
    finally:
        gc.unfreeze()
    assert min(took_s) < 2.0, f"{took_s} s"


def test_planning_imports_nothing_heavy() -> None:
    heavy = ("torch", "mlflow", "pandas", "numpy", "submitit")
    code = f"import sys, scaling.sweeps.plan, scaling.sweeps.spec; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_estimates() -> None:
    planned = make(**grid(**{"run.seed": [0, 1, 2]}))
    device = Device.named("h100", mfu=0.5)
    one = planned.runs[0].flops / (989.5e12 * 0.5)
    assert run_s(planned.runs[0], device) == pytest.approx(one)
    assert gpu_hours(planned.runs, device) == pytest.approx(3 * one / 3600)
    assert wall_s(planned.runs, device, 2) == pytest.approx(2 * one)
    assert wall_s(planned.runs, device, None) == pytest.approx(one)
    with pytest.raises(UsageError, match=re.escape("--gpu h10: unknown device; did you mean 'h100'?")):
        Device.named("h10")
    with pytest.raises(UsageError, match="--mfu 2: allowed"):
        Device.named("h100", mfu=2)


def test_packed_runs_share_a_gpu_s_speed_and_cost() -> None:
    alone, packed = make(), make(resources={"gpus": 1, "runs_per_gpu": 4})
    device = Device.named("h100")
    assert run_s(packed.runs[0], device) == pytest.approx(4 * run_s(alone.runs[0], device))
    assert gpu_hours(packed.runs, device) == pytest.approx(gpu_hours(alone.runs, device))


def test_concerns_name_memory_and_time() -> None:
    big = make(base={**TREE["base"], "model": {"size": "1b"}, "data": {"seq_len": 4096, "batch_size": 512}})
    (text,) = concerns(big.runs[0], Device.named("l4"))
    assert re.search(r"needs about \d+ GiB, l4 has 24; lower data\.micro_batch_size", text)
    long = make(base={**TREE["base"], "model": {"size": "1b"}, "schedule": {"steps": 10**8}})
    assert any("will be requeued" in text for text in concerns(long.runs[0], Device.named("h100")))
    assert concerns(make().runs[0], Device.named("h100")) == []
