"""The text that an own tokenizer is trained on: training documents from every file, in proportion to its size.

Beside ``tokenizer`` in ``scaling.corpus``. Held-out documents are left out, so that the vocabulary has not seen them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from scaling.corpus.documents import Document, digest
from scaling.corpus.inputs import Input
from scaling.corpus.pieces import Columns, feeds, read_piece
from scaling.tokens import is_held_out


def sample_texts(
    inputs: Sequence[Input],
    documents: Sequence[Document],
    columns: Columns,
    fraction: float,
    num_bytes: int,
    progress: Callable[[int, int], None] | None = None,
) -> Iterator[str]:
    """Some ``num_bytes`` of training text: the first documents of each feed, or all there is."""
    total = sum(item.size for item in inputs) or sum(len(document.text) for document in documents)
    budget = min(num_bytes, 2**62)
    taken = 0
    streams: list[tuple[float, Iterator[Document]]] = [(1.0, iter(documents))] if documents else []
    ignored: Counter[str] = Counter()
    for feed in feeds(inputs):
        share = sum(item.size for item in feed.inputs) / max(1, total)
        streams.append((share, (d for piece in feed.pieces() for d in read_piece(piece, columns, ignored))))
    for share, stream in streams:
        quota = budget * share
        for document in stream:
            if quota <= 0:
                break
            text = document.encode()
            if _is_training(text, fraction):
                quota -= len(text)
                taken += len(text)
                yield text.decode("utf-8")
                if progress is not None:
                    progress(min(taken, budget), budget)


def _is_training(text: bytes, fraction: float) -> bool:
    first = np.frombuffer(digest(text)[:8], dtype="<u8").astype(np.uint64)
    return not bool(is_held_out(first, fraction)[0])
