"""Shards: the tokens of one piece of the input, on disk, and their merging into a store.

Middle of ``scaling.corpus``: workers write shards, each complete or absent; ``merge`` lays their documents out by split and source.
A shard is two files, ``NNNNNNNN.tokens`` and ``NNNNNNNN.npz``; the second is written last and marks the first complete. Its
documents are already grouped by split and source, so merging copies ranges of bytes.
"""

from __future__ import annotations

import hashlib
import os
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, Final

import numpy as np
import numpy.typing as npt

from scaling.corpus.documents import Document, digest
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
    is_held_out,
    token_dtype,
)

_COPY_BYTES: Final = 16 * 2**20


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The index of a shard, one entry a document, grouped by side and source; ``counts`` says what was left out.

    ``side_D`` is 0 for training and 1 for held out, ``label_D`` an index into ``labels``, ``order_D`` the document's place in
    the piece of input.
    """

    labels: tuple[str, ...]
    side_D: npt.NDArray[np.uint8]
    label_D: npt.NDArray[np.uint16]
    order_D: npt.NDArray[np.int64]
    num_tokens_D: npt.NDArray[np.int64]
    num_bytes_D: npt.NDArray[np.int64]
    hash_D2: npt.NDArray[np.uint64]
    counts: Mapping[str, int]

    def __len__(self) -> int:
        return len(self.side_D)


def write_shard(
    folder: Path,
    number: int,
    documents: Iterable[Document],
    encoder: Encoder,
    fraction: float,
    counts: Mapping[str, int],
) -> None:
    """Tokenize the documents of one piece of input and put them on disk."""
    held = list(documents)
    texts = [document.encode() for document in held]
    labels = tuple(sorted({document.source for document in held}))
    place = {label: index for index, label in enumerate(labels)}
    label_D = np.array([place[document.source] for document in held], dtype=np.uint16)
    digests = b"".join(map(digest, texts))
    hash_D2 = np.frombuffer(digests, dtype="<u8").reshape(-1, 2).astype(np.uint64)
    side_D = is_held_out(hash_D2[:, 0], fraction).astype(np.uint8)
    order_D = np.lexsort((np.arange(len(held)), label_D, side_D))
    ids, num_tokens_D = encoder.encode([texts[i] for i in order_D])
    tokens_path, index_path = shard_paths(folder, number)
    _write(tokens_path, np.ascontiguousarray(ids).data)
    beside = index_path.with_suffix(".partial")
    with beside.open("wb") as file:
        np.savez(
            file,
            labels=np.array(labels, dtype=np.str_),
            side_D=side_D[order_D],
            label_D=label_D[order_D],
            order_D=order_D,
            num_tokens_D=num_tokens_D,
            num_bytes_D=np.array([len(texts[i]) for i in order_D], dtype=np.int64),
            hash_D2=hash_D2[order_D],
            count_names=np.array(sorted(counts), dtype=np.str_),
            count_values=np.array([counts[name] for name in sorted(counts)], dtype=np.int64),
        )
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, index_path)


def shard_paths(folder: Path, number: int) -> tuple[Path, Path]:
    return folder / f"{number:08d}.tokens", folder / f"{number:08d}.npz"


def is_complete(folder: Path, number: int) -> bool:
    return shard_paths(folder, number)[1].exists()


def read_shard(folder: Path, number: int) -> Shard:
    with np.load(shard_paths(folder, number)[1], allow_pickle=False) as file:
        arrays = {name: file[name] for name in file.files}
    counts = dict(zip(arrays.pop("count_names").tolist(), arrays.pop("count_values").tolist(), strict=True))
    labels = tuple(arrays.pop("labels").tolist())
    return Shard(labels=labels, counts=counts, **arrays)


def merge(
    shards: Path,
    count: int,
    out: Path,
    *,
    encoder: Encoder,
    fraction: float,
    keep: Sequence[npt.NDArray[np.bool_]] | None = None,
    dropped: Mapping[str, int] | None = None,
    request: str = "",
) -> StoreMeta:
    """Lay out shards ``0..count-1`` as a store in the empty folder ``out``; ``meta.json`` comes last.

    Parameters
    ----------
    keep
        For each shard, which of its documents (in the shard's order) to take; all by default.
    dropped
        How many documents were dropped, by reason, for the record.

    Raises
    ------
    DataError
        If there are no documents at all.
    """
    dtype = token_dtype(encoder.vocab_size)
    tokens_of, documents_of, bytes_of = (
        Counter[tuple[int, str]](),
        Counter[tuple[int, str]](),
        Counter[tuple[int, str]](),
    )
    skipped: Counter[str] = Counter()
    for number in range(count):
        shard = read_shard(shards, number)
        skipped.update(shard.counts)
        for group, rows in _groups(shard, keep[number] if keep else None):
            tokens_of[group] += int(shard.num_tokens_D[rows].sum())
            documents_of[group] += len(rows)
            bytes_of[group] += int(shard.num_bytes_D[rows].sum())
    if not documents_of:
        left_out = ", ".join(f"{number} {reason}" for reason, number in sorted(skipped.items())) or "no files with text"
        raise DataError(f"the corpus is empty: 0 documents ({left_out}); give other sources")
    parts, token, document = [], 0, 0
    for side, label in sorted(documents_of):
        group = (side, label)
        parts.append(
            Part(
                split=SPLITS[side],
                source=label,
                first_token=token,
                last_token=token + tokens_of[group],
                first_document=document,
                last_document=document + documents_of[group],
                text_bytes=bytes_of[group],
            )
        )
        token, document = parts[-1].last_token, parts[-1].last_document
    _lay_out(shards, count, out, parts, dtype, keep)
    token_bytes = encoder.token_bytes()
    np.save(out / TOKEN_BYTES, token_bytes)
    if encoder.text is not None:
        _write(out / TOKENIZER, encoder.text.encode("utf-8"))
    text_bytes = sum(bytes_of.values())
    meta = StoreMeta(
        format=FORMAT,
        version=VERSION,
        fingerprint=_fingerprint(out, parts, encoder),
        vocab_size=encoder.vocab_size,
        end_of_document=encoder.end_of_document,
        num_tokens=token,
        num_documents=document,
        text_bytes=text_bytes,
        bytes_per_token=text_bytes / token,
        held_out_fraction=fraction,
        tokenizer=TOKENIZER if encoder.text is not None else None,
        tokenizer_sha256=sha256_of(encoder),
        parts=tuple(parts),
        skipped=dict(sorted(skipped.items())),
        dropped=dict(sorted((dropped or {}).items())),
        request=request,
    )
    _write(out / META, dump_meta(meta).encode("utf-8"))
    return meta


def _groups(
    shard: Shard, keep_D: npt.NDArray[np.bool_] | None
) -> Iterable[tuple[tuple[int, str], npt.NDArray[np.int64]]]:
    """The shard's documents by side and source: the rows to keep of each."""
    code_D = shard.side_D.astype(np.int64) * 2**16 + shard.label_D
    for code in np.unique(code_D).tolist():
        wanted = code_D == code if keep_D is None else (code_D == code) & keep_D
        rows = np.flatnonzero(wanted)
        if len(rows):
            yield (code >> 16, shard.labels[code & 0xFFFF]), rows


def _lay_out(
    shards: Path,
    count: int,
    out: Path,
    parts: Sequence[Part],
    dtype: np.dtype[Any],
    keep: Sequence[npt.NDArray[np.bool_]] | None,
) -> None:
    """Copy every group of every shard to where its part of the store is."""
    documents = parts[-1].last_document
    offsets = np.lib.format.open_memmap(out / OFFSETS, mode="w+", dtype=np.int64, shape=(documents + 1,))
    hashes = np.lib.format.open_memmap(out / HASHES, mode="w+", dtype=np.uint64, shape=(documents, 2))
    next_token = {(SPLITS.index(part.split), part.source): part.first_token for part in parts}
    next_document = {(SPLITS.index(part.split), part.source): part.first_document for part in parts}
    with (out / TOKENS).open("wb") as target:
        target.truncate(parts[-1].last_token * dtype.itemsize)
        for number in range(count):
            shard = read_shard(shards, number)
            start_D = np.cumsum(shard.num_tokens_D) - shard.num_tokens_D
            with shard_paths(shards, number)[0].open("rb") as source:
                for group, rows in _groups(shard, keep[number] if keep else None):
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
    state = hashlib.sha256(f"{FORMAT} {VERSION} {sha256_of(encoder)} {parts}".encode())
    for name in (OFFSETS, HASHES):
        with (out / name).open("rb") as file:
            while piece := file.read(_COPY_BYTES):
                state.update(piece)
    return state.hexdigest()[:32]


def _write(path: Path, data: bytes | memoryview) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
