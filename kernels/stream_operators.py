"""Operators of multi-stream routing (msar), with fake kernels and autograd, over the ledgers of banks.

Between :mod:`scaling.kernels.stream_bank`, which calls them, and :mod:`scaling.kernels.stream_ledger`. A token ties the
operators of one pass together, as in :mod:`scaling.kernels.operators`; graphs see a bank as a tensor that nothing
writes. In backward, running sums get their gradient at their site and finished ones when backward leaves the block
after.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaling.kernels.ledgers import Ledgers
from scaling.kernels.schedule import in_backward
from scaling.kernels.stream_ledger import (
    Scope,
    StreamLedger,
    backward_site,
    forward_site,
    newest_row,
    numbers_on,
)
from scaling.kernels.streams import Streams, ages

SCOPES: tuple[Scope, ...] = ("source", "global", "site")

_LEDGERS: Ledgers[StreamLedger] = Ledgers("streams", "StreamBank")


@torch.library.custom_op(
    "isoloss::stream_open",
    mutates_args=(),
    schema="(Tensor source, Tensor? document, Tensor[] weights, int[] starts, int[] taps, int block, int scope, "
    "float eps) -> Tensor",
)
def _open(
    source: Tensor,
    document: Tensor | None,
    weights: list[Tensor],
    starts: list[int],
    taps: list[int],
    block: int,
    scope: int,
    eps: float,
) -> Tensor:
    bank: Tensor = _open_fake(source, document, weights, starts, taps, block, scope, eps)
    tap, key, phi, scale, bias = (weight.clone() for weight in weights)
    batch, time, _ = source.shape
    num_sites, num_streams, _ = key.shape
    bases, gated = [0], bool(phi.numel())
    for site in range(num_sites):
        bases.append(bases[-1] + newest_row(site, block) + 1)
    ledger = StreamLedger(
        num_sites=num_sites,
        streams=Streams(
            tap_QKD=tap,
            taps=tuple(taps),
            first=tuple(starts),
            age_T=ages(document, batch, time, source.device),
            eps=eps,
        ),
        block=block,
        scope=SCOPES[scope],
        key_SMD=key,
        phi_SKV=phi.transpose(1, 2).to(source.dtype).contiguous() if gated else None,  # every token reads it
        scale_S=scale,
        bias_SM=bias,
        base_S=numbers_on(source.device, tuple(bases)),
        bases=bases,
        score_TPM=tap.new_empty((batch * time, bases[-1], num_streams)),
        lse_TSM=tap.new_empty((batch * time, num_sites, num_streams)),
        kept_STM=tap.new_empty((num_sites if gated else 0, batch * time, num_streams + 1)),
    )
    _LEDGERS.keep(bank, ledger)
    return bank


@_open.register_fake
def _open_fake(
    source: Tensor,
    document: Tensor | None,
    weights: list[Tensor],
    starts: list[int],
    taps: list[int],
    block: int,
    scope: int,
    eps: float,
) -> Tensor:
    batch, time, width = source.shape
    rows = (weights[1].shape[0] - 1) // block + 1
    return source.new_empty((rows, batch * time, width))


@torch.library.custom_op(
    "isoloss::stream_begin",
    mutates_args=(),
    schema="(Tensor tap, Tensor key, Tensor phi, Tensor scale, Tensor bias, Tensor bank) -> Tensor",
)
def _begin(tap: Tensor, key: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, bank: Tensor) -> Tensor:
    return tap.new_zeros(1)


@_begin.register_fake
def _begin_fake(tap: Tensor, key: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, bank: Tensor) -> Tensor:
    return tap.new_empty(1)


@torch.library.custom_op(
    "isoloss::stream_finish",
    mutates_args=(),
    schema="(Tensor token_gradient, Tensor tap, Tensor key, Tensor phi, Tensor scale, Tensor bias, Tensor bank) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _finish(
    token_gradient: Tensor, tap: Tensor, key: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, bank: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tap_gradient, key_gradient, phi_gradient, scale_gradient, bias_gradient = _LEDGERS.of(bank).finish()
    phi_gradient = torch.empty_like(phi) if phi_gradient is None else phi_gradient
    return tap_gradient, key_gradient, phi_gradient, scale_gradient, bias_gradient


@_finish.register_fake
def _finish_fake(
    token_gradient: Tensor, tap: Tensor, key: Tensor, phi: Tensor, scale: Tensor, bias: Tensor, bank: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    tap, key, phi, scale, bias = (torch.empty_like(weight) for weight in (tap, key, phi, scale, bias))
    return tap, key, phi, scale, bias


def _begin_setup(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _begin_backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor | None, ...]:
    return *torch.ops.isoloss.stream_finish(token_gradient, *ctx.saved_tensors), None


_begin.register_autograd(_begin_backward, setup_context=_begin_setup)


@torch.library.custom_op(
    "isoloss::stream_site",
    mutates_args=(),
    schema="(Tensor token, Tensor source, Tensor bank, int site, int block) -> (Tensor, Tensor)",
)
def _site(token: Tensor, source: Tensor, bank: Tensor, site: int, block: int) -> tuple[Tensor, Tensor]:
    ledger = _LEDGERS.of(bank)
    again = ledger.enter_site(site, in_backward=in_backward())
    return torch.empty_like(token), forward_site(ledger, bank, site, source, again=again)[1]


@_site.register_fake
def _site_fake(token: Tensor, source: Tensor, bank: Tensor, site: int, block: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(token), bank.new_empty(bank.shape[1:])


@torch.library.custom_op(
    "isoloss::stream_add_site",
    mutates_args=(),
    schema="(Tensor token, Tensor sum, Tensor update, Tensor bank, int site, int block) -> (Tensor, Tensor, Tensor)",
)
def _add_site(
    token: Tensor, sum: Tensor, update: Tensor, bank: Tensor, site: int, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    ledger = _LEDGERS.of(bank)
    again = ledger.enter_site(site, in_backward=in_backward())
    return torch.empty_like(token), *forward_site(ledger, bank, site, sum, update, again=again)


@_add_site.register_fake
def _add_site_fake(
    token: Tensor, sum: Tensor, update: Tensor, bank: Tensor, site: int, block: int
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(token), torch.empty_like(sum), torch.empty_like(sum)


@torch.library.custom_op(
    "isoloss::stream_site_backward",
    mutates_args=(),
    schema="(Tensor token_gradient, Tensor incoming, Tensor? before, Tensor? source, Tensor bank, int site) "
    "-> (Tensor, Tensor)",
)
def _site_backward(
    token_gradient: Tensor, incoming: Tensor, before: Tensor | None, source: Tensor | None, bank: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    ledger = _LEDGERS.of(bank)
    ledger.enter_backward(site)
    source = bank[newest_row(site, ledger.block)] if source is None else source
    before = None if before is None else before.contiguous()
    result = backward_site(ledger, bank, site, incoming.contiguous(), source, before)
    return torch.empty_like(token_gradient), result


@_site_backward.register_fake
def _site_backward_fake(
    token_gradient: Tensor, incoming: Tensor, before: Tensor | None, source: Tensor | None, bank: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(token_gradient), bank.new_empty(bank.shape[1:])


def _site_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, int], output: tuple[Tensor, Tensor]) -> None:
    _, source, bank, site, block = inputs
    ctx.save_for_backward(source if site % block else None, bank)  # finished sources stay in their rows
    ctx.site = site


def _site_backward_formula(ctx: Any, token_gradient: Tensor, incoming: Tensor) -> tuple[Tensor | None, ...]:
    token, source = torch.ops.isoloss.stream_site_backward(token_gradient, incoming, None, *ctx.saved_tensors, ctx.site)
    return token, source, None, None, None


_site.register_autograd(_site_backward_formula, setup_context=_site_setup)


def _add_site_setup(
    ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, int, int], output: tuple[Tensor, Tensor, Tensor]
) -> None:
    _, _, _, bank, site, _ = inputs
    ctx.save_for_backward(output[1], bank)
    ctx.site = site
    ctx.set_materialize_grads(False)  # the last sum of all has no other reader, and zeros would be added


def _add_site_backward_formula(
    ctx: Any, token_gradient: Tensor | None, before: Tensor | None, incoming: Tensor | None
) -> tuple[Tensor | None, ...]:
    source, bank = ctx.saved_tensors
    token_gradient = source.new_zeros(1, dtype=torch.float32) if token_gradient is None else token_gradient
    incoming = torch.zeros_like(source) if incoming is None else incoming
    token, result = torch.ops.isoloss.stream_site_backward(token_gradient, incoming, before, source, bank, ctx.site)
    return token, result, result, None, None, None


_add_site.register_autograd(_add_site_backward_formula, setup_context=_add_site_setup)
