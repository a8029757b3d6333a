"""Sites of each method against its definition, written out here, every parameter moved away from its start."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from scaling.config.residual import (
    AttnResMhc,
    Baseline,
    DeepNet,
    Delta,
    DenseFormer,
    HyperConnections,
    Mhc,
    Msar,
    MuddFormer,
    RealFormer,
)
from scaling.models.layers import make_context
from scaling.models.residual.convolution import causal_convolution

Build = Callable[..., Any]  # tests reach into the parts of a model by name
Perturb = Callable[..., Any]


def test_mhc_is_its_definition(build: Build, perturb: Perturb) -> None:
    model = perturb(build(Mhc(streams=3, sinkhorn_iterations=5)))
    residual, eps = model.residual, model.config.norm_eps
    embedding = torch.randn(1, 2, 24, dtype=torch.float64)
    out = torch.randn(1, 2, 24, dtype=torch.float64)
    state = residual.start(embedding, None)
    state.streams_BTMD = torch.randn(1, 2, 3, 24, dtype=torch.float64)
    streams = state.streams_BTMD.clone()
    site = 4
    read = state.read(site)
    state.write(site, out)
    for t in range(2):
        x = streams[0, t].flatten()
        normed = x / torch.sqrt((x * x).mean() + eps)
        gates, bias = residual.gate_S3[site], residual.bias_SK[site]
        projected = normed @ residual.project_SVK[site]
        pre = torch.sigmoid(gates[0] * projected[:3] + bias[:3])
        post = 2 * torch.sigmoid(gates[1] * projected[3:6] + bias[3:6])
        mixing = torch.exp((gates[2] * projected[6:] + bias[6:]).reshape(3, 3))
        for _ in range(5):
            mixing = mixing / mixing.sum(0, keepdim=True)
            mixing = mixing / mixing.sum(1, keepdim=True)
        torch.testing.assert_close(read[0, t], pre @ streams[0, t])
        torch.testing.assert_close(state.streams_BTMD[0, t], mixing @ streams[0, t] + torch.outer(post, out[0, t]))


def test_hyper_connections_are_their_definition(build: Build, perturb: Perturb) -> None:
    model = perturb(build(HyperConnections(streams=3)))
    residual = model.residual
    state = residual.start(torch.randn(1, 2, 24, dtype=torch.float64), None)
    state.streams_BTND = torch.randn(1, 2, 3, 24, dtype=torch.float64)
    streams, out, site = state.streams_BTND.clone(), torch.randn(1, 2, 24, dtype=torch.float64), 1
    read = state.read(site)
    state.write(site, out)
    for t in range(2):
        x = streams[0, t]
        centred = x - x.mean(-1, keepdim=True)
        normed = centred / torch.sqrt((centred**2).mean(-1, keepdim=True) + model.config.norm_eps)
        normed = normed * residual.norm_gain_SD[site] + residual.norm_bias_SD[site]
        dynamic = torch.tanh(normed @ residual.project_SDM[site])
        reading = residual.read_SN[site] + residual.gate_S2[site, 0] * dynamic[:, 0]
        mixing = residual.mixing_SNN[site] + residual.gate_S2[site, 0] * dynamic[:, 1:4]
        writing = residual.write_SN[site] + residual.gate_S2[site, 1] * dynamic[:, 4]
        torch.testing.assert_close(read[0, t], reading @ x)
        torch.testing.assert_close(state.streams_BTND[0, t], mixing.T @ x + torch.outer(writing, out[0, t]))


@settings(max_examples=25)
@given(taps=st.integers(1, 12), length=st.integers(1, 20), seed=st.integers(0, 99))
def test_convolution_is_its_definition_within_documents(taps: int, length: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    v = torch.randn(2, length, 3, generator=generator, dtype=torch.float64)
    kernel = torch.randn(taps, 3, generator=generator, dtype=torch.float64)
    documents = torch.randint(0, 2, (2, length), generator=generator).cumsum(1)
    for document_BT in (None, torch.zeros(2, length, dtype=torch.long), documents):
        expected = torch.zeros_like(v)
        for b in range(2):
            for t in range(length):
                for tau in range(min(taps, t + 1)):
                    if document_BT is None or document_BT[b, t - tau] == document_BT[b, t]:
                        expected[b, t] += kernel[tau] * v[b, t - tau]
        torch.testing.assert_close(causal_convolution(v, kernel, document_BT), expected)


def test_msar_site_is_its_definition(build: Build, perturb: Perturb) -> None:
    model = perturb(build(Msar(streams=3, kernels=(2, 4), block_sublayers=2)))
    residual, eps = model.residual, model.config.norm_eps
    sources = [torch.randn(1, 6, 24, dtype=torch.float64) for _ in range(4)]  # embedding, two outputs, one more
    state = residual.start(sources[0], None)
    for site in range(3):
        state.read(site)
        state.write(site, sources[site + 1])
    visible = [sources[0], sources[1] + sources[2], sources[3]]  # a block, and the begun one's partial sum
    site, retrieved = 3, []
    for j in range(3):
        streams = [
            source if j == 0 else causal_convolution(source, residual.kernels[j - 1].kernel_OKD[i], None)
            for i, source in enumerate(visible)
        ]
        keys = [x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * residual.gain_SGD[site, 0] for x in streams]
        weights = torch.stack([(key * residual.query_SMD[site, j]).sum(-1) for key in keys]).softmax(0)
        retrieved.append(sum(w.unsqueeze(-1) * x for w, x in zip(weights, streams, strict=True)))
    flat = torch.cat(retrieved, dim=-1)
    flat = flat / torch.sqrt((flat * flat).mean(-1, keepdim=True) + eps)
    projected = flat @ residual.mixer_project_SVM[site]
    a = torch.sigmoid(residual.mixer_gate_S[site] * projected + residual.mixer_bias_SM[site])
    expected = sum(a[..., j : j + 1] * retrieved[j] for j in range(3))
    torch.testing.assert_close(state.read(site), expected)


def test_the_hybrid_with_one_stream_attends_over_blocks_and_the_cumulative_stream(
    build: Build, perturb: Perturb, tokens_BT: Tensor
) -> None:
    model = perturb(build(AttnResMhc(streams=1, block_sublayers=2)))
    residual, eps = model.residual, model.config.norm_eps
    for bias in (residual.bias_SK, residual.project_SVK):
        torch.nn.init.zeros_(bias)  # H^post = 1, H^res = 1, H^pre = 1 / 2
    state = residual.start(model.embedding(tokens_BT), None)
    block: Any = 0.0
    blocks, stream = [model.embedding(tokens_BT)], model.embedding(tokens_BT)
    for site in range(7):
        sources = [*blocks, stream / 2 if site < 6 else stream]
        keys = [x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * residual.gain_SD[site] for x in sources]
        weights = torch.stack([(key * residual.query_SD[site]).sum(-1) for key in keys]).softmax(0)
        expected = sum(w.unsqueeze(-1) * x for w, x in zip(weights, sources, strict=True))
        torch.testing.assert_close(state.read(site), expected)
        if site < 6:
            out = torch.randn(2, 9, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(site))
            state.write(site, out)
            stream, block = stream + out, block + out
            if site % 2:
                blocks.append(block)
                block = 0.0


@pytest.mark.parametrize(("dilation", "period"), [(1, 1), (2, 1), (1, 2), (2, 2), (3, 1)])
def test_denseformer_is_its_definition(build: Build, perturb: Perturb, dilation: int, period: int) -> None:
    model = perturb(build(DenseFormer(dilation=dilation, period=period), num_layers=5))
    outputs = [torch.randn(1, 2, 24, dtype=torch.float64)]
    state, y = model.residual.start(outputs[0], None), outputs[0]
    for block in range(5):
        delta = torch.randn(2, 1, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(block))
        torch.testing.assert_close(state.read(2 * block), y)
        state.write(2 * block, delta[0])
        state.write(2 * block + 1, delta[1])
        outputs.append(y + delta.sum(0))
        y = outputs[-1]
        if (block + 1) % period == 0:
            chosen = [j for j in range(block + 2) if (block + 1 - j) % dilation == 0]
            weights = model.residual.averages[str(block)].weights_N
            assert len(chosen) == len(weights)
            y = sum(weights[i] * outputs[j] for i, j in enumerate(chosen))
    torch.testing.assert_close(state.read(10), y)


def test_muddformer_is_its_definition(build: Build, perturb: Perturb) -> None:
    model = perturb(build(MuddFormer(hidden_multiple=4)), 0.2)
    outputs = [torch.randn(1, 2, 24, dtype=torch.float64)]
    state = model.residual.start(outputs[0], None)
    streams = [outputs[0]] * 4
    for block in range(3):
        delta = torch.randn(2, 1, 2, 24, dtype=torch.float64, generator=torch.Generator().manual_seed(block))
        for got, expected in zip(state.read(2 * block), streams[:3], strict=True):
            torch.testing.assert_close(got, expected)
        state.write(2 * block, delta[0])
        torch.testing.assert_close(state.read(2 * block + 1), streams[3] + delta[0])
        state.write(2 * block + 1, delta[1])
        outputs.append(streams[3] + delta.sum(0))
        x, net = outputs[-1], model.residual.blocks[block]
        normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.config.norm_eps)
        made = F.gelu(normed @ net.hidden_KD.T) @ net.weights_OK.T
        ways = 4 if block < 2 else 1
        streams = []
        for way in range(ways):
            w = made[..., way * (block + 2) : (way + 1) * (block + 2)] + net.static_WN[way]
            streams.append(sum(w[..., j : j + 1] * outputs[j] for j in range(block + 2)))
    torch.testing.assert_close(state.read(6), streams[0])


def test_deepnet_is_its_definition(build: Build, perturb: Perturb, tokens_BT: Tensor) -> None:
    model = build(DeepNet())
    plain = build(Baseline())
    # Starts: value, output and feed-forward weights times (8 M)^(-1/4); query, key and embedding as they were.
    ratio = {name: p for name, p in plain.named_parameters()}
    for name in ("attention.value", "attention.output", "mlp.gate", "mlp.up", "mlp.down"):
        ours, theirs = model.get_parameter(f"layers.1.{name}.weight"), ratio[f"layers.1.{name}.weight"]
        torch.testing.assert_close(ours, theirs * (8 * 3) ** -0.25, rtol=1e-6, atol=0)
    assert torch.equal(model.get_parameter("layers.1.attention.query.weight"), ratio["layers.1.attention.query.weight"])
    perturb(model)
    h = model.embedding(tokens_BT)
    context = make_context(tokens_BT, None, model.config, torch.float64)
    for site, sublayer in enumerate(model.sublayers()):
        x = (2 * 3) ** 0.25 * h + sublayer(h, context)
        h = x / torch.sqrt((x * x).mean(-1, keepdim=True) + model.config.norm_eps) * model.residual.norms[site].weight
    torch.testing.assert_close(model(tokens_BT), h)


def test_realformer_adds_up_scores(build: Build, perturb: Perturb, tokens_BT: Tensor) -> None:
    plain, model = perturb(build(Baseline(), num_layers=1)), perturb(build(RealFormer(norm="pre"), num_layers=1))
    torch.testing.assert_close(model(tokens_BT), plain(tokens_BT))  # nothing to add in the first layer
    attention = model.layers[0].attention
    context = make_context(tokens_BT, None, model.config, torch.float64)
    h = torch.randn(2, 9, 24, dtype=torch.float64)
    _, first = attention(h, context, None)
    _, second = attention(h, context, first)
    torch.testing.assert_close(second, 2 * first)
    sharp, _ = attention(h, context, first)
    alone, _ = attention(h, context, None)
    assert not torch.allclose(sharp, alone)


def test_delta_in_blocks_reads_changes_of_the_stream_or_the_released_recursion(build: Build, perturb: Perturb) -> None:
    embedding = torch.randn(1, 2, 24, dtype=torch.float64)
    outs = [torch.randn(1, 2, 24, dtype=torch.float64) for _ in range(4)]
    kinds: list[tuple[Any, Tensor]] = [("change", outs[2] + outs[3]), ("recursive", embedding + outs[2] + outs[3])]
    for kind, second in kinds:
        model = perturb(build(Delta(block_sublayers=2, block_delta=kind)))
        state = model.residual.start(embedding, None)
        for site, out in enumerate(outs):
            state.read(site)
            state.write(site, out)
        torch.testing.assert_close(state.sources[1], outs[0] + outs[1])
        torch.testing.assert_close(state.sources[2], second)
        assert state.partial_BTD is None
