"""``scaling bench``: routing kernels and whole training steps, side by side in one run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scaling.kernels.table import Table

app = typer.Typer(help="Kernels and training steps, side by side in one run.", no_args_is_help=True)

# as in scaling.kernels, which would load torch; a test holds them to it
SHAPES = ("d512", "d1024", "d1280", "d2048")
METHODS = ("baseline", "mhar", "block", "block-attnres", "attnres", "delta", "msar", "hc", "mhc")
IMPLEMENTATIONS = "kernels, compiled or eager (PyTorch), fla, liger (if installed)"
OPERATIONS = ("pull", "pull_group", "receive", "gather", "gather_group", "query_gradient", "streams", "hc", "mhc")

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object at the end and nothing else.")]
TableFile = Annotated[
    Path | None,
    typer.Option(
        "--table", metavar="FILE", help="New CSV file; a row is in it as soon as it is measured, whatever comes after."
    ),
]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help=f"{', '.join(SHAPES)}; may be given again. Default: all.")
]

KERNELS_EPILOG = (
    "Examples:  scaling bench kernels --shape d1024 --table kernels.csv   |   "
    "scaling bench kernels --shape d1024 --operation pull --operation gather --json"
)
TRAIN_EPILOG = (
    "Examples:  scaling bench train --shape d1024 --vocabulary 32768 --method mhar --table mine.csv   |   "
    "scaling bench train --shape d512 --implementation kernels --implementation compiled --json"
)


@app.command(epilog=KERNELS_EPILOG)
def kernels(
    shape: Shapes = None,
    operation: Annotated[
        list[str] | None,
        typer.Option(help=f"First word of kernels' names: {', '.join(OPERATIONS)}; may be given again. Default: all."),
    ] = None,
    table: TableFile = None,
    as_json: Json = False,
) -> None:
    """Time the kernels against the bytes they must move and the copy rate of this run.

    ms are the 20, 50 and 80% quantiles in milliseconds, replayed as a CUDA graph, so that the host does not count;
    bytes count every tensor once; ceiling_share is the share that the kernel reaches of the rate of a large copy,
    timed in the same run.
    """
    from scaling.kernels.table import KERNELS, Table

    made = None if table is None else Table(table, KERNELS)
    from scaling.kernels.benchmark import bench_kernels

    each = _follow(made, ("operation", "shape", "pass", "ms", "bytes", "ceiling_share"), as_json)
    result = bench_kernels(shapes=shape, operations=operation, each=each)
    if as_json:
        typer.echo(json.dumps(result))


@app.command(epilog=TRAIN_EPILOG)
def train(
    shape: Shapes = None,
    vocabulary: Annotated[
        list[int] | None, typer.Option(help="Vocabulary size; may be given again. Default: 32768 and 151936.")
    ] = None,
    method: Annotated[
        list[str] | None,
        typer.Option(
            help=f"{', '.join(METHODS)}; may be given again. The compiled baseline is timed in any case. Default: all."
        ),
    ] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help=f"{IMPLEMENTATIONS}; may be given again. Default: kernels."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed steps of each kind.")] = 10,
    table: TableFile = None,
    as_json: Json = False,
) -> None:
    """Time whole steps of every method against the compiled pre-norm baseline.

    ms are the 20, 50 and 80% quantiles of a step in milliseconds, launched one kernel at a time (eager) and replayed as
    one CUDA graph (graph). ratio is the baseline's median over the method's: above 1, the method is faster; the
    baseline is timed anew for every shape and vocabulary. peak_ratio is the method's peak memory over the baseline's.

    All shapes, vocabularies and methods with kernels take about 40 minutes on one H200, most of it compiling; a
    single shape and vocabulary about four.
    """
    from scaling.kernels.table import STEPS, Table

    made = None if table is None else Table(table, STEPS)
    from scaling.kernels.benchmark import bench_train
    from scaling.kernels.decoder import VOCABULARIES

    columns = ("shape", "vocabulary", "method", "implementation", "pass", "launch", "ms", "baseline_ms", "ratio")
    result = bench_train(
        shapes=shape,
        vocabularies=vocabulary or VOCABULARIES,
        methods=method,
        implementations=implementation or ("kernels",),
        repeats=repeats,
        each=_follow(made, (*columns, "peak_ratio"), as_json),
    )
    if as_json:
        typer.echo(json.dumps(result))


def _follow(
    table: Table | None, columns: tuple[str, ...], as_json: bool
) -> Callable[[dict[str, Any], dict[str, str]], None]:
    """What takes each row as it is measured: into the table, then, unless JSON is to come, onto the screen."""
    begun = False

    def each(row: dict[str, Any], versions: dict[str, str]) -> None:
        nonlocal begun
        if table is not None:
            table.add(row, versions)
        if as_json:
            return
        if not begun:
            begun = True
            typer.echo(" ".join(f"{name} {value}" for name, value in versions.items()))
            typer.echo("\t".join(columns))
        failed = {"ms": row["failed"]} if "failed" in row else {}
        typer.echo("\t".join(_cell({**row, **failed}.get(column, "-")) for column in columns))

    return each


def _cell(value: object) -> str:
    if isinstance(value, list):
        return "/".join(f"{number:.3f}" for number in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
