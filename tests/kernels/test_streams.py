"""Multi-stream routing against float64: outputs and every gradient, shapes, scopes, documents, misuse.

The truth is written out below with the model's convolution; memory is poisoned with NaN (conftest).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scaling.errors import KernelError
from scaling.kernels import stream_expand, stream_fold, stream_ledger, stream_mix, stream_turn
from scaling.kernels.reference import rms_factor
from scaling.kernels.stream_bank import StreamBank
from scaling.kernels.stream_gather import gather
from scaling.kernels.stream_ledger import Scope
from scaling.kernels.streams import Phase
from scaling.models.residual.convolution import causal_convolution

EPS = 1e-6
TOLERANCE = 3e-6  # float32, maximal error relative to the largest value

Mixer = tuple[Tensor, Tensor, Tensor] | None


def route(
    key_SMD: Tensor, kernels: list[Tensor], mixer: Mixer, sources: list[Tensor], document: Tensor | None,
    *, block: int, scope: Scope,
) -> list[Tensor]:  # fmt: skip
    """Every site's output by the definition, in the dtype given."""
    outputs: list[Tensor] = []
    finished: list[Tensor] = []
    streams = key_SMD.shape[1]
    for site, source in enumerate(sources):
        seen = [*finished, source]
        if site % block == 0:
            finished.append(source)
        mixed = []
        for j in range(streams):
            index = j - (streams - len(kernels))
            expanded = []
            for i, value in enumerate(seen):
                owner = {"source": i, "global": 0, "site": site}[scope]
                kernel = None if index < 0 else kernels[index][owner]
                expanded.append(value if kernel is None else causal_convolution(value, kernel, document))
            x = torch.stack(expanded)
            weights = (x * rms_factor(x, EPS) * key_SMD[site, j]).sum(-1, keepdim=True).softmax(0)
            mixed.append((weights * x).sum(0))
        if mixer is None:
            outputs.append(torch.stack(mixed).mean(0))
            continue
        phi_SVM, scale_S, bias_SM = mixer
        flat = torch.cat(mixed, -1)
        gates = torch.sigmoid(scale_S[site] * ((flat * rms_factor(flat, EPS)) @ phi_SVM[site]) + bias_SM[site])
        outputs.append((gates.unsqueeze(-2) * torch.stack(mixed, -1)).sum(-1))
    return outputs


