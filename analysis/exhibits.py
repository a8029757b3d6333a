"""The figures beyond the core ones: grids, speedup by scale, costs, and the fits' own diagnostics.

Beside ``gallery``, which puts them with the core ones. Each function gives a picture, or ``None`` where the runs have
nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np
import pandas as pd

from scaling.analysis import digits
from scaling.analysis.figures import costs, fits, grids, routing, speeds
from scaling.analysis.findings import Findings
from scaling.analysis.gallery import Picture
from scaling.analysis.grids import Grid, gather, with_single_head
from scaling.analysis.result import Result
from scaling.analysis.supplements import Probe
from scaling.analysis.tables.core import dropped_text
from scaling.analysis.tables.costs import kernels as kernel_table
from scaling.analysis.tables.costs import measured
from scaling.errors import TableError


def speedups(found: Findings) -> Picture | None:
    """Speedup of each method by scale."""
    shown = [item for item in found.speedups if item.scales]
    if not shown:
        return None
    rows = [
        {"method": s.method, "scale": p.scale, "compute": p.compute, "speedup": p.speedup, "low": p.low, "high": p.high}
        for s in shown
        for p in s.scales
    ]
    if any(row["low"] is not None for row in rows):
        intervals = f"{digits.share(shown[0].level)} intervals"
        cut = " Intervals far wider than the points differ are cut at the edge."
    else:
        intervals, cut = f"no intervals ({shown[0].why or 'no noise estimate'})", ""
    return Picture(
        name="speedup-by-scale",
        section="speedups",
        title="Speedup by scale",
        caption=f"Iso-loss speedup over {found.baseline} at each scale, {intervals}. "
        f"Hollow: the baseline's law is extrapolated there. Dashed: trend with compute.{cut}"
        f"{dropped_text(len(found.dropped))}",
        alt="; ".join(f"{s.method}: {s.mean:.3g} on average" for s in shown) + ".",
        draw=lambda width: speeds.speedup_by_scale(shown, baseline=found.baseline or "", width_in=width),
        data=pd.DataFrame(rows),
    )


def heads(found: Findings) -> Picture | None:
    """Loss over head counts."""
    runs = with_single_head(found.usable)
    if runs.groupby("size")["heads"].nunique().max() < 2 if len(runs) else True:
        return None
    grid = gather(runs, ["size", "method", "heads"], within=["size", "method"], sd=found.seed_sd)
    return _grid_picture(
        "heads", "Loss by routing heads", grid, found,
        "Shaded: head counts not distinguishable from the best.",
        lambda width: grids.head_counts(grid, sizes=found.sizes, width_in=width),
    )  # fmt: skip


def heads_by_kv(found: Findings) -> Picture | None:
    """Heat map of heads by key-value heads."""
    runs = with_single_head(found.usable).dropna(subset=["kv"])
    if runs["heads"].nunique() < 2 or runs["kv"].nunique() < 2:
        return None
    grid = gather(runs, ["size", "kv", "heads"], within=["size", "kv"], sd=found.seed_sd)
    return _grid_picture(
        "heads-kv", "Loss by routing heads and key-value heads", grid, found,
        "● least of its row; ○ not distinguishable from it.",
        lambda width: grids.heads_by_kv(grid, sizes=found.sizes, width_in=width),
    )  # fmt: skip


def learning_rates(found: Findings) -> Picture | None:
    """Loss over learning rates."""
    rates = found.usable.dropna(subset=["lr", "val_loss"]).groupby(["size", "method"])["lr"].nunique()
    if rates.empty or rates.max() < 2:
        return None
    grid = gather(found.usable, ["size", "method", "lr"], within=["size", "method"], sd=found.seed_sd)
    return _grid_picture(
        "lr", "Loss by learning rate", grid, found,
        "Ringed: each method's best rate.",
        lambda width: grids.learning_rates(grid, sizes=found.sizes, baseline=found.baseline, width_in=width),
    )  # fmt: skip


def throughput(found: Findings) -> Picture | None:
    """Throughput and memory bars."""
    try:
        frame = measured(found.table.assign(method=found.compared["method"]), found.histories)
    except TableError:
        return None
    return Picture(
        name="throughput",
        section="costs",
        title="Throughput and memory",
        caption="Medians over runs, without the first fifth of each. Meaningful only where runs had a machine to "
        "themselves.",
        alt=f"Throughput and memory of {frame['method'].nunique()} methods at {frame['size'].nunique()} sizes.",
        draw=lambda width: costs.costs(frame, baseline=found.baseline, sizes=found.sizes, width_in=width),
        data=frame,
    )


def steps(found: Findings) -> Picture | None:
    """Benchmarked steps as bars against the baseline's."""
    frame = found.supplements.steps
    if frame is None or "ratio" not in frame:
        return None
    shown = frame.dropna(subset=["ratio"])
    launch = "graph" if (shown["launch"] == "graph").any() else "eager"
    whole = "forward+backward+optimiser"
    shown = shown[(shown["launch"] == launch) & (shown["pass"] == whole)]
    if shown.empty:
        return None
    if "implementation" in shown:  # one bar a method: this project's kernels where they were timed
        own = (shown["implementation"] == "kernels") | (shown["method"] == "baseline")
        others = ~own & ~shown["method"].isin(shown.loc[own, "method"])
        named = shown["method"].astype(str) + " (" + shown["implementation"].astype(str) + ")"
        shown = shown.assign(method=shown["method"].where(~others, named))[own | others]
    labels = shown["shape"].astype(str) + " " + shown["vocabulary"].map(lambda v: f"{float(v) / 1000:.0f}k")
    data = shown.assign(size=labels, ratio=shown["ratio"].astype(float))
    if "peak_bytes" in data:
        data = data.assign(peak_gib=data["peak_bytes"].astype(float) / 2**30)
    width = data["shape"].astype(str).str.extract(r"(\d+)", expand=False).fillna("0").astype(int)
    order = data.assign(shape=width, vocabulary=data["vocabulary"].astype(float))
    data = data.loc[order.sort_values(["shape", "vocabulary"], kind="stable").index]
    sizes = list(dict.fromkeys(data["size"]))
    launched = "replayed as one CUDA graph" if launch == "graph" else "launched one kernel at a time"
    return Picture(
        name="steps",
        section="costs",
        title="Training steps against the baseline",
        caption=f"Whole steps ({whole}), {launched}, by shape and vocabulary. Dashed: the compiled pre-norm "
        "baseline of the same call; methods by this project's kernels, unless another implementation is named.",
        alt=f"Throughput of {data['method'].nunique()} methods at {len(sizes)} shapes, as shares of the baseline's.",
        draw=lambda width: costs.costs(data, sizes=sizes, ceilings={"ratio": 1.0}, width_in=width),
        data=data,
    )


