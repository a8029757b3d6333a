"""Laws of the loader: what a step's batch is, and that nothing but (data, seed, step) decides it."""

from __future__ import annotations

import time
from collections import Counter
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from scaling.corpus import Document, prepare
from scaling.errors import ConfigError, DataError
from scaling.loader import IGNORED, MIXTURE_BLOCK, Batch, Loader, held_out_batches, largest_remainder, papers_batches
from scaling.tokens import TokenStore


def loader(store: TokenStore, **options: object) -> Loader:
    settings = {"seq_len": 32, "batch_size": 24, "seed": 3, **options}
    return Loader(store, **settings)  # type: ignore[arg-type]


def joined(batches: list[Batch]) -> tuple[list[list[int]], list[list[int]], list[int]]:
    return (
        [row for batch in batches for row in batch.tokens_BT.tolist()],
        [row for batch in batches for row in batch.targets_BT.tolist()],
        [start for batch in batches for start in batch.start_B.tolist()],
    )


@given(
    step=st.integers(0, 10**6),
    world_size=st.integers(1, 24),
    micro=st.one_of(st.none(), st.integers(1, 30)),
    weighted=st.booleans(),
    masked=st.booleans(),
)
def test_any_world_size_and_micro_batch_make_the_same_global_batch(
    store: TokenStore, step: int, world_size: int, micro: int | None, weighted: bool, masked: bool
) -> None:
    weights = {"code": 1.0, "books": 2.0} if weighted else None
    one = loader(store, weights=weights, document_masking=masked)
    parts = [
        piece for rank in range(world_size) for piece in one.batch(step, rank, world_size).split(micro) if len(piece)
    ]
    assert joined(parts) == joined([one.batch(step)])
    assert max(map(len, parts)) <= (micro or 24)


@given(seq_len=st.integers(1, 200), batch_size=st.integers(1, 40), seed=st.integers(0, 2**40))
def test_every_sequence_comes_once_an_epoch(store: TokenStore, seq_len: int, batch_size: int, seed: int) -> None:
    one = Loader(store, seq_len=seq_len, batch_size=batch_size, seed=seed)
    count = one.sequences_per_epoch
    first, last = store.span("train")
    whole = [first + seq_len * i for i in range(count)]
    assert last - first - 1 - seq_len < count * seq_len <= last - first - 1
    positions = one.starts(np.arange(2 * count))
    assert sorted(positions[:count].tolist()) == whole == sorted(positions[count:].tolist())
    if count > 20:
        assert positions[:count].tolist() != positions[count:].tolist()


def test_batches_are_the_stores_tokens_and_the_ones_after(store: TokenStore) -> None:
    batch = loader(store).batch(5)
    for row, start in enumerate(batch.start_B.tolist()):
        assert batch.tokens_BT[row].tolist() == store.tokens[start : start + 32].tolist()
        assert batch.targets_BT[row].tolist() == store.tokens[start + 1 : start + 33].tolist()
    assert batch.tokens_BT.dtype == batch.targets_BT.dtype == np.int64 and batch.document_BT is None


def test_order_depends_on_the_seed_and_the_step_alone(store: TokenStore) -> None:
    reference = joined([loader(store).batch(step) for step in range(4)])
    again = loader(TokenStore.open(store.path))
    assert joined([again.batch(step) for step in (3, 2, 1, 0)][::-1]) == reference
    assert joined([loader(store, seed=4).batch(step) for step in range(4)]) != reference
    assert joined(list(islice(loader(store).prefetch(0), 4))) == reference


def test_order_depends_on_the_data(store: TokenStore, tmp_path: Path) -> None:
    other = prepare([Document("x" * 5000, "code")], tmp_path / "s", held_out_fraction=0.0)
    same_length = Loader(other, seq_len=32, batch_size=24, seed=3)
    assert other.fingerprint != store.fingerprint
    assert same_length.starts(np.arange(50)).tolist() != loader(store).starts(np.arange(50)).tolist()


def test_masking_marks_documents_and_ignores_targets_across_them(store: TokenStore) -> None:
    batch = loader(store, document_masking=True).batch(0)
    assert batch.document_BT is not None
    ends = 0
    for row, start in enumerate(batch.start_B.tolist()):
        for column in range(32):
            position = start + column
            document = int(store.document_of(position))
            assert store.offsets[document] <= position < store.offsets[document + 1]
            assert batch.document_BT[row, column] == document
            crosses = int(store.document_of(position + 1)) != document
            ends += crosses
            assert batch.targets_BT[row, column] == (IGNORED if crosses else store.tokens[position + 1])
    assert ends > 0 and batch.num_targets == batch.targets_BT.size - ends


@given(
    shares=st.fixed_dictionaries({"code": st.floats(0.1, 9), "books": st.floats(0.1, 9), "maths": st.floats(0.1, 9)}),
    seed=st.integers(0, 100),
)
@settings(max_examples=8)
def test_mixture_gives_each_source_its_share(store: TokenStore, shares: dict[str, float], seed: int) -> None:
    one = loader(store, weights=shares, seed=seed)
    starts = one.starts(np.arange(MIXTURE_BLOCK))
    seen = Counter(store.sources[i] for i in store.source_of(store.document_of(starts)).tolist())
    total = sum(shares.values())
    for source, share in shares.items():
        assert abs(seen[source] / MIXTURE_BLOCK - share / total) <= 1 / MIXTURE_BLOCK
        assert seen[source] / MIXTURE_BLOCK == one.mixture[source]


