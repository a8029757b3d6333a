"""``scaling train``: one run, on one process or, under torchrun or srun, on many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

EPILOG = (
    "Examples:  scaling train run.yaml   |   scaling train run.yaml --set optimizer.lr=3e-3 --set run.seed=1   |   "
    "torchrun --nproc-per-node 2 -m scaling train run.yaml --set run.parallel=ddp   |   "
    "scaling train run.yaml --track http://login1:5000"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command(epilog=EPILOG)
    def train(
        config: Annotated[Path, typer.Argument(metavar="CONFIG.yaml", help="The run's configuration.")],
        settings: Annotated[
            list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change one value; may be repeated.")
        ] = None,
        out: Annotated[Path | None, typer.Option("--out", help="Folder of run folders (default: run.out).")] = None,
        track: Annotated[
            str | None,
            typer.Option(
                "--track", metavar="URL", help="MLflow server to write to meanwhile, from a thread (same as run.track)."
            ),
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    ) -> None:
        """Train one run, or go on with it. SIGINT, SIGTERM and SIGUSR2 save a checkpoint and leave."""
        from scaling.stop import STOP

        installed = STOP.listen()  # before torch is imported: a signal may come in the seconds that takes
        try:
            from scaling.config.strict import load_config
            from scaling.resolve import resolve

            run = load_config(config, [*(settings or []), *([f"run.track={track}"] if track else [])])
            resolve(run)  # what is wrong with the configuration is said before torch is imported
            from scaling.cli.training import run_and_show

            code = run_and_show(run, out=out or Path(run.run.out), as_json=as_json)
        finally:
            if installed:
                STOP.forget()
        raise typer.Exit(code)
