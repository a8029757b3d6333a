"""Preparing a store: the last module of ``scaling.corpus``, which puts readers, tokenizer and shards together.

Work in progress lies in a folder beside the store, which appears whole or not at all.
"""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path
from typing import Final

from scaling.corpus.documents import Document
from scaling.corpus.shards import merge, write_shard
from scaling.corpus.tokenizer import ByteEncoder, Encoder, TokenizerEncoder, load_tokenizer, train_bpe
from scaling.errors import DataError
from scaling.tokens import TokenStore, is_held_out

logger = logging.getLogger(__name__)

PIECE_BYTES: Final = 16 * 2**20  # of text in one shard
BPE_SAMPLE_BYTES: Final = 256 * 2**20  # of text that an own tokenizer is trained on


def prepare(
    sources: Iterable[Document],
    out: str | Path,
    *,
    vocab_size: int | None = None,
    tokenizer: str | Path | None = None,
    held_out_fraction: float = 0.01,
) -> TokenStore:
    """Tokenize documents into a token store at ``out`` and open it; a store already there is opened as it is."""
    target = Path(out)
    if (target / "meta.json").exists():
        return TokenStore.open(target)
    work = target.with_name(f"{target.name}.partial")
    held = list(sources)
    if not held:
        raise DataError("the corpus is empty: 0 documents; give other sources")
    encoder = choose_encoder(held, vocab_size, tokenizer)
    shutil.rmtree(work, ignore_errors=True)
    (work / "shards").mkdir(parents=True)
    (work / "store").mkdir()
    count = 0
    for piece in _pieces(held):
        write_shard(work / "shards", count, piece, encoder, held_out_fraction, {})
        count += 1
    merge(work / "shards", count, work / "store", encoder=encoder, fraction=held_out_fraction)
    os.replace(work / "store", target)
    shutil.rmtree(work)
    return TokenStore.open(target)


def choose_encoder(sample: Iterable[Document], vocab_size: int | None, tokenizer: str | Path | None) -> Encoder:
    """The tokenizer that was asked for: a file, plain bytes (no ``vocab_size``), or an own BPE trained on the sample."""
    if tokenizer is not None:
        return load_tokenizer(Path(tokenizer))
    if vocab_size is None:
        return ByteEncoder()
    return TokenizerEncoder(train_bpe((document.text for document in sample), vocab_size))


def _pieces(documents: Iterable[Document]) -> Iterator[list[Document]]:
    piece: list[Document] = []
    size = 0
    for document in documents:
        piece.append(document)
        size += len(document.text)
        if size >= PIECE_BYTES:
            yield piece
            piece, size = [], 0
    if piece:
        yield piece
