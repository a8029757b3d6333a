"""The source bank: depth routing as operators with fake kernels and autograd, for eager mode, compile and CUDA graphs.

A forward pass opens one bank, writes every source into it once and reads the mix of each site. Between the sites runs
the model's own code. What ties the operators together is a one-element *token*: each takes the token of the one before
and returns a new one, so that both passes run in order under any graph transformation, and the token's gradient carries
that order backwards. The bank's rows, factors and log-sum-exps are storage behind the token: the operators fill them in
place, and nothing else may read them. They are not declared as mutated, because a functionalising compiler would then
copy the whole bank at every site; the token chain, which has no other consumers, is what makes this safe.

The backward operator of site s receives ``G_s`` and returns the gradient of the newest source of s, which is complete
by then (:mod:`scaling.kernels.gather`). Rows are named by site, so that recomputing a site writes the same row again.

Shape legend: N rows, S sites, T tokens, D width, H heads, P splits of the sum over tokens.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from scaling.errors import KernelError
from scaling.kernels.backward import BackwardStep
from scaling.kernels.gather import receive
from scaling.kernels.pull import pull
from scaling.kernels.pull_group import pull_group
from scaling.kernels.schedule import Ledger, Plan, grouping
from scaling.kernels.tile import head_fold

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SITES = 512
_PROGRAMS = 528  # programs of the query gradient: four for each of an H200's 132 multiprocessors

# A bank's ledger lives as long as its storage; the address names it because compiled graphs pass tensors alone.
_ledgers: dict[tuple[torch.device, int], tuple[StorageWeakRef, Ledger]] = {}


class SourceBank:
    """Depth routing of one forward pass.

    Parameters
    ----------
    query_SD
        ``u = w * g`` of every site, float32; its gradient is complete when backward has reached site 0.
    source_TD
        Any tensor with the sources' shape, dtype and device.
    heads
        Heads of every site; must divide D.
    eps
        Epsilon of the key norm.
    block
        Sublayers summed into one source; with more than 1 the caller passes running sums (see :meth:`site`).
    group
        Sites that share one read of the older rows; None takes what measured best.

    Raises
    ------
    KernelError
        If a size or dtype is not supported.
    """

    def __init__(
        self, query_SD: Tensor, source_TD: Tensor, *, heads: int, eps: float, block: int = 1, group: int | None = None
    ) -> None:
        num_sites, width = query_SD.shape
        if width % heads or width % 16 or source_TD.shape[-1] != width:
            raise KernelError(
                f"source bank: width {source_TD.shape[-1]} with queries of {width} and {heads} heads; the width must "
                "be the queries', a multiple of 16 and of the heads; choose other heads"
            )
        if source_TD.dtype not in _DTYPES or num_sites > _MAX_SITES:
            raise KernelError(
                f"source bank: {source_TD.dtype} with {num_sites} sites; allowed are float32, bfloat16, float16 and up "
                f"to {_MAX_SITES} sites; use the reference"
            )
        head_width = width // heads
        if group is None or head_width > 256:
            group = grouping(head_width)
        plan = Plan(num_sites=num_sites, block=block, group=group)
        self._heads, self._eps, self._block, self._group = heads, eps, block, group
        with torch.no_grad():
            self._bank, self._factor, self._lse, self._query = torch.ops.isoloss.bank_open(
                source_TD.detach().flatten(0, -2), query_SD.detach(), heads, block, group
            )
        self._token = torch.ops.isoloss.bank_begin(query_SD, self._bank)
        self._num_sites = plan.num_sites

    def site(self, site: int, source_BTD: Tensor) -> Tensor:
        """Hand in the newest source of a site and return the site's mix, in the source's shape.

        With blocks of 1 the newest source is the output of the sublayer before (the embedding at site 0). With larger
        blocks it is the sum of the outputs in the current block: of the whole block at the site that follows it.
        """
        return self._run(site, source_BTD, None, self._eps)[0]

    def normed_site(self, site: int, source_BTD: Tensor, gain_D: Tensor, norm_eps: float) -> Tensor:
        """Return ``RMSNorm(mix) * gain``: :meth:`site` and the sublayer's input norm in one, forward and backward."""
        return self._run(site, source_BTD, gain_D, norm_eps)[1]

    def _run(self, site: int, source_BTD: Tensor, gain_D: Tensor | None, norm_eps: float) -> tuple[Tensor, Tensor]:
        source_TD = source_BTD.flatten(0, -2).to(self._bank.dtype)
        self._token, mixed_TD, normed_TD, _ = torch.ops.isoloss.bank_site(
            self._token, source_TD, self._bank, self._factor, self._lse, self._query, gain_D,
            site, self._heads, self._eps, norm_eps,
        )  # fmt: skip
        if gain_D is None:
            return mixed_TD.view(source_BTD.shape), mixed_TD
        return mixed_TD, normed_TD.view(source_BTD.shape)


