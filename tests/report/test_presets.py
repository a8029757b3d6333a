"""Every shipped preset, shrunk to toy size and trained here, fills the tables and figures it was made for.

Each preset is extended by a file that a person could have written: other sizes, fewer steps, a small vocabulary. What
large grids leave out is said beside them. All runs are trained by one local pool, those that presets share once.
"""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import pytest
import yaml
from typer.testing import CliRunner

from scaling.cli.main import app
from scaling.corpus import prepare
from scaling.sweeps.local import run_local
from scaling.sweeps.plan import Plan, plan
from scaling.sweeps.spec import load_spec
from tests.conftest import ROOT

pytestmark = pytest.mark.slow

PRESETS: Final = sorted(path.stem for path in (ROOT / "sweeps" / "presets").glob("*.yaml"))
BASE: Final[dict[str, Any]] = {
    "model": {"vocab_size": 257},
    "data": {"seq_len": 32, "batch_size": 2},
    "schedule": {"steps": 8, "warmup_steps": 1},
    "evaluation": {"every_steps": 2, "num_sequences": 8, "tail": 3},
    "run": {"device": "cpu", "parallel": "none", "activation_checkpointing": "none", "log_every_steps": 2},
}
ONE: Final = {"gpus": 1, "nodes": 1}
# The MHAR presets set lengths by size; here one length holds for all.
MHAR: Final[dict[str, Any]] = {
    "size": ["6k", "12k", "25k"],
    "data.seq_len": [32],
    "data.batch_size": [2],
    "evaluation.num_sequences": [8],
}
MOE: Final[dict[str, Any]] = {"num_experts": 4, "top_k": 2, "d_expert": 16, "num_shared_experts": 1}
MIXTURE: Final = {"model": {"vocab_size": 257, "num_kv_heads": 1, "head_dim": 8, "moe": MOE}}


def mixture(layers: int, width: int) -> dict[str, int]:
    """A case of a mixture's shape."""
    return {"model.num_layers": layers, "model.d_model": width, "model.num_heads": 2, "model.d_ffn": 3 * width}


def deep() -> dict[str, Any]:
    """The ablation model: 8 sublayers, so that blocks of 1, 2, 4 and 8 differ."""
    return {"model": {**MIXTURE["model"], "num_layers": 4, "d_model": 16, "num_heads": 2, "d_ffn": 48}}


TOY: Final[dict[str, dict[str, Any]]] = {
    "fair": {  # two sizes and two seeds of four and three; the second size for three methods only
        "grid": {"size": ["6k", "12k"], "schedule.steps": None, "seed": [0, 1]},
        "exclude": [
            {"size": "12k", "method": ["hc", "mhc", "attnres", "delta", "attnres_mhc", "denseformer", "muddformer",
                                       "rezero", "deepnet", "realformer"]},
        ],
    },
    "mhar_heads": {"grid": {**MHAR, "size": ["6k"], "kv": [1, 2]}},  # one size of two, two KV counts of three
    "mhar_lr": {"grid": {**MHAR, "size": ["6k"]}},  # one size of three
    "mhar_main": {"grid": MHAR},
    "mhar_seeds": {"grid": {**MHAR, "seed": [42, 43]}},  # two seeds of three
    "mhar_undertrained": {"base": {"schedule": {"steps": 4}}, "grid": {**MHAR, "size": ["6k"], "kv": [1, 2]}},
    "mhar_width": {
        "base": {"model": {"num_layers": 2, "num_kv_heads": 1}},
        "grid": {
            "cases": [
                {"model.d_model": 16, "model.num_heads": 2, "model.d_ffn": 40},
                {"model.d_model": 32, "model.num_heads": 4, "model.d_ffn": 80},
            ]
        },
    },
    "msar_ablation": {"base": deep()},
    "msar_blocks": {"base": deep()},
    "msar_main": {"base": MIXTURE, "grid": {"cases": [mixture(2, 16), mixture(2, 32)]}},
    "msar_scaling": {
        "base": MIXTURE,
        "grid": {"cases": [mixture(2, 16), mixture(2, 24), mixture(3, 32), mixture(3, 48)]},
    },
    "msar_streams": {"base": deep()},
    "quickstart": {"base": {"schedule": {"tokens_per_parameter": None}}},
}  # fmt: skip

