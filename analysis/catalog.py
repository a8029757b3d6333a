"""Every table and figure by name: what ``report table`` and ``report figure`` offer, and what a report puts where.

After ``gallery``, ``exhibits`` and ``tables``, before ``sections``. Each entry builds from findings, or says that
the runs have nothing for it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from scaling.analysis import exhibits, gallery
from scaling.analysis.findings import Findings
from scaling.analysis.gallery import Picture
from scaling.analysis.published import TOPICS
from scaling.analysis.tables import ablations, beside, core, costs, inside, overhead, scores, shapes, uncertainty
from scaling.analysis.tables.table import Table
from scaling.errors import TableError, UsageError, nearest

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Entry(Generic[T]):
    """A named table or figure: what it shows, what runs it needs, how it is built (``None``: nothing to show)."""

    shows: str
    needs: str
    build: Callable[[Findings], T | None]


def _speedups(found: Findings) -> Table | None:
    if not found.speedups:
        return None
    return core.speedups(
        found.speedups, baseline=found.baseline or "", conventions=found.conventions, dropped=len(found.dropped)
    )


def _by_scale(found: Findings) -> Table | None:
    return core.speedups_by_scale(found.speedups, baseline=found.baseline or "") if found.speedups else None


def _seeds(found: Findings) -> Table | None:
    return (
        core.seed_deltas(found.deltas, baseline=found.baseline or "", dropped=len(found.dropped))
        if found.deltas
        else None
    )


def _main(found: Findings) -> Table | None:
    return ablations.main(found.compared_usable, baseline=found.baseline, sd=found.seed_sd, dropped=len(found.dropped))


def _heads(found: Findings) -> Table | None:
    if exhibits.heads(found) is None:
        return None
    return ablations.heads(found.usable, sd=found.seed_sd, dropped=len(found.dropped))


def _heads_kv(found: Findings) -> Table | None:
    if exhibits.heads_by_kv(found) is None:
        return None
    return ablations.heads_by_kv(found.usable, sd=found.seed_sd, dropped=len(found.dropped))


def _rates(found: Findings) -> Table | None:
    if exhibits.learning_rates(found) is None:
        return None
    return ablations.learning_rates(found.usable, sd=found.seed_sd, dropped=len(found.dropped))


def _throughput(found: Findings) -> Table | None:
    try:
        return costs.throughput(found.compared, found.histories, baseline=found.baseline)
    except TableError:
        return None


def _configurations(found: Findings) -> Table | None:
    if not found.sizes:
        return None
    return shapes.configurations(found.usable, sizes=found.sizes, baseline=found.baseline, dropped=len(found.dropped))


def _added(found: Findings) -> Table | None:
    if found.baseline is None or found.compared["method"].nunique() < 2:
        return None
    return shapes.added(found.compared_usable, sizes=found.places, baseline=found.baseline)


def _variants(found: Findings) -> Table | None:
    return ablations.variants(found.usable, sd=found.seed_sd, dropped=len(found.dropped))


def _tasks(found: Findings) -> Table | None:
    given = found.scores
    return None if given is None else scores.tasks(given, sizes=found.places)


def _items(found: Findings) -> Table | None:
    return scores.items(found.supplements.items) if found.supplements.items else None


def _steps(found: Findings) -> Table | None:
    return None if found.supplements.steps is None else costs.steps(found.supplements.steps)


def _kernels(found: Findings) -> Table | None:
    return None if found.supplements.kernels is None else costs.kernels(found.supplements.kernels)


def _disagreement(found: Findings) -> Table | None:
    return inside.disagreement(found.supplements.probes) if found.supplements.probes else None


def _intervals(found: Findings) -> Table | None:
    start = "speedup "
    speedups = {name.removeprefix(start): r for name, r in found.results.items() if name.startswith(start)}
    return uncertainty.kinds(found.results.get("law"), speedups)


def _published(topic: str) -> Callable[[Findings], Table]:
    return lambda found: beside.published(topic, found)


TABLES: Final[Mapping[str, Entry[Table]]] = {
    "runs": Entry(shows="every run", needs="any run", build=lambda found: core.runs(found.table)),
    "speedups": Entry(shows="iso-loss speedups", needs="a baseline at 3 or more scales, FLOPs", build=_speedups),
    "speedups-by-scale": Entry(shows="the speedup at each scale", needs="as speedups", build=_by_scale),
    "seed-deltas": Entry(shows="paired differences of loss", needs="a baseline, seeds in common", build=_seeds),
    "noise": Entry(
        shows="the noise floor",
        needs="two seeds of one setting",
        build=lambda f: core.noise(f.noises) if f.noises else None,
    ),
    "intervals": Entry(
        shows="kinds of interval beside each other", needs="a law or speedups with an interval", build=_intervals
    ),
    "configurations": Entry(
        shows="shape, budget and recipe of each size", needs="runs with a size", build=_configurations
    ),
    "main": Entry(shows="methods by size, with the difference to the baseline", needs="any run", build=_main),
    "heads": Entry(shows="head counts by size", needs="two or more head counts", build=_heads),
    "heads-kv": Entry(shows="H x KV grid with each row's optimum", needs="two or more H and KV", build=_heads_kv),
    "lr": Entry(shows="each method at its own learning rate", needs="two or more learning rates", build=_rates),
    "variants": Entry(
        shows="one method with several options: streams, blocks, without a part",
        needs="two or more options of a method at a size",
        build=_variants,
    ),
    "tasks": Entry(
        shows="downstream scores, one column a task",
        needs="--scores FILE, or columns score/TASK of the runs",
        build=_tasks,
    ),
    "items": Entry(shows="McNemar's test of paired answers", needs="--items FILE", build=_items),
    "disagreement": Entry(
        shows="disagreement of routing heads", needs="--probe FILE, or run folders with probes", build=_disagreement
    ),
    "throughput": Entry(shows="throughput and peak memory", needs="histories of perf/ and mem/", build=_throughput),
    "steps": Entry(
        shows="benchmarked training steps", needs="--bench FILE of `scaling bench train --json`", build=_steps
    ),
    "kernels": Entry(
        shows="benchmarked kernels", needs="--bench FILE of `scaling bench kernels --json`", build=_kernels
    ),
    "added": Entry(
        shows="parameters and FLOPs that methods added in these runs", needs="a baseline, FLOPs", build=_added
    ),
    "overhead": Entry(shows="parameters and FLOPs added, counted", needs="no run", build=lambda _: overhead.overhead()),
    "traffic": Entry(
        shows="memory accesses of the residual a token and layer, counted",
        needs="no run",
        build=lambda found: overhead.traffic(size=overhead.on_ladder(found.sizes)),
    ),
    "dropped": Entry(
        shows="runs left out", needs="a run left out", build=lambda f: core.dropped(f.dropped) if f.dropped else None
    ),
    **{
        f"published-{topic}": Entry(
            shows=f"published: {beside.TITLES[topic].lower()}", needs="any run", build=_published(topic)
        )
        for topic in TOPICS
    },
}

FIGURES: Final[Mapping[str, Entry[Picture]]] = {
    "scaling-curves": Entry(shows="loss against compute, laws, arrows", needs="FLOPs", build=gallery.curves),
    "speedup-by-scale": Entry(shows="speedup by scale", needs="speedups", build=exhibits.speedups),
    "seed-deltas": Entry(shows="paired differences", needs="a baseline, seeds in common", build=gallery.deltas),
    "noise-floor": Entry(shows="effects against the noise", needs="two seeds of one setting", build=gallery.noise),
    "heads": Entry(shows="loss by head count", needs="two or more head counts", build=exhibits.heads),
    "heads-kv": Entry(shows="H x KV heat map", needs="two or more H and KV", build=exhibits.heads_by_kv),
    "lr": Entry(shows="loss by learning rate", needs="two or more learning rates", build=exhibits.learning_rates),
    "loss-curves": Entry(shows="loss during training", needs="histories of val/loss", build=gallery.losses),
    "throughput": Entry(shows="throughput and memory", needs="histories of perf/ and mem/", build=exhibits.throughput),
    "steps": Entry(
        shows="benchmarked steps against the baseline",
        needs="--bench FILE of `scaling bench train --json`",
        build=exhibits.steps,
    ),
    "kernels": Entry(
        shows="benchmarked kernels against the copy rate",
        needs="--bench FILE of `scaling bench kernels --json`",
        build=exhibits.kernels,
    ),
    "routing-weights": Entry(
        shows="per-head routing weights over depth",
        needs="--probe FILE, or run folders with probes",
        build=exhibits.routing_weights,
    ),
    "disagreement": Entry(
        shows="disagreement by layer against random queries",
        needs="--probe FILE, or run folders with probes",
        build=exhibits.disagreement,
    ),
    "residuals": Entry(shows="residuals and influence of the law", needs="a law", build=exhibits.residuals),
    "backtest": Entry(shows="error against extrapolation", needs="5 or more scales", build=exhibits.backtest),
    "isoflop": Entry(
        shows="loss over size at equal compute", needs="3 or more sizes at a budget", build=exhibits.isoflop
    ),
}


def table(found: Findings, name: str) -> Table:
    """A table by name.

    Raises
    ------
    UsageError
        If there is no such table.
    TableError
        If these runs have nothing for it; the message says what it needs.
    """
    return _get(TABLES, "table", found, name)


def picture(found: Findings, name: str) -> Picture:
    """A figure by name; raises as ``table`` does."""
    return _get(FIGURES, "figure", found, name)


def pictures(found: Findings) -> list[Picture]:
    """Every figure that these runs have something for, in reading order."""
    return [built for entry in FIGURES.values() if (built := entry.build(found)) is not None]


def _get(entries: Mapping[str, Entry[T]], what: str, found: Findings, name: str) -> T:
    if name not in entries:
        raise UsageError(f"{what} {name!r} is unknown; {nearest(name, entries)}")
    built = entries[name].build(found)
    if built is None:
        raise TableError(f"{what} {name!r}: these runs have nothing for it; it needs {entries[name].needs}")
    return built
