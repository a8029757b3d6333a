"""Multi-stream routing (msar) of one forward pass: sources once in a bank, streams never; operators with autograd.

As :mod:`scaling.kernels.operators` does for single streams, a token ties the operators of one pass together, and
storage behind it is filled in place: here the ledger of a bank holds it, and graphs see the bank alone. Site s hands in
its newest source, the finished sum of a block at the first site of the next, else the running sum of the begun block;
in backward, running sums get their gradient at their site and finished ones when backward leaves the block after.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from scaling.errors import KernelError
from scaling.kernels.stream_ledger import (
    Scope,
    StreamLedger,
    newest_row,
    numbers_on,
    settle_site,
    spread_finished,
    spread_newest,
)
from scaling.kernels.stream_mix import blend, gate, measure
from scaling.kernels.streams import score, segments, tile_sides

_SCOPES: tuple[Scope, ...] = ("source", "global", "site")
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class StreamBank:
    """Multi-stream routing of one forward pass.

    Parameters
    ----------
    key_SMD
        ``u = w * g`` of every site and stream.
    kernels
        Taps of the convolutions, ``(owners, taps, D)`` each, for the last streams; the others are the source itself.
    mixer
        Projections ``(S, M * D, M)``, scales ``(S,)`` and biases ``(S, M)`` of the gates; None takes the mean.
    source_BTD
        Any tensor with the sources' shape, dtype and device.
    document_BT
        Document number of each position; convolutions do not cross from one into another.
    block
        Sublayers summed into one source.
    scope
        Whose kernels are: a source's, all sources' or a site's.
    eps
        Epsilon of all norms.

    Raises
    ------
    KernelError
        If a size or dtype is not supported.
    """

    def __init__(
        self,
        key_SMD: Tensor,
        kernels: list[Tensor],
        mixer: tuple[Tensor, Tensor, Tensor] | None,
        source_BTD: Tensor,
        document_BT: Tensor | None,
        *,
        block: int,
        scope: Scope,
        eps: float,
    ) -> None:
        num_sites, num_streams, width = key_SMD.shape
        if width % 16 or source_BTD.dtype not in _DTYPES:
            raise KernelError(
                f"streams: width {width} in {source_BTD.dtype}; allowed are multiples of 16 in float32, bfloat16 and "
                "float16; choose another width, or set ISOLOSS_KERNELS=reference"
            )
        tile_sides(-(-(num_sites - 1) // block) + 1, width)
        owners = kernels[0].shape[0] if kernels else 1
        identity = key_SMD.new_ones((owners, 1, width))
        tap_QKD = torch.cat([identity, *kernels], dim=1).float()
        taps = [1] * (num_streams - len(kernels)) + [kernel.shape[1] for kernel in kernels]
        starts = [0] * (num_streams - len(kernels))
        for width_before in [1, *taps[len(starts) :]][: len(kernels)]:
            starts.append(starts[-1] + width_before)
        empty = key_SMD.new_empty(0)
        phi, scale, bias = (empty, empty, empty) if mixer is None else mixer
        owned: Scope = scope if kernels else "global"
        weights = [tap_QKD, *(weight.float().contiguous() for weight in (key_SMD, phi, scale, bias))]
        with torch.no_grad():
            self._bank = torch.ops.isoloss.stream_open(
                source_BTD.detach(), document_BT, [weight.detach() for weight in weights], starts, taps, block,
                _SCOPES.index(owned), eps,
            )  # fmt: skip
        self._token = torch.ops.isoloss.stream_begin(*weights, self._bank)
        self._block = block

    def site(self, site: int, source_BTD: Tensor) -> Tensor:
        """Hand in the newest source of a site and return what the site reads, in the source's shape."""
        source_TD = source_BTD.flatten(0, -2).to(self._bank.dtype)
        output_TD: Tensor
        self._token, output_TD = torch.ops.isoloss.stream_site(self._token, source_TD, self._bank, site, self._block)
        return output_TD.view(source_BTD.shape)


_ledgers: dict[tuple[torch.device, int], tuple[StorageWeakRef, StreamLedger]] = {}


