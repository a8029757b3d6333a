"""Preparing a store: the last module of ``scaling.corpus``, which puts inputs, tokenizer, shards and layout together.

Work in progress lies in ``<out>.partial`` and ends with one rename, so that the store is there whole or not at all.
What was tokenized stays when a preparation is interrupted, however harshly; the same call goes on from it and ends in
the same bytes. Where the input or an option is refused nothing stays: what is given instead is another request, which
could not use it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from scaling.corpus.documents import Document
from scaling.corpus.duplicates import Order, drop_exact, drop_near
from scaling.corpus.inputs import Input, find_inputs
from scaling.corpus.layout import lay_out
from scaling.corpus.pieces import Columns, Feed, Piece, feeds
from scaling.corpus.shards import SHARD_BYTES, Folder, batches, write_through
from scaling.corpus.tokenizer import BYTES, ByteEncoder, Encoder, load_tokenizer, train_bpe
from scaling.corpus.training_sample import sample_texts
from scaling.corpus.workers import Task, tokenize
from scaling.corpus.workplace import work_folder
from scaling.errors import DataError, UsageError
from scaling.tokens import META, VERSION, TokenStore, read_meta

BPE_SAMPLE_BYTES: Final = 256 * 2**20  # of text that an own tokenizer is trained on

Progress = Callable[[str, int, int], None]  # stage, done, total


@dataclass(frozen=True, kw_only=True, slots=True)
class Options:
    """How a corpus becomes tokens; all of it counts for whether an interrupted preparation may go on."""

    vocab_size: int | None = None
    tokenizer: str | None = None
    end_of_document: str | None = None
    held_out_fraction: float = 0.01
    columns: Columns = Columns()
    drop_duplicates: bool = True
    near_duplicates: float | None = None
    bpe_sample_bytes: int = BPE_SAMPLE_BYTES

    def __post_init__(self) -> None:
        if not 0 <= self.held_out_fraction < 1:
            raise UsageError(f"held_out_fraction={self.held_out_fraction} is outside 0..1 (1 excluded)")
        if self.near_duplicates is not None and not 0.5 <= self.near_duplicates <= 1:
            raise UsageError(f"near_duplicates={self.near_duplicates}: a similarity from 0.5 to 1 is allowed")
        if self.near_duplicates is not None and not self.drop_duplicates:
            raise UsageError("near_duplicates: near duplicates cannot be dropped while exact ones are kept")
        if self.tokenizer is not None and self.vocab_size is not None:
            raise UsageError("vocab_size and tokenizer: give one of them; a tokenizer brings its own vocabulary")
        if self.end_of_document is not None and self.tokenizer is None:
            raise UsageError(
                f"end_of_document={self.end_of_document!r} is a token of a given tokenizer; give tokenizer too, or "
                "leave it out: bytes and an own BPE have their own"
            )
        if self.vocab_size is not None and self.vocab_size < BYTES + 1:
            raise UsageError(f"vocab_size={self.vocab_size}: a byte-level vocabulary needs at least {BYTES + 1}")


def prepare(
    sources: Sequence[str | Path] | Iterable[Document],
    out: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    end_of_document: str | None = None,
    held_out_fraction: float = 0.01,
    text_column: str = "text",
    source_column: str | None = None,
    text_suffixes: Sequence[str] = (),
    drop_duplicates: bool = True,
    near_duplicates: float | None = None,
    bpe_sample_bytes: int = BPE_SAMPLE_BYTES,
    workers: int = 1,
    progress: Progress | None = None,
) -> TokenStore:
    """Turn a corpus into the token store ``out`` and open it; at once where the same call has made it before.

    Parameters
    ----------
    sources
        Arguments as ``scaling data prepare`` takes them (``inputs.find_inputs``), or documents.
    vocab_size
        Train an own byte-level BPE of this size on the training documents; without it (and ``tokenizer``) ids are
        bytes.
    tokenizer
        A ``tokenizer.json`` to use as it is.
    end_of_document
        That tokenizer's token to end documents with; by default the usual ones are tried.
    held_out_fraction
        Share of the documents, by hash of their text, to hold out.
    text_column, source_column
        Where JSON lines and Parquet keep the text and the source's name (by default ``source``, where there is one).
    text_suffixes
        Further file name endings to read as text.
    drop_duplicates, near_duplicates
        Drop copies of a document; drop also documents whose five-word runs are as similar as this (Jaccard, 0.5 to 1).
    bpe_sample_bytes
        How much text the own BPE is trained on, taken from every file in proportion to its size.
    workers
        Processes that tokenize. The store does not depend on their number.
    progress
        Called with a stage's name, what is done and the total.

    Raises
    ------
    UsageError
        If an option is out of range or two do not go together.
    DataError
        If the sources cannot be read or are too small, ``out`` holds another store, or the disk is full or read-only.
    """
    options = Options(
        vocab_size=vocab_size,
        tokenizer=None if tokenizer is None else str(tokenizer),
        end_of_document=end_of_document,
        held_out_fraction=held_out_fraction,
        columns=Columns(text=text_column, source=source_column),
        drop_duplicates=drop_duplicates,
        near_duplicates=near_duplicates,
        bpe_sample_bytes=bpe_sample_bytes,
    )
    if workers < 1:
        raise UsageError(f"workers={workers}: at least one process is needed; give 1 or more")
    target = Path(out)
    arguments, documents = _sorted_out(sources)
    inputs, passed_over = find_inputs(arguments, text_suffixes)
    if not inputs and not documents:
        raise DataError("the corpus is empty: no files with text; give other sources")
    request = _request(inputs, documents, options)
    if (target / META).exists():
        if read_meta(target).request == request:
            return TokenStore.open(target)
        raise DataError(
            f"{target}: holds a token store made from other inputs or options; choose another --out or remove it"
        )
    if target.exists() and (not target.is_dir() or any(target.iterdir())):
        raise DataError(f"{target}: exists and is not a token store; choose another --out or remove it")
    work = target.with_name(f"{target.name}.partial")
    cuts: list[Feed | list[Piece]] = [*feeds(inputs)] if inputs else [_held_pieces(documents)]
    try:
        with work_folder(work, request):
            _build(cuts, inputs, documents, work, options, passed_over, request, workers, progress)
            if target.exists():
                target.rmdir()
            os.replace(work / "store", target)
            shutil.rmtree(work)
    except OSError as error:
        raise DataError(
            f"{error.filename or work}: cannot be written ({error.strerror}); free space or choose another --out, "
            "then run again: what was tokenized is kept"
        ) from None
    return TokenStore.open(target)


def _build(
    cuts: Sequence[Feed | list[Piece]],
    inputs: Sequence[Input],
    documents: Sequence[Document],
    work: Path,
    options: Options,
    passed_over: dict[str, int],
    request: str,
    workers: int,
    progress: Progress | None,
) -> None:
    encoder = _encoder(inputs, documents, work, options, progress)
    folder = Folder(work / "shards")
    task = Task(
        folder=folder.path,
        columns=options.columns,
        tokenizer=encoder.text,
        end_of_document=options.end_of_document,
        fraction=options.held_out_fraction,
        signatures=options.near_duplicates is not None,
    )
    total = sum(item.size for item in inputs) or sum(len(document.text) for document in documents)
    tokenize(cuts, task, encoder, workers, None if progress is None else lambda done: progress("tokenize", done, total))
    order = Order(folder, folder.names())
    dropped: dict[str, int] = {}
    if options.drop_duplicates:
        dropped["duplicate"] = drop_exact(order)
    if options.near_duplicates is not None:
        step = None if progress is None else lambda done, all_: progress("near duplicates", done, all_)
        dropped["near duplicate"] = drop_near(order, options.near_duplicates, step)
    store = work / "store"
    shutil.rmtree(store, ignore_errors=True)
    store.mkdir()
    lay_out(
        order,
        store,
        encoder=encoder,
        fraction=options.held_out_fraction,
        skipped=Counter(passed_over) + folder.counts(),
        dropped=dropped,
        request=request,
        progress=None if progress is None else lambda done, all_: progress("lay out", done, all_),
    )


def _encoder(
    inputs: Sequence[Input],
    documents: Sequence[Document],
    work: Path,
    options: Options,
    progress: Progress | None,
) -> Encoder:
    """The tokenizer that was asked for: a file, plain bytes, or an own BPE (trained before, if this resumes)."""
    if options.tokenizer is not None:
        return load_tokenizer(Path(options.tokenizer), options.end_of_document)
    if options.vocab_size is None:
        return ByteEncoder()
    trained = work / "tokenizer.json"
    if not trained.exists():
        step = None if progress is None else lambda done, all_: progress("train tokenizer", done, all_)
        texts = sample_texts(
            inputs, documents, options.columns, options.held_out_fraction, options.bpe_sample_bytes, step
        )
        write_through(trained, train_bpe(texts, options.vocab_size).encode("utf-8"))
    return load_tokenizer(trained)


def _sorted_out(sources: Sequence[str | Path] | Iterable[Document]) -> tuple[list[str | Path], list[Document]]:
    arguments: list[str | Path] = []
    documents: list[Document] = []
    for item in [sources] if isinstance(sources, (str, Path)) else sources:
        if isinstance(item, Document):
            documents.append(item)
        else:
            arguments.append(item)
    assert not (arguments and documents), "sources are either arguments or documents"
    return arguments, documents


def _held_pieces(documents: Sequence[Document]) -> list[Piece]:
    return [
        Piece(name=f"{0:07d}-{number:07d}", input_bytes=sum(len(item.text) for item in some), documents=tuple(some))
        for number, some in enumerate(batches(iter(documents), SHARD_BYTES))
    ]


def _request(inputs: Sequence[Input], documents: Sequence[Document], options: Options) -> str:
    """Hash of what the store is made from: names, sizes and times of files (not folders), or texts; and options."""
    files = [[item.path.name, item.source, item.size, item.mtime_ns] for item in inputs]
    tree: dict[str, Any] = {"version": VERSION, "files": files, "options": asdict(options)}
    state = hashlib.sha256()
    if options.tokenizer is not None:
        tree["options"]["tokenizer"] = hashlib.sha256(_content(Path(options.tokenizer))).hexdigest()
    for document in documents:
        state.update(f"{len(document.text)} {document.source} ".encode() + document.encode())
    state.update(json.dumps(tree, sort_keys=True).encode("utf-8"))
    return state.hexdigest()[:32]


def _content(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise DataError(f"{path}: cannot be read ({error.strerror}); give a tokenizer.json") from None
