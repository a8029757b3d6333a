"""The token store: a corpus as one memory-mapped file of token ids, with its documents, sources and held-out part.

Between ``corpus``, which writes it, and ``loader``, which reads it. A store is a folder:

=====================  ================================================================================================
``meta.json``          ``StoreMeta``: fingerprint, vocabulary, tokenizer, parts, counts; written last
``tokens.bin``         little-endian uint16 (vocabularies up to 65,536) or uint32, every document ended by one
                       end-of-document token; first all training documents, then all held-out ones, each by source
``offsets.npy``        int64, ``documents + 1``: where each document's tokens begin
``hashes.npy``         uint64, ``(documents, 2)``: 128-bit BLAKE2b of each document's text
``token_bytes.npy``    uint16, ``vocab_size``: bytes of text that a token stands for (0: end of document)
``tokenizer.json``     the tokenizer, unless tokens are plain bytes
=====================  ================================================================================================

The side a document falls on is a function of its text alone (``is_held_out``), so copies of a document never meet
across the split.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Literal

import numpy as np
import numpy.typing as npt

from scaling.errors import DataError

FORMAT: Final = "isoloss-tokens"
VERSION: Final = 1

META: Final = "meta.json"
TOKENS: Final = "tokens.bin"
OFFSETS: Final = "offsets.npy"
HASHES: Final = "hashes.npy"
TOKEN_BYTES: Final = "token_bytes.npy"
TOKENIZER: Final = "tokenizer.json"

_LOOKS: Final = 256  # documents that a training looks at before it begins

Split = Literal["train", "held_out"]
SPLITS: Final[tuple[Split, Split]] = ("train", "held_out")
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    """The narrowest of uint16 and uint32 that holds every id."""
    return np.dtype("<u2" if vocab_size <= 2**16 else "<u4")


def is_held_out(hashes: npt.NDArray[np.uint64], fraction: float) -> npt.NDArray[np.bool_]:
    """Which documents are held out: those whose hash, read as a fraction of its range, is below ``fraction``."""
    threshold = int(fraction * 2.0**64)
    if threshold >= 2**64:
        return np.ones(hashes.shape, dtype=np.bool_)
    return hashes < np.uint64(threshold)


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """The documents of one source on one side of the split: ranges of tokens and documents, and bytes of text."""

    split: Split
    source: str
    first_token: int
    last_token: int
    first_document: int
    last_document: int
    text_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StoreMeta:
    """What ``meta.json`` holds. ``last_...`` of a part is exclusive; ``text_bytes`` counts UTF-8 bytes of text."""

    format: str
    version: int
    fingerprint: str
    vocab_size: int
    end_of_document: int
    num_tokens: int
    num_documents: int
    text_bytes: int
    bytes_per_token: float
    held_out_fraction: float
    tokenizer: str | None
    tokenizer_sha256: str
    parts: tuple[Part, ...]
    skipped: Mapping[str, int] = field(default_factory=dict)
    dropped: Mapping[str, int] = field(default_factory=dict)
    request: str = ""


class TokenStore:
    """A store opened for reading; arrays are memory maps, so that opening costs nothing and workers share pages."""

    def __init__(self, path: Path, meta: StoreMeta) -> None:
        self.path = path
        self.meta = meta
        self.tokens: npt.NDArray[Any] = np.memmap(path / TOKENS, dtype=token_dtype(meta.vocab_size), mode="r")
        self.offsets: npt.NDArray[np.int64] = _load(path / OFFSETS, (meta.num_documents + 1,))
        self.hashes: npt.NDArray[np.uint64] = _load(path / HASHES, (meta.num_documents, 2))

    @classmethod
    def open(cls, path: str | Path) -> TokenStore:
        """Open a store and check that its files have the sizes that its description says.

        Raises
        ------
        DataError
            If there is no store, another version wrote it, its description is damaged, or a file is cut short.
        """
        folder = Path(path)
        meta = read_meta(folder)
        expected = meta.num_tokens * token_dtype(meta.vocab_size).itemsize
        try:
            actual = (folder / TOKENS).stat().st_size
        except OSError as error:
            raise DataError(f"{folder / TOKENS}: {error.strerror}; prepare the store again") from None
        if actual != expected:
            raise DataError(
                f"{folder / TOKENS}: {actual:,} bytes where {META} says {expected:,} ({meta.num_tokens:,} tokens); "
                "the file is damaged, copy or prepare the store again"
            )
        return cls(folder, meta)

    @property
    def fingerprint(self) -> str:
        return self.meta.fingerprint

    @property
    def vocab_size(self) -> int:
        return self.meta.vocab_size

    @property
    def num_tokens(self) -> int:
        """Tokens of both sides, ends of documents included; ``tokens_of("train")`` counts those to train on."""
        return self.meta.num_tokens

    @property
    def sources(self) -> tuple[str, ...]:
        return tuple(sorted({part.source for part in self.meta.parts}))

    def span(self, split: Split, source: str | None = None) -> tuple[int, int]:
        """First and last (exclusive) token of a side, or of one source on it.

        Raises
        ------
        DataError
            If the store has no such source.
        """
        if source is not None and source not in self.sources:
            raise DataError(f"{self.path}: no source {source!r}; it holds {', '.join(self.sources)}")
        parts = [part for part in self.meta.parts if part.split == split and source in (None, part.source)]
        return (parts[0].first_token, parts[-1].last_token) if parts else (0, 0)

    def tokens_of(self, split: Split, source: str | None = None) -> int:
        first, last = self.span(split, source)
        return last - first

    @cached_property
    def token_bytes_V(self) -> npt.NDArray[np.uint16]:
        """Bytes of text that each id stands for, shape ``(vocab_size,)``; over targets they give bits per byte."""
        return _load(self.path / TOKEN_BYTES, (self.vocab_size,))

    def document_of(self, position: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Index of the document that holds the token at each position."""
        return np.searchsorted(self.offsets, np.asarray(position, dtype=np.int64), side="right") - 1

    def source_of(self, document: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Index into ``sources`` of each document's source."""
        starts = np.array([part.first_document for part in self.meta.parts], dtype=np.int64)
        of_part = np.array([self.sources.index(part.source) for part in self.meta.parts], dtype=np.int64)
        return of_part[np.searchsorted(starts, np.asarray(document, dtype=np.int64), side="right") - 1]

    def require_alignment(self) -> None:
        """Check that documents end where ``offsets.npy`` says: a look at 256 of them, whatever the store's size.

        Raises
        ------
        DataError
            If one does not, because ``tokens.bin`` is not the file that was prepared with it.
        """
        document = np.unique(np.linspace(0, self.meta.num_documents - 1, _LOOKS).astype(np.int64))
        last = np.asarray(self.offsets[document + 1]) - 1
        inside = (last >= 0) & (last < self.num_tokens)
        wrong = document[~inside | (self.tokens[np.where(inside, last, 0)] != self.meta.end_of_document)]
        if len(wrong):
            raise DataError(
                f"{self.path / TOKENS}: document {wrong[0]:,} does not end where {OFFSETS} says; the files are not of "
                "one store any more, copy or prepare it again"
            )

    def require_vocabulary(self, model_vocab_size: int) -> None:
        """Check that every token id has a row in a model's embedding.

        Raises
        ------
        DataError
            If the model's vocabulary is smaller than the store's.
        """
        if model_vocab_size < self.vocab_size:
            raise DataError(
                f"{self.path}: token ids go up to {self.vocab_size - 1:,} but the model's vocabulary has "
                f"{model_vocab_size:,}; set model.vocab_size={self.vocab_size} or more, or prepare a smaller vocabulary"
            )


def read_meta(folder: Path) -> StoreMeta:
    """Read ``meta.json``; the errors are those of ``TokenStore.open``."""
    path = folder / META
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        raise DataError(f"{folder}: no token store here (no {META}); make one with `scaling data prepare`") from None
    except ValueError:
        raise DataError(f"{path}: damaged; prepare the store again") from None
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise DataError(f"{path}: not a token store's description; give the folder that `scaling data prepare` made")
    if tree.get("version") != VERSION:
        raise DataError(
            f"{path}: store version {tree.get('version')}, this program reads version {VERSION}; prepare it again"
        )
    try:
        parts = tuple(Part(**part) for part in tree.pop("parts"))
        return StoreMeta(parts=parts, **tree)
    except (TypeError, KeyError):
        raise DataError(f"{path}: damaged (fields missing or unknown); prepare the store again") from None


def dump_meta(meta: StoreMeta) -> str:
    """``meta.json``'s text; the same store gives the same bytes."""
    return json.dumps(asdict(meta), indent=1, sort_keys=True) + "\n"


def _load(path: Path, shape: tuple[int, ...]) -> npt.NDArray[Any]:
    try:
        array: npt.NDArray[Any] = np.load(path, mmap_mode="r" if shape[0] else None, allow_pickle=False)
    except (OSError, ValueError, EOFError):
        raise DataError(f"{path}: missing or damaged; copy or prepare the store again") from None
    if array.shape != shape:
        raise DataError(f"{path}: shape {array.shape} where {META} says {shape}; copy or prepare the store again")
    return array
