"""The plain PyTorch truth: its explicit backward pass, its grouped schedule, and its identities."""

from __future__ import annotations

import torch
from hypothesis import given
from hypothesis import strategies as st

from scaling.kernels import reference

EPS = 1e-6


def _draw(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from([1, 2, 3]), st.integers(1, 5), st.integers(0, 99))
def test_explicit_gradients_are_autograds(sites: int, tokens: int, heads: int, width: int, seed: int) -> None:
    """The gather over sites gives what autograd gives, for every source and query."""
    source = _draw(seed, sites, tokens, heads * width).requires_grad_()
    query = _draw(seed + 1, sites, heads * width).requires_grad_()
    gradient = _draw(seed + 2, sites, tokens, heads * width)
    outputs = torch.stack([reference.route(source[: s + 1], query[s], heads, EPS) for s in range(sites)])
    expected = torch.autograd.grad(outputs, (source, query), gradient)
    found = reference.route_gradients(source.detach(), query.detach(), gradient, heads, EPS)
    for name, a, b in zip(("source", "query"), expected, found, strict=True):
        torch.testing.assert_close(b, a, rtol=1e-9, atol=1e-10, msg=name)


@given(st.integers(1, 9), st.integers(1, 9), st.sampled_from([1, 2, 4]), st.integers(0, 99))
def test_grouping_changes_nothing(sites: int, group: int, heads: int, seed: int) -> None:
    """Routing in groups of any size is routing."""
    source, query = _draw(seed, sites, 3, 8), _draw(seed + 1, sites, 8)
    expected = torch.stack([reference.route(source[: s + 1], query[s], heads, EPS) for s in range(sites)])
    torch.testing.assert_close(reference.route_grouped(source, query, heads, EPS, group), expected)


def test_zero_queries_average() -> None:
    """With zero queries a site returns the mean of its sources: the pre-norm stream up to scale."""
    source = _draw(0, 5, 3, 8)
    torch.testing.assert_close(reference.route(source, torch.zeros(8), 4, EPS), source.mean(0))


def test_streams_with_delta_taps_are_one_stream() -> None:
    """Identity convolutions, equal queries and gates of 1/4 give single-stream routing."""
    source, query = _draw(0, 3, 2, 5, 8), _draw(1, 8)
    tap = torch.zeros(8, 4, dtype=torch.float64)
    tap[:, 0] = 1.0
    bias = torch.full((4,), -torch.log(torch.tensor(3.0, dtype=torch.float64)).item(), dtype=torch.float64)
    mixer = torch.zeros(32, 4, dtype=torch.float64)
    scale = torch.ones((), dtype=torch.float64)
    found = reference.route_streams(source, query.expand(4, 8), [tap] * 3, mixer, scale, bias, EPS)
    expected = reference.route(source.reshape(3, 10, 8), query, 1, EPS).view(2, 5, 8)
    torch.testing.assert_close(found, expected)


def test_streams_are_causal() -> None:
    """A change at token 3 leaves all outputs before it as they were, to the bit."""
    source, query = _draw(0, 3, 1, 6, 8), _draw(1, 2, 8)
    taps, mixer = [_draw(2, 8, 3)], _draw(3, 16, 2)
    other = source.clone()
    other[:, :, 3:] += 1.0
    scale, bias = torch.ones((), dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    a, b = (reference.route_streams(v, query, taps, mixer, scale, bias, EPS) for v in (source, other))
    assert torch.equal(a[:, :3], b[:, :3]) and not torch.equal(a[:, 3:], b[:, 3:])


def test_sinkhorn_sums_to_one() -> None:
    """Rows are exact after the last step; columns converge."""
    matrix = reference.sinkhorn(_draw(0, 7, 4, 4), 20)
    torch.testing.assert_close(matrix.sum(-1), torch.ones(7, 4, dtype=torch.float64))
    torch.testing.assert_close(matrix.sum(-2), torch.ones(7, 4, dtype=torch.float64), rtol=0, atol=1e-3)


def test_hyper_connections_start_as_prenorm() -> None:
    """With zero weights, equal streams stay equal and the update is added once: the pre-norm stream."""
    stream = _draw(0, 6, 1, 8).expand(6, 4, 8)
    zero = torch.zeros(32, 24, dtype=torch.float64)
    read, write, mix = reference.hyper_weights(stream, zero, torch.zeros(3), torch.zeros(24), EPS, 20)
    update = _draw(1, 6, 8)
    torch.testing.assert_close(reference.hyper_read(stream, read), 2.0 * stream[:, 0])
    torch.testing.assert_close(
        reference.hyper_write(stream, mix, write, update), stream + update.unsqueeze(1).expand(6, 4, 8)
    )
