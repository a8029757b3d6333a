"""Hyper-connections by kernels against the models' plain PyTorch in float64: reads and every gradient."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from scaling.config.model import ModelConfig
from scaling.config.residual import HyperConnections, Mhc, ResidualConfig
from scaling.errors import KernelError
from scaling.kernels import dispatch, reference
from scaling.kernels.hyper import Rule
from scaling.kernels.hyper_streams import HyperStreams
from scaling.kernels.hyper_tokens import write
from scaling.models.registry import make_residual
from scaling.models.residual.hc import FusedHyperState
from scaling.models.residual.mhc import FusedMhcState
from scaling.models.residual.mhc import Mhc as Mixed

TOLERANCE = 3e-6  # float32, maximal error relative to the largest value


def run(method: Any, embedding: Tensor, outputs: list[Tensor], gradients: list[Tensor], mode: str) -> dict[str, Tensor]:
    """Reads of all sites of one layer whose sublayers answer ``outputs``, and every gradient."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(dispatch.VARIABLE, mode)
        leaves = [value.detach().clone().requires_grad_() for value in (embedding, *outputs)]
        state = method.start(leaves[0], None)
    assert isinstance(state, FusedHyperState | FusedMhcState) == (mode == "triton")
    reads = []
    for site in range(len(outputs) + 1):
        reads.append(state.read(site))
        if site < len(outputs):
            state.write(site, leaves[site + 1])
    torch.autograd.backward(reads, [g.to(r.dtype) for r, g in zip(reads, gradients, strict=True)])
    found = {"read": torch.stack(reads).detach()}
    found |= {f"value {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
    found |= {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    return {name: value.double() for name, value in found.items()}


def run_narrow(method: Any, embedding: Tensor, outputs: list[Tensor], gradients: list[Tensor]) -> dict[str, Tensor]:
    """The same with everything in 16 bits, coefficients too, which the models' code keeps in float32."""
    leaves = [value.detach().clone().requires_grad_() for value in (embedding, *outputs)]
    stream_TMD = leaves[0].flatten(0, 1).unsqueeze(1).expand(-1, method.streams, -1)
    reads, mixing, write = [], None, None
    for site in range(len(outputs) + 1):
        if mixing is not None and write is not None:
            stream_TMD = reference.hyper_write(stream_TMD, mixing, write, leaves[site].flatten(0, 1))
        if site == len(outputs):
            reads.append(stream_TMD.sum(1))
            continue
        if isinstance(method, Mixed):
            read, write, mixing = reference.hyper_weights(
                stream_TMD, method.project_SVK[site], method.gate_S3[site], method.bias_SK[site], method.eps,
                method.choice.sinkhorn_iterations,
            )  # fmt: skip
        else:
            width = stream_TMD.shape[-1:]
            normed = F.layer_norm(stream_TMD, width, method.norm_gain_SD[site], method.norm_bias_SD[site], method.eps)
            moved = torch.tanh(normed @ method.project_SDM[site])
            gates = method.gate_S2[site]
            read = method.read_SN[site] + gates[0] * moved[..., 0]
            mixing = (method.mixing_SNN[site] + gates[0] * moved[..., 1:-1]).transpose(-1, -2)
            write = method.write_SN[site] + gates[1] * moved[..., -1]
        reads.append(reference.hyper_read(stream_TMD, read))
    torch.autograd.backward(reads, [g.flatten(0, 1) for g in gradients])
    found = {"read": torch.stack(reads).detach().view(len(reads), *embedding.shape)}
    found |= {f"value {i}": leaf.grad for i, leaf in enumerate(leaves) if leaf.grad is not None}
    found |= {name: p.grad for name, p in method.named_parameters() if p.grad is not None}
    return {name: value.double() for name, value in found.items()}


def compare(
    choice: ResidualConfig, device: torch.device, *, tokens: int, width: int = 16, dtype: torch.dtype = torch.float32
) -> None:
    """Hold the kernels to the float32 tolerance, or in 16 bits to the error of PyTorch in the same dtype."""
    config = ModelConfig(
        residual=choice, num_layers=1, d_model=width, num_heads=2, num_kv_heads=1, d_ffn=16, vocab_size=7
    )
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    method = make_residual(config)
    with torch.no_grad():
        for parameter in method.parameters():
            parameter.copy_(draw(*parameter.shape) * (0.3 if parameter.dim() > 2 else 1.0))
    embedding, *outputs = (draw(1, tokens, width).to(device, dtype) for _ in range(3))
    gradients = [draw(1, tokens, width).to(device, dtype) for _ in range(3)]
    method = method.to(device)
    found = run(method, embedding, outputs, gradients, "triton")
    wide = [value.double() for value in (embedding, *outputs)]
    truth = run(copy.deepcopy(method).double(), wide[0], wide[1:], gradients, "reference")
    assert set(found) == set(truth)
    plain = {}
    if dtype != torch.float32:
        plain = run_narrow(copy.deepcopy(method).to(dtype), embedding, outputs, gradients)
    for name, expected in truth.items():
        if dtype == torch.float32:
            error = float((found[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
            assert error <= TOLERANCE, f"{name}: {error:.2e}"
        else:
            error, allowed = float((found[name] - expected).norm()), float((plain[name] - expected).norm())
            assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e} of PyTorch in {dtype}"


CASES: dict[str, ResidualConfig] = {
    "dynamic": HyperConnections(streams=4),
    "rms": HyperConnections(streams=3, norm="rms", tanh=False),
    "static": HyperConnections(streams=2, variant="static"),
    "comparison": HyperConnections(streams=2, variant="mhar_comparison"),
    "mhc": Mhc(streams=4, sinkhorn_iterations=8),
    "switched": Mhc(
        streams=3, sinkhorn_iterations=4, order="row_column", sinkhorn_start="softmax", transpose=True,
        read_out="learned", post_scale=1.0,
    ),
    "one": Mhc(streams=1, sinkhorn_iterations=2),
    "eight": Mhc(streams=8, sinkhorn_iterations=2),
}  # fmt: skip


TOKENS = {"switched": 35, "rms": 23}  # more than a program's 32 tokens, or 64 pairs of token and stream


@pytest.mark.parametrize("name", CASES)
def test_float32(name: str, device: torch.device) -> None:
    """Reads and every gradient are within 3e-6 of float64; an odd number of tokens, tiles that are not full."""
    compare(CASES[name], device, tokens=TOKENS.get(name, 3), width=48 if name == "dynamic" else 32)


def test_variance_about_a_large_mean(device: torch.device) -> None:
    """With a mean of 4,096 deviations the deviation is as exact as the mean; sums of squares would lose all of it."""
    torch.manual_seed(0)
    rule = Rule(kind="hc", tanh=True, centred=True)
    stream_TMD = 4096 + torch.randn(3, 2, 80, device=device)
    factor = torch.empty(2, 3, 2, device=device)
    none = torch.empty(0, device=device)
    write(rule, stream_TMD=stream_TMD, update_TD=None, post_TM=none, mix_TMM=none, out_TMD=stream_TMD, factor=factor)
    exact = stream_TMD.double()
    expected = (exact.var(-1, correction=0) + rule.eps).rsqrt()
    eps = torch.finfo(torch.float32).eps
    torch.testing.assert_close(factor[0].double(), expected, rtol=4096 * eps, atol=0)
    torch.testing.assert_close(factor[1].double(), exact.mean(-1), rtol=2 * eps, atol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", ["dynamic", "mhc"])
def test_sixteen_bits(name: str, dtype: torch.dtype, device: torch.device) -> None:
    """In 16 bits no result is farther from float64 than PyTorch's."""
    choice = HyperConnections(streams=2) if name == "dynamic" else Mhc(streams=2, sinkhorn_iterations=3)
    compare(choice, device, tokens=7, width=32, dtype=dtype)


@pytest.mark.slow
@settings(max_examples=2)
@given(
    tokens=st.integers(1, 20),
    units=st.integers(1, 4),
    streams=st.integers(1, 5),
    iterations=st.integers(1, 4),
    order=st.sampled_from(["column_row", "row_column"]),
    start=st.sampled_from(["exp", "softmax"]),
)
def test_any_shape(tokens: int, units: int, streams: int, iterations: int, order: Any, start: Any) -> None:
    """Any shape and rule."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choice = Mhc(streams=streams, sinkhorn_iterations=iterations, order=order, sinkhorn_start=start)
    compare(choice, device, tokens=tokens, width=16 * units)


def _step(streams: HyperStreams, update: Tensor | None, weights: dict[str, Tensor]) -> Tensor:
    return streams.step(Rule(kind="mhc", iterations=2), update, **weights)


def test_compiles_repeats_and_runs_backward_twice(device: torch.device) -> None:
    """No graph break; the same bits from run to run; no state that a second backward pass could find used up."""
    torch.manual_seed(0)
    weights = {
        "phi": torch.randn(32, 8, device=device),
        "scale_K": torch.ones(8, device=device),
        "bias_K": torch.zeros(8, device=device),
    }
    leaf = torch.randn(1, 3, 16, device=device).requires_grad_()

    def forward(x: Tensor) -> Tensor:
        streams = HyperStreams(x, 2)
        first = torch.tanh(_step(streams, None, weights))
        return _step(streams, first, weights).square().sum()

    loss = forward(leaf)
    (once,) = torch.autograd.grad(loss, leaf, retain_graph=True)
    (twice,) = torch.autograd.grad(loss, leaf)
    assert torch.equal(once, twice)
    (compiled,) = torch.autograd.grad(torch.compile(forward, fullgraph=True, backend="aot_eager")(leaf), leaf)
    torch.testing.assert_close(compiled, once, rtol=1e-5, atol=1e-6)


def test_sizes_out_of_range_are_refused() -> None:
    """Widths, numbers of streams and dtypes are named."""
    with pytest.raises(KernelError, match="9 streams of width 24 in torch.float64; allowed are 1 to 8 streams"):
        HyperStreams(torch.zeros(1, 2, 24, dtype=torch.float64), 9)