def draw(
    *, tokens: int, batch: int, width: int, sites: int, streams: int, kernels: tuple[int, ...], block: int,
    scope: Scope, gated: bool, device: torch.device,
) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:  # fmt: skip
    """Sources, weights (keys, kernels, mixer) and output gradients."""
    generator = torch.Generator().manual_seed(sites)

    def normal(*shape: int, std: float = 1.0) -> Tensor:
        return (torch.randn(*shape, generator=generator) * std).to(device)

    owners = {"source": -(-sites // block) + 1, "global": 1, "site": sites}[scope]
    weights = [normal(sites, streams, width, std=width**-0.5)]
    weights += [normal(owners, taps, width, std=taps**-0.5) for taps in kernels]
    if gated:
        mixer = normal(sites, streams * width, streams, std=(streams * width) ** -0.5)
        weights += [mixer, normal(sites) + 1, normal(sites, streams)]
    sources, gradients = ([normal(batch, tokens, width) for _ in range(sites)] for _ in range(2))
    return sources, weights, gradients


def run(
    sources: list[Tensor], weights: list[Tensor], gradients: list[Tensor], document: Tensor | None,
    *, fused: bool, kernels: int, block: int, scope: Scope,
) -> list[Tensor]:  # fmt: skip
    """Outputs and gradients of sources and weights, in the dtypes given."""
    sources = [value.detach().clone().requires_grad_() for value in sources]
    weights = [value.detach().clone().requires_grad_() for value in weights]
    key, convolutions, rest = weights[0], weights[1 : 1 + kernels], weights[1 + kernels :]
    mixer = (rest[0], rest[1], rest[2]) if rest else None
    if fused:
        bank = StreamBank(key, convolutions, mixer, sources[0], document, block=block, scope=scope, eps=EPS)
        outputs = [bank.site(site, value) for site, value in enumerate(sources)]
    else:
        outputs = route(key, convolutions, mixer, sources, document, block=block, scope=scope)
    torch.autograd.backward(outputs, [g.to(o.dtype) for o, g in zip(outputs, gradients, strict=True)])
    found = [torch.stack(outputs).detach()]
    for value in [*sources, *weights]:
        assert value.grad is not None
        found.append(value.grad)
    return [value.double() for value in found]


def compare(
    device: torch.device,
    *,
    tokens: int,
    streams: int = 2,
    kernels: tuple[int, ...] = (3,),
    batch: int = 1,
    width: int = 16,
    sites: int = 3,
    block: int = 2,
    scope: Scope = "source",
    gated: bool = True,
    dtype: torch.dtype = torch.float32,
    document: list[list[int]] | None = None,
) -> None:
    """Hold the kernels to the float32 tolerance, or in 16 bits to the error of PyTorch in the same dtype."""
    sources, weights, gradients = draw(
        tokens=tokens, batch=batch, width=width, sites=sites, streams=streams, kernels=kernels, block=block,
        scope=scope, gated=gated, device=device,
    )  # fmt: skip
    documents = None if document is None else torch.tensor(document, device=device)
    sources, gradients = [v.to(dtype) for v in sources], [g.to(dtype) for g in gradients]
    options: dict[str, Any] = {"kernels": len(kernels), "block": block, "scope": scope}
    found = run(sources, weights, gradients, documents, fused=True, **options)
    a, b, c = ([v.double() for v in values] for values in (sources, weights, gradients))
    truth = run(a, b, c, documents, fused=False, **options)
    if dtype == torch.float32:
        for index, (ours, exact) in enumerate(zip(found, truth, strict=True)):
            error = float((ours - exact).abs().max() / exact.abs().max().clamp_min(1e-30))
            assert error <= TOLERANCE, f"result {index}: {error:.2e}"
        return
    narrow = [value.to(dtype) for value in weights]
    plain = run(sources, narrow, gradients, documents, fused=False, **options)
    for index, (ours, exact, theirs) in enumerate(zip(found, truth, plain, strict=True)):
        error, allowed = float((ours - exact).norm()), float((theirs - exact).norm())
        assert error <= allowed, f"result {index}: {error:.3e} > {allowed:.3e} of PyTorch in {dtype}"


@pytest.mark.parametrize(
    "case",
    [
        dict(tokens=5, streams=4, kernels=(2, 1, 3), width=32),
        dict(tokens=3, streams=1, kernels=(), gated=False),
        dict(tokens=3, streams=2, kernels=(), width=48, sites=2),
        dict(tokens=7, kernels=(4,), block=1, scope="global", document=[[0, 0, 0, 1, 1, 2, 2]]),
        dict(tokens=2, batch=2, kernels=(5,), scope="site", gated=False, block=3),
        dict(tokens=2, kernels=(2,), sites=11, block=1),  # more finished sources than are gathered together
        dict(tokens=2, kernels=(2,), sites=11, block=10),  # a block of two phases
    ],
    ids=lambda case: "-".join(f"{key}{value}" for key, value in case.items()),
)
def test_float32(device: torch.device, case: dict[str, Any]) -> None:
    """Output and every gradient are within 3e-6 of float64."""
    compare(device, **case)


@pytest.mark.parametrize(
    ("sites", "block", "tokens", "width", "dtype"),
    [
        (6, 3, 5, 16, torch.float32),
        (5, 4, 3, 48, torch.float32),
        pytest.param(5, 4, 33, 32, torch.bfloat16, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_running_sums(
    sites: int, block: int, tokens: int, width: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A site that adds to its running sum first gives, and gets, what an addition before it does; so do its readers."""
    updates, weights, gradients = draw(
        tokens=tokens, batch=1, width=width, sites=sites, streams=2, kernels=(3,), block=block, scope="source",
        gated=True, device=device,
    )  # fmt: skip
    updates, gradients = [v.to(dtype) for v in updates], [g.to(dtype) for g in gradients]

    def sums(kind: torch.dtype, *, fused: bool) -> list[Tensor]:
        leaves = [v.detach().to(kind).requires_grad_() for v in updates]
        parts = [w.detach().to(torch.float32 if fused else kind) for w in weights]
        key, convolution, *mixer = (w.requires_grad_() for w in parts)
        last = [g.to(kind) for g in gradients]
        gates = (mixer[0], mixer[1], mixer[2])
        if fused:
            bank = StreamBank(key, [convolution], gates, leaves[0], None, block=block, scope="source", eps=EPS)
            outputs, source = [], leaves[0]
            for site, update in enumerate(leaves):
                if site == 0 or site % block == 1:
                    source = update
                    outputs.append(bank.site(site, source))
                else:
                    source, output = bank.add_site(site, source, update)
                    outputs.append(output)
        else:
            sources = [leaves[0]]
            for site in range(1, sites):
                sources.append(leaves[site] if site % block == 1 else sources[-1] + leaves[site])
            outputs = route(key, [convolution], gates, sources, None, block=block, scope="source")
            source = sources[-1]
        torch.autograd.backward([*outputs, source], [*last, last[0]])
        found = [torch.stack(outputs).detach(), source.detach()]
        for value in [*leaves, *parts]:
            assert value.grad is not None
            found.append(value.grad)
        return [value.double() for value in found]

    found, truth = sums(dtype, fused=True), sums(torch.float64, fused=False)
    plain = sums(dtype, fused=False) if dtype != torch.float32 else truth
    for index, (ours, exact, theirs) in enumerate(zip(found, truth, plain, strict=True)):
        error = float((ours - exact).norm())
        allowed = TOLERANCE * float(exact.norm()) if dtype == torch.float32 else float((theirs - exact).norm())
        assert error <= allowed, f"result {index}: {error:.2e} > {allowed:.2e}"


@pytest.mark.slow
def test_eight_streams(device: torch.device) -> None:
    """m = 8."""
    compare(device, tokens=2, streams=8, kernels=(2,) * 7, sites=2, block=1)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(device: torch.device, dtype: torch.dtype) -> None:
    """In 16 bits no result is farther from float64 than PyTorch's."""
    compare(device, tokens=5, width=32, sites=2, dtype=dtype)


@pytest.mark.parametrize(
    ("dtype", "width", "rows"), [(torch.float32, 80, range(1, 4)), (torch.bfloat16, 528, range(3))]
)
def test_gather_over_chunks(dtype: torch.dtype, width: int, rows: range, device: torch.device) -> None:
    """Gradients of finished sources' streams, where the last columns of the width and the last tokens are padding."""
    F, L, T = 4, 3, 5
    generator = torch.Generator().manual_seed(width)
    x, g, k = (torch.randn(n, 1, T, width, generator=generator).to(dtype) for n in (F, L, L))
    k = k[:, :, 0] * width**-0.5
    streams_FTD = x[:, 0].double().requires_grad_()
    factor_FT = rms_factor(streams_FTD, EPS).squeeze(-1)
    score_LTF = torch.einsum("ftd,ld,ft->ltf", streams_FTD, k[:, 0].double(), factor_FT)
    score_LTF.retain_grad()
    mix_LTD = torch.einsum("ltf,ftd->ltd", score_LTF.softmax(-1), streams_FTD)
    mix_LTD.backward(g[:, 0].double())
    assert score_LTF.grad is not None and streams_FTD.grad is not None
    score_TPM = torch.full((T, L * (F + 1), 1), float("nan"))
    for site in range(L):  # the first site has no running sum
        first = site * (F + 1) - min(site, 1)
        score_TPM[:, first : first + F, 0] = score_LTF[site].detach().float()
    scalar_LWT = torch.full((L, 2, T), float("nan"))
    scalar_LWT[:, 1] = (g[:, 0].double() * mix_LTD.detach()).sum(-1).float()
    found, coefficient = torch.empty(len(rows), 1, T, width, dtype=dtype), torch.empty(F, 1, 2, L, T)
    tensors = [
        g,
        x,
        k,
        score_TPM,
        score_LTF.detach().logsumexp(-1).T[..., None].float(),
        scalar_LWT,
        found,
        coefficient,
    ]
    g, x, k, score_TPM, lse_TSM, scalar_LWT, found, coefficient = (value.contiguous().to(device) for value in tensors)
    phase = Phase(sites=range(L), num_rows=F, first_base=0, first_pairs=F)
    gather(
        g, x, phase, rows=rows, key_SMD=k, score_TPM=score_TPM, lse_TSM=lse_TSM, scalar_LWT=scalar_LWT,
        stream_gradient=found, coefficient_FM2LT=coefficient, eps=EPS,
    )  # fmt: skip
    chosen = slice(rows.start, rows.stop)
    truth_LTF = score_LTF.grad * factor_FT.detach().T
    pairs = [
        (coefficient.cpu()[chosen, 0, 0], truth_LTF.permute(2, 0, 1)[chosen], TOLERANCE),
        (coefficient.cpu()[chosen, 0, 1], score_LTF.detach().softmax(-1).permute(2, 0, 1)[chosen], TOLERANCE),
        (found.cpu()[:, 0], streams_FTD.grad[chosen], TOLERANCE if dtype == torch.float32 else 2.0**-7),
    ]
    for ours, exact, tolerance in pairs:
        assert float((ours.double() - exact).abs().max() / exact.abs().max()) <= tolerance


@pytest.mark.slow
@settings(max_examples=2)
@given(
    tokens=st.integers(1, 6),
    streams=st.sampled_from([1, 2, 4]),
    sites=st.integers(1, 4),
    block=st.integers(1, 3),
    scope=st.sampled_from(["source", "global", "site"]),
    gated=st.booleans(),
)
def test_any_shape(tokens: int, streams: int, sites: int, block: int, scope: Scope, gated: bool) -> None:
    """Any shape and schedule."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compare(
        device, tokens=tokens, streams=streams, kernels=(2, 3, 4)[: streams - 1], sites=sites, block=block,
        scope=scope, gated=gated,
    )  # fmt: skip


@pytest.mark.slow
def test_splits_and_determinism(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens in one split and in three, tiles with neighbours on both sides: the same; twice the same to the bit."""
    options: dict[str, Any] = {"block": 2, "scope": "source"}
    drawn = draw(tokens=21, batch=1, width=16, sites=2, streams=2, kernels=(3,), gated=False, device=device, **options)
    runs = []
    for splits in (1, 3, 3):
        monkeypatch.setattr(stream_ledger, "num_splits", lambda *_, splits=splits: splits)
        for module in (stream_expand, stream_fold):
            monkeypatch.setattr(module, "num_spans", lambda *_, splits=splits: splits)
        runs.append(run(*drawn, None, fused=True, kernels=1, **options))
    for one, three, again in zip(*runs, strict=True):
        assert float((one - three).abs().max() / one.abs().max().clamp_min(1e-30)) <= TOLERANCE
        assert torch.equal(three, again)


@pytest.mark.parametrize("width", [48, 112])
def test_tiles_of_other_sides(width: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two tokens a program of which the last is alone; a width of two parts, and one that is padded."""
    for module, name in ((stream_mix, "_BLEND"), (stream_turn, "_TURN")):
        monkeypatch.setattr(module, name, {"tokens": 2, "per_warp": 32})
    compare(device, tokens=3, width=width, sites=2, streams=3, kernels=(2, 3))


class Tiny(torch.nn.Module):
    """Three sublayers between four sites; blocks of two or three sublayers, two sublayers recomputed together."""

    def __init__(self, *, block: int = 2, scope: Scope = "source", again: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.key = torch.nn.Parameter(torch.randn(4, 2, 16) * 0.3)
        self.kernel = torch.nn.Parameter(torch.randn(4, 2, 16))
        self.maps = torch.nn.ParameterList(torch.randn(16, 16) / 4 for _ in range(3))
        self.block, self.scope, self.again = block, scope, again

    def forward(self, x_TD: Tensor) -> Tensor:
        bank = StreamBank(self.key, [self.kernel], None, x_TD, None, block=self.block, scope=self.scope, eps=EPS)

        def read(site: int, source: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor]:
            """With blocks of three, the third site adds to a running sum."""
            return (source, bank.site(site, source)) if update is None else bank.add_site(site, source, update)

        def part(first: int, last: int, source: Tensor, update: Tensor | None) -> tuple[Tensor, Tensor | None]:
            for site in range(first, last):
                source, routed = read(site, source, update)
                out = torch.tanh(routed @ self.maps[site])
                source, update = (out, None) if site % self.block == 0 else (source, out)
            return source, update

        update = None
        for first, last in ((0, 1), (1, 3)):  # the second pair of sites is of two blocks of two
            if self.again:
                x_TD, update = checkpoint(part, first, last, x_TD, update, use_reentrant=False)
            else:
                x_TD, update = part(first, last, x_TD, update)
        return read(3, x_TD, update)[1]


@pytest.mark.parametrize(("block", "scope"), [(2, "source"), (3, "source"), (2, "site")])
def test_activation_checkpointing_is_exact(block: int, scope: Scope, device: torch.device) -> None:
    """Recomputing sublayers and their sites gives the same bits, across the end of a block too."""
    runs = []
    for again in (False, True):
        model, x = Tiny(block=block, scope=scope, again=again).to(device), torch.ones(1, 2, 16).to(device)
        x = (x * torch.arange(1, 3, device=device).view(1, 2, 1)).requires_grad_()
        output = model(x)
        runs.append([output.detach(), *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])])
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("block", [2, 3])
def test_compiles_without_graph_breaks(block: int, device: torch.device) -> None:
    """One graph forward, one backward, the same values."""
    model, x = Tiny(block=block).to(device), torch.randn(1, 2, 16).to(device).requires_grad_()
    results = []
    for call in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        output = call(x)
        results.append([output.detach(), *torch.autograd.grad(output.square().sum(), [x, *model.parameters()])])
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_misuse_is_refused(device: torch.device) -> None:
    """A second backward pass, widths and numbers of sources out of range."""
    loss = Tiny().to(device)(torch.randn(1, 1, 16, device=device)).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(KernelError, match="its backward pass is already done"):
        loss.backward()
    with pytest.raises(KernelError, match="width 24 in torch.float32; allowed are multiples of 16"):
        StreamBank(torch.zeros(3, 1, 24), [], None, torch.zeros(1, 1, 24), None, block=1, scope="source", eps=EPS)
    with pytest.raises(KernelError, match="258 sources; up to 256 fit a tile; choose larger blocks"):
        StreamBank(torch.zeros(258, 1, 16), [], None, torch.zeros(1, 1, 16), None, block=1, scope="source", eps=EPS)
