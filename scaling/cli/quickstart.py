"""``scaling quickstart``: the main job, small, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scaling.quickstart import Outcome

EPILOG = "Examples:  scaling quickstart   |   scaling quickstart --out try --json"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command(epilog=EPILOG)
    def quickstart(
        out: Annotated[Path, typer.Option("--out", help="Folder for everything it makes.")] = Path(
            "isoloss-quickstart"
        ),
        workers: Annotated[int | None, typer.Option(help="Runs at a time (default: one a core).", min=1)] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    ) -> None:
        """Train a tiny real sweep here, analyse it, write the report. Finished runs are not trained again."""
        from scaling.quickstart import quickstart as run

        outcome = run(out, workers=workers, say=lambda text: typer.echo(text, err=True))
        typer.echo(json.dumps(_tree(outcome)) if as_json else _words(outcome))
        if outcome.interrupted or outcome.unfinished:
            raise typer.Exit(1)


def _tree(outcome: Outcome) -> dict[str, Any]:
    answer = outcome.answer or {}
    return {
        "out": str(outcome.out),
        "report": str(outcome.report),
        "store": outcome.store_uri,
        "trained": outcome.trained,
        "finished": outcome.finished,
        "unfinished": outcome.unfinished,
        "interrupted": outcome.interrupted,
        "wall_time_s": outcome.wall_time_s,
        "times_s": outcome.times_s,
        "results": answer.get("results", {}),
        "refusals": answer.get("refusals", []),
    }


def _words(outcome: Outcome) -> str:
    if outcome.answer is None:
        return f"broken off: {outcome.unfinished} runs to go, nothing is lost; the same command goes on"
    times = ", ".join(f"{name} {seconds:.0f} s" for name, seconds in outcome.times_s.items() if seconds >= 0.5)
    return f"""{outcome.answer["text"]}

A tiny grid proves nothing about the methods: it shows that training, tracking, fitting and comparing work here.

runs    {outcome.trained} trained now, {outcome.finished} finished before: {outcome.out / "runs"}
MLflow  scaling runs ui --store {outcome.store_uri}
report  {outcome.report}
time    {outcome.wall_time_s:.0f} s{f" ({times})" if times else ""}"""
