"""``scaling report``: a report, one table or one figure from runs."""

from __future__ import annotations

import json
import shlex
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Write a report, or one of its tables or figures, from runs.", no_args_is_help=True)

Runs = Annotated[str, typer.Argument(help="Folder of run folders, MLflow store address, or .parquet / .csv file.")]
Out = Annotated[Path, typer.Option("--out", help="Folder to write to.")]
Baseline = Annotated[
    str | None, typer.Option("--baseline", help="Method the others are compared with (default: 'baseline', if there).")
]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns", help="For other tables: N=...,D=...,C=...,loss=...,method=...,seed=... (names or arithmetic)."
    ),
]
Where = Annotated[
    list[str] | None, typer.Option("--where", help="Keep rows that satisfy this, e.g. 'loss<4.9'. Repeatable.")
]
AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object on stdout.")]


@app.command(
    epilog="Examples: scaling report build runs/ --out report | scaling report build runs.csv --columns "
    "'loss=final_val_loss,method=group' --baseline adam --out report"
)
def build(
    runs: Runs,
    out: Out = Path("report"),
    baseline: Baseline = None,
    columns: Columns = None,
    where: Where = None,
    title: Annotated[str, typer.Option("--title", help="Heading of the report.")] = "Scaling report",
    as_json: AsJson = False,
) -> None:
    """Write report.html (one file, no network), report.md, tables, figures and results.json."""
    from scaling.analysis.report import build_report
    from scaling.analysis.source import read

    source = read(runs, columns=columns, where=where or ())
    page = build_report(
        source.table,
        source.histories,
        out=out,
        baseline=baseline,
        title=title,
        dropped=source.dropped,
        command=shlex.join(["scaling", *sys.argv[1:]]),
    )
    typer.echo(json.dumps({"report": str(page), "runs": len(source.table)}) if as_json else str(page))
