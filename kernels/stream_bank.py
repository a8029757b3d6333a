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

from scaling.errors import KernelError
from scaling.kernels.ledgers import Ledgers
from scaling.kernels.schedule import check_source, in_backward
from scaling.kernels.stream_ledger import (
    Scope,
    StreamLedger,
    backward_site,
    forward_site,
    newest_row,
    numbers_on,
)
from scaling.kernels.streams import Streams, ages, check_sources

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
        if block < 1 or scope not in _SCOPES or not num_sites or len(kernels) >= num_streams:
            raise KernelError(
                f"streams: {num_sites} sites in blocks of {block}, {len(kernels)} kernels of scope {scope!r} for "
                f"{num_streams} streams; allowed are one site and block at least, scopes {', '.join(_SCOPES)}, and "
                "fewer kernels than streams; choose other sizes"
            )
        if source_BTD.dim() != 3 or not source_BTD.numel():
            raise KernelError(
                f"streams: a source of shape {tuple(source_BTD.shape)}; needed is (batch, time, {width}), none of them "
                "0; hand in sequences"
            )
        check_sources(-(-(num_sites - 1) // block) + 1)
        _check_shapes(key_SMD, kernels, mixer, source_BTD, document_BT, block=block, scope=scope)
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
        check_source("streams", source_BTD, self._bank)
        source_TD = source_BTD.flatten(0, -2).to(self._bank.dtype).contiguous()
        output_TD: Tensor
        self._token, output_TD = torch.ops.isoloss.stream_site(self._token, source_TD, self._bank, site, self._block)
        return output_TD.view(source_BTD.shape)


def _check_shapes(
    key_SMD: Tensor,
    kernels: list[Tensor],
    mixer: tuple[Tensor, Tensor, Tensor] | None,
    source_BTD: Tensor,
    document_BT: Tensor | None,
    *,
    block: int,
    scope: Scope,
) -> None:
    """Refuse weights of other sizes than the keys and sources: kernels read memory by these sizes."""
    S, M, D = key_SMD.shape
    owners = {"source": newest_row(S - 1, block) + 1, "global": 1, "site": S}[scope]
    wanted: list[tuple[str, Tensor, tuple[int, ...]]] = [("sources", source_BTD, (*source_BTD.shape[:2], D))]
    for kernel in kernels:
        count, taps = max(owners, len(kernels[0])), max(1, kernel.shape[1] if kernel.dim() == 3 else 1)
        wanted.append((f"kernels of {owners} owners", kernel, (count, taps, D)))
    if mixer is not None:
        sizes: tuple[tuple[int, ...], ...] = ((S, M * D, M), (S,), (S, M))
        names = "projections", "scales", "biases"
        wanted += [(name, weight, size) for name, weight, size in zip(names, mixer, sizes, strict=True)]
    if document_BT is not None:
        wanted.append(("documents", document_BT, tuple(source_BTD.shape[:2])))
    for name, tensor, size in wanted:
        if tuple(tensor.shape) != size:
            raise KernelError(
                f"streams: {name} of shape {tuple(tensor.shape)} with keys {(S, M, D)}; needed is {size}; "
                "hand in weights of one model"
            )


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
        scope=_SCOPES[scope],
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
    return torch.empty_like(token), forward_site(ledger, bank, site, source, again=again)


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
    ledger = _LEDGERS.of(bank)
    ledger.enter_backward(site)
    source = bank[newest_row(site, ledger.block)] if source is None else source
    return torch.empty_like(token_gradient), backward_site(ledger, bank, site, incoming.contiguous(), source)


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