def _ledger(bank: Tensor) -> StreamLedger:
    entry = _ledgers.get((bank.device, bank.data_ptr()))
    if entry is None or entry[0].expired():
        raise KernelError("streams: unknown bank; open it with StreamBank in the same process before routing")
    return entry[1]


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
    bases = [0]
    for site in range(num_sites):
        bases.append(bases[-1] + newest_row(site, block) + 1)
    numbers = numbers_on(source.device, (*starts, *taps, *bases))
    gated = bool(phi.numel())
    for stale in [key for key, (storage, _) in _ledgers.items() if storage.expired()]:
        del _ledgers[stale]
    ledger = StreamLedger(
        num_sites=num_sites,
        tap_QKD=tap,
        segment_T=segments(document, batch, time, source.device),
        table_2M=numbers[: 2 * num_streams].view(2, num_streams),
        eps=eps,
        block=block,
        scope=_SCOPES[scope],
        max_taps=max(taps),
        key_SMD=key,
        phi_SVM=phi if gated else None,
        scale_S=scale,
        bias_SM=bias,
        base_S=numbers[2 * num_streams :],
        bases=bases,
        score_PMT=tap.new_empty((bases[-1], num_streams, batch * time)),
        lse_SMT=tap.new_empty((num_sites, num_streams, batch * time)),
        kept=tap.new_empty((num_sites if gated else 0, num_streams + 1, batch * time)),
    )
    _ledgers[bank.device, bank.data_ptr()] = (StorageWeakRef(bank.untyped_storage()), ledger)
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
    rows = newest_row(weights[1].shape[0] - 1, block) + 1
    return source.new_empty((rows + 2 * block, batch * time, width))


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
    ledger = _ledger(bank)
    ledger.require_end()
    found = (ledger.tap_gradient_GQKD, ledger.key_gradient_SMD, ledger.scale_gradient_S, ledger.bias_gradient_SM)
    tap_gradient, key_gradient, scale_gradient, bias_gradient = found
    assert tap_gradient is not None and key_gradient is not None
    assert scale_gradient is not None and bias_gradient is not None
    # The first site has one source: its weight is 1 whatever the query, all else is rounding.
    key_gradient[0] = 0.0
    phi_gradient = torch.empty_like(phi) if ledger.phi_gradient_SVM is None else ledger.phi_gradient_SVM
    result = tap_gradient.sum(0), key_gradient, phi_gradient, scale_gradient, bias_gradient
    ledger.scalar_LWT = ledger.source_gradient_NTD = ledger.tap_gradient_GQKD = None
    ledger.key_gradient_SMD = ledger.phi_gradient_SVM = ledger.scale_gradient_S = ledger.bias_gradient_SM = None
    return result


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
    ledger = _ledger(bank)
    ledger.enter_site(site)
    newest = newest_row(site, block)
    bank.data[newest] = source  # behind autograd's back, as the kernels write: .data has a version counter of its own
    streams, reads = ledger.streams(bank), ledger.reads(site)
    here = range(site, site + 1)
    common: dict[str, Any] = {"key_SMD": ledger.key_SMD, "base_S": ledger.base_S, "score_PMT": ledger.score_PMT}
    if ledger.scope == "site":
        for row in range(newest + 1):
            score(streams, bank_row=row, source_row=row, owner=site, sites=here, **common)
    else:
        # A finished source's logits for all sites to come, in one expansion; a running sum has one reader.
        readers = here if site % block else range(site, ledger.num_sites)
        score(streams, bank_row=newest, source_row=newest, owner=ledger.owner(newest, site), sites=readers, **common)
    scores, lse = ledger.scores(site), ledger.lse_SMT[site]
    torch.logsumexp(scores, 0, out=lse)
    gates = None
    if ledger.phi_SVM is not None:
        stat = measure(streams, reads, phi_VM=ledger.phi_SVM[site], score_NMT=scores, lse_MT=lse)
        gates = gate(
            stat, scale=ledger.scale_S[site], bias_M=ledger.bias_SM[site], kept=ledger.kept[site],
            width=bank.shape[-1], eps=ledger.eps,
        )  # fmt: skip
    output = torch.empty_like(bank[0])
    blend(streams, reads, score_NMT=scores, lse_MT=lse, gate_MT=gates, output_TD=output)
    return torch.empty_like(token), output


@_site.register_fake
def _site_fake(token: Tensor, source: Tensor, bank: Tensor, site: int, block: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(token), bank.new_empty(bank.shape[1:])


@torch.library.custom_op(
    "isoloss::stream_site_backward",
    mutates_args=(),
    schema="(Tensor token_gradient, Tensor incoming, Tensor? source, Tensor bank, int site) -> (Tensor, Tensor)",
)
def _site_backward(
    token_gradient: Tensor, incoming: Tensor, source: Tensor | None, bank: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    ledger = _ledger(bank)
    ledger.enter_backward(site)
    if ledger.scalar_LWT is None:
        ledger.open_backward()
    local = site % ledger.block
    slot = ledger.num_rows + local
    later = slot + ledger.block
    bank.data[slot] = incoming
    if source is not None:
        bank.data[later] = source
    reads = ledger.reads(site, last_row=None if source is None else later)
    settle_site(ledger, bank, site, reads)
    result = torch.empty_like(bank[0])
    if source is not None:
        spread_newest(ledger, bank, site, reads, result)
    if ledger.scope == "site":
        spread_finished(ledger, bank, range(site, site + 1))
    elif not local:
        spread_finished(ledger, bank, range(site, min(site + ledger.block, ledger.num_sites)))
    if source is None:
        assert ledger.source_gradient_NTD is not None
        result.copy_(ledger.source_gradient_NTD[newest_row(site, ledger.block)])
    return torch.empty_like(token_gradient), result


@_site_backward.register_fake
def _site_backward_fake(
    token_gradient: Tensor, incoming: Tensor, source: Tensor | None, bank: Tensor, site: int
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(token_gradient), bank.new_empty(bank.shape[1:])


def _site_setup(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, int, int], output: tuple[Tensor, Tensor]) -> None:
    _, source, bank, site, block = inputs
    ctx.save_for_backward(source if site % block else None, bank)  # finished sources stay in their rows
    ctx.site = site


def _site_backward_formula(ctx: Any, token_gradient: Tensor, incoming: Tensor) -> tuple[Tensor | None, ...]:
    token, source = torch.ops.isoloss.stream_site_backward(token_gradient, incoming, *ctx.saved_tensors, ctx.site)
    return token, source, None, None, None


_site.register_autograd(_site_backward_formula, setup_context=_site_setup)
