"""What each method equals: the pre-norm function at its start, other methods at its limits; doubly stochastic maps."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from scaling.config.residual import (
    AttnRes,
    AttnResMhc,
    Baseline,
    Delta,
    DenseFormer,
    HyperConnections,
    Mhar,
    Mhc,
    Msar,
    MuddFormer,
    ResidualConfig,
    ReZero,
)
from scaling.models.residual import attnres_mhc
from scaling.models.residual.mhc import sinkhorn

Build = Callable[..., Any]  # tests reach into the parts of a model by name
Perturb = Callable[..., Any]
TINY_EPS = 1e-30  # stands for eps -> 0


def distance(a: Tensor, b: Tensor) -> float:
    """Relative difference in norm."""
    return float((a - b).detach().norm() / b.detach().norm())


def copy_base(source: Any, target: Any) -> Any:
    """Give ``target`` the base weights of ``source``; its connection parameters stay."""
    shared = {name: p for name, p in source.state_dict().items() if not name.startswith("residual.")}
    missing, unexpected = target.load_state_dict(shared, strict=False)
    assert not unexpected
    assert all(name.startswith("residual.") or "_input_norm" in name for name in missing)
    return target


STARTS: list[ResidualConfig] = [
    HyperConnections(),
    HyperConnections(variant="static", streams=3),
    HyperConnections(streams=1),
    HyperConnections(norm="rms", tanh=False, streams=2),
    Mhc(),
    Mhc(streams=2, order="row_column", sinkhorn_start="softmax", read_out="learned"),
    Mhc(streams=3, transpose=True, mixing_start="identity"),
    Mhc(start="random", gate_start=0.0),
    AttnRes(),
    Mhar(num_blocks=2),
    Mhar(key_norm="per_head"),
    Mhar(align="kv_groups"),
    Mhar(align="kv_groups", block_sublayers=4),
    Delta(),
    Delta(heads=1, null_source=True),
    Delta(heads=3, block_sublayers=3, null_source=True),
    Delta(gate="learned", query_init="random"),
    Msar(),
    Msar(streams=2, block_sublayers=1, conv_scope="site"),
    Msar(streams=8, num_blocks=2, conv_scope="global", gain="stream"),
    Msar(convolution=False, mixer="mean", block_sublayers=2),
    Msar(streams=1),
    DenseFormer(),
    DenseFormer(dilation=2, period=2),
    DenseFormer(dilation=3),
    MuddFormer(),
    MuddFormer(pre_post_norm=True),
]


@pytest.mark.parametrize("options", STARTS, ids=repr)
def test_start_is_the_prenorm_function_for_any_base_weights(
    build: Build, perturb: Perturb, tokens_BT: Tensor, options: ResidualConfig
) -> None:
    base = perturb(build(Baseline(), norm_eps=TINY_EPS), 0.1)
    if isinstance(options, MuddFormer):  # its key and value norms start at 1, as the query's must then be
        for layer in base.layers:
            torch.nn.init.ones_(layer.attention.norm.weight)
    model = copy_base(base, build(options, norm_eps=TINY_EPS))
    assert distance(model(tokens_BT), base(tokens_BT)) < 1e-10


@pytest.mark.parametrize(
    "options",
    [HyperConnections(variant="mhar_comparison"), Mhar(source="cumulative"), Msar(conv_start="random"), ReZero()],
    ids=repr,
)
def test_what_does_not_start_as_the_prenorm_function(build: Build, tokens_BT: Tensor, options: ResidualConfig) -> None:
    base = build(Baseline(), norm_eps=TINY_EPS)
    assert distance(build(options, norm_eps=TINY_EPS)(tokens_BT), base(tokens_BT)) > 0.01


def test_a_closed_delta_gate_is_the_baseline_bit_for_bit(build: Build, perturb: Perturb, tokens_BT: Tensor) -> None:
    base = perturb(build(Baseline()))
    model = copy_base(base, perturb(build(Delta(gate="learned", null_source=True))))
    torch.nn.init.zeros_(model.residual.gate_S)
    assert torch.equal(model(tokens_BT), base(tokens_BT))


@settings(max_examples=40)
@given(
    size=st.integers(1, 6),
    iterations=st.integers(1, 30),
    order=st.sampled_from(["column_row", "row_column"]),
    start=st.sampled_from(["exp", "softmax"]),
    seed=st.integers(0, 999),
)
def test_sinkhorn_is_doubly_stochastic(size: int, iterations: int, order: str, start: str, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(5, size, size, generator=generator, dtype=torch.float64)
    matrix = sinkhorn(logits, iterations=iterations + (start == "softmax"), order=order, start=start)
    assert bool((matrix > 0).all())
    last = -1 if order == "column_row" else -2
    torch.testing.assert_close(matrix.sum(last), torch.ones(5, size, dtype=torch.float64), rtol=1e-12, atol=1e-12)
    # The other axis converges with the contraction of Hilbert's metric, tanh(d / 4) for each of its two halves, d the
    # largest logarithm of a cross ratio (Birkhoff 1957; Franklin and Lorenz 1989).
    rows = logits[:, :, None, :] - logits[:, None, :, :]
    diameter = float((rows[..., :, None] - rows[..., None, :]).abs().max())
    bound = math.expm1(diameter * math.tanh(diameter / 4) ** (2 * iterations - 1))
    # A softmax start adds 1e-6 to every entry, which moves the logarithms a little.
    slack = 1e-5 if start == "softmax" else 1e-12
    assert float((matrix.sum(-3 - last) - 1).abs().max()) <= bound + slack


def test_twenty_sinkhorn_iterations_of_a_4_by_4_are_as_good_as_stated() -> None:
    logits = torch.randn(1000, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    errors = (sinkhorn(logits, iterations=20).sum(-2) - 1).abs().amax(-1)
    assert float(errors.max()) < 1e-4
    assert float(errors.median()) < 1e-7


@pytest.mark.parametrize("order", ["column_row", "row_column"])
def test_one_stream_mhc_has_unit_mixing(build: Build, perturb: Perturb, tokens_BT: Tensor, order: Any) -> None:
    model = perturb(build(Mhc(streams=1, order=order)))
    streams = torch.randn(2, 3, 1, 24, dtype=torch.float64)
    *_, mixing = model.residual.coefficients(streams, 2)
    torch.testing.assert_close(mixing, torch.ones_like(mixing))


@pytest.mark.parametrize("blocks", [{"block_sublayers": 1}, {"block_sublayers": 2}, {"num_blocks": 1}], ids=str)
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_msar_with_equal_streams_is_block_attnres(
    build: Build, perturb: Perturb, tokens_BT: Tensor, blocks: dict[str, Any], streams: int
) -> None:
    """Identity kernels, the same query in every stream, a = 1 / m. The heads differ: msar merges, attnres routes."""
    single = perturb(build(AttnRes(**blocks), norm_eps=TINY_EPS))
    torch.nn.init.zeros_(single.residual.query_SD[-1])  # a mean of the sources, parallel to their sum
    multi = copy_base(single, build(Msar(streams=streams, **blocks), norm_eps=TINY_EPS))
    with torch.no_grad():
        multi.residual.query_SMD.copy_(single.residual.query_SD[:-1].unsqueeze(1).expand(-1, streams, -1))
        multi.residual.gain_SGD.copy_(single.residual.gain_SD[:-1].unsqueeze(1))
    assert distance(multi(tokens_BT), single(tokens_BT)) < 1e-10


def test_the_hybrid_forced_onto_the_current_state_is_mhc(
    build: Build, perturb: Perturb, tokens_BT: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    mhc = perturb(build(Mhc()))
    hybrid = copy_base(mhc, build(AttnResMhc(block_sublayers=2)))
    hybrid.residual.load_state_dict(mhc.residual.state_dict(), strict=False)

    def force(logits_BTH: list[Tensor]) -> Tensor:
        weights = torch.zeros(len(logits_BTH), *logits_BTH[0].shape, dtype=logits_BTH[0].dtype)
        weights[-1] = 1.0
        return weights

    monkeypatch.setattr(attnres_mhc, "routing_weights", force)
    assert distance(hybrid(tokens_BT), mhc(tokens_BT)) < 1e-14


def test_rezero_starts_as_the_embedding(build: Build, tokens_BT: Tensor) -> None:
    model = build(ReZero(final_norm=False))
    assert torch.equal(model(tokens_BT), model.embedding(tokens_BT))
    norms = {name.split(".")[-2] for name, _ in model.named_parameters() if "norm" in name}
    assert norms == {"query_norm", "key_norm"}  # attention's own


def test_group_routing_with_equal_queries_is_attnres_at_attention_sites(
    build: Build, perturb: Perturb, tokens_BT: Tensor
) -> None:
    grouped = perturb(build(Mhar(heads=1, align="kv_groups")))
    single = copy_base(grouped, build(AttnRes()))
    with torch.no_grad():
        residual = grouped.residual
        residual.group_query_LGD.copy_(residual.group_query_LGD[:, :1].expand_as(residual.group_query_LGD))
        rows = [(site // 2, site % 2 or site == 6) for site in range(7)]
        for site, (row, sliced) in enumerate(rows):
            query, gain = (
                (residual.query_SD[row], residual.gain_SD[row])
                if sliced
                else (residual.group_query_LGD[row, 0], residual.group_gain_LD[row])
            )
            single.residual.query_SD[site], single.residual.gain_SD[site] = query, gain
    torch.testing.assert_close(grouped(tokens_BT), single(tokens_BT), rtol=1e-11, atol=1e-12)


def test_a_norm_per_head_is_the_full_norm_with_one_head(build: Build, perturb: Perturb, tokens_BT: Tensor) -> None:
    full, sliced = (perturb(build(Mhar(heads=1, key_norm=kind)))(tokens_BT) for kind in ("full", "per_head"))
    torch.testing.assert_close(full, sliced, rtol=1e-12, atol=1e-13)
    full, sliced = (perturb(build(Mhar(heads=4, key_norm=kind)))(tokens_BT) for kind in ("full", "per_head"))
    assert distance(full, sliced) > 1e-4
