"""``scaling data``: make a token store out of text, and say what is in one."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from scaling.tokens import TokenStore

app = typer.Typer(help="Turn text into a token store; describe a store.", no_args_is_help=True)

Json = Annotated[bool, typer.Option("--json", help="One JSON object on stdout and nothing else.")]

_PREPARE_EXAMPLES = """\
Examples:

scaling data prepare python-library --vocab-size 1024 --out stores/python

scaling data prepare corpus/*.jsonl.xz --vocab-size 32768 --near-duplicates 0.8 --out stores/mixed

scaling data prepare code=src books=books.parquet --tokenizer tokenizer.json --out stores/two-sources

Interrupted, however harshly, the same command goes on where it was. Without --vocab-size or --tokenizer, tokens are
bytes.
"""


@app.command(epilog=_PREPARE_EXAMPLES)
def prepare(
    sources: Annotated[
        list[str],
        typer.Argument(
            metavar="[NAME=]SOURCE...",
            help="Files (.jsonl, .parquet, text; also .gz, .xz, .zst), folders, quoted patterns, or python-library.",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", help="The store's folder; made whole or not at all.")],
    vocab_size: Annotated[int | None, typer.Option(help="Train a byte-level BPE of this size.")] = None,
    tokenizer: Annotated[Path | None, typer.Option(help="Use this tokenizer.json.")] = None,
    end_of_document: Annotated[str | None, typer.Option(help="That tokenizer's token that ends documents.")] = None,
    held_out_fraction: Annotated[float, typer.Option(help="Share of documents, by hash, to hold out.")] = 0.01,
    text_column: Annotated[str, typer.Option(help="Where records keep their text.")] = "text",
    source_column: Annotated[
        str | None, typer.Option(help="Where records keep their source's name; by default source, if there.")
    ] = None,
    text_suffix: Annotated[list[str] | None, typer.Option(help="A further file name ending to read as text.")] = None,
    duplicates: Annotated[
        bool, typer.Option("--keep-duplicates/--drop-duplicates", help="Keep or drop copies of a document.")
    ] = False,
    near_duplicates: Annotated[
        float | None, typer.Option(help="Drop documents this similar to an earlier one (0.5 to 1; try 0.8).")
    ] = None,
    workers: Annotated[int | None, typer.Option(help="Processes; by default one a core.")] = None,
    as_json: Json = False,
) -> None:
    """Make a token store out of text."""
    from scaling import corpus

    with _progress() as progress:
        store = corpus.prepare(
            sources,
            out,
            vocab_size=vocab_size,
            tokenizer=tokenizer,
            end_of_document=end_of_document,
            held_out_fraction=held_out_fraction,
            text_column=text_column,
            source_column=source_column,
            text_suffixes=text_suffix or (),
            drop_duplicates=not duplicates,
            near_duplicates=near_duplicates,
            workers=len(os.sched_getaffinity(0)) if workers is None else workers,
            progress=progress,
        )
    _print(store, as_json)


@app.command(epilog="Example:\n\nscaling data info stores/python --json")
def info(store: Annotated[Path, typer.Argument(help="The store's folder.")], as_json: Json = False) -> None:
    """Say what a store holds."""
    from scaling.tokens import TokenStore

    _print(TokenStore.open(store), as_json)


def _print(store: TokenStore, as_json: bool) -> None:
    tree = describe(store)
    if as_json:
        typer.echo(json.dumps(tree))
        return
    typer.echo(f"{tree['path']}: {tree['num_tokens']:,} tokens, {tree['num_documents']:,} documents")
    typer.echo(f"fingerprint   {tree['fingerprint']}")
    kind = tree["tokenizer"] or "plain bytes"
    typer.echo(f"vocabulary    {tree['vocab_size']:,} ({kind}), {tree['bytes_per_token']:.3f} bytes/token")
    for name in ("skipped", "dropped"):
        if any(tree[name].values()):
            typer.echo(f"{name:<14}" + ", ".join(f"{count:,} {reason}" for reason, count in tree[name].items()))
    width = max(len(row["source"]) for row in tree["sources"])
    typer.echo(f"{'source':<{width}}  {'train tokens':>16}  {'held-out tokens':>16}  {'documents':>11}  bytes/token")
    for row in tree["sources"]:
        typer.echo(
            f"{row['source']:<{width}}  {row['train_tokens']:>16,}  {row['held_out_tokens']:>16,}  "
            f"{row['documents']:>11,}  {row['bytes_per_token']:>11.3f}"
        )


def describe(store: TokenStore) -> dict[str, Any]:
    """What ``scaling data info --json`` prints."""
    meta = store.meta
    rows = []
    for source in store.sources:
        parts = [part for part in meta.parts if part.source == source]
        tokens = sum(part.last_token - part.first_token for part in parts)
        rows.append(
            {
                "source": source,
                "train_tokens": store.tokens_of("train", source),
                "held_out_tokens": store.tokens_of("held_out", source),
                "documents": sum(part.last_document - part.first_document for part in parts),
                "text_bytes": sum(part.text_bytes for part in parts),
                "bytes_per_token": sum(part.text_bytes for part in parts) / tokens,
            }
        )
    return {
        "path": str(store.path),
        "fingerprint": store.fingerprint,
        "version": meta.version,
        "vocab_size": store.vocab_size,
        "end_of_document": meta.end_of_document,
        "tokenizer": meta.tokenizer,
        "num_tokens": store.num_tokens,
        "train_tokens": store.tokens_of("train"),
        "held_out_tokens": store.tokens_of("held_out"),
        "num_documents": meta.num_documents,
        "text_bytes": meta.text_bytes,
        "bytes_per_token": meta.bytes_per_token,
        "held_out_fraction": meta.held_out_fraction,
        "skipped": dict(meta.skipped),
        "dropped": dict(meta.dropped),
        "sources": rows,
    }


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on stderr for each stage; where stderr is no terminal, a line when a stage begins."""
    stages: dict[str, Any] = {}
    if not sys.stderr.isatty():

        def note(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = True
                typer.echo(f"{stage} ...", err=True)

        yield note
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

    columns = (TextColumn("{task.description:<16}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, TimeRemainingColumn(), console=Console(stderr=True)) as bars:

        def draw(stage: str, done: int, total: int) -> None:
            if stage not in stages:
                stages[stage] = bars.add_task(stage, total=total)
            bars.update(stages[stage], completed=done)

        yield draw
