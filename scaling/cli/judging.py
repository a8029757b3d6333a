"""What the analysis commands share: the table's options and how a result is printed.

Between ``fit``, ``compare``, ``noise`` and the functions they call. Nothing here computes.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated

import typer

from scaling.analysis import digits
from scaling.cli.highlights import highlights

if TYPE_CHECKING:
    import pandas as pd

    from scaling.analysis.result import Result

Runs = Annotated[str, typer.Option("--runs", metavar="FILE|STORE", help="A .csv or .parquet file, or an MLflow store.")]
Columns = Annotated[
    str | None,
    typer.Option(
        "--columns",
        metavar="N=...,D=...,loss=...",
        help="Column (spaces allowed) or arithmetic for each short name: N, D, C, loss, method, seed, lr, H.",
    ),
]
Where = Annotated[
    list[str] | None, typer.Option("--where", metavar="loss<4.9", help="Keep rows that satisfy it (repeatable).")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout, numbers unrounded.")]
Level = Annotated[float, typer.Option(help="Level of intervals.")]
Unfinished = Annotated[
    bool, typer.Option("--keep-unfinished", help="Keep runs whose learning-rate schedule did not finish.")
]
Draws = Annotated[int, typer.Option(help="Bootstrap draws.")]
RandomSeed = Annotated[int, typer.Option("--random-seed", help="Seed of the bootstrap.")]


def read(runs: str, columns: str | None, where: list[str] | None) -> pd.DataFrame:
    """The table with its short names."""
    from scaling.analysis.columns import load_table

    return load_table(runs, columns=columns, where=where)


def show(result: Result, as_json: bool) -> None:
    """Print one result; exit 1 where there is none (status refused)."""
    typer.echo(result.to_json() if as_json else describe(result))
    if result.status == "refused":
        raise typer.Exit(1)


def show_many(results: Mapping[str, Result], as_json: bool) -> None:
    """Print one result a method; exit 1 where one was refused."""
    if as_json:
        typer.echo(json.dumps({name: r.to_dict() for name, r in results.items()}, indent=2, allow_nan=False))
    else:
        typer.echo("\n\n".join(f"{name}\n{describe(r)}" for name, r in results.items()))
    if any(r.status == "refused" for r in results.values()):
        raise typer.Exit(1)


def describe(result: Result) -> str:
    """Estimates with intervals, what must be known before using them, and the checklist."""
    fitted = result.certificate or result.status != "converged"
    head = [result.kind + (f": {result.status}" if fitted else "")]
    head += [f"n = {result.n}"] if result.kind != "noise power" else []
    head += [f"df = {result.df:g}"] if result.df is not None else []
    lines = [", ".join(head)]
    interval = result.interval
    for name, value in result.estimate.items():
        line = f"  {name:<28} {value:.7g}"
        if interval is not None and name in interval.low:
            line += f"   [{interval.low[name]:.6g}, {interval.high[name]:.6g}]"
        lines.append(line)
    if interval is not None:
        lines.append(f"  {digits.share(interval.level)} interval: {interval.method}")
    lines += highlights(result)
    if result.objective is not None:
        lines.append(f"  objective {result.objective:.10g}")
    lines += [f"  warning {w.code}: {w.message}" for w in result.warnings]
    if result.dropped:
        lines.append(f"  left out: {len(result.dropped)} rows")
    lines += [f"  {item}: {text}" for item, text in result.checklist.items() if text != "does not apply"]
    return "\n".join(lines)
