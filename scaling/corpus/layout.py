"""Laying out the store: the documents to keep, copied from shards to where their side and source are.

After ``duplicates`` in ``scaling.corpus``, before ``preparation``. Reads each shard's index twice and copies its
tokens once.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from scaling.corpus.duplicates import Order
from scaling.corpus.shards import Shard, write_through
from scaling.corpus.tokenizer import Encoder, sha256_of
from scaling.errors import DataError
from scaling.tokens import (
    FORMAT,
    HASHES,
    META,
    OFFSETS,
    SPLITS,
    TOKEN_BYTES,
    TOKENIZER,
    TOKENS,
    VERSION,
    Part,
    StoreMeta,
    dump_meta,
    token_dtype,
)

_COPY_BYTES: Final = 16 * 2**20
MAX_SOURCES: Final = 2**15  # labels are stored in 16 bits beside the side

Group = tuple[int, str]  # side (0 training, 1 held out) and source


def lay_out(
    order: Order,
    out: Path,
    *,
    encoder: Encoder,
    fraction: float,
    skipped: Mapping[str, int],
    dropped: Mapping[str, int],
    request: str,
    progress: Callable[[int, int], None] | None = None,
) -> StoreMeta:
    """Write the store into the empty folder ``out``; ``meta.json`` comes last.

    Raises
    ------
    DataError
        If there are no documents, or none on one side of the split.
    """
    parts = _parts(order)
    _check(parts, fraction, skipped, dropped)
    dtype = token_dtype(encoder.vocab_size)
    _copy_documents(order, out, parts, dtype, progress)
    with (out / TOKEN_BYTES).open("wb") as file:
        np.save(file, encoder.token_bytes())
    if encoder.text is not None:
        write_through(out / TOKENIZER, encoder.text.encode("utf-8"))
    text_bytes = sum(part.text_bytes for part in parts)
    num_tokens = parts[-1].last_token
    meta = StoreMeta(
        format=FORMAT,
        version=VERSION,
        fingerprint=_fingerprint(out, parts, encoder),
        vocab_size=encoder.vocab_size,
        end_of_document=encoder.end_of_document,
        num_tokens=num_tokens,
        num_documents=parts[-1].last_document,
        text_bytes=text_bytes,
        bytes_per_token=text_bytes / num_tokens,
        held_out_fraction=fraction,
        tokenizer=TOKENIZER if encoder.text is not None else None,
        tokenizer_sha256=sha256_of(encoder),
        parts=tuple(parts),
        skipped=dict(sorted(skipped.items())),
        dropped=dict(sorted(dropped.items())),
        request=request,
    )
    write_through(out / META, dump_meta(meta).encode("utf-8"))
    return meta


def _parts(order: Order) -> list[Part]:
    tokens, documents, text_bytes = Counter[Group](), Counter[Group](), Counter[Group]()
    for number, name in enumerate(order.names):
        shard = order.folder.read(name)
        for group, rows in _groups(shard, order.kept(number)):
            tokens[group] += int(shard.num_tokens_D[rows].sum())
            documents[group] += len(rows)
            text_bytes[group] += int(shard.num_bytes_D[rows].sum())
    parts, token, document = [], 0, 0
    for group in sorted(documents):
        part = Part(
            split=SPLITS[group[0]],
            source=group[1],
            first_token=token,
            last_token=token + tokens[group],
            first_document=document,
            last_document=document + documents[group],
            text_bytes=text_bytes[group],
        )
        parts.append(part)
        token, document = part.last_token, part.last_document
    return parts


def _check(parts: Sequence[Part], fraction: float, skipped: Mapping[str, int], dropped: Mapping[str, int]) -> None:
    count = sum(part.last_document - part.first_document for part in parts)
    if not count:
        reasons = [f"{number} {reason}" for reason, number in sorted({**skipped, **dropped}.items()) if number]
        raise DataError(f"the corpus is empty: no documents ({', '.join(reasons) or 'no text'}); give other sources")
    if len({part.source for part in parts}) > MAX_SOURCES:
        raise DataError(f"more than {MAX_SOURCES:,} sources; name a coarser --source-column or a NAME=PATH")
    for split in SPLITS:
        if not any(part.split == split for part in parts) and (split == "train" or fraction > 0):
            raise DataError(
                f"the corpus is too small: none of its {count:,} documents falls on the {split} side "
                f"(--held-out-fraction {fraction:g}); add documents or change the fraction"
            )


def _groups(shard: Shard, keep_D: npt.NDArray[np.bool_]) -> Iterator[tuple[Group, npt.NDArray[np.int64]]]:
    """The shard's documents by side and source: the rows to keep of each."""
    code_D = shard.side_D.astype(np.int64) * 2**16 + shard.label_D
    for code in np.unique(code_D).tolist():
        rows = np.flatnonzero((code_D == code) & keep_D)
        if len(rows):
            yield (code >> 16, shard.labels[code & 0xFFFF]), rows


def _copy_documents(
    order: Order,
    out: Path,
    parts: Sequence[Part],
    dtype: np.dtype[Any],
    progress: Callable[[int, int], None] | None,
) -> None:
    documents = parts[-1].last_document
    offsets = np.lib.format.open_memmap(out / OFFSETS, mode="w+", dtype=np.int64, shape=(documents + 1,))
    hashes = np.lib.format.open_memmap(out / HASHES, mode="w+", dtype=np.uint64, shape=(documents, 2))
    next_token = {(SPLITS.index(part.split), part.source): part.first_token for part in parts}
    next_document = {(SPLITS.index(part.split), part.source): part.first_document for part in parts}
    with (out / TOKENS).open("wb") as target:
        for number, name in enumerate(order.names):
            shard = order.folder.read(name)
            start_D = np.cumsum(shard.num_tokens_D) - shard.num_tokens_D
            with order.folder.tokens(name).open("rb") as source:
                for group, rows in _groups(shard, order.kept(number)):
                    sizes = shard.num_tokens_D[rows]
                    first = next_document[group]
                    offsets[first : first + len(rows)] = next_token[group] + np.cumsum(sizes) - sizes
                    hashes[first : first + len(rows)] = shard.hash_D2[rows]
                    target.seek(next_token[group] * dtype.itemsize)
                    for run in np.split(rows, np.flatnonzero(np.diff(rows) != 1) + 1):
                        begin, end = int(start_D[run[0]]), int(start_D[run[-1]] + shard.num_tokens_D[run[-1]])
                        _copy(source, target, begin * dtype.itemsize, end * dtype.itemsize)
                    next_token[group] += int(sizes.sum())
                    next_document[group] += len(rows)
            if progress is not None:
                progress(number + 1, len(order.names))
        target.flush()
        os.fsync(target.fileno())
    offsets[documents] = parts[-1].last_token
    offsets.flush()
    hashes.flush()


def _copy(source: BinaryIO, target: BinaryIO, begin: int, end: int) -> None:
    source.seek(begin)
    while begin < end:
        piece = source.read(min(_COPY_BYTES, end - begin))
        assert piece, f"{source.name}: shorter than its index says"
        target.write(piece)
        begin += len(piece)


def _fingerprint(out: Path, parts: Sequence[Part], encoder: Encoder) -> str:
    """Hash of what decides every id and its place: the tokenizer, the layout, and each document's text hash."""
    state = hashlib.sha256(f"{FORMAT} {VERSION} {sha256_of(encoder)} {list(parts)}".encode())
    for name in (OFFSETS, HASHES):
        with (out / name).open("rb") as file:
            while piece := file.read(_COPY_BYTES):
                state.update(piece)
    return state.hexdigest()[:32]
