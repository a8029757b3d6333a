"""The tables that every report has: runs, speedups, paired deltas, noise."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import pandas as pd

from scaling.analysis import digits
from scaling.analysis.readings import OVER_SIZES, Delta, Noise, Speedup
from scaling.analysis.tables.table import Column, Table

RUN_COLUMNS: Final = (
    Column(key="name", label="run"),
    Column(key="method", label="method"),
    Column(key="size", label="size"),
    Column(key="heads", label="H", kind="integer"),
    Column(key="kv", label="KV", kind="integer"),
    Column(key="lr", label="peak LR", kind="general"),
    Column(key="seed", label="seed", kind="integer"),
    Column(key="n_params_non_embedding", label="non-embedding parameters", kind="integer"),
    Column(key="tokens", label="tokens", kind="integer"),
    Column(key="flops", label="FLOPs", kind="number", digits=3),
    Column(key="steps", label="steps", kind="integer"),
    Column(key="val_loss", label="held-out loss (nats)", kind="number"),
    Column(key="val_loss_se", label="its evaluation SE", kind="number", digits=2),
    Column(key="val_bpb", label="bits per byte", kind="number"),
    Column(key="gpu_seconds", label="GPU s", kind="number", digits=3),
    Column(key="wall_time_s", label="wall s", kind="number", digits=3),
    Column(key="status", label="status"),
    Column(key="run_key", label="run key"),
)
_CONVENTIONS: Final = {
    ("currency", "flops"): "compute is counted in FLOPs of training",
    ("currency", "tokens"): "compute is counted in training tokens",
    ("currency", "seconds"): "compute is counted in seconds of training",
    ("currency", "gpu_hours"): "compute is counted in GPU hours of training",
    ("difference", "method minus baseline"): "differences are the method's loss minus the baseline's",
    ("pairing", "paired"): "runs of one seed are paired",
    ("pairing", "unpaired"): "runs are not paired by seed",
    ("asymptote", "shared"): "both laws have the same loss E that no compute goes below",
    ("asymptote", "free"): "each law has its own loss E that no compute goes below",
    ("mean", "geometric"): "geometric mean over scales",
    ("inversion", "law"): "the baseline's compute is read off its fitted law",
    ("inversion", "chord"): "the baseline's compute is read off straight lines between its runs",
}
_DELTA_VERDICTS: Final = {"lower": "lower loss", "higher": "higher loss", "undecided": "not decided"}
_ALWAYS: Final = ("method", "val_loss", "run_key")


def runs(table: pd.DataFrame, *, title: str = "Runs") -> Table:
    """Every run, best loss first; columns that no run fills are left out."""
    columns = tuple(c for c in RUN_COLUMNS if c.key in table and (table[c.key].notna().any() or c.key in _ALWAYS))
    order = [key for key in ("val_loss", "run_key") if key in table]
    frame = table.sort_values(order, na_position="last") if order else table
    if "n_params" in table and "size" in table:
        frame = frame.assign(size_sort=frame["n_params"].astype("Float64"))
    seeds = table["seed"].nunique() if "seed" in table else 0
    counted = _plural(len(table), "run") + (f", {_plural(seeds, 'seed')}" if seeds else "")
    caption = f"{counted}. Loss is the held-out loss at the last step."
    return Table(name="runs", title=title, caption=caption, columns=columns, frame=frame.reset_index(drop=True))


def speedups(found: Sequence[Speedup], *, baseline: str, conventions: Mapping[str, str], dropped: int = 0) -> Table:
    """Geometric mean of the iso-loss speedups of each method, its interval, and its trend with compute."""
    rows = []
    for item in sorted(found, key=lambda s: -s.mean if s.mean == s.mean else 0.0):
        outside = sum(scale.extrapolated for scale in item.scales)
        rows.append(
            {
                "method": item.method,
                "speedup": item.mean,
                "speedup_low": item.low,
                "speedup_high": item.high,
                "scales": len(item.scales),
                "extrapolated": outside,
                "trend": item.trend,
                "trend_p": item.trend_p,
                "n": item.n,
                "verdict": _speedup_verdict(item),
            }
        )
    _mark(rows, "speedup", higher_is_better=True)
    columns = (
        Column(key="method", label="method"),
        Column(key="speedup", label="speedup [interval]", kind="speedup"),
        Column(key="scales", label="scales", kind="integer"),
        Column(key="extrapolated", label="of them beyond the baseline's range", kind="integer"),
        Column(key="trend", label="trend of log speedup per decade", kind="number", digits=2),
        Column(key="trend_p", label="p of the trend", kind="number", digits=2),
        Column(key="n", label="runs", kind="integer"),
        Column(key="verdict", label="in words"),
    )
    level = found[0].level if found else 0.95
    way = found[0].interval_method if found else ""
    sure = any(item.low is not None for item in found)
    marks = " Bold: better than all others by more than the noise; = not distinguishable from the best." * sure
    interval = f"{digits.share(level)} interval{f' ({way})' if way else ''}" if sure else "no intervals, and no best"
    caption = (
        f"How many times the compute {baseline} needs to reach the same loss: geometric mean over scales, {interval}. "
        f"{convention_text(conventions)}{dropped_text(dropped)}{marks}"
    )
    return Table(
        name="speedups", title="Iso-loss speedup", caption=caption, columns=columns, frame=_frame(rows, columns)
    )


def speedups_by_scale(found: Sequence[Speedup], *, baseline: str) -> Table:
    """One row a method and scale: the points behind the means of ``speedups``."""
    rows = [
        {
            "method": item.method,
            "scale": scale.scale,
            "compute": scale.compute,
            "loss": scale.loss,
            "baseline_compute": scale.baseline_compute,
            "speedup": scale.speedup,
            "speedup_low": scale.low,
            "speedup_high": scale.high,
            "extrapolated": "yes" if scale.extrapolated else "no",
        }
        for item in found
        for scale in item.scales
    ]
    columns = (
        Column(key="method", label="method"),
        Column(key="scale", label="scale"),
        Column(key="compute", label="compute", kind="number", digits=3),
        Column(key="loss", label="loss (nats)", kind="number"),
        Column(key="baseline_compute", label=f"{baseline}'s compute at that loss", kind="number", digits=3),
        Column(key="speedup", label="speedup [interval]", kind="speedup"),
        Column(key="extrapolated", label="beyond the baseline's range"),
    )
    caption = f"Each scale's speedup: {baseline}'s compute at the method's loss, divided by the method's compute."
    return Table(
        name="speedups-by-scale",
        title="Speedup by scale",
        caption=caption,
        columns=columns,
        frame=_frame(rows, columns),
    )


def seed_deltas(found: Sequence[Delta], *, baseline: str, dropped: int = 0) -> Table:
    """Mean loss difference to the baseline by method and size, with interval, p, and the smallest p of a sign flip."""
    sizes = [*dict.fromkeys(delta.size for delta in found if delta.size != OVER_SIZES), OVER_SIZES]
    rows = [
        {
            "method": delta.method,
            "size": delta.size,
            "size_sort": float(sizes.index(delta.size)),
            "delta": delta.mean,
            "delta_low": delta.low,
            "delta_high": delta.high,
            "n": delta.n,
            "p": delta.p,
            "p_adjusted": delta.p_adjusted,
            "smallest_p": delta.smallest_sign_flip_p,
            "rho": delta.rho,
            "test": "none" if delta.p is None else "paired t" if delta.paired else "unpaired t",
            "verdict": "no interval" if delta.low is None else _DELTA_VERDICTS[delta.verdict],
        }
        for delta in found
    ]
    sure = any(delta.low is not None for delta in found)
    columns = tuple(
        column
        for column in (
            Column(key="method", label="method"),
            Column(key="size", label="size"),
            Column(key="delta", label=f"loss difference{' [interval]' * sure} (nats)", kind="estimate"),
            Column(key="n", label="pairs" if any(d.paired for d in found) else "runs, the fewer", kind="integer"),
            Column(key="test", label="test"),
            Column(key="p", label="p", kind="number", digits=2),
            Column(key="p_adjusted", label="p, adjusted", kind="number", digits=2),
            Column(key="smallest_p", label="smallest p by sign flips", kind="general", digits=2),
            Column(key="rho", label="pair correlation", kind="number", digits=2),
            Column(key="verdict", label="in words"),
        )
        if column.key not in {"p", "p_adjusted", "smallest_p", "rho"} or any(r[column.key] is not None for r in rows)
    )
    level = found[0].level if found else 0.95
    paired = any(delta.paired for delta in found)
    counts = sorted({delta.n for delta in found})
    word = "pair" if paired else "run"
    many = "no pairs" if not counts else _plural(counts[0], word) if len(counts) == 1 else ""
    many = many or f"{counts[0]} to {counts[-1]} {word}s"
    how = (
        f"Loss of a method minus {baseline}'s with the same seed (same token order, same initial values), {many} a cell"
        if paired
        else f"Mean loss of a method minus {baseline}'s, {many} on the side with fewer; runs are not paired by seed "
        "(no seeds in common, or no correlation between runs that share one)"
    )
    methods = len({delta.method for delta in found})
    luck = f" p, adjusted: for {methods} methods compared with one baseline (Dunnett)." if methods > 1 else ""
    why = "; ".join(dict.fromkeys(delta.why for delta in found if delta.low is None and delta.why))
    interval = f"{digits.share(level)} t interval" + (f"; none where {why}" if why else "")
    interval = interval if sure else f"no interval: {why or 'no noise estimate'}"
    caption = f"{how}; {interval}. Negative is better than {baseline}.{luck}{dropped_text(dropped)}"
    title = "Paired seeds" if paired else "Loss differences"
    return Table(name="seed-deltas", title=title, caption=caption, columns=columns, frame=_frame(rows, columns))


def noise(found: Sequence[Noise], *, level: float = 0.95) -> Table:
    """Each kind of noise with its interval, and what it is good for."""
    rows = [
        {
            "kind": item.label,
            "sd": item.sd,
            "sd_low": item.low,
            "sd_high": item.high,
            "n": item.n,
            "df": item.df,
            "use": "judges methods" if item.counts_for_methods else "does not judge methods",
            "note": item.note,
        }
        for item in found
    ]
    columns = (
        Column(key="kind", label="kind of noise"),
        Column(key="sd", label="standard deviation [interval] (nats)", kind="estimate"),
        Column(key="n", label="runs", kind="integer"),
        Column(key="df", label="degrees of freedom", kind="general"),
        Column(key="use", label="use"),
        Column(key="note", label="what it is"),
    )
    caption = (
        f"Standard deviations of the held-out loss, {digits.share(level)} intervals. "
        "A claim about a method counts seed noise only."
    )
    return Table(name="noise", title="Noise floor", caption=caption, columns=columns, frame=_frame(rows, columns))


def dropped(reasons: Sequence[tuple[str, str]]) -> Table:
    """Runs left out of the analyses, each with its reason."""
    columns = (Column(key="run", label="run"), Column(key="reason", label="reason"))
    rows = [{"run": run, "reason": reason} for run, reason in reasons]
    caption = f"{_plural(len(rows), 'run')} left out of fits and comparisons; nothing is left out silently."
    return Table(name="dropped", title="Left out", caption=caption, columns=columns, frame=_frame(rows, columns))


def convention_text(conventions: Mapping[str, str]) -> str:
    """Conventions of a result as one sentence.

    >>> convention_text({"N": "non-embedding", "asymptote": "shared"})
    'Conventions: N non-embedding; both laws have the same loss E that no compute goes below.'
    """
    told = [
        f"runs are of one setting where they agree in {value}"
        if key == "configuration"
        else _CONVENTIONS.get((key, value), f"{key} {value}")
        for key, value in conventions.items()
    ]
    return f"Conventions: {'; '.join(told)}." if told else ""


def dropped_text(count: int) -> str:
    """How many rows were left out, as the end of a caption."""
    return f" {_plural(count, 'run')} left out." if count else ""


def _speedup_verdict(item: Speedup) -> str:
    if item.status not in ("converged", "bound-hit") or not item.mean == item.mean:
        return f"not determined ({item.status})"
    if item.low is None or item.high is None:
        return f"no interval: {item.why or 'too few degrees of freedom'}"
    if item.low > 1:
        return f"saves compute: between {digits.speedup(item.low)} and {digits.speedup(item.high)}"
    return "needs more compute than the baseline" if item.high < 1 else "not distinguishable from 1×"


def _mark(rows: list[dict[str, Any]], key: str, *, higher_is_better: bool) -> None:
    """Mark the best value: ``best`` if its interval is apart from every other's, else a tie of all that overlap it."""
    ready = [
        row for row in rows if row[f"{key}_low"] is not None and row[f"{key}_high"] is not None and row[key] == row[key]
    ]
    if len(ready) < 2:
        return
    sign = 1.0 if higher_is_better else -1.0
    best = max(ready, key=lambda row: sign * row[key])
    near = "low" if higher_is_better else "high"
    far = "high" if higher_is_better else "low"
    ties = [row for row in ready if row is not best and sign * row[f"{key}_{far}"] >= sign * best[f"{key}_{near}"]]
    best[f"{key}_mark"] = "tie" if ties else "best"
    for row in ties:
        row[f"{key}_mark"] = "tie"


def _frame(rows: list[dict[str, Any]], columns: Sequence[Column]) -> pd.DataFrame:
    frame = pd.DataFrame(rows)
    for column in columns:
        if column.key not in frame:
            frame[column.key] = pd.Series(dtype="object")
    return frame


def _plural(count: int, word: str) -> str:
    return f"{count:,} {word}" if count == 1 else f"{count:,} {word}s"
