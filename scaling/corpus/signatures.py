"""MinHash signatures: how alike two texts are, from 512 bytes of each.

Before ``shards`` in ``scaling.corpus``. A text is the set of its runs of five words (case and white space do not
count); two signatures agree in a share of their places that estimates the Jaccard similarity of the sets, with a
standard error of at most ``0.5 / sqrt(128)`` = 0.044.

References
----------
Broder (1997), "On the resemblance and containment of documents": MinHash.
Li, Owen and Zhang (2012), "One permutation hashing": one hash of each item, binned, instead of 128.
Shrivastava (2017), "Optimal densification for fast and accurate minwise hashing": empty bins borrow from random others.
"""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

from scaling.permutation import key_words, mix

PLACES: Final = 128
BANDS: Final = 16  # of 8 places each: pairs of similarity (1/16)**(1/8) = 0.71 are found half the time or more
RUN_WORDS: Final = 5

_BIN_BITS: Final = np.uint64(64 - 7)  # the highest 7 bits choose one of 128 places
_WHITE: Final = np.isin(np.arange(256), np.frombuffer(b" \t\n\r\v\f", dtype=np.uint8))
_LOWERED: Final = np.frombuffer(bytes(range(256)).lower(), dtype=np.uint8)
_BYTE_KEYS: Final = np.where(_WHITE, np.uint64(0), key_words("bytes", count=256)[_LOWERED])
_WORD_KEYS: Final = key_words("words", count=RUN_WORDS) | np.uint64(1)
_PLACE_KEYS: Final = key_words("places in a word", count=256) | np.uint64(1)
_LENDERS: Final = np.argsort(key_words("lenders", count=PLACES * PLACES).reshape(PLACES, PLACES), axis=1)


def signature(text: bytes) -> npt.NDArray[np.uint32]:
    """128 places of 32 bits."""
    runs = np.sort(_runs(text))
    first = np.searchsorted(runs, np.arange(PLACES, dtype=np.uint64) << _BIN_BITS)
    found = runs[np.minimum(first, len(runs) - 1)]
    filled = (first < len(runs)) & ((found >> _BIN_BITS) == np.arange(PLACES, dtype=np.uint64))
    values = (found & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    if not filled.all():
        lender = np.argmax(filled[_LENDERS], axis=1)
        values = np.where(filled, values, values[_LENDERS[np.arange(PLACES), lender]])
    return values


def band_keys(signatures_DP: npt.NDArray[np.uint32], band: int) -> npt.NDArray[np.uint64]:
    """One 64-bit word a document: equal where all places of the band are."""
    rows = PLACES // BANDS
    keys = np.zeros(len(signatures_DP), dtype=np.uint64)
    for place in range(band * rows, (band + 1) * rows):
        keys = mix(keys + signatures_DP[:, place].astype(np.uint64))
    return keys


def _runs(text: bytes) -> npt.NDArray[np.uint64]:
    """A hash of each run of five words; of the whole text where it has fewer."""
    codes = np.frombuffer(text.strip(), dtype=np.uint8)
    if not len(codes):
        return np.zeros(1, dtype=np.uint64)
    white = _WHITE[codes]
    starts = np.concatenate([[0], np.flatnonzero(white[:-1] & ~white[1:]) + 1])
    place = np.arange(len(codes)) - np.repeat(starts, np.diff(np.append(starts, len(codes))))
    words = mix(np.add.reduceat(_BYTE_KEYS[codes] * _PLACE_KEYS[place & 255], starts))
    if len(words) < RUN_WORDS:
        return mix(np.array([words.sum(dtype=np.uint64)], dtype=np.uint64))
    count = len(words) - RUN_WORDS + 1
    total = np.zeros(count, dtype=np.uint64)
    for offset, key in enumerate(_WORD_KEYS):
        total += words[offset : offset + count] * key
    return mix(total)