def kernels(found: Findings) -> Picture | None:
    """Kernels of a benchmark against the copy rate."""
    frame = found.supplements.kernels
    if frame is None or "ceiling_share" not in frame:
        return None
    data = kernel_table(frame).frame
    return Picture(
        name="kernels",
        section="costs",
        title="Routing kernels against the copy rate",
        caption="Bytes that each kernel must move over its median time, as a share of the copy rate measured in the "
        "same call of the benchmark. Beyond 100%, part of the data came from the cache.",
        alt="; ".join(
            f"{o} at {s}: {v:.0f}%" for o, s, v in zip(data["operation"], data["shape"], data["share"], strict=True)
        ),
        draw=lambda width: costs.kernels(data, width_in=width),
        data=data,
    )


def routing_weights(found: Findings) -> Picture | None:
    """Per-head routing weights over depth of the largest probed model."""
    probes = _probes(found)
    if not probes:
        return None
    probe = probes[-1]
    seen = ~np.isnan(probe.weights)
    row, source, head = np.nonzero(seen)
    data = pd.DataFrame({"site": probe.sites[row], "source": source, "head": head, "weight": probe.weights[seen]})
    others = f" {len(probes) - 1} other probed models are not shown; name one with --probe." if len(probes) > 1 else ""
    return Picture(
        name="routing-weights",
        section="routing",
        title="What each routing head reads",
        caption=f"{probe.name}: mean weight that each head of a site gives to each source, over {len(probe.learned)} "
        f"held-out sequences. Source 0 is the embedding, source k the output of sublayer k (or of block k).{others}",
        alt=f"Routing weights of {probe.heads} heads at {len(probe.sites)} sites.",
        draw=lambda width: routing.routing_weights(
            probe.weights, sites=list(probe.sites), title=probe.name, width_in=width
        ),
        data=data,
    )


def disagreement(found: Findings) -> Picture | None:
    """Disagreement of the heads by layer, of every probed model."""
    probes = _probes(found)
    if not probes:
        return None
    panels = [(probe.name, probe) for probe in reversed(probes)]
    rows = [
        {"run": name, "site": int(site), "learned": float(a), "random": float(b)}
        for name, probe in panels
        for site, a, b in zip(probe.sites, probe.learned.mean(axis=0), probe.random.mean(axis=(0, 2)), strict=True)
    ]
    means = "; ".join(
        f"{name}: {probe.learned.mean():.2g} against {probe.random.mean():.2g}" for name, probe in panels[:6]
    )
    more = " The six largest models are shown." if len(panels) > 6 else ""
    return Picture(
        name="disagreement",
        section="routing",
        title="Disagreement between routing heads by layer",
        caption="Mean over pairs of heads of the total variation distance between their weights (0: all read alike, "
        "1: no "
        "source in common) at each site, for the trained queries and for random ones of the same norms; shaded: two "
        "standard "
        f"deviations over the random draws.{more}",
        alt=f"Trained against random queries: {means}.",
        draw=lambda width: routing.disagreement(panels, width_in=width),
        data=pd.DataFrame(rows),
    )


