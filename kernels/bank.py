"""The source bank: depth routing of one forward pass, for eager mode, compile and CUDA graphs.

A forward pass opens one bank, writes every source into it once and reads the mix of each site. Between the sites runs
the model's own code. Last of the routing modules: :mod:`scaling.kernels.operators` has the operators behind it, and
:mod:`scaling.kernels.dispatch` opens it, or plain PyTorch with the same interface.

Shape legend: S sites, R readers, T tokens, D width, H heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scaling.errors import KernelError
from scaling.kernels import operators as operators  # registers what torch.ops.isoloss calls
from scaling.kernels.schedule import Plan, check_source, grouping

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_SITES = 512


class SourceBank:
    """Depth routing of one forward pass.

    Parameters
    ----------
    query_SD
        ``u = w * g`` of every site (of each of its readers, site by site), float32; its gradient is complete when
        backward has reached site 0.
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
    readers
        Mixes that each site makes, with a query each; more than 1 runs without groups.
    per_head
        Norm keys head by head instead of over the full width.

    Raises
    ------
    KernelError
        If a size or dtype is not supported.
    """

    def __init__(
        self,
        query_SD: Tensor,
        source_TD: Tensor,
        *,
        heads: int,
        eps: float,
        block: int = 1,
        group: int | None = None,
        readers: int = 1,
        per_head: bool = False,
    ) -> None:
        if query_SD.dim() != 2 or source_TD.dim() < 2 or not eps >= 0:
            raise KernelError(
                f"source bank: queries of shape {tuple(query_SD.shape)}, sources of {tuple(source_TD.shape)}, epsilon "
                f"{eps}; allowed are queries (sites, width), sources (tokens, width) with more axes in front, epsilon "
                "from 0; hand in such"
            )
        queries, width = query_SD.shape
        if heads < 1 or width % heads or width % 16 or source_TD.shape[-1] != width:
            raise KernelError(
                f"source bank: width {source_TD.shape[-1]} with queries of {width} and {heads} heads; the width must "
                "be the queries', a multiple of 16 and of the heads; choose other heads"
            )
        if readers < 1 or queries % readers or not source_TD.numel():
            raise KernelError(
                f"source bank: {queries} queries of {readers} readers for sources of shape {tuple(source_TD.shape)}; "
                "allowed are as many queries for every site, and one token at least; hand in other sizes"
            )
        num_sites = queries // readers
        if source_TD.dtype not in _DTYPES or num_sites > _MAX_SITES:
            raise KernelError(
                f"source bank: {source_TD.dtype} with {num_sites} sites; allowed are float32, bfloat16, float16 and up "
                f"to {_MAX_SITES} sites; use the reference"
            )
        head_width = width // heads
        if readers > 1:
            group = 1
        elif group is None or head_width > 256:
            group = grouping(head_width)
        Plan(num_sites=num_sites, block=block, group=group, readers=readers)  # refuses impossible sizes
        self._eps, self._readers = eps, readers
        with torch.no_grad():
            self._bank, self._factor, self._lse, self._query = torch.ops.isoloss.bank_open(
                source_TD.detach().flatten(0, -2), query_SD.detach(), heads, block, group, readers, per_head
            )
        self._token = torch.ops.isoloss.bank_begin(query_SD, self._bank)

    def site(self, site: int, source_BTD: Tensor) -> Tensor:
        """Hand in the newest source of a site and return the site's mix, in the source's shape.

        With blocks of 1 the newest source is the output of the sublayer before (the embedding at site 0). With larger
        blocks it is the sum of the outputs in the current block: of the whole block at the site that follows it. With
        several readers the mixes come along a new first axis.
        """
        mixed, _, _ = self._run(site, source_BTD, None, self._eps)
        return mixed.view(*mixed.shape[:-2], *source_BTD.shape)

    def site_with_lse(self, site: int, source_BTD: Tensor) -> tuple[Tensor, Tensor]:
        """Return :meth:`site` and the log-sum-exp of its scores ``(B, T, H)``, to merge it with more sources."""
        self._need_one_reader("site_with_lse")
        mixed_TD, _, lse_TH = self._run(site, source_BTD, None, self._eps, with_lse=True)
        return mixed_TD.view(source_BTD.shape), lse_TH.view(*source_BTD.shape[:-1], -1)

    def normed_site(self, site: int, source_BTD: Tensor, gain_D: Tensor, norm_eps: float) -> Tensor:
        """Return ``RMSNorm(mix) * gain``: :meth:`site` and the sublayer's input norm in one, forward and backward."""
        self._need_one_reader("normed_site")
        _, normed_TD, _ = self._run(site, source_BTD, gain_D.contiguous(), norm_eps)
        return normed_TD.view(source_BTD.shape)

    def silent_site(self, site: int, source_BTD: Tensor) -> None:
        """Hand in the newest source at a site that nothing reads."""
        self._run(site, source_BTD, None, self._eps, silent=True)

    def _need_one_reader(self, what: str) -> None:
        if self._readers > 1:
            raise KernelError(
                f"source bank: {what} of {self._readers} readers; allowed is one; use site, and norm what it returns"
            )

    def _run(
        self,
        site: int,
        source_BTD: Tensor,
        gain_D: Tensor | None,
        norm_eps: float,
        *,
        silent: bool = False,
        with_lse: bool = False,
    ) -> tuple[Tensor, Tensor, Tensor]:
        check_source("source bank", source_BTD, self._bank)
        if gain_D is not None and gain_D.shape != self._bank.shape[-1:]:
            raise KernelError(
                f"source bank: a gain of shape {tuple(gain_D.shape)}; needed is ({self._bank.shape[-1]},); hand in the "
                "gain of the sublayer's norm"
            )
        source_TD = source_BTD.flatten(0, -2).to(self._bank.dtype)
        self._token, mixed, normed_TD, _, lse_TH = torch.ops.isoloss.bank_site(
            self._token, source_TD, self._bank, self._factor, self._lse, self._query, gain_D,
            site, self._readers, silent, with_lse, self._eps, norm_eps,
        )  # fmt: skip
        return mixed, normed_TD, lse_TH
