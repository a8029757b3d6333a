"""Noise of the tail mean: how far runs of one setting differ in it, and how little one run fluctuates within it.

After ``noise`` and ``curve_noise``, before ``inquiry``. Both stand in the noise table beside the spread of final
losses, because papers quote either for it: the fluctuation within a tail understates the noise between seeds.
"""

from __future__ import annotations

import pandas as pd

from scaling.analysis.curve_noise import TAIL, tail_noise
from scaling.analysis.noise import CONFIGURATION, noise_floor
from scaling.analysis.readings import Noise
from scaling.errors import ScalingError


def tail_noises(runs: pd.DataFrame, histories: pd.DataFrame | None) -> tuple[Noise, ...]:
    """The tail mean between seeds, and the fluctuation within the tails; nothing where the runs cannot give them."""
    return (*_between(runs), *_within(runs, histories))


def _between(runs: pd.DataFrame) -> tuple[Noise, ...]:
    if runs["val_loss_tail"].isna().all():
        return ()
    try:
        found = noise_floor(runs.assign(val_loss=runs["val_loss_tail"]))
    except ScalingError:
        return ()
    if "seed_sd" not in found.estimate:
        return ()
    interval = found.interval
    return (
        Noise(
            kind="tail_mean_sd",
            label="tail mean between seeds",
            sd=float(found.estimate["seed_sd"]),
            low=float(interval.low["seed_sd"]) if interval else None,
            high=float(interval.high["seed_sd"]) if interval else None,
            n=found.n,
            df=found.df,
            counts_for_methods=False,
            note="the mean of the last evaluations in place of the last; comparisons here use the last",
        ),
    )


def _within(runs: pd.DataFrame, histories: pd.DataFrame | None) -> tuple[Noise, ...]:
    """Deviations about the mean path of the runs of one setting: needs two runs with common evaluations."""
    if histories is None:
        return ()
    points = histories[histories["metric"] == "val/loss"]
    known = [column for column in CONFIGURATION if column in runs.columns]
    setting = runs.groupby(known, dropna=False, sort=False).ngroup()
    group = dict(zip(runs["run_key"].astype(str), setting, strict=True))
    curves = pd.DataFrame(
        {
            "run": points["run_key"].astype(str),
            "step": points["step"],
            "loss": points["value"].astype(float),
            "group": points["run_key"].astype(str).map(group),
        }
    ).dropna(subset=["group", "loss"])
    for tail in (TAIL, 3):
        try:
            found = tail_noise(curves, by="group", tail=tail)
        except ScalingError:
            continue
        if "tail_sd" not in found.estimate:
            return ()
        return (
            Noise(
                kind="tail_sd",
                label="within the tail of a run",
                sd=float(found.estimate["tail_sd"]),
                low=None,
                high=None,
                n=found.n,
                df=float((tail - 1) * (found.df or 0)),
                counts_for_methods=False,
                note=f"last {tail} evaluations about the mean path of the seeds; a run keeps its offset, so this is "
                f"less "
                "than the noise between seeds",
            ),
        )
    return ()