def _probes(found: Findings) -> list[Probe]:
    """Probes, the smallest model first; one of a size that the runs do not have comes last."""
    order = {size: place for place, size in enumerate(found.sizes)}
    return sorted(found.supplements.probes, key=lambda probe: order.get(probe.size, len(order)))


def residuals(found: Findings) -> Picture | None:
    """Residuals and influence of the joint law."""
    fit = found.results.get("law")
    if fit is None or "rows" not in fit.details:
        return None
    rows = pd.DataFrame(fit.details["rows"]).assign(influence=fit.details["influence"])
    return Picture(
        name="residuals",
        section="fits",
        title="Residuals of the law and influence of each run",
        caption=f"Observed minus fitted loss under the law {fit.details['formula']}; "
        f"{_shared(fit)}{_STATUS[fit.status]}. "
        "Right of the dashed line, where there is one, a run moves the fit more than twice as much as the average one.",
        alt=f"{len(rows)} residuals, the greatest {rows['residual'].abs().max():.2g}.",
        draw=lambda width: fits.residuals(fit, baseline=found.baseline, width_in=width),
        data=rows,
    )


_STATUS: Final[dict[str, str]] = {
    "converged": "the fit converged",
    "bound-hit": "one of its parameters ended at its bound, so that the curve is less sure than it looks",
    "unmoved": "the fit did not move from its start and is not to be trusted",
    "multimodal": "several fits are about equally good, one of them is shown",
    "undetermined": "the runs do not determine all of its parameters",
    "max-iter": "the fit was stopped before it converged",
    "refused": "the fit was refused",
}


def _shared(fit: Result) -> str:
    """What methods have in common in a joint law."""
    if not fit.details.get("by"):
        return ""
    words = {"E+exponents": "methods share E and a; ", "E": "methods share E; ", "none": "each method has its own; "}
    shared = str(fit.details["shared"])
    return words.get(shared, f"shared by methods: {shared}; ")


def backtest(found: Findings) -> Picture | None:
    """Backtest of the baseline's law."""
    fit = found.results.get("backtest")
    if fit is None:
        return None
    level = fit.interval.level if fit.interval else 0.9
    return Picture(
        name="backtest",
        section="fits",
        title="How well smaller runs foretold larger ones",
        caption=f"Laws fitted to the smaller runs of {fit.conventions.get('rows of', 'the baseline')}, each larger "
        f"run predicted; "
        f"shaded: {digits.share(level)} of the errors. What lies further out than these factors is not known.",
        alt=f"{fit.n} predictions; median absolute error {100 * fit.estimate['median_error']:.2g} percent.",
        draw=lambda width: fits.backtest(fit, width_in=width),
        data=pd.DataFrame(fit.details["predictions"]),
    )


def isoflop(found: Findings) -> Picture | None:
    """IsoFLOP parabolas."""
    fit = found.results.get("isoflop")
    if fit is None:
        return None
    rows = [
        {"budget": p["budget"], "N": n, "loss": loss, "optimum": p["optimum"]}
        for p in fit.details["profiles"]
        for n, loss in zip(p["N"], p["loss"], strict=True)
    ]
    return Picture(
        name="isoflop",
        section="fits",
        title="Loss over model size at equal compute",
        caption=f"One curve a compute budget; diamonds: minima. N* grows as C to the {fit.estimate['N_exponent']:.3g}.",
        alt=f"{len(fit.details['profiles'])} budgets.",
        draw=lambda width: fits.isoflop(fit, width_in=width),
        data=pd.DataFrame(rows),
    )


def _grid_picture(
    name: str, title: str, grid: Grid, found: Findings, told: str, draw: Callable[[float], object]
) -> Picture:  # fmt: skip
    spread = (
        f"{digits.share(grid.level)} intervals, spread {grid.source}" if grid.df > 0 else f"no intervals: {grid.source}"
    )
    return Picture(
        name=name,
        section="grids",
        title=title,
        caption=f"Mean held-out loss of each cell; {spread}. {told}{dropped_text(len(found.dropped))}",
        alt=f"{len(grid.frame)} cells; the best has a loss of {grid.frame['mean'].min():.4g}.",
        draw=draw,  # type: ignore[arg-type]
        data=grid.frame,
    )
