"""``scaling``: puts the nouns together, and turns errors that a user can cause into one line and an exit status.

A command's module is imported when that command is called: ``scaling --help`` imports none of them, it has their
one-line descriptions here (a test holds them to what the modules say).
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import sys
from typing import Annotated, Any, Final

import typer
import typer.core
import typer.main

from scaling import __version__
from scaling.errors import ScalingError

# command -> description; nouns are modules with an ``app``, verbs modules with ``register(app)``
VERBS: Final = {
    "quickstart": "Train a tiny real sweep here, analyse it, write the report.",
    "doctor": "Check python, torch, CUDA, Triton, Slurm, MLflow: what works, what does not, why.",
    "train": "Train one run, or go on with it.",
    "eval": "Downstream evaluation of a checkpoint, through lm-evaluation-harness.",
}
NOUNS: Final = {
    "data": "Turn text into a token store; describe a store.",
    "model": "Parameters, FLOPs and bytes of a model; Hugging Face in and out.",
    "sweep": "Plan, submit, watch and mend sweeps, on Slurm or on this machine.",
    "runs": "MLflow store <-> run folders <-> tidy table.",
    "fit": "Scaling laws with intervals.",
    "compare": "Methods against a baseline.",
    "noise": "Noise floor by kind; detectable effects.",
    "report": "Write a report, or one of its tables or figures, from runs.",
    "probe": "Look inside trained models.",
    "bench": "Kernels and training steps, side by side in one run.",
}


class LazyGroup(typer.core.TyperGroup):
    """A group of commands that are imported when they are called."""

    def list_commands(self, ctx: Any) -> list[str]:
        return [name for name in (*VERBS, *NOUNS) if importlib.util.find_spec(f"scaling.cli.{name}")]

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        if cmd_name not in self.list_commands(ctx):
            return None
        return command(cmd_name)

    def format_commands(self, ctx: Any, formatter: Any) -> None:
        known = {**VERBS, **NOUNS}
        with formatter.section("Commands"):
            formatter.write_dl([(name, known[name]) for name in self.list_commands(ctx)])


def command(name: str) -> Any:
    """The command or group called ``name``, imported now."""
    module = importlib.import_module(f"scaling.cli.{name}")
    made: Any
    if name in NOUNS:
        module.app.rich_markup_mode = None
        made = typer.main.get_group(module.app)  # a group also where there is one command only
    else:
        alone = typer.Typer(rich_markup_mode=None, add_completion=False)
        module.register(alone)
        made = typer.main.get_command(alone)
    made.name = name
    return made


app = typer.Typer(
    name="scaling",
    cls=LazyGroup,
    help="Run sweeps of language-model trainings, train depth-residual Transformers, judge runs with intervals.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # plain help: importing rich costs more than half of the start-up budget
)


def _version(value: bool) -> None:
    if value:
        typer.echo(f"isoloss {__version__}")
        raise typer.Exit()


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
    debug: Annotated[bool, typer.Option("--debug", help="Show tracebacks and debug logging.")] = False,
) -> None:
    """Options that go before the command."""
    logging.basicConfig(level=logging.DEBUG if debug else logging.WARNING, format="%(levelname)s %(name)s: %(message)s")


def main() -> None:
    """Entry point of the ``scaling`` command."""
    try:
        app()
    except ScalingError as error:
        if "--debug" in sys.argv[1:]:
            raise
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
