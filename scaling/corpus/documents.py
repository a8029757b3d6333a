"""What a corpus is made of: a text with the name of its source, and a count of what could not be read.

First module of ``scaling.corpus``: every reader yields documents, everything after takes them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Document:
    """A text and the name of the source that it counts for."""

    text: str
    source: str

    def encode(self) -> bytes:
        """The text in UTF-8; lone surrogates, which JSON allows and UTF-8 does not, become question marks."""
        return self.text.encode("utf-8", errors="replace")


def digest(text: bytes) -> bytes:
    """128-bit BLAKE2b, by which documents are compared and split."""
    return blake2b(text, digest_size=16).digest()


def read_text_files(paths: Iterable[Path], source: str, skipped: dict[str, int]) -> Iterator[Document]:
    """One document a file; files that are not UTF-8 are counted in ``skipped`` under ``"not UTF-8"``, empty ones left out."""
    for path in paths:
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            skipped["not UTF-8"] = skipped.get("not UTF-8", 0) + 1
            continue
        if text.strip():
            yield Document(text, source)
