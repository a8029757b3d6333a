"""A keyed permutation of ``0..n-1`` in constant memory: what the loader shuffles with.

Before ``loader`` in the flow. ``Permutation(n, key)(i)`` is computed, not looked up, so that the order of any number of
sequences needs no table, no state and no replay: where a run stands is one number.

References
----------
Luby and Rackoff (1988), "How to construct pseudorandom permutations from pseudorandom functions": Feistel networks.
Black and Rogaway (2002), "Ciphers with arbitrary finite domains", method 2: cycle walking.
Steele, Lea and Flood (2014), "Fast splittable pseudorandom number generators": the 64-bit finalizer (variant 13).
"""

from __future__ import annotations

import hashlib
from typing import Final

import numpy as np
import numpy.typing as npt

ROUNDS: Final = 8  # even, so that halves of unequal width end where they began; 4 suffice in theory for large halves

_SHIFTS: Final = (np.uint64(30), np.uint64(27), np.uint64(31))
_FACTORS: Final = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))


def mix(values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
    """Scramble 64-bit words one to one (the splitmix64 finalizer)."""
    mixed = (values ^ (values >> _SHIFTS[0])) * _FACTORS[0]
    mixed = (mixed ^ (mixed >> _SHIFTS[1])) * _FACTORS[1]
    return mixed ^ (mixed >> _SHIFTS[2])


def key_words(*parts: str | int, count: int) -> npt.NDArray[np.uint64]:
    """``count`` 64-bit words that depend on every one of ``parts``; the same on any machine and version."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    digest = hashlib.shake_256(text.encode("utf-8")).digest(8 * count)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


class Permutation:
    """A bijection of ``0..size-1``, chosen by ``key``.

    A Feistel network permutes the smallest ``2**bits >= size``; values that fall outside are walked on until they fall
    inside, which takes fewer than two rounds on average and keeps the map one to one.

    >>> sorted(Permutation(5, "any", "key", 7)(np.arange(5)).tolist())
    [0, 1, 2, 3, 4]
    """

    def __init__(self, size: int, *key: str | int) -> None:
        assert 1 <= size <= 2**62, f"a permutation of {size} items"
        self.size = size
        bits = max(2, (size - 1).bit_length())
        self._widths = (bits // 2, bits - bits // 2)
        self._keys = key_words(*key, count=ROUNDS)

    def __call__(self, index: npt.ArrayLike) -> npt.NDArray[np.int64]:
        """Where each index goes; the shape is kept.

        Raises
        ------
        IndexError
            If an index is outside ``0..size-1``.
        """
        given = np.asarray(index, dtype=np.int64)
        if given.size and (int(given.min()) < 0 or int(given.max()) >= self.size):
            raise IndexError(f"index outside 0..{self.size - 1}")
        values = self._network(given.astype(np.uint64).ravel())
        outside = np.flatnonzero(values >= self.size)
        while outside.size:
            walked = self._network(values[outside])
            values[outside] = walked
            outside = outside[walked >= self.size]
        return values.astype(np.int64).reshape(given.shape)

    def _network(self, values: npt.NDArray[np.uint64]) -> npt.NDArray[np.uint64]:
        width_left, width_right = self._widths
        left = values >> np.uint64(width_right)
        right = values & np.uint64((1 << width_right) - 1)
        for key in self._keys:
            left, right = right, left ^ (mix(right + key) & np.uint64((1 << width_left) - 1))
            width_left, width_right = width_right, width_left
        return (left << np.uint64(width_right)) | right
