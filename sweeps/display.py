"""Plans, states and progress as tables for people; the command line prints what this returns.

On standard error while something runs (a live table in a terminal, plain lines when piped), on standard output for
results.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from scaling.sweeps.estimate import Device, concerns, gpu_hours, run_s, wall_s
from scaling.sweeps.plan import Plan, PlannedRun
from scaling.sweeps.resources import clock
from scaling.sweeps.status import RunStatus, SweepStatus, status
from scaling.sweeps.watch import PatientSlurm

COLORS: Final = {
    "done": "green", "running": "cyan", "failed": "red", "diverged": "magenta", "stalled": "yellow",
    "unknown": "yellow", "requeued": "blue", "queued": "blue", "cancelled": "bright_black", "planned": "bright_black",
}  # fmt: skip

PIPED_WIDTH: Final = 220  # columns; every table of ours fits
LIVE_S: Final = 1.0  # between two looks at the run folders while this process trains them


def number(value: float) -> str:
    """``1.2k``, ``3.4M``, ``5.6e+17``.

    >>> number(950), number(12_400), number(3.2e9), number(4.5e18)
    ('950', '12.4k', '3.2B', '4.5e+18')
    """
    for limit, unit in ((1e3, ""), (1e6, "k"), (1e9, "M"), (1e12, "B"), (1e15, "T")):
        if abs(value) < limit:
            text = f"{value / (limit / 1e3):.1f}".removesuffix(".0")
            return f"{text}{unit}"
    return f"{value:.1e}"


def span(total_s: float | None) -> str:
    """``42s``, ``3m10s``, ``2h05m``; nothing for ``None``."""
    if total_s is None:
        return ""
    whole = round(total_s)
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    return f"{whole // 3600}h{whole % 3600 // 60:02d}m"


def console(*, stderr: bool = False) -> Console:
    """A console that does not cut tables where its output is piped."""
    plain = Console(stderr=stderr)
    return plain if plain.is_terminal else Console(stderr=stderr, width=PIPED_WIDTH)


def plan_tables(
    plan: Plan, now: SweepStatus, *, device: Device | None, price: float | None, throttle: int | None, rows: int = 40
) -> RenderableType:
    """The dry run: what there is, what is to be done, what it will take; the largest runs first."""
    table = Table(title=f"{plan.spec.name}: {len(plan.runs)} runs in {plan.out}", title_justify="left")
    for name in ("key", "run", "state"):
        table.add_column(name, no_wrap=True)
    for name in ("parameters", "tokens", "FLOPs", "memory", *(["time"] if device else [])):
        table.add_column(name, justify="right", no_wrap=True)
    for item in now.runs[:rows]:
        run = item.run
        cells: list[RenderableType] = [run.key[:8], run.label, _state(item)]
        cells += [number(run.parameters), number(run.tokens), f"{run.flops:.2e}", f"{run.memory_bytes / 2**30:.2f} GiB"]
        if device:
            cells.append(span(run_s(run, device)))
        table.add_row(*cells)
    lines = [f"... and {len(now.runs) - rows} smaller runs"] if len(now.runs) > rows else []
    lines.append("states: " + _counts(now))
    if plan.merged:
        lines.append(f"merged: {plan.merged} runs that blocks have in common")
    open_runs = [item.run for item in now.runs if item.state.state not in ("done", "diverged")]
    lines.append(
        f"to be trained: {len(open_runs)} runs, {number(sum(r.tokens for r in open_runs))} tokens, "
        f"{sum(r.flops for r in open_runs):.2e} FLOPs"
    )
    lines += _costs(open_runs, device, price, throttle)
    warned = [(run, text) for run in open_runs for text in concerns(run, device)]
    lines += [f"note: {run.label}: {text}" for run, text in warned[:5]]
    if len(warned) > 5:
        lines.append(f"note: ... and {len(warned) - 5} more like these")
    return Group(table, *(Text(line) for line in lines))


def _costs(runs: Sequence[PlannedRun], device: Device | None, price: float | None, throttle: int | None) -> list[str]:
    if device is None:
        return ["GPU-hours: not estimated (give --gpu NAME, or gpu: in the site profile)"]
    hours = gpu_hours(runs, device)
    line = f"GPU-hours: {hours:.1f} on {device.name} at an assumed MFU of {device.mfu:.0%}"
    if price is not None:
        line += f", about {hours * price:,.2f} at {price:g} a GPU-hour"
    at = f"{throttle} jobs at a time" if throttle else "all jobs at a time"
    return [line, f"wall time: {clock(wall_s(runs, device, throttle))} with {at}, no wait in the queue"]


def status_table(now: SweepStatus, rows: Sequence[RunStatus], *, limit: int | None = None) -> RenderableType:
    """One line a run, then the counts."""
    cells = [_cells(item) for item in rows[:limit]]
    table = Table()
    shown = [name for name in _COLUMNS if name in _ALWAYS or any(str(row[name]) for row in cells)]
    for name in shown:
        right = name in ("step", "loss", "tokens/s", "ETA", "tries", "GPU-h")
        table.add_column(name, justify="right" if right else "left", no_wrap=name != "reason", overflow="fold")
    for row in cells:
        table.add_row(*(row[name] for name in shown))
    lines = [f"... and {len(rows) - limit} more"] if limit is not None and len(rows) > limit else []
    lines.append(f"{now.plan.spec.name}: {_counts(now)}")
    if now.left_over:
        lines.append(f"{now.left_over} runs submitted earlier are not in the grid any more")
    if now.trouble:
        lines.append(f"last known states; {now.trouble}")
    return Group(table, *(Text(line) for line in lines))


_COLUMNS: Final = ("key", "run", "state", "Slurm", "job", "step", "loss", "tokens/s", "ETA", "tries", "GPU-h", "reason")
_ALWAYS: Final = ("key", "run", "state", "step", "loss")


def _cells(item: RunStatus) -> dict[str, RenderableType]:
    look = item.look
    used = f"{item.gpu_hours_used:.2f}/{item.gpu_hours_asked:.2f}" if item.run.resources.gpus else ""
    return {
        "key": item.run.key[:8],
        "run": item.run.label,
        "state": _state(item),
        "Slurm": item.state.slurm,
        "job": item.state.job,
        "step": f"{item.step if item.step is not None else 0}/{item.steps}",
        "loss": f"{look.loss:.4f}" if look is not None and look.loss is not None else "",
        "tokens/s": number(look.tokens_per_s) if look is not None and look.tokens_per_s else "",
        "ETA": span(item.eta_s),
        "tries": str(look.attempts) if look is not None and look.attempts > 1 else "",
        "GPU-h": used,
        "reason": item.state.reason,
    }


def _state(item: RunStatus) -> Text:
    return Text(item.state.word, style=COLORS[item.state.state])


def _counts(now: SweepStatus) -> str:
    return ", ".join(f"{count} {state}" for state, count in now.counts.items())


class Progress:
    """A live table of a local sweep on standard error, or plain lines where that is no terminal.

    A context manager; its ``tick`` goes to ``run_local``.
    """

    def __init__(
        self, plan: Plan, terminal: Console | None = None, clock_s: Callable[[], float] = time.monotonic
    ) -> None:
        self.plan = plan
        self.console = terminal or console(stderr=True)
        self.clock_s = clock_s
        self.slurm = PatientSlurm()  # asked only where the sweep was submitted to Slurm before
        self.live: Live | None = None
        self.next_s = 0.0
        self.words: dict[str, str] = {}

    def __enter__(self) -> Progress:
        self.words = {item.run.key: item.state.word for item in status(self.plan, slurm=self.slurm).runs}
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.next_s = 0.0
        self.tick(frozenset())
        if self.live is not None:
            self.live.__exit__(kind, error, trace)

    def tick(self, training: frozenset[str]) -> None:
        """Show where things stand, unless that was just done."""
        if self.clock_s() < self.next_s:
            return
        self.next_s = self.clock_s() + LIVE_S
        now = status(self.plan, slurm=self.slurm)
        if self.live is not None:
            self.live.update(status_table(now, _interesting(now), limit=self.console.size.height - 8), refresh=True)
            return
        for item in now.runs:
            key, word = item.run.key, item.state.word
            if self.words.get(key, "planned") != word:
                loss = f" loss {item.look.loss:.4f}" if item.look is not None and item.look.loss is not None else ""
                why = (
                    f": {item.state.reason}" if item.state.state in ("failed", "diverged") and item.state.reason else ""
                )
                line = f"{item.run.label}: {word}{loss}{why}"
                self.console.print(line, highlight=False, soft_wrap=True, markup=False)
            self.words[key] = word


class LiveStatus:
    """A live status table on standard error; plain counts, when they change, where that is no terminal."""

    def __init__(self, terminal: Console | None = None) -> None:
        self.console = terminal or console(stderr=True)
        self.live: Live | None = None
        self.last = ""

    def __enter__(self) -> LiveStatus:
        if self.console.is_terminal:
            self.live = Live(console=self.console, auto_refresh=False)
            self.live.__enter__()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.live is not None:
            self.live.__exit__(kind, error, trace)

    def show(self, now: SweepStatus) -> None:
        """Show a status."""
        if self.live is not None:
            self.live.update(status_table(now, _interesting(now), limit=self.console.size.height - 8), refresh=True)
        elif (text := f"{now.plan.spec.name}: {_counts(now)}") != self.last:
            self.console.print(text, highlight=False, soft_wrap=True)
            self.last = text


def _interesting(now: SweepStatus) -> list[RunStatus]:
    """What trains first, then what has gone wrong, then the rest."""
    order = {"running": 0, "stalled": 1, "failed": 2, "unknown": 3, "requeued": 4, "diverged": 5, "done": 7}
    return sorted(now.runs, key=lambda item: order.get(item.state.state, 6))
