"""Which documents to drop because an earlier one is the same, or nearly.

After ``shards`` in ``scaling.corpus``, before ``layout``. The first in the order of the input stays. Memory is
bounded: hashes are looked at in ranges of at most ``BUCKET`` documents, signatures through memory maps; what grows
with the corpus is one byte a document.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from scaling.corpus.shards import Folder
from scaling.corpus.signatures import BANDS, PLACES, band_keys

BUCKET: Final = 2**22  # documents sorted at once: some 200 MB
_COMPARED: Final = 2**14  # pairs of signatures compared at once: 16 MB

Keys = npt.NDArray[np.uint64]
Progress = Callable[[int, int], None]


class Order:
    """Numbers all documents of some shards in the order of the input, from 0."""

    def __init__(self, folder: Folder, names: Sequence[str]) -> None:
        self.folder = folder
        self.names = names
        sizes = np.array([len(folder.read(name)) for name in names], dtype=np.int64)
        self.first = np.concatenate([[0], np.cumsum(sizes)])
        self.keep = np.ones(int(self.first[-1]), dtype=np.bool_)

    def kept(self, number: int) -> npt.NDArray[np.bool_]:
        """Which documents of shard ``number`` to keep, in the shard's own order."""
        shard = self.folder.read(self.names[number])
        kept: npt.NDArray[np.bool_] = self.keep[self.first[number] + shard.place_D]
        return kept

    def signatures(self, number: int) -> npt.NDArray[np.uint32]:
        """Signatures of shard ``number``, in the order of the input."""
        mapped: npt.NDArray[np.uint32] = np.load(self.folder.signatures(self.names[number]), mmap_mode="r")
        return mapped


def drop_exact(order: Order) -> int:
    """Drop documents whose text another has before them; returns how many."""

    def keys() -> Iterator[tuple[npt.NDArray[np.int64], Keys]]:
        for number, name in enumerate(order.names):
            shard = order.folder.read(name)
            yield order.first[number] + shard.place_D, shard.hash_D2

    before = int(order.keep.sum())
    for document, hash_D2 in _buckets(keys, len(order.keep)):
        sequence = np.lexsort((document, hash_D2[:, 1], hash_D2[:, 0]))
        same = np.all(hash_D2[sequence[1:]] == hash_D2[sequence[:-1]], axis=1)
        order.keep[document[sequence[1:][same]]] = False
    return before - int(order.keep.sum())


def drop_near(order: Order, threshold: float, progress: Progress | None = None) -> int:
    """Drop documents whose signature agrees with that of one before them in at least ``threshold`` of its places.

    Pairs are looked for among documents that agree in a whole band: each is compared with the first of them and with
    its predecessor. Exact copies must have been dropped before. Returns how many were dropped.
    """
    before = int(order.keep.sum())

    def rows(document: npt.NDArray[np.int64]) -> npt.NDArray[np.uint32]:
        out = np.empty((len(document), PLACES), dtype=np.uint32)
        shard = np.searchsorted(order.first, document, side="right") - 1
        for number in np.unique(shard).tolist():
            here = np.flatnonzero(shard == number)
            out[here] = order.signatures(number)[document[here] - order.first[number]]
        return out

    for band in range(BANDS):

        def keys(band: int = band) -> Iterator[tuple[npt.NDArray[np.int64], Keys]]:
            for number in range(len(order.names)):
                document = np.arange(order.first[number], order.first[number + 1])
                wanted = order.keep[document]
                yield document[wanted], band_keys(order.signatures(number)[wanted], band)[:, None]

        for document, key_D1 in _buckets(keys, len(order.keep)):
            sequence = np.lexsort((document, key_D1[:, 0]))
            document, key = document[sequence], key_D1[sequence, 0]
            again = np.concatenate([[False], key[1:] == key[:-1]])
            leader = np.maximum.accumulate(np.where(again, 0, np.arange(len(key))))
            later = np.flatnonzero(again)
            for first in range(0, len(later), _COMPARED):
                some = later[first : first + _COMPARED]
                own = rows(document[some])
                alike = np.zeros(len(some), dtype=np.bool_)
                for other in (leader[some], some - 1):
                    alike |= (own == rows(document[other])).mean(axis=1) >= threshold
                order.keep[document[some[alike]]] = False
        if progress is not None:
            progress(band + 1, BANDS)
    return before - int(order.keep.sum())


def _buckets(
    keys: Callable[[], Iterator[tuple[npt.NDArray[np.int64], Keys]]], num_documents: int
) -> Iterator[tuple[npt.NDArray[np.int64], Keys]]:
    """All documents and keys, by ranges of the first key's value so narrow that each fits in memory."""
    count = max(1, -(-num_documents // BUCKET))
    edges = [2**64 * i // count for i in range(count + 1)]
    for low, high in zip(edges[:-1], edges[1:], strict=True):
        documents, found = [], []
        for document, key in keys():
            inside = (key[:, 0] >= np.uint64(low)) & (key[:, 0] <= np.uint64(high - 1))
            documents.append(document[inside])
            found.append(key[inside])
        if documents:
            yield np.concatenate(documents), np.concatenate(found)
