"""``scaling report``: a report, one table or one figure from runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scaling.analysis.findings import Findings
    from scaling.analysis.source import Sweep

app = typer.Typer(help="Write a report, or one of its tables or figures, from runs.", no_args_is_help=True)

Runs = Annotated[
    str,
    typer.Argument(
        help="Folder of run folders, MLflow store address, .parquet / .csv file, or a sweep (file or preset)."
    ),
]
Set = Annotated[
    list[str] | None, typer.Option("--set", help="Of a sweep: change one value (default: as at its last submit).")
]
Folder = Annotated[Path | None, typer.Option("--folder", help="Of a sweep: folder of its runs (default: its own).")]
Baseline = Annotated[
    str | None, typer.Option("--baseline", help="Method the others are compared with (default: 'baseline', if there).")
]
Columns = Annotated[
    str | None,
    typer.Option("--columns", help="For other tables: N=...,D=...,C=...,loss=...,method=...,seed=... (or arithmetic)."),
]
Where = Annotated[list[str] | None, typer.Option("--where", help="Keep rows that satisfy this, e.g. 'loss<4.9'.")]
Curves = Annotated[
    str | None,
    typer.Option("--curves", help="CSV or Parquet of loss curves of a table: columns run, step, and the loss."),
]
Probes = Annotated[
    list[str] | None,
    typer.Option("--probe", help="Routing of a model, from `scaling probe disagreement --out`; may be repeated."),
]
Benches = Annotated[
    list[str] | None,
    typer.Option("--bench", help="What `scaling bench kernels|train --json` printed, or CSV; may be repeated."),
]
Items = Annotated[
    str | None, typer.Option("--items", help="Answers to test items: columns item, method, correct; task, cluster.")
]
Scores = Annotated[
    str | None, typer.Option("--scores", help="Downstream scores: columns method, task, score; size, seed, se.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]

BUILD = (
    "Examples:  scaling report build runs/ --out report   |   scaling report build runs.csv "
    "--columns loss=final_val_loss,method=group --baseline adam   |   scaling report build sweep.yaml"
)
TABLE = (
    "Examples:  scaling report table runs/ speedups   |   scaling report table runs.parquet main --format tex   |   "
    "scaling report table runs/ items --items answers.csv   |   scaling report table runs/ steps --bench train.json"
)
FIGURE = (
    "Examples:  scaling report figure runs/ scaling-curves --out curves.pdf   |   scaling report figure list   |   "
    "scaling report figure runs/ routing-weights --probe routing.npz --out routing.pdf"
)


@app.command(epilog=BUILD)
def build(
    runs: Runs,
    out: Annotated[Path, typer.Option("--out", help="Folder to write to.")] = Path("report"),
    baseline: Baseline = None,
    columns: Columns = None,
    where: Where = None,
    curves: Curves = None,
    probe: Probes = None,
    bench: Benches = None,
    items: Items = None,
    scores: Scores = None,
    set_: Set = None,
    folder: Folder = None,
    title: Annotated[str, typer.Option("--title", help="Heading of the report.")] = "Scaling report",
    formats: Annotated[
        str, typer.Option("--formats", help="Formats of the figure files: png, pdf, svg, separated by commas.")
    ] = "png,pdf,svg",
    mlflow: Annotated[
        str | None,
        typer.Option("--mlflow", help="Store whose sweep gets the report, its figures and tables as artifacts."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write report.html (one file, no network), report.md, tables, figures, a LaTeX document and results.json."""
    from scaling.analysis.report import build_report
    from scaling.analysis.source import sweep_of

    command = shlex.join(["scaling", *sys.argv[1:]])
    sweep = sweep_of(runs, settings=set_ or (), folder=folder)
    found = _findings(runs, baseline, columns, where, curves, probe, bench, items, scores, sweep)
    kinds = [kind.strip() for kind in formats.split(",")]
    page = build_report(found.table, out=out, title=title, command=command, findings=found, formats=kinds)
    if mlflow is not None:
        _attach(runs if sweep is None else str(sweep.folder), mlflow, out)
    typer.echo(json.dumps({"report": str(page), "runs": len(found.table)}) if as_json else str(page))


