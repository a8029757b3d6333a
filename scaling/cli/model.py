"""``scaling model``: what a model costs, and models in and out of Hugging Face's format."""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(help="Parameters, FLOPs and bytes of a model; Hugging Face in and out.", no_args_is_help=True)

Settings = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Any value of the configuration.")
]
AsJson = Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")]

INFO_EPILOG = (
    "Examples:  scaling model info --size 100m --method mhar   |   "
    "scaling model info --size 1b --method mhar --set model.residual.heads=4 --json"
)


@app.command(epilog=INFO_EPILOG)
def info(
    size: Annotated[
        str | None, typer.Option(help="Named size; or give the shape with --set model.d_model=... .")
    ] = None,
    method: Annotated[str, typer.Option(help="Residual method.")] = "baseline",
    moe: Annotated[
        bool, typer.Option("--moe", help="Feed-forward of experts (options: --set model.moe.top_k=4).")
    ] = False,
    settings: Settings = None,
    as_json: AsJson = False,
) -> None:
    """Parameters by group, FLOPs a token, bytes of parameters, optimiser and activations."""
    from scaling.accounting.summary import render, summarise
    from scaling.config.strict import apply_settings, build
    from scaling.config.tree import RunConfig

    model: dict[str, object] = {"residual": {"method": method}} | ({"size": size} if size else {})
    tree = apply_settings({"model": model | ({"moe": {}} if moe else {})}, settings or [])
    summary = summarise(build(RunConfig, tree, source="options"))
    typer.echo(json.dumps(summary) if as_json else render(summary))
