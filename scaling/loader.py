"""The loader: from a step number to a batch, and nothing else.

Between ``tokens`` and ``train``. Position ``step * batch_size + slot`` of one global cursor names a sequence through a
keyed permutation, so a batch is a pure function of (data fingerprint, seed, step): every method, world size and
micro-batch sees the same sequences in the same order, and resuming needs the step alone.

Array shapes: B sequences, T tokens in each (``seq_len``), V ids.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt
from numpy.lib.stride_tricks import sliding_window_view

from scaling.errors import ConfigError, DataError, nearest
from scaling.permutation import Permutation
from scaling.tokens import TOKENS, Split, TokenStore

logger = logging.getLogger(__name__)

IGNORED: Final = -100  # the target that torch's cross-entropy leaves out by default
MIXTURE_BLOCK: Final = 2**14  # positions over which source weights hold exactly; weights are rounded to 1/16,384
PAPERS_SEED_OFFSET: Final = 9999  # the MHAR paper evaluates on its training corpus, reshuffled with seed + 9999


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """Sequences to train or evaluate on.

    ``tokens_BT`` and ``targets_BT`` are int64 (a target of ``IGNORED`` does not count); ``document_BT`` is int32, the
    store's index of the document that each token belongs to, where asked for; ``start_B`` names the sequences by the
    position of their first token in the store.
    """

    tokens_BT: npt.NDArray[np.int64]
    targets_BT: npt.NDArray[np.int64]
    document_BT: npt.NDArray[np.int32] | None
    start_B: npt.NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.start_B)

    @property
    def num_targets(self) -> int:
        return int(np.count_nonzero(self.targets_BT != IGNORED))

    def rows(self, first: int, last: int) -> Batch:
        """Sequences ``first..last-1`` of this batch."""
        return Batch(
            tokens_BT=self.tokens_BT[first:last],
            targets_BT=self.targets_BT[first:last],
            document_BT=None if self.document_BT is None else self.document_BT[first:last],
            start_B=self.start_B[first:last],
        )

    def split(self, micro_batch_size: int | None) -> Iterator[Batch]:
        """Pieces of at most ``micro_batch_size`` sequences, in order; ``None`` gives the batch whole."""
        size = micro_batch_size or len(self)
        for first in range(0, len(self), size):
            yield self.rows(first, first + size)


@dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """A span of the store cut into sequences of ``seq_len`` tokens, each with the token after it as last target.

    Every token of the span but its first is a target of exactly one sequence (fewer than ``seq_len`` are left at the
    end).
    """

    first_token: int
    last_token: int
    seq_len: int

    @classmethod
    def of(cls, store: TokenStore, seq_len: int, split: Split, source: str | None = None) -> Windows:
        first, last = store.span(split, source)
        return cls(first_token=first, last_token=last, seq_len=seq_len)

    def __len__(self) -> int:
        return max(0, (self.last_token - self.first_token - 1) // self.seq_len)


class Loader:
    """Training batches of a store.

    Without ``weights``, one permutation of all training sequences an epoch: each is seen once before any is seen again.
    With ``weights`` (source -> share of the sequences), the same holds within each source, and any ``MIXTURE_BLOCK``
    consecutive positions hold each source in exactly its share.

    Parameters
    ----------
    store, seq_len, batch_size, seed
        ``batch_size`` counts sequences over all processes.
    weights
        Shares, of any sum; sources that are not named are left out.
    document_masking
        Give ``document_BT`` and ignore targets that lie in the next document.

    Raises
    ------
    DataError
        If the store has too few training tokens for one batch (or for one sequence of a weighted source).
    ConfigError
        If a weighted source is not in the store, or no weight is positive.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        seq_len: int,
        batch_size: int,
        seed: int,
        weights: Mapping[str, float] | None = None,
        document_masking: bool = False,
    ) -> None:
        self.store = store
        self.seq_len = seq_len
        self.batch_size = batch_size
        self.seed = seed
        self.document_masking = document_masking
        whole = Windows.of(store, seq_len, "train")
        if len(whole) < batch_size:
            raise DataError(
                f"{store.path}: too small: one batch of {batch_size} sequences of {seq_len} needs "
                f"{batch_size * seq_len + 1:,} training tokens, the store has {store.tokens_of('train'):,}; "
                "add text, or lower data.batch_size or data.seq_len"
            )
        self._streams: tuple[tuple[str, Windows], ...] = (("", whole),)
        self._shares = np.array([MIXTURE_BLOCK], dtype=np.int64)
        if weights:
            self._streams, self._shares = self._weighted(weights)
        self._bounds = np.concatenate([[0], np.cumsum(self._shares)])

    @property
    def sequences_per_epoch(self) -> int:
        """Sequences of one pass over everything that this loader draws from."""
        return sum(len(windows) for _, windows in self._streams)

    @property
    def mixture(self) -> dict[str, float]:
        """Share of the sequences that each weighted source gets, after rounding; empty without weights."""
        return {
            name: int(share) / MIXTURE_BLOCK
            for (name, _), share in zip(self._streams, self._shares, strict=True)
            if name
        }

    def epochs(self, steps: int) -> dict[str, float]:
        """How often ``steps`` steps pass over each source (``""``: over everything, without weights)."""
        drawn = steps * self.batch_size / MIXTURE_BLOCK
        pairs = zip(self._streams, self._shares, strict=True)
        return {name: drawn * int(share) / len(windows) for (name, windows), share in pairs}

    def batch(self, step: int, rank: int = 0, world_size: int = 1) -> Batch:
        """The part of step ``step``'s batch (steps count from 0) that process ``rank`` of ``world_size`` trains on.

        Parts are consecutive and as equal as can be; put together in order they are ``batch(step)``.
        """
        assert step >= 0 and 0 <= rank < world_size, f"step {step}, rank {rank} of {world_size}"
        if world_size > self.batch_size:
            raise ConfigError(
                f"data.batch_size={self.batch_size} sequences cannot feed {world_size} processes; raise it"
            )
        first = step * self.batch_size + rank * self.batch_size // world_size
        last = step * self.batch_size + (rank + 1) * self.batch_size // world_size
        start_B = self.starts(np.arange(first, last, dtype=np.int64))
        return gather(self.store, start_B, self.seq_len, documents=self.document_masking, masking=self.document_masking)

    def prefetch(self, step: int, rank: int = 0, world_size: int = 1, *, depth: int = 2) -> Iterator[Batch]:
        """``batch(step)``, ``batch(step + 1)``, ... read ahead by one thread, against stalls of a cold disk."""
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="loader") as pool:
            ahead = deque(pool.submit(self.batch, step + i, rank, world_size) for i in range(depth))
            step += depth
            while True:
                ahead.append(pool.submit(self.batch, step, rank, world_size))
                step += 1
                yield ahead.popleft().result()

    def starts(self, position_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """First token of the sequence at each position of the global cursor."""
        if len(self._streams) == 1:
            return self._draw(0, position_B)
        block_B, within_B = np.divmod(position_B, MIXTURE_BLOCK)
        start_B = np.empty_like(position_B)
        for block in np.unique(block_B).tolist():
            rows = np.flatnonzero(block_B == block)
            slot_B = self._permutation(MIXTURE_BLOCK, "mixture", block)(within_B[rows])
            stream_B = np.searchsorted(self._bounds, slot_B, side="right") - 1
            ordinal_B = block * self._shares[stream_B] + slot_B - self._bounds[stream_B]
            for i in np.unique(stream_B).tolist():
                start_B[rows[stream_B == i]] = self._draw(i, ordinal_B[stream_B == i])
        return start_B

    def _draw(self, i: int, ordinal_B: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        """First token of the sequence that stream ``i`` gives when drawn from for the ``ordinal``-th time."""
        name, windows = self._streams[i]
        epoch_B, within_B = np.divmod(ordinal_B, len(windows))
        sequence_B = np.empty_like(ordinal_B)
        for epoch in np.unique(epoch_B).tolist():
            rows = epoch_B == epoch
            sequence_B[rows] = self._permutation(len(windows), f"source {name}", epoch)(within_B[rows])
        return windows.first_token + sequence_B * self.seq_len

    def _permutation(self, size: int, stream: str, epoch: int) -> Permutation:
        return Permutation(size, "loader", self.store.fingerprint, self.seed, stream, epoch)

    def _weighted(self, weights: Mapping[str, float]) -> tuple[tuple[tuple[str, Windows], ...], npt.NDArray[np.int64]]:
        for name in weights:
            if name not in self.store.sources:
                raise ConfigError(f"data.weights.{name}: no such source; {nearest(name, self.store.sources)}")
        total = sum(weights.values())
        if not total > 0:
            raise ConfigError("data.weights: no weight is positive; drop the weights or name a source to train on")
        names = [name for name in sorted(weights) if weights[name] > 0]
        streams = tuple((name, Windows.of(self.store, self.seq_len, "train", name)) for name in names)
        for name, windows in streams:
            if not len(windows):
                raise DataError(
                    f"{self.store.path}: source {name!r} is too small: one sequence needs {self.seq_len + 1:,} "
                    f"training tokens, it has {self.store.tokens_of('train', name):,}; "
                    f"drop data.weights.{name} or lower data.seq_len"
                )
        shares = largest_remainder(np.array([weights[name] / total for name in names]), MIXTURE_BLOCK)
        if int(shares.min()) == 0:
            name = names[int(shares.argmin())]
            raise ConfigError(f"data.weights.{name}: less than 1/{MIXTURE_BLOCK:,} of the whole; raise or drop it")
        return streams, shares


def gather(store: TokenStore, start_B: npt.NDArray[np.int64], seq_len: int, *, documents: bool, masking: bool) -> Batch:
    """Read the sequences that start at the given tokens.

    ``masking`` ignores the target at each end of a document: it lies in the next one, which masked attention cannot
    see. ``DataError`` names a token id that is not in the vocabulary, and where it stands.
    """
    end = store.meta.end_of_document
    rows_BT = sliding_window_view(store.tokens, seq_len + 1)[start_B]
    if rows_BT.size and rows_BT.max() >= store.vocab_size:  # the embedding would read beyond its end
        row, column = np.argwhere(rows_BT >= store.vocab_size)[0]
        raise DataError(
            f"{store.path / TOKENS}: token id {rows_BT[row, column]} at position {start_B[row] + column:,}, beyond the "
            f"vocabulary of {store.vocab_size:,}; the file is damaged, copy or prepare the store again"
        )
    tokens_BT = rows_BT[:, :-1].astype(np.int64)
    targets_BT = rows_BT[:, 1:].astype(np.int64)
    document_BT = None
    if documents:
        # each document ends in exactly one end-of-document token, so counting those is enough after one look-up a row
        document_BT = np.zeros(tokens_BT.shape, dtype=np.int32)
        np.cumsum(tokens_BT[:, :-1] == end, axis=1, dtype=np.int32, out=document_BT[:, 1:])
        document_BT += store.document_of(start_B).astype(np.int32)[:, None]
    if masking:
        targets_BT[tokens_BT == end] = IGNORED
    return Batch(tokens_BT=tokens_BT, targets_BT=targets_BT, document_BT=document_BT, start_B=start_B)


def held_out_batches(
    store: TokenStore,
    seq_len: int,
    num_sequences: int,
    *,
    batch_size: int = 32,
    rank: int = 0,
    world_size: int = 1,
    document_masking: bool = False,
) -> Iterator[Batch]:
    """The fixed evaluation set: ``num_sequences`` held-out sequences, the same for every run on this store.

    They are the first of one keyed order over the held-out part, so a larger number extends a smaller one; each has
    ``document_BT``, for errors clustered by document. Process ``rank`` gets its consecutive part of them.

    Raises
    ------
    DataError
        If the held-out part has fewer sequences.
    """
    windows = Windows.of(store, seq_len, "held_out")
    if len(windows) < num_sequences:
        raise DataError(
            f"{store.path}: held-out part too small: {num_sequences} sequences of {seq_len} need "
            f"{num_sequences * seq_len + 1:,} tokens, it has {store.tokens_of('held_out'):,}; "
            f"set evaluation.num_sequences={len(windows)} or less, or prepare with a larger --held-out-fraction"
        )
    first, last = rank * num_sequences // world_size, (rank + 1) * num_sequences // world_size
    order = Permutation(len(windows), "held out", store.fingerprint)
    start_B = windows.first_token + order(np.arange(first, last)) * seq_len
    return _batches(store, start_B, seq_len, batch_size, document_masking)


def papers_batches(
    store: TokenStore,
    seq_len: int,
    num_sequences: int,
    *,
    seed: int,
    batch_size: int = 32,
    rank: int = 0,
    world_size: int = 1,
    document_masking: bool = False,
) -> Iterator[Batch]:
    """The MHAR paper's evaluation set: the *training* corpus in the order of seed + 9999. Nothing in it is held out."""
    logger.warning("evaluating on training text (protocol 'papers'): losses are not held-out losses")
    loader = Loader(store, seq_len=seq_len, batch_size=1, seed=seed + PAPERS_SEED_OFFSET)
    first, last = rank * num_sequences // world_size, (rank + 1) * num_sequences // world_size
    start_B = loader.starts(np.arange(first, last, dtype=np.int64))
    return _batches(store, start_B, seq_len, batch_size, document_masking)


def largest_remainder(shares: npt.NDArray[np.float64], total: int) -> npt.NDArray[np.int64]:
    """Whole numbers with sum ``total`` nearest to ``total * shares`` (Hamilton's method; ties to the first).

    >>> largest_remainder(np.array([0.5, 0.25, 0.25]), 10).tolist()
    [5, 3, 2]
    """
    exact = shares * total
    counts = np.floor(exact).astype(np.int64)
    short = total - int(counts.sum())
    counts[np.argsort(counts - exact, kind="stable")[:short]] += 1
    return counts


def _batches(
    store: TokenStore, start_B: npt.NDArray[np.int64], seq_len: int, batch_size: int, masking: bool
) -> Iterator[Batch]:
    for first in range(0, len(start_B), batch_size):
        yield gather(store, start_B[first : first + batch_size], seq_len, documents=True, masking=masking)