@app.command(epilog=TABLE)
def table(
    runs: Runs,
    name: Annotated[str, typer.Argument(help="Name of the table; 'list' names all.")] = "list",
    fmt: Annotated[str, typer.Option("--format", help="md, tex, html or csv.")] = "md",
    baseline: Baseline = None,
    columns: Columns = None,
    where: Where = None,
    curves: Curves = None,
    probe: Probes = None,
    bench: Benches = None,
    items: Items = None,
    scores: Scores = None,
    as_json: AsJson = False,
) -> None:
    """Print one table of the report."""
    from scaling.analysis import catalog
    from scaling.analysis.tables.render import to_json, write

    if "list" in (runs, name):
        typer.echo(_listing({key: (e.shows, e.needs) for key, e in catalog.TABLES.items()}, as_json))
        return
    found = _findings(runs, baseline, columns, where, curves, probe, bench, items, scores)
    built = catalog.table(found, name)
    typer.echo(json.dumps(to_json(built), allow_nan=False) if as_json else write(built, fmt), nl=as_json)


@app.command(epilog=FIGURE)
def figure(
    runs: Runs,
    name: Annotated[str, typer.Argument(help="Name of the figure; 'list' names all.")] = "list",
    out: Annotated[Path | None, typer.Option("--out", help="File to write: .png, .pdf or .svg.")] = None,
    baseline: Baseline = None,
    columns: Columns = None,
    where: Where = None,
    curves: Curves = None,
    probe: Probes = None,
    bench: Benches = None,
    items: Items = None,
    scores: Scores = None,
    as_json: AsJson = False,
) -> None:
    """Write one figure of the report to a file."""
    from scaling.analysis import catalog
    from scaling.analysis.report import write_figure

    if "list" in (runs, name):
        typer.echo(_listing({key: (e.shows, e.needs) for key, e in catalog.FIGURES.items()}, as_json))
        return
    target = out or Path(f"{name}.png")
    found = _findings(runs, baseline, columns, where, curves, probe, bench, items, scores)
    picture = catalog.picture(found, name)
    path = str(write_figure(picture, target))
    told = {"name": picture.name, "figure": path, "title": picture.title, "caption": picture.caption}
    typer.echo(json.dumps(told) if as_json else path)


def _attach(runs: str, store: str, out: Path) -> None:
    """Log the report's files into the parent run of the sweeps whose run folders are ``runs``."""
    from scaling.analysis.report import attachments
    from scaling.errors import UsageError
    from scaling.tracking import sync

    if not Path(runs).is_dir():
        raise UsageError(
            f"--mlflow: {runs} is no folder of run folders, so its sweep is not known; give that folder as RUNS"
        )
    sync(Path(runs), store_uri=store, figures=attachments(out))


def _findings(
    runs: str,
    baseline: str | None,
    columns: str | None,
    where: list[str] | None,
    curves: str | None,
    probes: list[str] | None,
    benches: list[str] | None,
    items: str | None,
    scores: str | None,
    sweep: Sweep | None = None,
) -> Findings:
    from scaling.analysis.inquiry import inquire
    from scaling.analysis.source import read, read_sweep, sweep_of
    from scaling.analysis.supplements import collect

    sweep = sweep or sweep_of(runs)
    if sweep is None:
        source = read(runs, columns=columns, where=where or (), curves=curves)
    else:
        source, runs = read_sweep(sweep, where=where or ()), str(sweep.folder)
    only = None if sweep is None else sweep.runs.keys()
    given = collect(
        runs=runs, only=only, probes=probes or (), benches=benches or (), items=items, scores=scores, baseline=baseline
    )
    return inquire(source.table, source.histories, baseline=baseline, dropped=source.dropped, supplements=given)


def _listing(entries: dict[str, tuple[str, str]], as_json: bool) -> str:
    if as_json:
        return json.dumps({name: {"shows": shows, "needs": needs} for name, (shows, needs) in entries.items()})
    width = max(map(len, entries))
    return "\n".join(f"{name:<{width}}  {shows} (needs {needs})" for name, (shows, needs) in entries.items())
