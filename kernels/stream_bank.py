"""Multi-stream routing (msar) of one forward pass: sources once in a bank, streams never.

What models call; behind it are :mod:`scaling.kernels.stream_operators`. Site s hands in its newest source: the finished
sum of a block at the first site of the next, else the running sum of the begun block.

Shape legend: as in :mod:`scaling.kernels.streams`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scaling.errors import KernelError
from scaling.kernels.schedule import check_source
from scaling.kernels.stream_ledger import Scope, newest_row
from scaling.kernels.stream_operators import SCOPES
from scaling.kernels.streams import check_sources

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
        if block < 1 or scope not in SCOPES or not num_sites or len(kernels) >= num_streams:
            raise KernelError(
                f"streams: {num_sites} sites in blocks of {block}, {len(kernels)} kernels of scope {scope!r} for "
                f"{num_streams} streams; allowed are one site and block at least, scopes {', '.join(SCOPES)}, and "
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
                SCOPES.index(owned), eps,
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

    def add_site(self, site: int, sum_BTD: Tensor, update_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """:meth:`site` of ``sum_BTD + update_BTD``, which comes first: within a block one kernel adds and reads it."""
        if sum_BTD.shape != update_BTD.shape:
            raise KernelError(
                f"streams: a sum of shape {tuple(sum_BTD.shape)} and an update of {tuple(update_BTD.shape)}; hand in "
                "two of the same shape"
            )
        kind = self._bank.dtype
        if site % self._block == 0 or sum_BTD.dtype != kind or update_BTD.dtype != kind:
            source_BTD = sum_BTD + update_BTD
            return source_BTD, self.site(site, source_BTD)
        for term_BTD in (sum_BTD, update_BTD):
            check_source("streams", term_BTD, self._bank)
        self._token, source_TD, output_TD = torch.ops.isoloss.stream_add_site(
            self._token, sum_BTD.flatten(0, -2).contiguous(), update_BTD.flatten(0, -2).contiguous(), self._bank, site,
            self._block,
        )  # fmt: skip
        return source_TD.view(sum_BTD.shape), output_TD.view(sum_BTD.shape)


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
