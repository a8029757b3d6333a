"""The source bank's operators against float64: outputs and every gradient, shapes, dtypes, schedules, misuse.

Each source is an independent leaf and each site's output has a gradient of its own, so that an error is the kernels'
and not one that a deep network has amplified. Memory is poisoned with NaN (conftest).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from scaling.errors import KernelError
from scaling.kernels import reference, tile
from scaling.kernels.bank import SourceBank
from scaling.kernels.dispatch import ReferenceBank

EPS = 1e-6
TOLERANCE = 3e-6  # float32, maximal error relative to the largest value


def run_bank(
    source_STD: Tensor,
    query_SD: Tensor,
    gain_SD: Tensor | None,
    gradient: Tensor,
    *,
    heads: int,
    block: int,
    group: int,
    per_head: bool = False,
) -> dict[str, Tensor]:
    """Outputs and gradients of the bank."""
    sources = [v.clone().requires_grad_() for v in source_STD]
    query = query_SD.clone().requires_grad_()
    gain = None if gain_SD is None else gain_SD.clone().requires_grad_()
    bank = SourceBank(query, sources[0], heads=heads, eps=EPS, block=block, group=group, per_head=per_head)
    outputs = [bank.site(s, v) if gain is None else bank.normed_site(s, v, gain[s], EPS) for s, v in enumerate(sources)]
    return _collect(outputs, sources, query, gain, gradient)


def run_reference(
    source_STD: Tensor,
    query_SD: Tensor,
    gain_SD: Tensor | None,
    gradient: Tensor,
    *,
    heads: int,
    block: int,
    per_head: bool = False,
) -> dict[str, Tensor]:
    """Outputs and gradients of plain PyTorch, in the dtype given."""
    sources = [v.clone().requires_grad_() for v in source_STD]
    query = query_SD.to(source_STD.dtype).clone().requires_grad_()
    gain = None if gain_SD is None else gain_SD.to(source_STD.dtype).clone().requires_grad_()
    seen: list[Tensor] = []
    outputs = []
    for site, source in enumerate(sources):
        stacked = torch.stack([*seen, source])
        output, _ = reference.route_with_lse(stacked, query[site], heads, EPS, per_head=per_head)
        if site % block == 0:
            seen.append(source)
        outputs.append(output if gain is None else output * reference.rms_factor(output, EPS) * gain[site])
    return _collect(outputs, sources, query, gain, gradient)


def _collect(
    outputs: list[Tensor], sources: list[Tensor], query: Tensor, gain: Tensor | None, gradient: Tensor
) -> dict[str, Tensor]:
    torch.autograd.backward(outputs, [g.to(o.dtype) for o, g in zip(outputs, gradient, strict=True)])
    found = {"output": torch.stack(outputs).detach(), "source": torch.stack([_gradient(v) for v in sources])}
    assert query.grad is not None
    found["query"] = query.grad
    if gain is not None:
        assert gain.grad is not None
        found["gain"] = gain.grad
    return {name: value.double() for name, value in found.items()}


def _gradient(value: Tensor) -> Tensor:
    assert value.grad is not None
    return value.grad


def compare(
    device: torch.device,
    *,
    tokens: int,
    width: int,
    heads: int,
    sites: int,
    block: int = 1,
    group: int = 2,
    normed: bool = False,
    per_head: bool = False,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> None:
    """Hold the bank to the float32 tolerance, or in 16 bits to the error of PyTorch in the same dtype."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    source, gradient = draw(sites, tokens, width).to(dtype), draw(sites, tokens, width).to(dtype)
    query = (
        draw(sites, width) * (heads / width) ** 0.5
    )  # scores of order 1: no softmax so sharp that dz is all cancellation
    gain = draw(sites, width).abs() + 0.5 if normed else None
    found = run_bank(source, query, gain, gradient, heads=heads, block=block, group=group, per_head=per_head)
    truth = run_reference(source.double(), query, gain, gradient, heads=heads, block=block, per_head=per_head)
    plain = run_reference(source, query, gain, gradient, heads=heads, block=block, per_head=per_head)
    for name, expected in truth.items():
        assert found[name].shape == expected.shape, name
        if dtype == torch.float32:
            error = float((found[name] - expected).abs().max() / expected.abs().max().clamp_min(1e-30))
            assert error <= TOLERANCE, f"{name}: {error:.2e} > {TOLERANCE:.0e}"
        else:
            error, allowed = float((found[name] - expected).norm()), float((plain[name] - expected).norm())
            assert error <= allowed, f"{name}: {error:.3e} > {allowed:.3e} of PyTorch in {dtype}"


def test_kernels_run_where_they_should(device: torch.device) -> None:
    """Compiled on a GPU, interpreted elsewhere."""
    assert tile.INTERPRETED == (device.type == "cpu")