# What a preset is for: tables and figures without which its runs would be wasted.
WANTED: Final[dict[str, set[str]]] = {
    "fair": {"main", "configurations", "seed-deltas", "noise", "added"},
    "mhar_heads": {"main", "heads", "heads-kv"},
    "mhar_lr": {"lr", "main"},
    "mhar_main": {"main", "configurations", "speedups", "added", "throughput", "published-main", "disagreement"},
    "mhar_seeds": {"main", "seed-deltas", "noise"},
    "mhar_undertrained": {"heads", "heads-kv"},
    "mhar_width": {"main", "configurations"},
    "msar_ablation": {"main", "variants"},
    "msar_blocks": {"variants"},
    "msar_main": {"main", "configurations"},
    "msar_scaling": {"main", "configurations", "speedups", "speedups-by-scale"},
    "msar_streams": {"main", "variants"},
    "quickstart": {"main", "speedups", "seed-deltas", "noise"},
}
DRAWN: Final[dict[str, set[str]]] = {
    "fair": {"seed-deltas", "noise-floor"},
    "mhar_heads": {"heads", "heads-kv"},
    "mhar_lr": {"lr"},
    "mhar_main": {"scaling-curves", "speedup-by-scale", "throughput", "routing-weights", "disagreement"},
    "mhar_seeds": {"seed-deltas", "noise-floor"},
    "mhar_undertrained": {"heads", "heads-kv"},
    "msar_scaling": {"scaling-curves", "speedup-by-scale"},
    "quickstart": {"scaling-curves", "seed-deltas", "noise-floor"},
}


def test_every_preset_has_a_toy_and_wishes() -> None:
    assert sorted(TOY) == sorted(WANTED) == PRESETS


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Plan]]:
    """All presets' runs, trained by one pool of one worker; the folder of run folders, and each preset's plan."""
    base = tmp_path_factory.mktemp("presets")
    store, out = base / "store", base / "runs"
    text = base / "text.jsonl"
    words = [f"number {i} follows {i - 1}; " * (3 + i % 5) for i in range(400)]
    text.write_text("\n".join(json.dumps({"text": word}) for word in words), encoding="utf-8")
    prepare([text], store, held_out_fraction=0.3)  # bytes: 257 token ids
    plans = {}
    for name, toy in TOY.items():
        merged = {**BASE, **{key: {**BASE.get(key, {}), **value} for key, value in toy.get("base", {}).items()}}
        merged["data"] = {**merged["data"], "path": str(store)}
        file = base / f"{name}.yaml"
        document = {**toy, "extends": name, "name": name, "base": merged, "resources": ONE}
        file.write_text(yaml.safe_dump(document), encoding="utf-8")
        plans[name] = plan(load_spec(file), out)
    unique = {run.key: run for found in plans.values() for run in found.runs}
    assert len(unique) < sum(len(found.runs) for found in plans.values()), "presets share runs"
    report = run_local(replace(plans["fair"], runs=tuple(unique.values())), workers=1, threads=1)
    assert report.complete, [outcome for outcome in report.outcomes.values() if outcome.outcome != "done"]
    largest = next(run for run in plans["mhar_main"].runs if run.config.model.residual.method == "mhar")
    probe = ["probe", "disagreement", str(out / largest.key), "--sequences", "4", "--draws", "2", "--save"]
    assert CliRunner().invoke(app, probe, catch_exceptions=False).exit_code == 0
    return out, plans


@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_s_runs_fill_its_tables_and_figures(
    name: str, trained: tuple[Path, dict[str, Plan]], tmp_path: Path
) -> None:
    out, plans = trained
    spec = str(out.parent / f"{name}.yaml")
    words = ["report", "build", spec, "--folder", str(out), "--out", str(tmp_path / "report"), "--formats", "svg"]
    baseline = [] if any(run.config.model.residual.method == "baseline" for run in plans[name].runs) else ["attnres"]
    if baseline and any(run.config.model.residual.method == "attnres" for run in plans[name].runs):
        words += ["--baseline", *baseline]
    called = CliRunner().invoke(app, words, catch_exceptions=False)
    assert called.exit_code == 0, called.output
    tables = {path.stem for path in (tmp_path / "report" / "tables").glob("*.csv")}
    figures = {path.stem for path in (tmp_path / "report" / "figures").glob("*.svg")}
    told = (tmp_path / "report" / "report.md").read_text(encoding="utf-8")
    assert WANTED[name] <= tables, (WANTED[name] - tables, told[:3000])
    assert {"loss-curves", *DRAWN.get(name, ())} <= figures, (figures, told[:3000])
    page = (tmp_path / "report" / "report.html").read_text(encoding="utf-8")
    assert all(f'id="table-{table}"' in page for table in WANTED[name])
    runs = int(re.search(r"^([\d,]+) runs? of", told, flags=re.MULTILINE)[1].replace(",", ""))  # type: ignore[index]
    assert runs == len(plans[name].runs)
