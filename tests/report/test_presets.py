"""Every shipped preset's grid fills the tables and figures it was made for."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from scaling.analysis import catalog
from scaling.analysis.figures import style
from scaling.analysis.inquiry import complete, inquire
from scaling.analysis.tables.render import FORMATS, write
from scaling.sweeps.plan import plan
from scaling.sweeps.spec import load_spec
from tests.conftest import ROOT

PRESETS = sorted(path.stem for path in (ROOT / "sweeps" / "presets").glob("*.yaml"))
# What a preset is for: without these its runs would be wasted.
WANTED = {
    "fair": {"main", "seed-deltas", "noise"},
    "mhar_heads": {"main", "heads", "heads-kv"},
    "mhar_lr": {"lr"},
    "mhar_main": {"main"},
    "mhar_seeds": {"main", "seed-deltas", "noise"},
    "mhar_undertrained": {"heads", "heads-kv"},
    "mhar_width": {"main"},
    "msar_scaling": {"main", "speedups"},
    "quickstart": {"main", "speedups", "seed-deltas", "noise"},
}


def planned(name: str, out: Path) -> pd.DataFrame:
    """The preset's runs as a tidy table: shapes, tokens and FLOPs as planned, losses from a law with a head optimum."""
    rng = np.random.default_rng(2)
    rows = []
    for run in plan(load_spec(name, [f"data.path={out}"]), out).runs:
        config = run.config
        heads = getattr(config.model.residual, "heads", None)
        effect = 0.0 if config.model.residual.method == "baseline" else -0.03
        effect += 0.0 if heads is None else 0.01 * (math.log2(heads) - 2.5) ** 2
        rows.append(
            {
                "run_key": run.key,
                "sweep": name,
                "name": run.label,
                "method": config.model.residual.method,
                "size": config.model.size or f"d{config.model.d_model}",
                "n_params": run.parameters,
                "n_params_non_embedding": run.parameters_non_embedding,
                "heads": heads,
                "kv": config.model.num_kv_heads,
                "lr": config.optimizer.lr,
                "seed": config.run.seed,
                "tokens": run.tokens,
                "flops": run.flops,
                "steps": config.schedule.steps,
                "val_loss": 1.8 + 60 * run.flops**-0.1 + effect + rng.normal(0, 0.003),
                "status": "done",
                "schedule_finished": True,
            }
        )
    return complete(pd.DataFrame(rows))


@pytest.mark.slow
@pytest.mark.parametrize("name", PRESETS)
def test_a_preset_fills_its_tables_and_figures(name: str, tmp_path: Path) -> None:
    runs = planned(name, tmp_path)
    found = inquire(runs)
    built = {key: entry.build(found) for key, entry in catalog.TABLES.items()}
    missing = WANTED.get(name, {"main"}) - {key for key, table in built.items() if table is not None}
    assert not missing, (missing, found.failures)
    for table in built.values():
        if table is not None:
            assert all(write(table, fmt) for fmt in FORMATS)
    pictures = catalog.pictures(found)
    assert {"scaling-curves"} <= {picture.name for picture in pictures}
    for picture in pictures:
        with style.context():
            picture.draw(style.WIDE_IN).draw_without_rendering()
