"""``scaling doctor``: what works on this machine, what does not, why."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import Annotated

import typer

EPILOG = "Examples:  scaling doctor   |   scaling doctor --json"


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command(epilog=EPILOG)
    def doctor(as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False) -> None:
        """Check python, torch, CUDA, Triton, Slurm, MLflow: what works, what does not, why.

        Exit status: 0 where what every run needs (python, torch, mlflow) works, else 1. Another part that is absent or
        broken leaves it 0: the row says what does not work without it.
        """
        from scaling.doctor import examine

        findings = examine()
        if as_json:
            typer.echo(json.dumps({"findings": [asdict(f) for f in findings]}))
        else:
            width = max(len(f.part) for f in findings)
            for f in findings:
                typer.echo(f"{f.part:<{width}}  {f.state:<6}  {f.detail}")
        if any(f.required and f.state != "ok" for f in findings):
            raise typer.Exit(1)
