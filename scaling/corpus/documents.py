"""What a corpus is made of: a text with the name of its source.

First module of ``scaling.corpus``: every reader yields documents, everything after takes them.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b


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
