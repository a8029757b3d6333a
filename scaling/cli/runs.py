"""``scaling runs``: MLflow store <-> run folders <-> tidy table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="MLflow store <-> run folders <-> tidy table.", no_args_is_help=True)

Store = Annotated[
    str, typer.Option("--store", help="sqlite:///FILE.db, http(s)://HOST:PORT or postgresql://USER@HOST/DB.")
]
Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]
DEFAULT_STORE = "sqlite:///mlflow.db"


@app.command(epilog="Example: scaling runs sync runs/ --store sqlite:///mlflow.db --follow")
def sync(
    out: Annotated[Path, typer.Argument(help="Folder of run folders (a sweep's or training's --out).")],
    store: Store = DEFAULT_STORE,
    experiment: Annotated[str | None, typer.Option(help="MLflow experiment; default: each run's sweep.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until interrupted.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between rounds of --follow.", min=0.1)] = 15.0,
    figures: Annotated[list[Path] | None, typer.Option(help="Files to attach to the sweep's parent run.")] = None,
    as_json: Json = False,
) -> None:
    """Bring an MLflow store up to date with run folders; the only writer of the store."""
    from scaling.cli.following import interruptible, line
    from scaling.tracking import SyncReport
    from scaling.tracking import sync as sync_folders

    def tell(report: SyncReport) -> None:
        typer.echo(line(report), err=True)

    with interruptible() as stop:
        report = sync_folders(
            out,
            store_uri=store,
            experiment=experiment,
            follow=follow,
            interval_s=interval,
            stop=stop,
            figures=figures or (),
            on_round=tell,
        )
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"ok": report.ok}))
    raise typer.Exit(0 if report.ok else 1)