@pytest.mark.parametrize(
    "case",
    [
        dict(tokens=3, width=32, heads=2, sites=5, normed=True),
        dict(tokens=1, width=320, heads=2, sites=3),  # 160 columns a head: no power of two
        dict(tokens=2, width=160, heads=1, sites=33),  # and two pieces of sites in a group's gather
        dict(tokens=2, width=32, heads=2, sites=49),  # three
        dict(tokens=2, width=48, heads=3, sites=4, group=1),  # heads no power of two
        dict(tokens=2, width=32, heads=1, sites=5, group=3),
        dict(tokens=2, width=16, heads=1, sites=1),
        dict(tokens=2, width=16, heads=1, sites=2),
        dict(tokens=2, width=32, heads=2, sites=6, block=2, normed=True),
        dict(tokens=2, width=32, heads=2, sites=5, block=3, group=1),
        dict(tokens=2, width=96, heads=2, sites=5, per_head=True),
        dict(tokens=2, width=48, heads=3, sites=5, block=2, per_head=True, normed=True),
        dict(tokens=2, width=16, heads=2, sites=5, group=3, normed=True),  # 8 columns a head, which tensor cores pad
        dict(tokens=2, width=48, heads=4, sites=5, block=2, per_head=True),  # 12
    ],
    ids=lambda case: "-".join(f"{key}{value}" for key, value in case.items()),
)
def test_float32(device: torch.device, case: dict[str, int]) -> None:
    """Output and every gradient are within 3e-6 of float64."""
    compare(device, **case)  # type: ignore[arg-type]


@pytest.mark.parametrize("block", [1, 2])
def test_readers_silent_sites_and_log_sums(block: int, device: torch.device) -> None:
    """Two mixes a site with a site that nothing reads between them; the gradient of a log-sum-exp."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator).to(device)

    values, queries, weight, lse_weight = draw(4, 3, 32), draw(8, 32), draw(4, 2, 3, 32), draw(4, 3, 2)
    found = []
    for fused in (True, False):
        kind = torch.float32 if fused else torch.float64
        source, query = (x.to(kind, copy=True).requires_grad_() for x in (values, queries))
        sources = source.unbind()
        pair: list[SourceBank | ReferenceBank]
        if fused:
            pair = [
                SourceBank(query, sources[0], heads=1, eps=EPS, block=block, readers=2),
                SourceBank(query[:4], sources[0], heads=2, eps=EPS, block=block),
            ]
        else:
            pair = [
                ReferenceBank(query, heads=1, eps=EPS, block=block, readers=2),
                ReferenceBank(query[:4], heads=2, eps=EPS, block=block),
            ]
        loss = torch.zeros((), dtype=kind, device=device)
        for site, value in enumerate(sources):
            if site == 2:
                for bank in pair:
                    bank.silent_site(site, value)
                continue
            mixed, lse = pair[1].site_with_lse(site, value)
            loss = loss + (pair[0].site(site, value) * weight[site]).sum()
            loss = loss + (mixed * weight[site, 0]).sum() + (lse * lse_weight[site]).sum()
        loss.backward()
        found.append([loss.detach().double(), _gradient(source).double(), _gradient(query).double()])
    for a, b in zip(*found, strict=True):
        assert float((a - b).abs().max() / b.abs().max()) <= TOLERANCE


@pytest.mark.parametrize("width", [64, 16])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_sixteen_bits(device: torch.device, dtype: torch.dtype, width: int) -> None:
    """In 16 bits no result is farther from float64 than PyTorch's."""
    compare(device, tokens=3, width=width, heads=2, sites=6, normed=True, dtype=dtype)


@pytest.mark.slow
@pytest.mark.parametrize("sites", [73, 145])
def test_many_sources(device: torch.device, sites: int) -> None:
    """As many sources as 36 and 72 layers have."""
    compare(device, tokens=1, width=16, heads=1, sites=sites, group=15)


