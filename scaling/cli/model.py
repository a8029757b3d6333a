"""``scaling model``: what a model costs, and models in and out of Hugging Face's format."""

from __future__ import annotations

import json
from pathlib import Path
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


CONVERT_EPILOG = (
    "Examples:  scaling model convert Qwen3-0.6B --out qwen   |   "
    "scaling model convert Qwen3-0.6B --method delta --set gate=learned --out qwen-delta"
)


@app.command(epilog=CONVERT_EPILOG)
def convert(
    source: Annotated[Path, typer.Argument(help="Folder of a Hugging Face Qwen3 or Llama checkpoint.")],
    out: Annotated[Path, typer.Option(help="New folder for model.yaml and model.safetensors.")],
    method: Annotated[str, typer.Option(help="Residual method; its own parameters start fresh.")] = "baseline",
    settings: Annotated[
        list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Options of the method, e.g. gate=learned.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Of starts that are random.")] = 0,
    as_json: AsJson = False,
) -> None:
    """From Hugging Face's format: a checkpoint as a model of this library."""
    from scaling.config.residual import ResidualConfig
    from scaling.config.strict import apply_settings, build
    from scaling.models.hf import import_model
    from scaling.trained import write_model

    tree = apply_settings({"method": method}, settings or [])
    model = import_model(source, build(ResidualConfig, tree, path="residual", source="options"), seed=seed)
    write_model(model, out)
    told = {"out": str(out), "parameters": sum(p.numel() for p in model.parameters()), "method": method}
    typer.echo(json.dumps(told) if as_json else f"{out}: {told['parameters']:,} parameters, residual {method}")


EXPORT_EPILOG = "Examples:  scaling model export runs/3f0c... --out hf   |   scaling model export qwen --out hf --json"


@app.command(epilog=EXPORT_EPILOG)
def export(
    source: Annotated[Path, typer.Argument(help="Run folder, checkpoint, or converted model; baseline only.")],
    out: Annotated[Path, typer.Option(help="Folder for config.json and model.safetensors.")],
    average: Annotated[bool, typer.Option("--average", help="The moving average of the weights.")] = False,
    as_json: AsJson = False,
) -> None:
    """To Hugging Face's format: Qwen3, or Llama for models without QK-norm."""
    from scaling.models.hf import export_model
    from scaling.trained import read_model

    config, weights = read_model(source, average=average)
    export_model(config, weights, out)
    told = {"out": str(out), "model_type": "qwen3" if config.qk_norm else "llama", "tensors": len(weights)}
    typer.echo(json.dumps(told) if as_json else f"{out}: {told['model_type']}, {told['tensors']} tensors")
