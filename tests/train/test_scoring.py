"""Scores of sequences: those of float64, whatever else is asked for; greedy continuations; refusals."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from scaling.config.model import ModelConfig
from scaling.config.residual import Mhar
from scaling.config.training import PrecisionConfig
from scaling.errors import UsageError
from scaling.models.transformer import Transformer
from scaling.scoring import Scorer

VOCAB = 11


def scorer(*, max_length: int = 80, dtype: torch.dtype = torch.float64) -> Scorer:
    config = ModelConfig(
        num_layers=1, d_model=16, num_heads=2, num_kv_heads=1, d_ffn=16, vocab_size=VOCAB, residual=Mhar(heads=2)
    )
    model = Transformer(config)
    model.init_weights(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)), alpha=0.3)
    return Scorer(
        model.to(dtype), arithmetic=PrecisionConfig(), device=torch.device("cpu"), max_length=max_length, pad=0
    )


def direct(model: Transformer, tokens: list[int], scored: int) -> float:
    """Sum of the last tokens' log-probabilities from one unpadded pass."""
    with torch.no_grad():
        logits = model.logits(model(torch.tensor([tokens[:-1]])))[0].log_softmax(-1)
    wanted = torch.tensor(tokens[1:])
    return float(logits.gather(-1, wanted.unsqueeze(-1))[-scored:].sum())


SEQUENCE = st.lists(st.integers(0, VOCAB - 1), min_size=1, max_size=40)


@given(requests=st.lists(st.tuples(SEQUENCE, SEQUENCE), min_size=1, max_size=5))
def test_scores_are_those_of_one_unpadded_pass(requests: list[tuple[list[int], list[int]]]) -> None:
    """Any contexts and continuations, padded and batched together."""
    judge = scorer()
    for (context, continuation), (score, greedy) in zip(requests, judge.log_likelihoods(requests), strict=True):
        expected = direct(judge.model, [*context, *continuation], len(continuation))
        assert score == pytest.approx(expected, rel=1e-6)  # the log-softmax is in float32
        assert greedy == (judge.continuations([context], [len(continuation)], lambda *_: False)[0] == continuation)


def test_a_score_depends_on_its_own_sequence_alone() -> None:
    """Order and company change no bit."""
    judge = scorer(dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    requests = []
    for length in (3, 70, 12, 64, 5, 33):
        tokens = torch.randint(VOCAB, (length + 1,), generator=generator).tolist()
        requests.append((tokens[:2], tokens[2:]))
    together = judge.log_likelihoods(requests)
    assert judge.log_likelihoods(requests[::-1])[::-1] == together
    assert [judge.log_likelihoods([request])[0] for request in requests] == together


def test_contexts_are_cut_from_the_left() -> None:
    """What does not fit is the beginning of the context; a continuation is never cut."""
    judge = scorer(max_length=8)
    context, continuation = [1, 2, 3, 4, 5, 6, 7, 8], [9, 1, 3]
    (found,) = judge.log_likelihoods([(context, continuation)])
    assert found[0] == pytest.approx(direct(judge.model, [*context, *continuation][-9:], 3), rel=1e-6)
    with pytest.raises(UsageError, match="a continuation of 9 tokens does not fit into 8 positions; raise --seq-len"):
        judge.log_likelihoods([([1], [1] * 9)])
    with pytest.raises(UsageError, match="need a token each"):
        judge.log_likelihoods([([], [1])])


def test_continuations_end_where_they_are_told() -> None:
    """The count, or the first token after which they are finished; each prompt by itself."""
    judge = scorer()
    free = judge.continuations([[1, 2], [3]], [6, 0], lambda *_: False)
    assert len(free[0]) == 6 and free[1] == []
    stopped = judge.continuations([[1, 2], [3]], [6, 6], lambda index, tokens: index == 0 and len(tokens) == 2)
    assert stopped[0] == free[0][:2] and len(stopped[1]) == 6