@torch.library.custom_op(
    "isoloss::bank_open",
    mutates_args=(),
    schema="(Tensor source, Tensor query, int heads, int block, int group) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _open(source: Tensor, query: Tensor, heads: int, block: int, group: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = Plan(num_sites=query.shape[0], block=block, group=group)
    tensors: tuple[Tensor, Tensor, Tensor, Tensor] = _open_fake(source, query, heads, block, group)
    tensors[3].copy_(query)
    for key in [key for key, (storage, _) in _ledgers.items() if storage.expired()]:
        del _ledgers[key]
    bank = tensors[0]
    _ledgers[bank.device, bank.data_ptr()] = (StorageWeakRef(bank.untyped_storage()), Ledger(plan=plan))
    return tensors


@_open.register_fake
def _open_fake(
    source: Tensor, query: Tensor, heads: int, block: int, group: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    plan = Plan(num_sites=query.shape[0], block=block, group=group)
    tokens, width = source.shape
    return (
        source.new_empty((plan.num_slots, tokens, width)),
        source.new_empty((plan.num_rows, tokens), dtype=torch.float32),
        source.new_empty((plan.num_sites, tokens, heads), dtype=torch.float32),
        source.new_empty(query.shape),
    )


@torch.library.custom_op("isoloss::bank_begin", mutates_args=(), schema="(Tensor query, Tensor bank) -> Tensor")
def _begin(query: Tensor, bank: Tensor) -> Tensor:
    return query.new_zeros(1, dtype=torch.float32)


@_begin.register_fake
def _begin_fake(query: Tensor, bank: Tensor) -> Tensor:
    return query.new_empty(1, dtype=torch.float32)


@torch.library.custom_op(
    "isoloss::bank_finish", mutates_args=(), schema="(Tensor token_gradient, Tensor bank, int sites) -> Tensor"
)
def _finish(token_gradient: Tensor, bank: Tensor, sites: int) -> Tensor:
    return _ledger(bank).finish()


@_finish.register_fake
def _finish_fake(token_gradient: Tensor, bank: Tensor, sites: int) -> Tensor:
    return bank.new_empty((sites, bank.shape[-1]), dtype=torch.float32)


def _begin_setup(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    query, bank = inputs
    ctx.save_for_backward(bank)
    ctx.sites, ctx.dtype = query.shape[0], query.dtype


def _begin_backward(ctx: Any, token_gradient: Tensor) -> tuple[Tensor, None]:
    (bank,) = ctx.saved_tensors
    return torch.ops.isoloss.bank_finish(token_gradient, bank, ctx.sites).to(ctx.dtype), None


_begin.register_autograd(_begin_backward, setup_context=_begin_setup)


@torch.library.custom_op(
    "isoloss::bank_site",
    mutates_args=(),
    schema="(Tensor token, Tensor source, Tensor bank, Tensor factor, Tensor lse, Tensor query, Tensor? gain, "
    "int site, int heads, float eps, float norm_eps) -> (Tensor, Tensor, Tensor, Tensor)",
)
def _site(
    token: Tensor,
    source: Tensor,
    bank: Tensor,
    factor: Tensor,
    lse: Tensor,
    query: Tensor,
    gain: Tensor | None,
    site: int,
    heads: int,
    eps: float,
    norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    ledger = _ledger(bank)
    plan = ledger.plan
    again = ledger.enter_site(site)
    source = source.contiguous()
    output = torch.empty_like(source)
    normed = source.new_empty(0) if gain is None else torch.empty_like(source)
    output_factor = source.new_empty(0 if gain is None else source.shape[0], dtype=torch.float32)
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
        if again or site == group.start:
            pull_group(
                bank_NTD=bank, factor_NT=factor, query_SD=query, partial_QTD=target, lse_QTH=target_lse,
                num_rows=older, sites=sites,
            )  # fmt: skip
    pull(
        source_TD=source,
        bank_NTD=bank,
        factor_NT=factor,
        query_SD=query,
        lse_STH=lse,
        output_TD=output,
        gain_D=gain,
        normed_TD=normed,
        output_factor_T=output_factor,
        partial_TD=partial,
        partial_lse_TH=partial_lse,
        rows=range(older if partial is not None else 0, plan.rows_before(site)),
        write_row=plan.write_row(site),
        site=site,
        eps=eps,
        output_eps=norm_eps,
    )
    return torch.empty_like(token), output, normed, output_factor


@_site.register_fake
def _site_fake(
    token: Tensor, source: Tensor, bank: Tensor, factor: Tensor, lse: Tensor, query: Tensor, gain: Tensor | None,
    site: int, heads: int, eps: float, norm_eps: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    output = torch.empty_like(source, memory_format=torch.contiguous_format)
    normed = source.new_empty(0) if gain is None else torch.empty_like(output)
    factor_size = 0 if gain is None else source.shape[0]
    return torch.empty_like(token), output, normed, source.new_empty(factor_size, dtype=torch.float32)


@torch.library.custom_op(
    "isoloss::bank_site_backward",
    mutates_args=(),
    schema="(Tensor token_gradient, Tensor incoming, Tensor output, Tensor output_factor, Tensor? source, Tensor bank, "
    "Tensor factor, Tensor lse, Tensor query, Tensor? gain, int site, int heads, float eps) "
    "-> (Tensor, Tensor, Tensor)",
)
def _site_backward(
    token_gradient: Tensor,
    incoming: Tensor,
    output: Tensor,
    output_factor: Tensor,
    source: Tensor | None,
    bank: Tensor,
    factor: Tensor,
    lse: Tensor,
    query: Tensor,
    gain: Tensor | None,
    site: int,
    heads: int,
    eps: float,
) -> tuple[Tensor, Tensor, Tensor]:
    ledger = _ledger(bank)
    ledger.enter_backward(site)
    if ledger.delta_STH is None or ledger.query_gradient_PSD is None:
        splits = max(1, min(_PROGRAMS // (heads * head_fold(bank.shape[-1] // heads)), -(-bank.shape[1] // 64)))
        ledger.delta_STH = torch.empty_like(lse)
        ledger.query_gradient_PSD = lse.new_zeros((splits, *query.shape))
    slot = ledger.plan.gradient_slot(site)
    gain_gradient = receive(
        incoming_TD=incoming.contiguous(),
        output_TD=output,
        output_factor_T=output_factor,
        gradient_TD=bank[slot],
        delta_TH=ledger.delta_STH[site],
        gain_D=gain,
    )
    result = torch.empty_like(output)
    step = BackwardStep(ledger, bank, factor, lse, query, eps)
    if ledger.plan.block == 1:
        step.full(site, result)
    else:
        step.block(site, source, result)
    return (
        torch.empty_like(token_gradient),
        result,
        token_gradient.new_empty(0) if gain_gradient is None else gain_gradient,
    )


@_site_backward.register_fake
def _site_backward_fake(
    token_gradient: Tensor, incoming: Tensor, output: Tensor, output_factor: Tensor, source: Tensor | None,
    bank: Tensor, factor: Tensor, lse: Tensor, query: Tensor, gain: Tensor | None, site: int, heads: int, eps: float,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    gain_gradient = token_gradient.new_empty(0 if gain is None else gain.shape[0], dtype=torch.float32)
    return torch.empty_like(token_gradient), torch.empty_like(output), gain_gradient


def _site_setup(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor, Tensor, Tensor]) -> None:
    _, source, bank, factor, lse, query, gain, site, heads, eps, _ = inputs
    _, mixed, _, mixed_factor = output
    # With blocks of 1 the source itself stays in its bank row; fewer rows than sites means larger blocks, and of a
    # single site it cannot be told.
    kept = source if factor.shape[0] < query.shape[0] or query.shape[0] == 1 else None
    ctx.save_for_backward(mixed, mixed_factor, kept, bank, factor, lse, query, gain)
    ctx.site, ctx.heads, ctx.eps = site, heads, eps
    ctx.gain_dtype = None if gain is None else gain.dtype


def _site_backward_formula(
    ctx: Any, token_gradient: Tensor, mixed_gradient: Tensor, normed_gradient: Tensor, _factor_gradient: Tensor
) -> tuple[Tensor | None, ...]:
    saved = ctx.saved_tensors
    incoming = mixed_gradient if ctx.gain_dtype is None else normed_gradient
    token, source, gain = torch.ops.isoloss.bank_site_backward(
        token_gradient, incoming, *saved, ctx.site, ctx.heads, ctx.eps
    )
    gain_gradient = None if ctx.gain_dtype is None else gain.to(ctx.gain_dtype)
    return token, source, None, None, None, None, gain_gradient, None, None, None, None


_site.register_autograd(_site_backward_formula, setup_context=_site_setup)


def _ledger(bank: Tensor) -> Ledger:
    entry = _ledgers.get((bank.device, bank.data_ptr()))
    if entry is None or entry[0].expired():
        raise KernelError("source bank: unknown bank; open it with SourceBank in the same process before routing")
    return entry[1]
