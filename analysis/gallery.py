"""The core figures for given findings, with captions, words for those who cannot see, and the data shown.

After ``figures`` and ``findings``, before ``page`` and ``report``. Nothing is drawn here: ``draw`` is called by them,
once for each width.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import pandas as pd
from matplotlib.figure import Figure

from scaling.analysis import digits
from scaling.analysis.figures.curves import AXES, scaling_curves
from scaling.analysis.figures.deltas import seed_deltas
from scaling.analysis.figures.losses import TAIL_EVALUATIONS, loss_curves
from scaling.analysis.figures.noises import noise_floor
from scaling.analysis.findings import Findings
from scaling.analysis.readings import OVER_SIZES
from scaling.analysis.tables.core import convention_text, dropped_text

_MOST_EFFECTS: Final = 40  # rows of differences in one figure


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """One figure to be drawn: ``draw(width_in)``; ``alt`` tells it in words; ``data`` is what it shows."""

    name: str
    section: str
    title: str
    caption: str
    alt: str
    draw: Callable[[float], Figure]
    data: pd.DataFrame


def curves(found: Findings) -> Picture | None:
    """Loss against compute, with laws and arrows."""
    columns = ["run_key", "method", "size", "seed", found.x, "val_loss"]
    data = found.compared[columns].dropna(subset=[found.x, "val_loss"])
    if data.empty:
        return None
    baseline = found.baseline
    base = (
        f" Lower panel: the same minus {baseline}'s law, over the range of its runs."
        if baseline in found.curves
        else ""
    )
    level = found.speedups[0].level if found.speedups else 0.95
    arrows = (
        f" An arrow runs from a method's loss to where {baseline}'s law has the same loss; its length is the "
        f"speedup at "
        "that scale."
        if found.speedups
        else ""
    )
    bands = f" with {digits.share(level)} bands" if any(curve.low for curve in found.curves.values()) else ""
    laws = f" Lines: fitted laws{bands}." if found.curves else " No law could be fitted."
    return Picture(
        name="scaling-curves",
        section="speedups",
        title="Loss against compute",
        caption=f"Points: runs ({found.num_seeds or 'no'} seed{'s' * (found.num_seeds != 1)}).{laws}{arrows}{base} "
        f"{convention_text(found.conventions)}"
        f"{dropped_text(len(found.dropped))}",
        alt=f"Held-out loss against {AXES.get(found.x, found.x)} for {', '.join(found.methods[:12])}. {_told(found)}",
        draw=lambda width: scaling_curves(
            found.compared, found.curves, found.speedups, x=found.x, baseline=baseline, width_in=width
        ),
        data=data,
    )


def _told(found: Findings) -> str:
    told = [f"{s.method}: speedup {s.mean:.3g}" for s in found.speedups if s.mean == s.mean]
    return "; ".join(told[:12]) + ("." if told else "")


def deltas(found: Findings) -> Picture | None:
    """Paired differences by seed."""
    if not found.deltas or found.baseline is None:
        return None
    baseline = found.baseline
    sd = next((noise.sd for noise in found.noises if noise.counts_for_methods), None)
    rows = [
        {"method": d.method, "size": d.size, "seed": seed, "delta": value, "mean": d.mean, "low": d.low, "high": d.high}
        for d in found.deltas
        for seed, value in zip(d.seeds, d.deltas, strict=True)
    ]
    level = found.deltas[0].level
    dots = (
        "Each dot is one pair of runs with the same seed; " if rows else "Mean differences, runs not paired by seed; "
    )
    bars = (
        f"bars are {digits.share(level)} intervals of the mean, cut at the edge where they are far wider than the dots"
        if any(d.low is not None for d in found.deltas)
        else f"no intervals: {found.deltas[0].why or 'no noise estimate'}"
    )
    shade = " Shaded: two standard deviations of seed noise either way." if sd is not None else ""
    alt = "; ".join(f"{d.method} at {d.size}: {d.mean:.3g}, {d.verdict}" for d in found.deltas[:24])
    return Picture(
        name="seed-deltas",
        section="seeds",
        title="Loss differences by seed",
        caption=f"{dots}{bars}. Left of zero: lower loss than {baseline}.{shade}",
        alt=f"Loss minus {baseline}'s: {alt}.",
        draw=lambda width: seed_deltas(
            found.deltas, baseline=baseline, noise_sd=sd, sizes=found.places or None, width_in=width
        ),
        data=pd.DataFrame(rows),
    )


def noise(found: Findings) -> Picture | None:
    """Effects against the noise; nothing where no noise was measured that they could be set against."""
    if not any(noise.sd > 0 for noise in found.noises):
        return None
    effects = list(found.deltas)
    if len(effects) > _MOST_EFFECTS:  # the mean over sizes of each method, or its last size
        last = {delta.method: delta for delta in effects}
        effects = list({**last, **{delta.method: delta for delta in effects if delta.size == OVER_SIZES}}.values())
    few = f" Of {len(found.deltas)} differences, one a method." if len(effects) < len(found.deltas) else ""
    drawn = [noise.sd for noise in found.noises if noise.sd > 0] + [d.mean for d in effects if d.mean != 0]
    if len(drawn) < 2:  # a single point is no picture; the table has it
        return None
    rows = [{"what": n.label, "sd_or_effect": n.sd, "low": n.low, "high": n.high, "n": n.n} for n in found.noises]
    rows += [
        {"what": f"{d.method} at {d.size}", "sd_or_effect": abs(d.mean), "low": d.low, "high": d.high, "n": d.n}
        for d in effects
    ]
    return Picture(
        name="noise-floor",
        section="noise",
        title="Effects against the noise",
        caption="Standard deviations of the loss by kind of noise, with intervals. The dashed line is seed noise, "
        "which alone judges methods."
        if not effects
        else "Above: standard deviations of the loss by kind of noise. Below: absolute mean differences between "
        "methods; filled where the interval leaves out zero. The shaded band is seed noise, that of single runs, which "
        "alone judges methods: a mean over many seeds, or over pairs of one seed, can be sure of less." + few,
        alt="; ".join(f"{n.label}: {n.sd:.2g} nats" for n in found.noises) + ".",
        draw=lambda width: noise_floor(found.noises, effects, baseline=found.baseline or "", width_in=width),
        data=pd.DataFrame(rows),
    )


def losses(found: Findings) -> Picture | None:
    """Loss during training."""
    histories = found.histories
    if histories is None or histories.empty:
        return None
    data = histories[(histories["metric"] == "val/loss") & histories["run_key"].isin(found.table["run_key"])]
    if data.empty:
        return None
    known = found.table["tail_evaluations"].dropna()
    tail = int(known.median()) if len(known) else TAIL_EVALUATIONS
    whose = "the tail mean of these runs averages" if len(known) else "the MHAR paper's tail mean averages"
    evaluations = int(data.groupby("run_key", observed=True)["step"].nunique().max())
    last = f" Shaded, where all runs of a panel end together: the last {tail} evaluations, which {whose}."
    window = last if evaluations > tail > 1 else ""
    return Picture(
        name="loss-curves",
        section="losses",
        title="Loss during training",
        caption="Held-out loss of each run by step, one panel a size; beyond 24 runs a panel, each method's mean "
        f"and, of up to five methods, range.{window} The steep fall of the first steps is cut off.",
        alt=f"Loss curves of {data['run_key'].nunique()} runs.",
        draw=lambda width: loss_curves(found.compared, histories, baseline=found.baseline, tail=tail, width_in=width),
        data=data[["run_key", "step", "value"]],
    )
