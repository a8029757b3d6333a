"""Made-up sweeps with a known law, for tests: a tidy table, its histories, and findings with known values."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pandas as pd

from scaling.analysis.findings import Failure, Findings
from scaling.analysis.readings import Curve, Delta, IsoLoss, Noise, Speedup
from scaling.analysis.schema import COLUMNS

E, A, EXPONENT = 1.8, 60.0, 0.15
SPEEDUP = 1.25


def truth(flops: float, speedup: float) -> float:
    return float(E + A * (flops * speedup) ** -EXPONENT)


def table(
    *,
    sizes: int = 4,
    methods: Sequence[str] = ("baseline", "mhar"),
    seeds: int = 2,
    sigma: float = 0.004,
    loss_scale: float = 1.0,
    evil: str = "",
) -> pd.DataFrame:
    """A tidy table: each method after the first saves compute by ``SPEEDUP`` to the power of its place."""
    rng = np.random.default_rng(11)
    rows = []
    for size in range(sizes):
        parameters = int(5e4 * 10 ** (size / 2))
        tokens = 20 * parameters
        flops = 6.5 * parameters * tokens
        shared = rng.normal(0, sigma, seeds)
        for place, method in enumerate(methods):
            for seed in range(seeds):
                loss = truth(flops, SPEEDUP**place) + shared[seed] + rng.normal(0, sigma / 2)
                rows.append(
                    {
                        "run_key": f"{size:02x}{place:02x}{seed:02x}aabbccdd",
                        "sweep": "planted",
                        "name": f"s{size}-{method}-s{seed}{evil}",
                        "method": method,
                        "size": f"{parameters / 1e6:.3g}m",
                        "n_params": parameters + 100_000,
                        "n_params_non_embedding": parameters,
                        "heads": 8 if method == "mhar" else None,
                        "kv": 4,
                        "lr": 1e-3,
                        "seed": seed,
                        "batch_tokens": 4096,
                        "steps": tokens // 4096,
                        "steps_planned": tokens // 4096,
                        "tokens": tokens,
                        "flops": flops,
                        "flops_6nd": 6.0 * parameters * tokens,
                        "wall_time_s": 3.0 * 10 ** (size / 2),
                        "gpu_seconds": 3.0 * 10 ** (size / 2),
                        "train_loss": loss * loss_scale,
                        "val_loss": loss * loss_scale,
                        "val_loss_se": 0.01,
                        "val_bpb": loss / np.log(2) / 4,
                        "val_loss_tail": loss * loss_scale,
                        "status": "done",
                        "schedule_finished": True,
                        "precision": "fp32",
                        "data_fingerprint": "d" * 16,
                        "eval_fingerprint": "e" * 16,
                        "curve_hash": f"{size}{place}{seed}",
                        "started_ms": 1_700_000_000_000,
                        "ended_ms": 1_700_000_100_000,
                        "attempts": 1,
                    }
                )
    return pd.DataFrame(rows, columns=list(COLUMNS)).astype(COLUMNS)


def histories(runs: pd.DataFrame, *, points: int = 40) -> pd.DataFrame:
    """Loss curves that end at each run's loss."""
    parts = []
    for key, steps, loss in zip(runs["run_key"], runs["steps"], runs["val_loss"], strict=True):
        step = np.linspace(0, max(int(steps), points), points).astype(int)
        value = float(loss) + 6.0 * np.exp(-7 * step / step[-1]) * (1 - step / step[-1])
        parts.append(
            pd.DataFrame(
                {
                    "run_key": key,
                    "metric": "val/loss",
                    "step": step,
                    "time_ms": 1_700_000_000_000 + step,
                    "value": value,
                }
            )
        )
    return pd.concat(parts, ignore_index=True)


def findings(runs: pd.DataFrame, lines: pd.DataFrame | None = None) -> Findings:
    """Findings with the planted truth in them, as if every analysis had succeeded without error."""
    methods = list(dict.fromkeys(runs["method"]))
    sizes = list(dict.fromkeys(runs["size"]))
    flops = np.geomspace(runs["flops"].min(), runs["flops"].max(), 40)
    curves, speedups, deltas = {}, [], []
    for place, method in enumerate(methods):
        loss = np.array([truth(c, SPEEDUP**place) for c in flops])
        curves[method] = Curve(
            method=method, x=tuple(flops), loss=tuple(loss), low=tuple(loss - 0.01), high=tuple(loss + 0.01)
        )
        if place == 0:
            continue
        s = SPEEDUP**place
        computes = sorted(runs["flops"].unique())
        scales = tuple(
            IsoLoss(
                scale=sizes[i],
                compute=c,
                loss=truth(c, s),
                baseline_compute=c * s,
                speedup=s,
                low=0.9 * s,
                high=1.1 * s,
                extrapolated=c * s > computes[-1],
            )
            for i, c in enumerate(computes)
        )
        speedups.append(
            Speedup(
                method=method,
                mean=s,
                low=0.92 * s,
                high=1.08 * s,
                level=0.95,
                scales=scales,
                trend=0.01,
                trend_p=0.4,
                n=len(runs),
                df=6,
                currency="flops",
                status="converged",
                interval_method="delta",
            )
        )
        for size in sizes:
            cell = runs[runs["size"] == size]
            mine = cell[cell["method"] == method].set_index("seed")["val_loss"]
            base = cell[cell["method"] == methods[0]].set_index("seed")["val_loss"]
            pairs = (mine - base).dropna()
            half = 12.7 * float(pairs.std()) / 2**0.5 if len(pairs) > 1 else None
            mean = float(pairs.mean())
            deltas.append(
                Delta(
                    method=method,
                    size=size,
                    seeds=tuple(int(s) for s in pairs.index),
                    deltas=tuple(map(float, pairs)),
                    mean=mean,
                    low=None if half is None else mean - half,
                    high=None if half is None else mean + half,
                    level=0.95,
                    n=len(pairs),
                    df=len(pairs) - 1,
                    p=0.2,
                    p_adjusted=0.4,
                    rho=0.8,
                    paired=True,
                    smallest_sign_flip_p=0.5,
                )
            )
    noises = (
        Noise(
            kind="seed",
            label="between seeds",
            sd=0.004,
            low=0.003,
            high=0.008,
            n=len(runs),
            df=8,
            counts_for_methods=True,
            note="only the seed differs",
        ),
        Noise(
            kind="tail",
            label="within the tail window",
            sd=0.0004,
            low=0.0003,
            high=0.0006,
            n=len(runs),
            df=80,
            counts_for_methods=False,
            note="fluctuation of one run",
        ),
        Noise(
            kind="evaluation",
            label="evaluation set",
            sd=0.01,
            low=None,
            high=None,
            n=len(runs),
            df=None,
            counts_for_methods=False,
            note="the same for all runs",
        ),
    )
    failures = (Failure(what="The IsoFLOP analysis", reason="each size was trained at one budget"),)
    return Findings(
        table=runs,
        histories=lines,
        baseline=methods[0],
        x="flops",
        curves=curves,
        speedups=tuple(speedups),
        deltas=tuple(deltas),
        noises=noises,
        failures=failures,
        dropped=(("deadbeef", "diverged at step 40"),),
    )
