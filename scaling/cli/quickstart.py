"""``scaling quickstart``: the main job, small, on this machine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

EPILOG = "Examples:  scaling quickstart   |   scaling quickstart --out try --json"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command(epilog=EPILOG)
    def quickstart(
        out: Annotated[Path, typer.Option("--out", help="Folder for everything it makes.")] = Path("isoloss-quickstart"),
        workers: Annotated[int | None, typer.Option(help="Runs at a time (default: one a core).", min=1)] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    ) -> None:
        """Train a tiny real sweep here, analyse it, write the report. Finished runs are not trained again."""
        from scaling.quickstart import quickstart as run

        outcome = run(out, workers=workers, say=lambda text: typer.echo(text, err=True))
        if as_json:
            from scaling.quickstart import tree

            typer.echo(json.dumps(tree(outcome)))
        else:
            from scaling.quickstart import words

            typer.echo(words(outcome))
        if outcome.interrupted or outcome.unfinished:
            raise typer.Exit(1)
