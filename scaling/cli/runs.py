"""``scaling runs``: MLflow store <-> run folders <-> tidy table."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="MLflow store <-> run folders <-> tidy table.", no_args_is_help=True)

DEFAULT_STORE = "sqlite:///mlflow.db"
SHOWN_EXPERIMENTS = 5  # of the newest, whose charts `runs ui` points to
StoreOption = Annotated[
    str, typer.Option("--store", help="sqlite:///FILE.db, http(s)://HOST:PORT or postgresql://USER@HOST/DB.")
]
SourceArgument = Annotated[str, typer.Argument(help="A store's address, a folder of run folders, or a table file.")]
SweepOption = Annotated[str | None, typer.Option(help="Only this sweep or experiment.")]
WhereOption = Annotated[list[str] | None, typer.Option(help="Only runs with e.g. 'lr >= 1e-3 and method == \"mhar\"'.")]
KeepOption = Annotated[
    list[str] | None, typer.Option(help="Keep runs that are failed, diverged, unfinished, ... or all.")
]
ColumnsOption = Annotated[
    str | None, typer.Option(help="For runs of other tools: val_loss=metric:eval_loss,method=param:arch.")
]
AuthOption = Annotated[bool, typer.Option("--auth", help="Ask for passwords (pip install 'isoloss[auth]').")]
JsonOption = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]


@app.command(epilog="Example: scaling runs sync runs/ --store sqlite:///mlflow.db --follow")
def sync(
    out: Annotated[Path, typer.Argument(help="Folder of run folders (a sweep's or training's --out).")],
    store: StoreOption = DEFAULT_STORE,
    experiment: Annotated[str | None, typer.Option(help="MLflow experiment; default: each run's sweep.")] = None,
    follow: Annotated[bool, typer.Option("--follow", help="Go on until interrupted.")] = False,
    interval: Annotated[float, typer.Option(help="Seconds between rounds of --follow.", min=0.1)] = 15.0,
    until_over: Annotated[int | None, typer.Option(help="End --follow when this many runs are over.", min=1)] = None,
    figures: Annotated[list[Path] | None, typer.Option(help="Files to attach to the sweep's parent run.")] = None,
    as_json: JsonOption = False,
) -> None:
    """Bring an MLflow store up to date with run folders; the only writer of the store."""
    from scaling.cli.following import Teller, interruptible
    from scaling.tracking import sync as sync_folders
    from scaling.tracking.jobs import Jobs

    with interruptible() as stop:
        report = sync_folders(
            out,
            store_uri=store,
            experiment=experiment,
            follow=follow,
            interval_s=interval,
            until_over=until_over,
            stop=stop,
            job_state=Jobs(),
            figures=figures or (),
            on_round=Teller(),
        )
    if as_json:
        typer.echo(json.dumps(asdict(report) | {"ok": report.ok}))
    raise typer.Exit(0 if report.ok else 1)


@app.command(epilog="Example: scaling runs ingest sqlite:///mlflow.db --out runs.parquet --sweep ladder --histories")
def ingest(
    source: SourceArgument = DEFAULT_STORE,
    out: Annotated[Path, typer.Option(help="Table to write: .parquet or .csv.")] = Path("runs.parquet"),
    sweep: SweepOption = None,
    where: WhereOption = None,
    columns: ColumnsOption = None,
    keep: KeepOption = None,
    histories: Annotated[bool, typer.Option("--histories", help="Read metrics by step too.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Read runs into one tidy table; again: only what is new."""
    from scaling.analysis.ingest import ingest as ingest_runs
    from scaling.analysis.schema import VERSION
    from scaling.cli.listing import bar, dropped, mapping
    from scaling.tracking.jobs import Jobs

    with bar() as progress:
        got = ingest_runs(
            source,
            out,
            sweep=sweep,
            where=where,
            columns=mapping(columns),
            keep=keep or (),
            histories=histories,
            job_state=Jobs(),
            progress=progress,
        )
    points = 0 if got.histories is None else len(got.histories)
    if as_json:
        lost = [asdict(one) for one in got.dropped]
        typer.echo(
            json.dumps({"out": str(out), "schema": VERSION, "n": len(got.table), "points": points, "dropped": lost})
        )
        return
    typer.echo(f"{out}: {len(got.table)} runs" + (f", {points} points" if points else ""))
    dropped(got.dropped)


@app.command("list", epilog="Example: scaling runs list runs/ --sort val_loss --where 'size == \"100m\"'")
def list_runs(
    source: SourceArgument = DEFAULT_STORE,
    sweep: SweepOption = None,
    where: WhereOption = None,
    sort: Annotated[str, typer.Option(help="Column to sort by; -COLUMN: the other way.")] = "started_ms",
    show: Annotated[str | None, typer.Option(help="Columns to show, separated by commas.")] = None,
    limit: Annotated[int, typer.Option(help="Rows to show; 0: all.", min=0)] = 0,
    columns: ColumnsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Show runs with their latest values, whatever became of them."""
    from scaling.analysis.ingest import read_runs
    from scaling.cli.listing import listing, mapping
    from scaling.tracking.jobs import Jobs

    got = read_runs(source, sweep=sweep, where=where, columns=mapping(columns), keep=("all",), job_state=Jobs())
    typer.echo(listing(got.table, sort=sort, show=show, limit=limit, as_json=as_json))


@app.command(epilog="Example: scaling runs ui --store sqlite:///mlflow.db --port 5001")
def ui(
    store: StoreOption = DEFAULT_STORE,
    host: Annotated[str, typer.Option(help="Address to listen at; loopback by default.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=1, max=65535)] = 5000,
    auth: AuthOption = False,
) -> None:
    """Open MLflow's pages on a store (a server's own address is only printed)."""
    from scaling.analysis.database import experiments
    from scaling.cli.listing import start
    from scaling.tracking.server import charts, filters, serve
    from scaling.tracking.store import normalise

    address = normalise(store)
    known = [] if address.startswith("http") else experiments(address, SHOWN_EXPERIMENTS)
    typer.echo("Filters worth typing into the search field:", err=True)
    for text in filters():
        typer.echo(f"  {text}", err=True)
    if address.startswith("http"):
        typer.echo(address)
        return
    command = serve(address, host=host, port=port, workers=1, auth=auth)
    for experiment_id, name in known:
        typer.echo(f"Charts of all runs of {name}: {charts(command.url, experiment_id)}", err=True)
    start(command, host, port)


@app.command(
    epilog="Example: scaling runs serve --store postgresql://mlflow@localhost/mlflow --host 10.1.2.3 --allow login1"
)
def serve(
    store: StoreOption = DEFAULT_STORE,
    host: Annotated[str, typer.Option(help="Loopback or private address to listen at.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="Port to listen at.", min=1, max=65535)] = 5000,
    workers: Annotated[
        int, typer.Option(help="Server processes; one answers 60-70 small requests a second.", min=1)
    ] = 2,
    allow: Annotated[list[str] | None, typer.Option(help="Names under which nodes reach this server.")] = None,
    artifacts: Annotated[Path | None, typer.Option(help="Folder for files.")] = None,
    auth: AuthOption = False,
) -> None:
    """Start an MLflow server with settings that survive a job array."""
    from scaling.cli.listing import start
    from scaling.tracking.server import serve as command

    start(
        command(store, host=host, port=port, workers=workers, allow=allow or (), artifacts=artifacts, auth=auth),
        host,
        port,
    )
