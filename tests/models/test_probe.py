"""The probe of routing heads: its measure, its null, and what it says of models whose answer is known."""

from __future__ import annotations

import json
from collections.abc import Callable
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scaling.analysis.disagreement import describe, judge_disagreement
from scaling.config.residual import AttnRes, Baseline, Delta, Mhar, Msar
from scaling.errors import ConfigError
from scaling.models.probe import Disagreement, disagreement, pairwise_distance
from scaling.probing import save_arrays

Build = Callable[..., Any]


@settings(max_examples=30)
@given(heads=st.integers(2, 6), sources=st.integers(2, 7), seed=st.integers(0, 99))
def test_distance_is_the_mean_total_variation_over_pairs(heads: int, sources: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    weights = torch.randn(sources, 2, 3, heads, generator=generator, dtype=torch.float64).softmax(0)
    pairs = [(weights[..., g] - weights[..., h]).abs().sum(0) / 2 for g, h in combinations(range(heads), 2)]
    torch.testing.assert_close(pairwise_distance(weights), torch.stack(pairs).mean(0))


def test_distance_is_0_for_equal_heads_and_1_for_disjoint_ones() -> None:
    equal = torch.tensor([0.2, 0.8]).view(2, 1, 1, 1).expand(2, 1, 1, 4)
    assert float(pairwise_distance(equal)) == pytest.approx(0, abs=1e-7)
    assert float(pairwise_distance(torch.eye(3).view(3, 1, 1, 3))) == pytest.approx(1)


def test_zero_queries_agree_and_their_null_is_zero_too(build: Build, tokens_BT: Tensor) -> None:
    probe = disagreement(build(Mhar(heads=4)), [tokens_BT, tokens_BT])
    assert probe.learned.shape == (4, 6)
    assert probe.random.shape == (4, 6, 4)
    assert probe.sites.tolist() == [1, 2, 3, 4, 5, 6]
    assert np.abs(probe.learned).max() < 1e-12
    assert np.abs(probe.random).max() < 1e-12
    for row, site in enumerate(probe.sites):
        np.testing.assert_allclose(probe.weights[row, : site + 1], 1 / (site + 1))
        assert np.isnan(probe.weights[row, site + 1 :]).all()


def test_opposed_heads_disagree_more_than_random_ones(build: Build, tokens_BT: Tensor) -> None:
    model = build(Mhar(heads=4))
    with torch.no_grad():
        # Heads 0 and 1 follow the embedding's common direction, heads 2 and 3 go against it.
        model.embedding.weight.add_(1.0)
        signs = torch.tensor([1.0, 1.0, -1.0, -1.0]).repeat_interleave(6)
        model.residual.query_SD.copy_(0.5 * signs.expand(7, 24))
    probe = disagreement(model, [tokens_BT], draws=8)
    assert probe.excess.min() > 0.1
    head_of_embedding = probe.weights[:, 0]
    assert (head_of_embedding[:, :2] > head_of_embedding[:, 2:]).all()


def test_random_queries_keep_the_trained_lengths_and_are_reproducible(
    build: Build, perturb: Callable[..., Any], tokens_BT: Tensor
) -> None:
    model = perturb(build(Mhar(heads=4)))
    one, same, other = (disagreement(model, [tokens_BT], seed=seed).random for seed in (0, 0, 1))
    np.testing.assert_array_equal(one, same)
    assert not np.allclose(one, other)
    quiet = perturb(build(Mhar(heads=4)))
    with torch.no_grad():
        quiet.residual.query_SD.mul_(1e-3)
    assert disagreement(quiet, [tokens_BT]).random.max() < 0.01 * one.max()


def test_weights_are_those_the_model_reads_with(build: Build, perturb: Callable[..., Any], tokens_BT: Tensor) -> None:
    model = perturb(build(Mhar(heads=4, block_sublayers=2)))
    probe = disagreement(model, [tokens_BT])
    np.testing.assert_allclose(np.nansum(probe.weights, axis=1), 1.0)
    seen = (~np.isnan(probe.weights[:, :, 0])).sum(axis=1)
    assert seen.tolist() == [2, 2, 3, 3, 4, 4]
    assert model.training


def test_single_head_and_delta_models_are_probed_in_slices(
    build: Build, perturb: Callable[..., Any], tokens_BT: Tensor
) -> None:
    single = disagreement(perturb(build(AttnRes())), [tokens_BT])
    assert single.heads == 8
    assert single.weights.shape == (6, 7, 8)
    delta = disagreement(perturb(build(Delta(heads=4, null_source=True))), [tokens_BT])
    assert delta.sites.tolist() == [0, 1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("options", "heads", "text"),
    [
        (Baseline(), None, "'baseline' does not route slices of the width over depth; allowed: attnres, delta, mhar"),
        (Msar(), None, "'msar' does not route slices"),
        (Mhar(align="kv_groups"), None, "does not route slices"),
        (Mhar(), 5, "heads=5 must be at least 2 and divide model.d_model=24"),
        (Mhar(), 1, "heads=1 must be at least 2"),
    ],
    ids=repr,
)
def test_what_cannot_be_probed_is_refused(
    build: Build, tokens_BT: Tensor, options: Any, heads: int | None, text: str
) -> None:
    with pytest.raises(ConfigError) as raised:
        disagreement(build(options), [tokens_BT], heads=heads)
    assert text in str(raised.value)


def fake(learned: list[float], random: float) -> Disagreement:
    n = len(learned)
    return Disagreement(
        learned=np.repeat(np.array(learned)[:, None], 2, axis=1),
        random=np.full((n, 2, 3), random),
        weights=np.full((2, 2, 4), 0.5),
        sites=np.array([1, 2]),
        heads=4,
    )


def test_result_has_a_t_interval_over_sequences() -> None:
    learned = [0.5, 0.6, 0.4, 0.7]
    result = judge_disagreement(fake(learned, 0.1))
    assert result.estimate["excess"] == pytest.approx(0.45)
    half = 3.182446305284263 * np.std(learned, ddof=1) / 2  # t quantile of 0.975 with 3 degrees of freedom
    assert result.interval is not None
    assert result.interval.low["learned"] == pytest.approx(0.55 - half)
    assert (result.n, result.df) == (4, 3)
    text = describe(result)
    assert "excess   0.4500   95 % [" in text
    tree = json.loads(result.to_json())
    assert tree["details"]["weights_by_site_source_head"] == [[[0.5] * 4] * 2] * 2


def test_one_sequence_gives_no_interval() -> None:
    result = judge_disagreement(fake([0.5], 0.1))
    assert result.interval is None
    assert [caution.code for caution in result.warnings] == ["one-sequence"]


def test_arrays_are_saved(tmp_path: Path) -> None:
    save_arrays(fake([0.5, 0.6], 0.1), tmp_path / "routing.npz")
    with np.load(tmp_path / "routing.npz") as stored:
        assert set(stored) == {"learned", "random", "weights", "sites"}
