"""``scaling bench``: routing kernels and whole training steps, side by side in one run."""

from __future__ import annotations

import json
from typing import Annotated, Any

import typer

app = typer.Typer(help="Kernels and training steps, side by side in one run.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="Print one JSON object and nothing else.")]
Shapes = Annotated[
    list[str] | None, typer.Option("--shape", help="d512, d1024, d1280 or d2048; may be given again. Default: all.")
]


@app.command(epilog="Example: scaling bench kernels --shape d1024 --json")
def kernels(
    shape: Shapes = None,
    operation: Annotated[
        list[str] | None, typer.Option(help="Only kernels whose name begins so: pull, streams, mhc, ...")
    ] = None,
    as_json: Json = False,
) -> None:
    """Time the kernels against the bytes they must move and the copy rate of this run."""
    from scaling.kernels.benchmark import bench_kernels

    result = bench_kernels(shapes=shape, operations=operation)
    _print(result, ("operation", "shape", "pass", "ms", "bytes", "ceiling_share"), as_json)


@app.command(epilog="Example: scaling bench train --shape d1024 --vocabulary 32768 --method mhar --json")
def train(
    shape: Shapes = None,
    vocabulary: Annotated[list[int] | None, typer.Option(help="Vocabulary sizes; default 32768 and 151936.")] = None,
    method: Annotated[list[str] | None, typer.Option(help="Methods beside the baseline; default: all.")] = None,
    implementation: Annotated[
        list[str] | None,
        typer.Option(help="kernels, compiled or eager (PyTorch), fla, liger (if installed). Default: kernels."),
    ] = None,
    repeats: Annotated[int, typer.Option(min=3, help="Timed steps of each kind.")] = 10,
    as_json: Json = False,
) -> None:
    """Time whole steps of every method against the compiled pre-norm baseline."""
    from scaling.kernels.benchmark import bench_train
    from scaling.kernels.decoder import VOCABULARIES

    result = bench_train(
        shapes=shape,
        vocabularies=vocabulary or VOCABULARIES,
        methods=method,
        implementations=implementation or ("kernels",),
        repeats=repeats,
    )
    columns = ("shape", "vocabulary", "method", "implementation", "pass", "launch", "ms", "ratio", "peak_ratio")
    _print(result, columns, as_json)


def _print(result: dict[str, Any], columns: tuple[str, ...], as_json: bool) -> None:
    if as_json:
        typer.echo(json.dumps(result))
        return
    typer.echo(" ".join(f"{name} {value}" for name, value in result["versions"].items()))
    typer.echo("\t".join(columns))
    for row in result["rows"]:
        typer.echo("\t".join(_cell(row.get(column, row.get("failed", ""))) for column in columns))


def _cell(value: object) -> str:
    if isinstance(value, list):
        return "/".join(f"{number:.3f}" for number in value)
    return f"{value:.3f}" if isinstance(value, float) else str(value)
