"""``scaling eval``: downstream tasks."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from scaling.downstream import Downstream

EPILOG = (
    "Examples:  scaling eval runs/3f0c... --tasks hellaswag,lambada_openai   |   "
    "scaling eval runs/3f0c... --tasks tasks/arc.yaml --shots 5 --ema   |   "
    "scaling compare items --runs runs --baseline baseline   (afterwards: paired tests over the same items)"
)


def register(app: typer.Typer) -> None:
    """Add the command to the application."""

    @app.command(epilog=EPILOG)
    def eval(
        checkpoint: Annotated[Path, typer.Argument(help="Run folder, checkpoint, or converted model.")],
        tasks: Annotated[
            str, typer.Option(metavar="NAME|FILE,...", help="Tasks of lm-evaluation-harness, or .yaml files of tasks.")
        ],
        data: Annotated[Path | None, typer.Option(help="Token store with the tokenizer; default the run's.")] = None,
        ema: Annotated[bool, typer.Option("--ema", help="The moving average of the weights.")] = False,
        shots: Annotated[int | None, typer.Option(min=0, help="Examples before an item; default the task's.")] = None,
        limit: Annotated[int | None, typer.Option(min=1, help="Only so many items a task, to try it.")] = None,
        seq_len: Annotated[int | None, typer.Option(min=2, help="Positions the model sees; default the run's.")] = None,
        out: Annotated[Path | None, typer.Option(help="Where results go; default within the run's folder.")] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object on stdout.")] = False,
    ) -> None:
        """Downstream evaluation of a checkpoint, through lm-evaluation-harness."""
        import importlib.util
        import os

        from scaling.errors import UsageError

        if importlib.util.find_spec("lm_eval") is None:
            raise UsageError("scaling eval needs lm-evaluation-harness; pip install 'isoloss[eval]'")
        names = [name.strip() for name in tasks.split(",") if name.strip()]
        if not names:
            raise UsageError("--tasks: names no task; give names or .yaml files with commas between them")
        os.environ.setdefault("TQDM_DISABLE", "1")  # before the harness is imported: its bars count requests it makes
        from scaling.downstream import evaluate_downstream

        result = evaluate_downstream(
            checkpoint, names, data=data, average=ema, out=out, shots=shots, limit=limit, seq_len=seq_len,
            say=lambda text: typer.echo(text, err=True),
        )  # fmt: skip
        if as_json:
            typer.echo(json.dumps({"folder": str(result.folder), "tasks": result.tasks, "how": result.how}))
        else:
            typer.echo(_words(result))


def _words(result: Downstream) -> str:
    width = max(len(task) for task in result.tasks)
    lines = [f"{result.how['name']} ({result.how['weights']})", ""]
    for task, found in result.tasks.items():
        lines.append(f"{task:{width}}  {found['items']} items, {found['shots']} shots")
        for metric, number in found["metrics"].items():
            error = "" if number["stderr"] is None else f" ± {number['stderr']:.4f}"
            value = "not finite" if number["value"] is None else f"{number['value']:.4f}{error}"
            lines.append(f"{'':{width}}  {metric:14} {value}")
    if result.how["limit"] is not None:
        lines.append(f"only the first {result.how['limit']} items of a task: to try it, not to report")
    lines += ["", f"items and results in {result.folder}"]
    return "\n".join(lines)
