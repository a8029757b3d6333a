"""The source bank's operators: forward, fake and backward functions that eager mode, compile and CUDA graphs all run.

Between the kernels and :mod:`scaling.kernels.bank`, which calls them. What ties the operators of one forward pass
together is a one-element *token*: each takes the token of the one before and returns a new one, so that both passes run
in order under any graph transformation, and the token's gradient carries that order backwards. The bank's rows, factors
and log-sum-exps are storage behind the token: the operators fill them in place, and nothing else may read them. They
are not declared as mutated, because a functionalising compiler would then copy the whole bank at every site; the token
chain, which has no other consumers, is what makes this safe.

The backward operator of site s receives ``G_s`` and returns the gradient of the newest source of s, which is complete
by then (:mod:`scaling.kernels.gather`). Rows are named by site, so that recomputing a site writes the same row again.

Shape legend: N rows, S sites, R readers, T tokens, D width, H heads, P splits of the sum over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from scaling.kernels.backward import BackwardStep
from scaling.kernels.ledgers import Ledgers
from scaling.kernels.pull import pull
from scaling.kernels.pull_group import pull_group
from scaling.kernels.receive import receive
from scaling.kernels.schedule import Ledger, Plan, in_backward
from scaling.kernels.tile import head_fold

_PROGRAMS = 528  # programs of the query gradient: four for each of an H200's 132 multiprocessors

_LEDGERS: Ledgers[Ledger] = Ledgers("source bank", "SourceBank")


@torch.library.custom_op(
    "isoloss::bank_open",
    mutates_args=(),
    schema="(Tensor source, Tensor query, int heads, int block, int group, int readers, bool per_head) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
)
def _open(
    source: Tensor, query: Tensor, heads: int, block: int, group: int, readers: int, per_head: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = Plan(num_sites=query.shape[0] // readers, block=block, group=group, readers=readers)
    tensors: tuple[Tensor, Tensor, Tensor, Tensor] = _open_fake(source, query, heads, block, group, readers, per_head)
    tensors[3].copy_(query)
    _LEDGERS.keep(tensors[0], Ledger(plan=plan))
    return tensors


@_open.register_fake
def _open_fake(
    source: Tensor, query: Tensor, heads: int, block: int, group: int, readers: int, per_head: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = Plan(num_sites=query.shape[0] // readers, block=block, group=group, readers=readers)
    tokens, width = source.shape
    factors = (plan.num_rows, tokens, heads) if per_head else (plan.num_rows, tokens)
    return (
        source.new_empty((plan.num_slots, tokens, width)),
        source.new_empty(factors, dtype=torch.float32),
        source.new_empty((query.shape[0], tokens, heads), dtype=torch.float32),
        source.new_empty(query.shape),
    )


@torch.library.custom_op("isoloss::bank_begin", mutates_args=(), schema="(Tensor query, Tensor bank) -> Tensor")
def _begin(query: Tensor, bank: Tensor) -> Tensor:
    return query.new_zeros(1, dtype=torch.float32)


@_begin.register_fake
def _begin_fake(query: Tensor, bank: Tensor) -> Tensor:
    return query.new_empty(1, dtype=torch.float32)


@torch.library.custom_op(
    "isoloss::bank_finish", mutates_args=(), schema="(Tensor token_gradient, Tensor bank, int queries) -> Tensor"
)
def _finish(token_gradient: Tensor, bank: Tensor, queries: int) -> Tensor:
    return _LEDGERS.of(bank).finish()


@_finish.register_fake
def _finish_fake(token_gradient: Tensor, bank: Tensor, queries: int) -> Tensor:
    return bank.new_empty((queries, bank.shape[-1]), dtype=torch.float32)


def _begin_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    query, bank = inputs
    ctx.save_for_backward(bank)
    ctx.queries, ctx.dtype = query.shape[0], query.dtype


def _begin_backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor, None]:
    (bank,) = ctx.saved_tensors
    return torch.ops.isoloss.bank_finish(token_gradient, bank, ctx.queries).to(ctx.dtype), None


_begin.register_autograd(_begin_backward, setup_context=_begin_setup)


def _stays(bank: Tensor, factor: Tensor, query: Tensor, gain: Tensor | None, site: int, readers: int) -> bool:
    """Whether a site's mix stays in the bank, in the row that its G will take: one that no source has.

    Only backward needs the mix where its norm is what goes on. Without this those rows, a group of them, would be empty
    while the loss is computed, which is when a step holds most.
    """
    rows = factor.shape[0]
    each = _each_is_a_source(factor, query, readers)
    return gain is not None and readers == 1 and each and site + bank.shape[0] - rows >= rows


def _each_is_a_source(factor: Tensor, query: Tensor, readers: int) -> bool:
    """Whether blocks are of 1, told from sizes: larger ones have fewer rows than sites. Of a single site it is not."""
    sites = query.shape[0] // readers
    return 1 < sites == factor.shape[0]


@torch.library.custom_op(
    "isoloss::bank_site",
    mutates_args=(),
    schema="(Tensor token, Tensor source, Tensor bank, Tensor factor, Tensor lse, Tensor query, Tensor? gain, "
    "int site, int readers, bool silent, bool with_lse, float eps, float norm_eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
)
def _site(
    token: Tensor, source: Tensor, bank: Tensor, factor: Tensor, lse: Tensor, query: Tensor, gain: Tensor | None,
    site: int, readers: int, silent: bool, with_lse: bool, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    ledger = _LEDGERS.of(bank)
    plan = ledger.plan
    again = ledger.enter_site(site, in_backward=in_backward())
    source = source.contiguous()
    results: tuple[Tensor, Tensor, Tensor, Tensor, Tensor] = _site_fake(
        token, source, bank, factor, lse, query, gain, site, readers, silent, with_lse, eps, norm_eps
    )
    _, output, normed, output_factor, site_lse = results
    if _stays(bank, factor, query, gain, site, readers):
        output = bank[plan.gradient_slot(site)]
    group = plan.forward_group(site)
    older = plan.rows_before(group.start)
    partial = partial_lse = None
    if older and len(group) > 1:
        if again:  # the group's partial results are gone; this site's is computed alone, row by row the same
            partial, partial_lse = torch.empty_like(source), torch.empty_like(lse[0])
            target, target_lse, sites = partial[None], partial_lse[None], range(site, site + 1)
        else:
            slot = plan.partial_slot(group.start)
            target, target_lse, sites = bank[slot : slot + len(group)], lse[group.start : group.stop], group
            partial, partial_lse = bank[plan.partial_slot(site)], lse[site]
        if (again and not silent) or site == group.start:
            pull_group(
                bank_NTD=bank, factor_NT=factor, query_SD=query, partial_QTD=target, lse_QTH=target_lse,
                num_rows=older, sites=sites, group=len(group),
            )  # fmt: skip
    row = plan.write_row(site)
    if silent:
        # Written behind autograd's back, as by the kernels: .data has a version counter of its own.
        lse.data[site * readers : (site + 1) * readers] = torch.inf  # weights of 0 in the backward pass
        if row is not None:
            bank.data[row] = source
            parts = source.view(*source.shape[:-1], *factor.shape[2:], -1).float()
            factor.data[row] = (parts.square().mean(-1) + eps).rsqrt()
        return results
    for reader in range(readers):
        pull(
            source_TD=source,
            bank_NTD=bank,
            factor_NT=factor,
            query_SD=query,
            lse_STH=lse,
            output_TD=output if readers == 1 else output[reader],
            gain_D=gain,
            normed_TD=normed,
            output_factor_T=output_factor,
            partial_TD=partial,
            partial_lse_TH=partial_lse,
            rows=range(older if partial is not None else 0, plan.rows_before(site)),
            write_row=row if reader == 0 else None,
            site=site * readers + reader,
            eps=eps,
            output_eps=norm_eps,
        )
    if with_lse:
        site_lse.copy_(lse[site])
    return results


@_site.register_fake
def _site_fake(
    token: Tensor, source: Tensor, bank: Tensor, factor: Tensor, lse: Tensor, query: Tensor, gain: Tensor | None,
    site: int, readers: int, silent: bool, with_lse: bool, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    tokens, width = source.shape
    nothing = silent or _stays(bank, factor, query, gain, site, readers)
    shape = (0,) if nothing else (tokens, width) if readers == 1 else (readers, tokens, width)
    return (
        torch.empty_like(token),
        source.new_empty(shape),
        source.new_empty((0,) if gain is None else (tokens, width)),
        source.new_empty(0 if gain is None else tokens, dtype=torch.float32),
        lse.new_empty(lse.shape[1:] if with_lse else (0,)),
    )


@torch.library.custom_op(
    "isoloss::bank_site_backward",
    mutates_args=(),
    schema="(Tensor token_gradient, Tensor incoming, Tensor? lse_gradient, Tensor output, Tensor output_factor, "
    "Tensor? source, Tensor bank, Tensor factor, Tensor lse, Tensor query, Tensor? gain, int site, int readers, "
    "bool silent, float eps) -> (Tensor, Tensor, Tensor)",
)
def _site_backward(
    token_gradient: Tensor, incoming: Tensor, lse_gradient: Tensor | None, output: Tensor, output_factor: Tensor,
    source: Tensor | None, bank: Tensor, factor: Tensor, lse: Tensor, query: Tensor, gain: Tensor | None,
    site: int, readers: int, silent: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    ledger = _LEDGERS.of(bank)
    ledger.enter_backward(site)
    if ledger.delta_STH is None or ledger.query_gradient_PSD is None:
        heads = lse.shape[-1]
        splits = max(1, min(_PROGRAMS // (heads * head_fold(bank.shape[-1] // heads)), -(-bank.shape[1] // 64)))
        ledger.delta_STH = torch.empty_like(lse)
        ledger.query_gradient_PSD = lse.new_zeros((splits, *query.shape))
    slot = ledger.plan.gradient_slot(site)
    gain_gradient = None
    if silent:
        bank.data[slot : slot + readers] = 0.0
        ledger.delta_STH[site * readers : (site + 1) * readers] = 0.0
    else:
        incoming = incoming.contiguous()
        if _stays(bank, factor, query, gain, site, readers):
            output = bank[slot]  # receive reads a token's mix before it writes the token's G
        for reader in range(readers):
            gain_gradient = receive(
                incoming_TD=incoming if readers == 1 else incoming[reader],
                output_TD=output if readers == 1 else output[reader],
                output_factor_T=output_factor,
                gradient_TD=bank[slot + reader],
                delta_TH=ledger.delta_STH[site * readers + reader],
                gain_D=gain,
            )
    if lse_gradient is not None:  # dz = p (<G, v> - delta + dLSE)
        ledger.delta_STH[site] -= lse_gradient
        ledger.lse_moved = True
    result = torch.empty_like(bank[0])
    step = BackwardStep(ledger, bank, factor, lse, query, eps)
    if ledger.plan.block == 1:
        step.full(site, result)
    else:
        step.block(site, source, result)
    if gain_gradient is None:
        gain_gradient = token_gradient.new_empty(0)
    return torch.empty_like(token_gradient), result, gain_gradient


@_site_backward.register_fake
def _site_backward_fake(
    token_gradient: Tensor, incoming: Tensor, lse_gradient: Tensor | None, output: Tensor, output_factor: Tensor,
    source: Tensor | None, bank: Tensor, factor: Tensor, lse: Tensor, query: Tensor, gain: Tensor | None,
    site: int, readers: int, silent: bool, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gain_gradient = token_gradient.new_empty(0) if gain is None else torch.empty_like(gain)
    return torch.empty_like(token_gradient), bank.new_empty(bank.shape[1:]), gain_gradient


def _site_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    _, source, bank, factor, lse, query, gain, site, readers, silent, with_lse, eps, _ = inputs
    _, mixed, _, mixed_factor, _ = output
    kept = None if _each_is_a_source(factor, query, readers) else source  # with blocks of 1 it stays in its bank row
    ctx.save_for_backward(mixed, mixed_factor, kept, bank, factor, lse, query, gain)
    ctx.site, ctx.readers, ctx.silent, ctx.with_lse, ctx.eps = site, readers, silent, with_lse, eps
    ctx.set_materialize_grads(False)  # or each site fills a tensor with zeros for the one of its outputs nobody uses


def _site_backward_formula(
    ctx: Any,
    token_gradient: Tensor | None,
    mixed_gradient: Tensor | None,
    normed_gradient: Tensor | None,
    _: Tensor | None,
    lse_gradient: Tensor | None,
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors  # once: recomputation hands them out a single time
    mixed, _, _, bank, _, lse, _, gain = saved
    incoming = mixed_gradient if gain is None else normed_gradient
    if incoming is None:
        incoming = torch.zeros_like(mixed) if gain is None else bank.new_zeros(bank.shape[1:])
    if token_gradient is None:  # of the last site
        token_gradient = lse.new_zeros(1)
    token, source, gain_gradient = torch.ops.isoloss.bank_site_backward(
        token_gradient, incoming, lse_gradient if ctx.with_lse else None, *saved, ctx.site, ctx.readers,
        ctx.silent, ctx.eps,
    )  # fmt: skip
    if gain is None:
        gain_gradient = None
    return token, source, None, None, None, None, gain_gradient, None, None, None, None, None, None


_site.register_autograd(_site_backward_formula, setup_context=_site_setup)