def test_mixture_goes_through_each_source_before_it_repeats(store: TokenStore) -> None:
    one = loader(store, weights={"code": 3, "maths": 1})
    starts = one.starts(np.arange(3 * MIXTURE_BLOCK))
    for source in ("code", "maths"):
        first, last = store.span("train", source)
        inside = starts[(starts >= first) & (starts < last)]
        counts = np.bincount((inside - first) // 32)
        assert counts.max() - counts.min() <= 1, "ordinals of whole blocks are consecutive"
        assert one.epochs(MIXTURE_BLOCK)[source] * len(counts) == pytest.approx(
            one.mixture[source] * MIXTURE_BLOCK * 24
        )
    assert set(store.source_of(store.document_of(starts)).tolist()) == {
        store.sources.index(s) for s in ("code", "maths")
    }


def test_mixture_is_mixed_within_a_batch(store: TokenStore) -> None:
    one = loader(store, weights={"code": 1, "books": 1}, batch_size=200)
    shares = [
        np.mean(store.source_of(store.document_of(one.batch(step).start_B)) == store.sources.index("code"))
        for step in range(20)
    ]
    assert 0.3 < min(shares) and max(shares) < 0.7  # 200 draws of a half: standard deviation 0.035


def test_epochs_without_weights(store: TokenStore) -> None:
    one = loader(store)
    assert one.epochs(10)[""] == pytest.approx(240 / one.sequences_per_epoch) and one.mixture == {}


def test_held_out_is_fixed_and_extends(store: TokenStore) -> None:
    few, many = (
        joined(list(held_out_batches(store, 32, 20))),
        joined(list(held_out_batches(store, 32, 60, batch_size=7))),
    )
    assert many[2][:20] == few[2] and len(set(many[2])) == 60
    first, last = store.span("held_out")
    assert min(many[2]) >= first and max(many[2]) + 33 <= last
    ranks = [batch for rank in range(3) for batch in held_out_batches(store, 32, 60, rank=rank, world_size=3)]
    assert joined(ranks) == many
    assert all(batch.document_BT is not None for batch in ranks)


def test_papers_protocol_is_the_training_corpus_in_another_order(
    store: TokenStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("WARNING"):
        batches = list(papers_batches(store, 32, 48, seed=3, batch_size=24))
    assert "not held-out losses" in caplog.text
    assert joined(batches) == joined([loader(store, seed=3 + 9999).batch(step) for step in range(2)])


@given(weights=st.lists(st.floats(0.01, 1), min_size=1, max_size=20), total=st.integers(1, 5000))
def test_largest_remainder_sums_and_is_near(weights: list[float], total: int) -> None:
    shares = np.array(weights) / sum(weights)
    counts = largest_remainder(shares, total)
    assert counts.sum() == total and np.all(np.abs(counts - shares * total) < 1 + 1e-9)


def test_too_small_says_how_many_tokens_are_needed(store: TokenStore) -> None:
    have = store.tokens_of("train")
    with pytest.raises(
        DataError, match=rf"256 sequences of 1024 needs 262,145 training tokens, the store has {have:,}"
    ):
        Loader(store, seq_len=1024, batch_size=256, seed=0)
    have = store.tokens_of("held_out")
    with pytest.raises(DataError, match=rf"need 131,073 tokens, it has {have:,}; set evaluation.num_sequences="):
        held_out_batches(store, 1024, 128)
    with pytest.raises(DataError, match=r"source 'maths' is too small: one sequence needs 200,001 training tokens"):
        loader(store, seq_len=200_000, batch_size=0, weights={"maths": 1})


def test_wrong_weights_are_explained(store: TokenStore) -> None:
    with pytest.raises(ConfigError, match=r"data.weights.book: no such source; did you mean 'books'\?"):
        loader(store, weights={"book": 1})
    with pytest.raises(ConfigError, match="no weight is positive"):
        loader(store, weights={"books": 0})
    with pytest.raises(ConfigError, match=r"data.weights.maths: less than 1/16,384 of the whole"):
        loader(store, weights={"books": 1, "maths": 1e-9})
    with pytest.raises(ConfigError, match="batch_size=24 sequences cannot feed 25 processes"):
        loader(store).batch(0, 0, 25)


def test_reading_takes_under_a_hundredth_of_a_step(tmp_path: Path) -> None:
    """At a million tokens a second and device, reading must take under 10 ms for each million."""
    store = prepare([Document("ab " * 2_000_000, "text")], tmp_path / "large", held_out_fraction=0.0)
    one = Loader(store, seq_len=1024, batch_size=256, seed=0)
    one.batch(0)
    times = []
    for step in range(20):
        start = time.process_time()
        one.batch(step)
        times.append(time.process_time() - start)
    assert 0.01 * 256 * 1024 / 1e6 > min(times), f"{256 * 1024 / min(times) / 1e6:.0f} million tokens a second"
