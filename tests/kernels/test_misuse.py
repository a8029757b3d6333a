"""What banks refuse, of single streams and of several: another pass or model, sizes that do not fit; what stays behind.

Kernels read memory by the sizes they are told, so that every size is checked before one runs.
"""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor

from scaling.errors import KernelError
from scaling.kernels import operators, stream_operators
from scaling.kernels.bank import SourceBank
from scaling.kernels.hyper import Rule
from scaling.kernels.hyper_streams import HyperStreams
from scaling.kernels.stream_bank import StreamBank

EPS = 1e-6
Bank = SourceBank | StreamBank


def open_bank(kind: str, source_BTD: Tensor, block: int = 1) -> Bank:
    """A bank of three sites for sources like this one."""
    key = torch.randn(3, 16, device=source_BTD.device, requires_grad=True)
    if kind == "source":
        return SourceBank(key, source_BTD, heads=2, eps=EPS, block=block)
    return StreamBank(key.unsqueeze(1), [], None, source_BTD, None, block=block, scope="source", eps=EPS)


def pass_through(bank: Bank, source_BTD: Tensor) -> Tensor:
    """A forward pass of three sites."""
    for site in range(3):
        source_BTD = bank.site(site, source_BTD)
    return source_BTD


@pytest.mark.parametrize("block", [1, 2])
@pytest.mark.parametrize("kind", ["source", "streams"])
def test_two_models_cannot_share_a_bank(kind: str, block: int, device: torch.device) -> None:
    """A second forward pass is refused, so that the gradients of the first cannot be wrong; they still come."""
    x = torch.randn(1, 2, 16, device=device, requires_grad=True)
    bank = open_bank(kind, x, block)
    output = pass_through(bank, x)
    for site in range(3):
        with pytest.raises(
            KernelError, match=f"site {site} ran again after all 3 sites, outside of backward; .* a new"
        ):
            bank.site(site, torch.randn_like(x))
    output.sum().backward()
    assert x.grad is not None and bool(x.grad.isfinite().all())


@pytest.mark.parametrize("kind", ["source", "streams"])
def test_a_site_beyond_the_last(kind: str, device: torch.device) -> None:
    """A bank has as many sites as queries."""
    x = torch.randn(1, 2, 16, device=device)
    bank = open_bank(kind, x)
    pass_through(bank, x)
    for site in (3, -1):
        with pytest.raises(KernelError, match=f"site {site} of 3; allowed are 0 to 2"):
            bank.site(site, x)


@pytest.mark.parametrize("kind", ["source", "streams"])
def test_other_sources_than_the_bank_was_opened_for(kind: str, device: torch.device) -> None:
    """Another number of tokens, another width, or 64 bits; the bank is as it was."""
    x = torch.randn(1, 2, 16, device=device)
    bank = open_bank(kind, x)
    for shape in ((1, 3, 16), (1, 1, 16), (1, 2, 32), (1, 1, 32)):
        with pytest.raises(KernelError, match="the bank was opened for 2 tokens of width 16"):
            bank.site(0, torch.zeros(shape, device=device))
    for number in (torch.float64, torch.int32):
        with pytest.raises(KernelError, match=rf"in {number}; the bank was opened for"):
            bank.site(0, x.to(number))
    with pytest.raises(KernelError, match=r"a source of shape \(32,\) in"):
        bank.site(0, x.flatten())
    pass_through(bank, x)


def test_an_update_of_another_shape(device: torch.device) -> None:
    """As many numbers are not enough; the bank is as it was."""
    x = torch.randn(1, 2, 16, device=device)
    bank = StreamBank(torch.randn(3, 1, 16, device=device), [], None, x, None, block=2, scope="source", eps=EPS)
    bank.site(0, x)
    with pytest.raises(KernelError, match=r"a sum of shape \(1, 2, 16\) and an update of \(2, 1, 16\)"):
        bank.add_site(1, x, x.view(2, 1, 16))
    bank.add_site(1, x, x)


