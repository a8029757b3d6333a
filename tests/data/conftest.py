"""A small store of several sources, made once."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from scaling.corpus import Document, prepare
from scaling.tokens import TokenStore

WORDS = "the quick brown fox jumps over a lazy dog while seven wizards brew potent mead in their jugs".split()


def documents(count: int, source: str, seed: int = 0) -> list[Document]:
    """``count`` different texts of 5 to 80 words."""
    rng = random.Random(f"{source} {seed}")
    return [
        Document(f"{source} {number}: " + " ".join(rng.choices(WORDS, k=rng.randint(5, 80))), source)
        for number in range(count)
    ]


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> TokenStore:
    """Plain bytes of 600 documents of three sources, a fifth of them held out."""
    corpus = documents(300, "code") + documents(200, "books") + documents(100, "maths")
    out: Path = tmp_path_factory.mktemp("store") / "bytes"
    return prepare(corpus, out, held_out_fraction=0.2)


@pytest.fixture(scope="session")
def make_documents() -> Callable[..., list[Document]]:
    return documents
