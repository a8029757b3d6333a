"""Times of one fit and of a bootstrap on the 240 Chinchilla points: this solver, Epoch's procedure, scipy's curve_fit.

    ISOLOSS_SHARED=../shared python -m tests.benchmarks.laws [--resamples 4000] [--starts 60]

All in one process and on one thread, CPU seconds. Epoch's procedure is written here from its description: L-BFGS-B with
numerical gradients from a grid of 4,500 starts for the fit, BFGS from Hoffmann's parameters for each resample; only a
share of its starts and resamples is run, and the total is that share scaled up (the column says so).
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from itertools import product
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = os.environ["OPENBLAS_NUM_THREADS"] = "1"

import numpy as np  # noqa: E402  (threads are set before numpy loads its BLAS)
from numpy.typing import NDArray  # noqa: E402
from scipy.optimize import curve_fit, minimize  # noqa: E402

from scaling.analysis.certify import solve  # noqa: E402
from scaling.analysis.columns import load_table  # noqa: E402
from scaling.analysis.laws import get_law  # noqa: E402
from scaling.analysis.uncertainty import cluster_bootstrap  # noqa: E402
from tests.benchmarks.epoch import DELTA, HOFFMANN, gradient, objective  # noqa: E402

Floats = NDArray[np.float64]


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of one call."""
    began = time.process_time()
    work()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--resamples", type=int, default=4000)
    parser.add_argument("--starts", type=int, default=60, help="of Epoch's 4,500 starts that are run")
    parser.add_argument("--their-resamples", type=int, default=40, help="of Epoch's resamples that are run")
    options = parser.parse_args()
    shared = Path(os.environ.get("ISOLOSS_SHARED", "../shared"))
    table = load_table(
        shared / "data/chinchilla-epoch/svg_extracted_data.csv", columns="N=Model Size,C=Training FLOP,D=C/(6*N)"
    )
    table = table[table["loss"] < sorted(table["loss"])[-5]]
    x = {v: table[v].to_numpy(dtype=np.float64) for v in ("N", "D")}
    y = table["loss"].to_numpy(dtype=np.float64)
    data = np.log(x["N"]), np.log(x["D"]), np.log(y)
    law = get_law("chinchilla")
    fitted = solve(law, x, y, np.ones(len(y)))
    fit_s = cpu(lambda: [solve(law, x, y, np.ones(len(y))) for _ in range(20)]) / 20
    boot_s = cpu(lambda: cluster_bootstrap(fitted, None, options.resamples, np.random.default_rng(0)))

    grid = list(
        product(
            np.arange(0, 30, 5.0),
            np.arange(0, 30, 5.0),
            np.arange(-1, 1.5, 0.5),
            np.arange(0, 2.5, 0.5),
            np.arange(0, 2.5, 0.5),
        )
    )
    rng = np.random.default_rng(0)
    chosen = [np.array(grid[k]) for k in rng.choice(len(grid), options.starts, replace=False)]
    found: list[float] = []
    grid_s = cpu(lambda: found.extend(float(minimize(objective, s, args=data, method="L-BFGS-B").fun) for s in chosen))
    reached = np.mean(np.array(found) < fitted.objective * (1 + 1e-6))

    def resample() -> object:
        pick = rng.integers(0, len(y), len(y))
        return minimize(objective, HOFFMANN, args=tuple(v[pick] for v in data), jac=gradient, method="BFGS")

    their_boot_s = cpu(lambda: [resample() for _ in range(options.their_resamples)])

    def prediction(_: object, a: float, b: float, e: float, alpha: float, beta: float) -> Floats:
        return np.asarray(np.logaddexp(np.logaddexp(a - alpha * data[0], b - beta * data[1]), e), dtype=np.float64)

    def scipy_fit() -> object:
        return curve_fit(prediction, np.arange(len(y)), data[2], p0=HOFFMANN, method="trf", loss="huber", f_scale=DELTA)

    scipy_s = cpu(lambda: [scipy_fit() for _ in range(10)]) / 10
    default, _ = curve_fit(prediction, np.arange(len(y)), data[2])
    moved = not np.allclose(default, 1.0)

    all_starts, all_resamples = (
        grid_s * len(grid) / options.starts,
        their_boot_s * options.resamples / options.their_resamples,
    )
    lines = [
        f"rows {len(y)}, objective {fitted.objective:.16f}, status {fitted.status}",
        f"{'one fit':<44}{'CPU s':>12}  note",
        f"{'  isoloss, no start asked':<44}{fit_s:>12.4f}  {fitted.certificate['starts_agreeing']} starts agree",
        f"{'  Epoch: L-BFGS-B from ' + str(len(grid)) + ' starts':<44}{all_starts:>12.1f}  {options.starts} "
        f"run; {reached:.0%} of them reach the optimum",
        f"{'  scipy curve_fit, Hoffmann start':<44}{scipy_s:>12.4f}  no certificate",
        f"{'  scipy curve_fit, default start':<44}{'':>12}  "
        f"{'moved' if moved else 'returned its start without an error'}",
        f"{str(options.resamples) + ' refits':<44}{'CPU s':>12}",
        f"{'  isoloss':<44}{boot_s:>12.2f}",
        f"{'  Epoch: BFGS, analytic gradient':<44}{all_resamples:>12.1f}  {options.their_resamples} run",
        f"{'  scipy curve_fit, Hoffmann start':<44}{scipy_s * options.resamples:>12.1f}  one fit scaled up",
    ]
    print("\n".join(lines))


if __name__ == "__main__":
    main()
