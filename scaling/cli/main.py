"""``scaling``: puts the nouns together, and turns errors that a user can cause into one line and an exit status."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from typing import Annotated

import typer

from scaling import __version__
from scaling.errors import ScalingError

app = typer.Typer(
    name="scaling",
    help="Run sweeps of language-model trainings, train depth-residual Transformers, judge runs with intervals.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    rich_markup_mode=None,  # plain help: importing rich costs more than half of the start-up budget
)

NOUNS = ("data", "model", "sweep", "runs", "fit", "compare", "noise", "report", "probe", "bench")
VERBS = ("quickstart", "doctor", "train", "eval")


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


def _register() -> None:
    for noun in NOUNS:
        if importlib.util.find_spec(f"scaling.cli.{noun}"):
            app.add_typer(importlib.import_module(f"scaling.cli.{noun}").app, name=noun)
    for verb in VERBS:
        if importlib.util.find_spec(f"scaling.cli.{verb}"):
            importlib.import_module(f"scaling.cli.{verb}").register(app)


def main() -> None:
    """Entry point of the ``scaling`` command."""
    _register()
    debug = "--debug" in sys.argv[1:]
    try:
        app()
    except ScalingError as error:
        if debug:
            raise
        typer.echo(f"error: {error}", err=True)
        raise SystemExit(error.exit_code) from None


if __name__ == "__main__":
    main()
