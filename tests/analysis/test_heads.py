"""Heads, learning rates and widths: optima with intervals, gains at each method's best rate, contrasts of sizes."""

from __future__ import annotations

import numpy as np
import pandas as pd
import pytest

from scaling.analysis.heads import head_optimum, learning_rate_robustness, width_contrast
from scaling.errors import FitError, TableError
from tests.analysis.synthetic import codes, table


def heads_table(sd: float = 0.001) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = [
        {"H": h, "kv": kv, "seed": s, "loss": 3.1 + 0.01 * (np.log2(h) - 2.5) ** 2 + 0.01 / kv + rng.normal(0, sd)}
        for h in (1, 2, 4, 8, 16) for kv in (1, 8) for s in range(3)
    ]  # fmt: skip
    return pd.DataFrame(rows)


def test_head_count() -> None:
    for name, result in head_optimum(heads_table(), by="kv").items():
        assert name in ("1", "8")
        assert {int(result.estimate["best_heads"])} <= set(result.details["indistinguishable"]) <= {4, 8}
        assert result.interval is not None and result.interval.low["curvature"] > 0
        assert result.estimate["vertex_heads"] == pytest.approx(2**2.5, rel=0.1)
    flat = head_optimum(heads_table(0.2), by="kv")["1"]
    assert "no-u-shape" in codes(flat) and len(flat.details["indistinguishable"]) > 1
    with pytest.raises(FitError, match="only H = 4 was run"):
        head_optimum(heads_table().query("H == 4"))


def test_learning_rate_robustness() -> None:
    rng = np.random.default_rng(0)
    rows = [
        {"method": m, "size": "s", "lr": lr,
         "loss": 3.0 - gain + 0.05 * (np.log10(lr) + centre) ** 2 + rng.normal(0, 0.001)}
        for m, centre, gain in (("base", 3.0, 0.0), ("new", 3.3, 0.02)) for lr in np.geomspace(1e-4, 1e-2, 9)
    ]  # fmt: skip
    result = learning_rate_robustness(pd.DataFrame(rows), baseline="base", noise_sd=0.001)["new"]
    assert result.estimate["delta[s]"] == pytest.approx(-0.02, abs=0.002)
    assert result.details["rows"][0]["best_lr"] == pytest.approx(10**-3.3, rel=0.15)


def test_width_contrast() -> None:
    runs = table()
    runs["size"] = np.where(runs["size"] == "s0", "narrow", np.where(runs["size"] == "s4", "wide", runs["size"]))
    result = width_contrast(runs, baseline="baseline", method="new", narrow="narrow", wide="wide")
    assert result.interval is not None
    assert result.estimate["contrast"] == pytest.approx(
        result.estimate["delta[wide]"] - result.estimate["delta[narrow]"]
    )
    with pytest.raises(TableError, match="no run of 'baseline' at size 'huge'"):
        width_contrast(runs, baseline="baseline", method="new", narrow="narrow", wide="huge")
