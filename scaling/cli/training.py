"""What ``scaling train`` shows: a line a logging interval on stderr, the end on stdout. Loaded when training starts."""

from __future__ import annotations

import json
import logging
import os
from dataclasses import asdict
from pathlib import Path

import typer

from scaling.config.tree import RunConfig
from scaling.identity import label, run_key
from scaling.loop import Progress
from scaling.record import EndRecord, encode
from scaling.resolve import resolve
from scaling.train import train


def run_and_show(config: RunConfig, *, out: Path, as_json: bool) -> int:
    """Train and print; the exit status: 0 where the schedule was finished."""
    first = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")) == "0" or config.run.parallel == "none"
    if not logging.getLogger().isEnabledFor(logging.DEBUG):  # which --debug asked for
        # this program's own news from the first process, and from the others what goes wrong
        logging.getLogger("scaling").setLevel(logging.INFO if first else logging.ERROR)
    resolved = resolve(config)
    folder = out / run_key(resolved)
    if first:
        typer.echo(f"{label(resolved)}  {folder}", err=True)
    end = train(config, out=out, progress=_show)
    if first:
        typer.echo(_json(folder, end) if as_json else _text(folder, end))
    return 0 if end.status == "done" else 1


def _show(progress: Progress) -> None:
    val = "" if progress.val_loss is None else f"  val {progress.val_loss:.4f}"
    typer.echo(
        f"step {progress.step}/{progress.steps}  loss {progress.loss:.4f}{val}  {progress.tokens_per_s:,.0f} tokens/s  "
        f"{_duration(progress.eta_s)} left",
        err=True,
    )


def _text(folder: Path, end: EndRecord) -> str:
    lines = [f"{end.status}  step {end.step}  {folder}"]
    if end.reason:
        lines.append(end.reason)
    if "val/loss" in end.final:
        lines.append(
            f"held-out loss {end.final['val/loss']:.4f} ± {end.final['val/loss_se']:.4f} nat a token "
            f"(standard error over documents), {end.final['val/bpb']:.4f} bits a byte"
        )
    if "perf/mfu" in end.final:
        lines.append(f"MFU {end.final['perf/mfu']:.1%}, {end.final['perf/tokens_per_s']:,.0f} tokens/s")
    return "\n".join(lines)


def _json(folder: Path, end: EndRecord) -> str:
    tree = asdict(end)
    tree["final"] = {name: encode(value) for name, value in end.final.items()}
    return json.dumps({"run_key": folder.name, "folder": str(folder), **tree})


def _duration(seconds: float) -> str:
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}"