@pytest.mark.slow
@settings(max_examples=6)
@given(
    tokens=st.integers(1, 2),
    heads=st.sampled_from([1, 2, 3, 4]),
    units=st.integers(1, 5),
    sites=st.integers(1, 6),
    block=st.integers(1, 3),
    group=st.integers(1, 5),
    normed=st.booleans(),
)
def test_any_shape(tokens: int, heads: int, units: int, sites: int, block: int, group: int, normed: bool) -> None:
    """Any shape and schedule."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    compare(
        device,
        tokens=tokens,
        width=16 * units * (3 if heads == 3 else 1),  # heads of 4 columns and more
        heads=heads,
        sites=sites,
        block=block,
        group=group,
        normed=normed,
    )


@pytest.mark.slow
def test_schedule_invariance_and_determinism(device: torch.device) -> None:
    """Group sizes agree to rounding; the same run twice agrees to the bit."""
    generator = torch.Generator().manual_seed(3)
    source, query, gradient = (
        torch.randn(s, generator=generator).to(device) for s in ((7, 1, 32), (7, 32), (7, 1, 32))
    )
    runs = [run_bank(source, query, None, gradient, heads=2, block=1, group=group) for group in (1, 2, 3, 7, 3)]
    for name, expected in runs[0].items():
        for other in runs[1:]:
            assert float((other[name] - expected).abs().max() / expected.abs().max()) <= TOLERANCE, name
        assert torch.equal(runs[2][name], runs[4][name]), name


class Tiny(torch.nn.Module):
    """Three sublayers between four sites."""

    def __init__(self, width: int, *, again: bool, normed: bool) -> None:
        super().__init__()
        self.query = torch.nn.Parameter(torch.randn(4, width) * 0.5)
        self.maps = torch.nn.ParameterList(torch.randn(width, width) / width**0.5 for _ in range(3))
        self.gains = torch.nn.ParameterList(torch.rand(width) for _ in range(4 if normed else 0))
        self.again = again

    def forward(self, x_TD: Tensor) -> Tensor:
        bank = SourceBank(self.query, x_TD, heads=2, eps=EPS, group=2)

        def read(site: int, source: Tensor) -> Tensor:
            return bank.normed_site(site, source, self.gains[site], EPS) if self.gains else bank.site(site, source)

        def part(site: int, source: Tensor) -> Tensor:
            return torch.tanh(read(site, source) @ self.maps[site])

        for site in range(3):
            x_TD = checkpoint(part, site, x_TD, use_reentrant=False) if self.again else part(site, x_TD)
        return read(3, x_TD)


def _gradients(model: Callable[[Tensor], Tensor], parameters: Iterable[Tensor], x: Tensor) -> list[Tensor]:
    output = model(x)
    return [output.detach(), *torch.autograd.grad(output.square().sum(), [x, *parameters])]


def _tiny(again: bool, device: torch.device, normed: bool = False) -> tuple[Tiny, Tensor]:
    torch.manual_seed(0)
    model = Tiny(32, again=again, normed=normed).to(device)
    return model, torch.randn(2, 32).to(device).requires_grad_()


@pytest.mark.parametrize("normed", [False, True])
def test_activation_checkpointing_is_exact(device: torch.device, normed: bool) -> None:
    """Recomputing every sublayer and its site gives the same bits."""
    runs = []
    for again in (False, True):
        model, x = _tiny(again, device, normed)
        runs.append(_gradients(model, model.parameters(), x))
    expected, found = runs
    assert all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


@pytest.mark.parametrize("normed", [False, True])
def test_compiles_without_graph_breaks(device: torch.device, normed: bool) -> None:
    """One graph forward, one backward, the same bits."""
    model, x = _tiny(False, device, normed)
    expected = _gradients(model, model.parameters(), x)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    found = _gradients(compiled, model.parameters(), x)
    for a, b in zip(expected, found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("block", [1, 2])
def test_mixes_of_the_last_group_stay_in_the_bank(device: torch.device, block: int) -> None:
    """A site whose norm alone goes on keeps its mix for backward, the last ones where their gradients will be."""
    sites, width = 7, 16
    query, gain = (torch.ones(sites, width, device=device, requires_grad=True) for _ in range(2))
    sources = torch.randn(sites, 3, width, device=device).requires_grad_()
    saved: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        saved.append(tensor)
        return tensor

    bank = SourceBank(query, sources[0], heads=2, eps=EPS, group=3, block=block)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        for site in range(sites):
            bank.normed_site(site, sources[site], gain[site], EPS)
    within = {tensor.untyped_storage().data_ptr() for tensor in (sources, bank._bank)}
    apart = {t.data_ptr() for t in saved if t.shape == (3, width)} - {
        t.data_ptr() for t in saved if t.untyped_storage().data_ptr() in within
    }
    # groups of three and the first source alone make four rows beyond the sources
    assert len(apart) == (sites - 4 if block == 1 else sites)


def test_second_backward_raises(device: torch.device) -> None:
    """Rows are reused during backward, so a second one is refused, not wrong."""
    model, x = _tiny(False, device)
    loss = model(x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(KernelError, match="its backward pass is already done"):
        loss.backward()


def test_bank_refuses_what_it_cannot_route(device: torch.device) -> None:
    """Widths, heads and dtypes out of range are named."""
    x = torch.zeros(2, 24, device=device)
    with pytest.raises(KernelError, match="a multiple of 16 and of the heads"):
        SourceBank(torch.zeros(3, 24, device=device), x, heads=2, eps=EPS)
    with pytest.raises(KernelError, match="float64 with 3 sites; allowed are float32, bfloat16, float16"):
        SourceBank(torch.zeros(3, 32, device=device), torch.zeros(2, 32, device=device).double(), heads=2, eps=EPS)
