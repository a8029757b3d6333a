"""``scaling probe``: look inside trained models."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(help="Look inside trained models.", no_args_is_help=True)

EPILOG = (
    "Examples:  scaling probe disagreement runs/3f0c...   |   "
    "scaling probe disagreement runs/3f0c... --heads 8 --draws 8 --save   (scaling report build runs/ then shows it)"
)


@app.command(epilog=EPILOG)
def disagreement(
    checkpoint: Annotated[Path, typer.Argument(help="Run folder, checkpoint, or converted model.")],
    data: Annotated[Path | None, typer.Option(help="Token store; default the run's.")] = None,
    sequences: Annotated[int, typer.Option(min=1, help="Held-out sequences.")] = 32,
    seq_len: Annotated[int | None, typer.Option(min=2, help="Tokens a sequence; default the run's.")] = None,
    heads: Annotated[int | None, typer.Option(help="Slices of the width; default the model's, else 8.")] = None,
    draws: Annotated[int, typer.Option(min=1, help="Random queries a head and site.")] = 4,
    seed: Annotated[int, typer.Option(help="Of the random queries.")] = 0,
    out: Annotated[Path | None, typer.Option(help="Write the arrays (per-head weights over depth) as .npz.")] = None,
    save: Annotated[bool, typer.Option("--save", help="Keep the arrays in the run's folder, for reports.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
) -> None:
    """How much routing heads disagree about what to read, against random queries of the same norm."""
    from scaling.analysis.disagreement import describe, judge_disagreement
    from scaling.errors import UsageError
    from scaling.probing import probe_disagreement, save_arrays
    from scaling.record import PROBE
    from scaling.trained import run_of

    run = run_of(checkpoint)
    if save and run is None:
        raise UsageError(f"--save: {checkpoint} lies in no run folder; name a file with --out instead")
    probe = probe_disagreement(
        checkpoint, data=data, seq_len=seq_len, sequences=sequences, heads=heads, draws=draws, seed=seed
    )
    for path in (out, run.path / PROBE if save and run is not None else None):
        if path is not None:
            save_arrays(probe, path, run)
    result = judge_disagreement(probe)
    typer.echo(result.to_json(indent=None) if as_json else describe(result))
