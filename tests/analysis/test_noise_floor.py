"""Losses that do not differ are no measurement of noise: said so, without an SD or an interval of zero width."""

from __future__ import annotations

import json
from pathlib import Path

import pandas as pd
import pytest
from typer.testing import CliRunner

from scaling.analysis.curve_noise import tail_noise
from scaling.analysis.noise import noise_floor
from scaling.cli.main import app

EQUAL = "equal losses (6 runs, 2 configurations): no spread could be measured, so there is no SD and no interval"


def runs(*losses: float, sizes: int = 2) -> pd.DataFrame:
    """Runs of as many seeds as losses, at each size."""
    rows = [
        {"method": "baseline", "size": f"{size}m", "seed": seed, "loss": loss + size}
        for size in range(1, sizes + 1)
        for seed, loss in enumerate(losses)
    ]
    return pd.DataFrame(rows)


def test_equal_losses_have_no_floor() -> None:
    result = noise_floor(runs(3.2, 3.2, 3.2))
    assert result.status == "undetermined" and result.interval is None
    assert not result.estimate and not result.standard_error
    assert [caution.code for caution in result.warnings] == ["identical-losses"]
    assert EQUAL in result.warnings[0].message
    assert result.warnings[0].message.endswith("check the runs' seeds, then train with others")
    assert all(row["low"] is None and row["high"] is None for row in result.details["configurations"])
    assert json.loads(result.to_json())["interval"] is None


def test_equal_losses_on_the_command_line(tmp_path: Path) -> None:
    runs(3.2, 3.2, 3.2).to_csv(tmp_path / "runs.csv", index=False)
    words = ["noise", "floor", "--runs", str(tmp_path / "runs.csv")]
    shown = CliRunner().invoke(app, words)
    assert shown.exit_code == 0 and shown.stdout.startswith("noise floor: undetermined, n = 6")
    assert f"warning identical-losses: all runs of a configuration have {EQUAL}" in shown.stdout
    assert "seed_sd" not in shown.stdout and "[0" not in shown.stdout and "nan" not in shown.stdout
    assert "2 configurations, losses equal within each" in shown.stdout
    tree = json.loads(CliRunner().invoke(app, [*words, "--json"]).stdout)
    assert tree["estimate"] == {} and tree["interval"] is None and tree["warnings"][0]["code"] == "identical-losses"


def test_one_configuration_of_equal_losses_is_named_beside_another() -> None:
    mixed = pd.concat([runs(3.2, 3.2, 3.2, sizes=1), runs(3.2, 3.21, 3.19, sizes=1).assign(size="9m")])
    result = noise_floor(mixed)
    assert result.status == "converged" and result.interval is not None and result.interval.low["seed_sd"] > 0
    assert "identical-losses" in {caution.code for caution in result.warnings}
    assert [row["low"] is None for row in result.details["configurations"]] == [True, False]


def test_equal_repeats_of_a_seed_have_no_interval() -> None:
    again = pd.concat([runs(3.2, 3.21, 3.19).assign(lot=lot) for lot in (1, 2, 3)])
    result = noise_floor(again, by=["method", "size"])
    assert result.interval is not None and "same_seed_sd" not in result.interval.low
    assert result.estimate["same_seed_sd"] == 0 and result.interval.low["seed_sd"] > 0
    assert "identical-repeats" in {caution.code for caution in result.warnings}


@pytest.mark.filterwarnings("error")
def test_equal_curves_have_no_tail_noise() -> None:
    curves = pd.DataFrame({"run": run, "step": step, "loss": 3.3 - 0.01 * step} for run in "abc" for step in range(9))
    result = tail_noise(curves)
    assert result.status == "undetermined" and result.interval is None and not result.estimate
    assert [caution.code for caution in result.warnings] == ["identical-losses"]
    assert "runs of a group have equal curves: no spread could be measured" in result.warnings[0].message
