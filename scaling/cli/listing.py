"""What ``scaling runs`` shows: tables of runs, progress bars, the lines before a server starts."""

from __future__ import annotations

import json
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final

import typer

from scaling.errors import TableError, UsageError, nearest

if TYPE_CHECKING:
    import pandas as pd

    from scaling.analysis.result import Dropped
    from scaling.tracking.server import Command

SHOWN: Final = ("run_key", "name", "sweep", "status", "steps", "tokens", "train_loss", "val_loss", "wall_time_s")
REASON: Final = "reason"  # shown behind those where a run has one
WIDEST: Final = 48  # characters of a text
_NARROWEST: Final = 24  # characters of a reason, however narrow the terminal
_PIPED_WIDTH: Final = 220  # characters of a line where the output is no terminal, as of the sweeps' tables


@contextmanager
def bar() -> Iterator[Callable[[str, int, int], None]]:
    """A progress bar on stderr, where that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    shown = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*shown, console=console, disable=not console.is_terminal, transient=True) as progress:
        tasks: dict[str, TaskID] = {}

        def tell(what: str, done: int, total: int) -> None:
            if what not in tasks:
                tasks[what] = progress.add_task(what, total=total or None)
            progress.update(tasks[what], completed=done, total=total or None)

        yield tell


def mapping(text: str | None) -> dict[str, str]:
    """``"val_loss=metric:eval_loss,lr=param:rate"`` as a mapping.

    Raises
    ------
    UsageError
        If a part is not COLUMN=FIELD.
    """
    found: dict[str, str] = {}
    for part in (text or "").split(","):
        name, sign, field = part.partition("=")
        if part.strip() and not (sign and name.strip() and field.strip()):
            raise UsageError(f"--columns: {part.strip()!r} is not COLUMN=FIELD, e.g. val_loss=metric:eval_loss")
        if part.strip():
            found[name.strip()] = field.strip()
    return found


def dropped(runs: Sequence[Dropped]) -> None:
    """Say on stderr how many runs were left out, and why."""
    counts = Counter(one.reason.split(" of ")[0].split(" (")[0] for one in runs)
    for reason, number in counts.most_common():
        typer.echo(f"  left out: {number} {reason}", err=True)


def listing(table: pd.DataFrame, *, sort: str, show: str | None, limit: int, as_json: bool) -> str:
    """Runs as aligned text or JSON.

    Raises
    ------
    TableError
        If a column does not exist.
    """
    names = [name.strip() for name in show.split(",")] if show else list(table.columns if as_json else SHOWN)
    for name in (*names, sort.removeprefix("-")):
        if name not in table.columns:
            raise TableError(f"column {name!r} is not of the run table; {nearest(name, table.columns)}")
    rows = table.sort_values(sort.removeprefix("-"), ascending=not sort.startswith("-"), kind="stable")
    rows = rows.head(limit) if limit else rows
    if not show and not as_json and rows[REASON].notna().any():
        names.append(REASON)
    rows = rows[names]
    if as_json:
        plain = json.loads(rows.to_json(orient="records", double_precision=15))
        return json.dumps({"n": len(rows), "runs": plain})
    if not len(rows):
        return "no runs"
    if len(names) > 1 and names[-1] == REASON:
        return _with_reasons(rows.drop(columns=REASON), rows[REASON].tolist())
    return rows.to_string(index=False, na_rep="-", max_colwidth=WIDEST)


def _with_reasons(rows: pd.DataFrame, reasons: Sequence[str | None]) -> str:
    """The rows as text, each with its reason behind it in what is left of the terminal's width."""
    import pandas as pd

    lines = rows.to_string(index=False, na_rep="-", max_colwidth=WIDEST).split("\n")
    columns = shutil.get_terminal_size((_PIPED_WIDTH, 0)).columns if sys.stdout.isatty() else _PIPED_WIDTH
    width = max(_NARROWEST, columns - len(lines[0]) - 2)
    told = ["-" if pd.isna(reason) else brief(str(reason), width) for reason in reasons]
    return "\n".join(f"{line}  {text}" for line, text in zip(lines, [REASON, *told], strict=True))


def brief(reason: str, width: int) -> str:
    """What went wrong, without what to do about it.

    Where it is too long its middle is left out: the kind of error stands in front, its cause mostly at the end.

    >>> brief("RecordError: end.json: cannot be written (No space left on device); free space", 80)
    'RecordError: end.json: cannot be written (No space left on device)'
    >>> brief("RecordError: end.json: cannot be written (No space left on device); free space", 40)
    'RecordError: end.jso…ace left on device)'
    """
    text = " ".join(reason.split()).partition("; ")[0]
    if len(text) <= width:
        return text
    tail = (width - 1) // 2
    return f"{text[: width - 1 - tail]}…{text[-tail:]}"


def start(command: Command, host: str, port: int) -> None:
    """Say where the server will be and what to mind, then become it.

    Raises
    ------
    UsageError
        If somebody listens at the port already.
    """
    from scaling.tracking.server import port_taken

    if port_taken(host, port):
        raise UsageError(f"--port {port}: somebody listens at {host}:{port} already; give another --port")
    for warning in command.warnings:
        typer.echo(f"warning: {warning}", err=True)
    typer.echo(command.url)
    command.execute()