@pytest.mark.parametrize("kind", ["source", "streams"])
def test_saved_tensors_that_are_copied(kind: str, device: torch.device) -> None:
    """A copy of a bank is no bank: offloading hooks are named as a cause, nothing is computed from the copy."""
    x = torch.randn(1, 2, 16, device=device, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(torch.clone, lambda tensor: tensor):
        output = pass_through(open_bank(kind, x), x)
    with pytest.raises(KernelError, match=r"unknown bank; .* hooks that copy saved tensors \(offloading\)"):
        output.sum().backward()


def test_a_gain_of_another_width(device: torch.device) -> None:
    """The norm's gain is as wide as the sources."""
    x = torch.randn(1, 2, 16, device=device)
    bank = SourceBank(torch.randn(3, 16, device=device), x, heads=2, eps=EPS)
    with pytest.raises(KernelError, match=r"a gain of shape \(8,\); needed is \(16,\)"):
        bank.normed_site(0, x, torch.ones(8, device=device), EPS)


@pytest.mark.parametrize("layout", ["column", "expanded"])
def test_a_gain_that_is_not_in_one_piece(device: torch.device, layout: str) -> None:
    """It is read as it is, and its gradient comes back in its shape."""
    whole = torch.rand(16, 3, device=device)
    gain = (whole[:, 1] if layout == "column" else whole[:1, 1].expand(16)).requires_grad_()
    x = torch.randn(1, 2, 16, device=device)
    results = []
    for given in (gain, gain.detach().clone(memory_format=torch.contiguous_format).requires_grad_()):
        bank = SourceBank(torch.ones(1, 16, device=device), x, heads=2, eps=EPS)
        normed = bank.normed_site(0, x, given, EPS)
        results.append((normed, *torch.autograd.grad(normed.square().sum(), given)))
    for found, expected in zip(*results, strict=True):
        assert torch.equal(found, expected)


def test_norms_and_scores_of_several_readers(device: torch.device) -> None:
    """A site with several mixes has no norm and no log-sum-exp of its own."""
    x = torch.randn(1, 2, 16, device=device)
    bank = SourceBank(torch.ones(4, 16, device=device), x, heads=2, eps=EPS, readers=2)
    with pytest.raises(KernelError, match="normed_site of 2 readers; allowed is one"):
        bank.normed_site(0, x, torch.ones(16, device=device), EPS)
    with pytest.raises(KernelError, match="site_with_lse of 2 readers; allowed is one"):
        bank.site_with_lse(0, x)
    assert bank.site(0, x).shape == (2, 1, 2, 16)


@pytest.mark.parametrize(
    ("queries", "source", "options", "message"),
    [
        ((3, 16), (1, 0, 16), {}, r"sources of shape \(1, 0, 16\); .* one token at least"),
        ((3, 16), (1, 2, 16), dict(heads=0), "0 heads; the width must be"),
        ((3, 16), (1, 2, 16), dict(readers=2), "3 queries of 2 readers .* as many queries for every site"),
        ((3, 16), (1, 2, 16), dict(readers=0), "3 queries of 0 readers"),
        ((0, 16), (1, 2, 16), {}, "bank with 0 sites"),
        ((3, 16), (1, 2, 32), {}, "width 32 with queries of 16"),
        ((16,), (1, 2, 16), {}, r"queries of shape \(16,\), .* allowed are queries \(sites, width\)"),
        ((3, 16), (16,), {}, r"sources of \(16,\)"),
        ((3, 16), (1, 2, 16), dict(eps=-1.0), "epsilon -1.0; .* from 0"),
    ],
    ids=str,
)
def test_a_source_bank_of_impossible_sizes(
    queries: tuple[int, ...], source: tuple[int, ...], options: dict[str, Any], message: str
) -> None:
    """One line each."""
    with pytest.raises(KernelError, match=message):
        SourceBank(torch.zeros(queries), torch.zeros(source), **{"heads": 2, "eps": EPS, **options})


def test_hyper_connections_of_no_stream() -> None:
    """At least one."""
    with pytest.raises(KernelError, match="0 streams of width 16 .* allowed are 1 to"):
        HyperStreams(torch.zeros(1, 2, 16), 0)


HYPER = {"phi": (32, 8), "scale_K": (8,), "bias_K": (8,), "update": (1, 3, 16)}


@pytest.mark.parametrize(
    ("rule", "change", "message"),
    [
        (dict(kind="mhc"), dict(phi=(16, 8)), r"phi of shape \(16, 8\) for 2 streams of width 16, .* \(32, 8\)"),
        (dict(kind="mhc"), dict(phi=(32, 5)), r"phi of shape \(32, 5\)"),
        (dict(kind="mhc"), dict(phi=None), r"phi of shape none .* needed is \(32, 8\); hand in weights of one model"),
        (dict(kind="mhc"), dict(scale_K=(1,)), r"scale of shape \(1,\) .* needed is \(8,\)"),
        (dict(kind="mhc"), dict(bias_K=(1,)), r"bias of shape \(1,\)"),
        (dict(kind="read"), {}, r"phi of shape \(32, 8\) .* kind 'read'; needed is \(32, 2\)"),
        (dict(kind="hc"), {}, r"phi of shape \(32, 8\) .* needed is \(16, 4\)"),
        (dict(kind="hc", centred=True), dict(phi=(16, 4)), r"shift of shape none .* needed is \(4,\)"),
        (dict(kind="hc", projects=False), dict(phi=None, scale_K=None, bias_K=None), "bias of shape none"),
        (dict(kind="hcc"), {}, "kind 'hcc'; did you mean 'hc'"),
        (dict(kind="mhc"), dict(update=(1, 1, 16)), r"an update of shape \(1, 1, 16\); .* opened for \(1, 3, 16\)"),
        (dict(kind="mhc"), dict(update=(2, 3, 16)), r"an update of shape \(2, 3, 16\)"),
        (dict(kind="mhc"), dict(update=(1, 3, 32)), r"an update of shape \(1, 3, 32\)"),
    ],
    ids=str,
)
def test_hyper_connections_of_other_sizes(
    device: torch.device, rule: dict[str, Any], change: dict[str, Any], message: str
) -> None:
    """Weights of another model, outputs for other tokens, before a kernel reads them; the streams are as they were."""
    sizes: dict[str, tuple[int, ...] | None] = {**HYPER, **change}
    tensors = {name: None if size is None else torch.ones(size, device=device) for name, size in sizes.items()}
    update = tensors.pop("update")
    streams = HyperStreams(torch.ones(1, 3, 16, device=device), 2)
    with pytest.raises(KernelError, match=message):
        streams.step(Rule(**rule), update, **tensors)
    assert torch.equal(streams.step(Rule(kind="sum"), None), torch.full((1, 3, 16), 2.0, device=device))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(key=(3, 2, 32)), r"sources of shape \(2, 4, 16\) with keys \(3, 2, 32\); needed is \(2, 4, 32\)"),
        (dict(source=(2, 4, 32)), r"sources of shape \(2, 4, 32\) with keys \(3, 2, 16\)"),
        (dict(kernel=(2, 3, 16)), r"kernels of 3 owners of shape \(2, 3, 16\) .* needed is \(3, 3, 16\)"),
        (dict(kernel=(3, 3, 32)), r"kernels of 3 owners of shape \(3, 3, 32\)"),
        (dict(projection=(3, 16, 2)), r"projections of shape \(3, 16, 2\) .* needed is \(3, 32, 2\)"),
        (dict(scale=(1,)), r"scales of shape \(1,\)"),
        (dict(bias=(3, 1)), r"biases of shape \(3, 1\)"),
        (dict(document=(1, 4)), r"documents of shape \(1, 4\) .* needed is \(2, 4\)"),
        (dict(source=(2, 0, 16)), r"a source of shape \(2, 0, 16\); needed is \(batch, time, 16\), none of them 0"),
        (dict(source=(8, 16)), r"a source of shape \(8, 16\); needed is \(batch, time, 16\)"),
        (dict(key=(0, 2, 16)), "0 sites in blocks of 1"),
        (dict(key=(3, 1, 16)), "1 kernels of scope 'source' for 1 streams; .* fewer kernels than streams"),
        (dict(block=0), "3 sites in blocks of 0"),
        (dict(scope="all"), "scope 'all' .* scopes source, global, site"),
    ],
    ids=str,
)
def test_stream_weights_that_do_not_fit(change: dict[str, Any], message: str) -> None:
    """Nothing is read beyond a tensor, whatever it was that did not fit."""
    sizes: dict[str, Any] = dict(
        key=(3, 2, 16), source=(2, 4, 16), kernel=(3, 3, 16), projection=(3, 32, 2), scale=(3,), bias=(3, 2),
        document=(2, 4), block=1, scope="source",
    )  # fmt: skip
    sizes.update(change)
    tensors = {name: torch.zeros(size) for name, size in sizes.items() if isinstance(size, tuple)}
    mixer = (tensors["projection"], tensors["scale"], tensors["bias"])
    with pytest.raises(KernelError, match=message):
        StreamBank(
            tensors["key"], [tensors["kernel"]], mixer, tensors["source"], tensors["document"], block=sizes["block"],
            scope=sizes["scope"], eps=EPS,
        )  # fmt: skip


@pytest.mark.parametrize("kind", ["source", "streams"])
def test_nothing_is_left_of_a_pass_that_was_given_up(kind: str, device: torch.device) -> None:
    """Ledgers, with all their buffers, go with the last tensor of the bank, after an error too."""
    ledgers = operators._LEDGERS if kind == "source" else stream_operators._LEDGERS
    gc.collect()
    before = len(ledgers)
    x = torch.randn(1, 2, 16, device=device, requires_grad=True)
    bank = open_bank(kind, x)
    bank.site(0, x)
    assert len(ledgers) == before + 1
    del bank
    loss = pass_through(open_bank(kind, x), x).sum()
    loss.backward(retain_graph=True)
    with pytest.raises(KernelError, match="already done"):
        loss.backward()
    del loss
    gc.collect()
    assert len(ledgers) == before
