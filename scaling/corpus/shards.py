"""Shards: tokenized documents on disk, written by workers, each complete or absent.

After ``pieces`` in ``scaling.corpus``, before ``duplicates`` and ``layout``. A piece becomes one or more shards of
some 16 MiB of text, then a marker ``PIECE.json``, whose presence says that all of them are complete. A shard is two or
three files: ``NAME.tokens``, ``NAME.npz`` (``Shard``) and, for the search for near duplicates, ``NAME.signatures.npy``
(in the order of the input). Its documents are grouped by split and source, so that laying out the store copies ranges
of bytes.
"""

from __future__ import annotations

import io
import json
import os
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from scaling.corpus.documents import Document, digest
from scaling.corpus.pieces import Columns, Piece, read_piece
from scaling.corpus.signatures import signature
from scaling.corpus.tokenizer import Encoder
from scaling.tokens import is_held_out

SHARD_BYTES: Final = 16 * 2**20  # of text; what a worker holds at once


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """The index of a shard, one entry a document, grouped by side and source, in the order of the input within a group.

    ``side_D`` is 0 for training and 1 for held out, ``label_D`` an index into ``labels``, ``place_D`` the document's
    place in the order of the input.
    """

    labels: tuple[str, ...]
    side_D: npt.NDArray[np.uint8]
    label_D: npt.NDArray[np.uint16]
    place_D: npt.NDArray[np.int64]
    num_tokens_D: npt.NDArray[np.int64]
    num_bytes_D: npt.NDArray[np.int64]
    hash_D2: npt.NDArray[np.uint64]

    def __len__(self) -> int:
        return len(self.side_D)


class Folder:
    """A folder of shards."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def tokens(self, name: str) -> Path:
        return self.path / f"{name}.tokens"

    def signatures(self, name: str) -> Path:
        return self.path / f"{name}.signatures.npy"

    def read(self, name: str) -> Shard:
        with np.load(self.path / f"{name}.npz", allow_pickle=False) as file:
            arrays = {key: file[key] for key in file.files}
        return Shard(labels=tuple(arrays.pop("labels").tolist()), **arrays)

    def is_complete(self, piece_name: str) -> bool:
        return (self.path / f"{piece_name}.json").exists()

    def names(self) -> list[str]:
        """Shards of all complete pieces, in the order of the input."""
        return [
            f"{marker.stem}-{number:05d}"
            for marker in sorted(self.path.glob("*.json"))
            for number in range(_marker(marker)[0])
        ]

    def counts(self) -> Counter[str]:
        """What readers left out, by reason."""
        total: Counter[str] = Counter()
        for marker in sorted(self.path.glob("*.json")):
            total.update(_marker(marker)[1])
        return total

    def write_piece(
        self, piece: Piece, *, columns: Columns, encoder: Encoder, fraction: float, signatures: bool
    ) -> int:
        """Read and tokenize a piece, put its shards on disk and mark it complete; returns its number of tokens."""
        counts: Counter[str] = Counter()
        number, tokens = 0, 0
        for documents in batches(read_piece(piece, columns, counts), SHARD_BYTES):
            tokens += self._write(f"{piece.name}-{number:05d}", documents, encoder, fraction, signatures)
            number += 1
        marker = {"shards": number, "counts": dict(sorted(counts.items()))}
        write_through(self.path / f"{piece.name}.json", json.dumps(marker).encode("ascii"))
        return tokens

    def _write(
        self, name: str, documents: Sequence[Document], encoder: Encoder, fraction: float, signatures: bool
    ) -> int:
        texts = [document.encode() for document in documents]
        labels = sorted({document.source for document in documents})
        numbers = {label: number for number, label in enumerate(labels)}
        label_D = np.array([numbers[document.source] for document in documents], dtype=np.uint16)
        hash_D2 = np.frombuffer(b"".join(map(digest, texts)), dtype="<u8").reshape(-1, 2).astype(np.uint64)
        side_D = is_held_out(hash_D2[:, 0], fraction).astype(np.uint8)
        place_D = np.lexsort((np.arange(len(texts)), label_D, side_D)).astype(np.int64)
        ordered = [texts[place] for place in place_D]
        ids, num_tokens_D = encoder.encode(ordered)
        assert int(np.count_nonzero(ids == encoder.end_of_document)) == len(ordered), "an end inside a document"
        write_through(self.tokens(name), ids.tobytes())
        if signatures:
            np.save(self.signatures(name), np.stack([signature(text) for text in texts]))
        index = io.BytesIO()
        np.savez(
            index,
            labels=np.array(labels, dtype=np.str_),
            side_D=side_D[place_D],
            label_D=label_D[place_D],
            place_D=place_D,
            num_tokens_D=num_tokens_D,
            num_bytes_D=np.array([len(text) for text in ordered], dtype=np.int64),
            hash_D2=hash_D2[place_D],
        )
        write_through(self.path / f"{name}.npz", index.getbuffer())
        return len(ids)


def batches(documents: Iterator[Document], num_bytes: int) -> Iterator[list[Document]]:
    """Lists of consecutive documents, each closed once it holds ``num_bytes`` characters."""
    held: list[Document] = []
    size = 0
    for document in documents:
        held.append(document)
        size += len(document.text)
        if size >= num_bytes:
            yield held
            held, size = [], 0
    if held:
        yield held


def write_through(path: Path, data: bytes | memoryview) -> None:
    """Write beside, sync to disk and rename.

    The name beside is this process's own: a worker that outlives a killed preparation for a moment must not meet the
    next.
    """
    beside = path.with_name(f"{path.name}.{os.getpid()}.partial")
    with beside.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(beside, path)


def _marker(path: Path) -> tuple[int, dict[str, int]]:
    """A complete piece's number of shards, and what its reader left out."""
    marker = json.loads(path.read_text(encoding="ascii"))
    return marker["shards"], marker["counts"]
