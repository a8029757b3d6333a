"""Sweeps with known truths: losses on laws plus seed noise; what a result warns of."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pandas as pd

from scaling.analysis.result import Result

E, EXPONENT, FIRST_LOSS = 1.8, 0.15, 3.6


def sweep(
    rng: np.random.Generator,
    *,
    scales: int = 5,
    seeds: int = 3,
    speedups: Mapping[str, float] | None = None,
    sd: float = 0.002,
    rho: float = 0.0,
    decades: float = 2.0,
) -> pd.DataFrame:
    """Runs of a baseline and of methods that need ``1/s`` of its compute; runs of one seed correlate by rho."""
    compute = 1e17 * np.logspace(0, decades, scales)
    amplitude = (FIRST_LOSS - E) * compute[0] ** EXPONENT
    common = rng.normal(0, sd * np.sqrt(rho), size=(scales, seeds))
    rows = []
    for method, s in {"baseline": 1.0, **(speedups if speedups is not None else {"new": 1.25})}.items():
        own = rng.normal(0, sd * np.sqrt(1 - rho), size=(scales, seeds))
        for i, c in enumerate(compute):
            for seed in range(seeds):
                loss = E + amplitude * (c * s) ** -EXPONENT + common[i, seed] + own[i, seed]
                rows.append({"method": method, "size": f"s{i}", "N": np.sqrt(c / 120), "D": 20 *
                np.sqrt(c / 120), "C": c,
                             "seed": seed, "loss": loss})  # fmt: skip
    return pd.DataFrame(rows)


def table(**options: float) -> pd.DataFrame:
    """The sweep of one fixed draw."""
    return sweep(np.random.default_rng(0), **options)  # type: ignore[arg-type]


def codes(result: Result) -> set[str]:
    """The names of a result's warnings."""
    return {w.code for w in result.warnings}
