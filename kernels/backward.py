"""The backward pass of one site: which kernels run, over which rows and sites, in which order.

Between the kernels and the operators of :mod:`scaling.kernels.bank`. With blocks of 1 each source is gathered from the
later sites of its group, and the group, when backward enters it, from all sites beyond; with larger blocks each block's
sites are added to the gradients of all older rows when backward leaves the block.

Shape legend: N rows, S sites, T tokens, D width, H heads, K sources of a group, M sites.
"""

from __future__ import annotations

from torch import Tensor

from scaling.kernels.gather import gather
from scaling.kernels.gather_group import gather_group
from scaling.kernels.query_gradient import query_gradient
from scaling.kernels.schedule import MAX_GROUP_SITES, MAX_GROUP_SOURCES, Ledger


class BackwardStep:
    """The kernels of one site's backward pass, after ``G`` and ``delta`` of the site have been received."""

    def __init__(self, ledger: Ledger, bank: Tensor, factor: Tensor, lse: Tensor, query: Tensor, eps: float) -> None:
        assert ledger.delta_STH is not None and ledger.query_gradient_PSD is not None
        self.ledger, self.bank, self.factor, self.lse, self.query, self.eps = ledger, bank, factor, lse, query, eps
        self.delta, self.query_gradient = ledger.delta_STH, ledger.query_gradient_PSD

    def full(self, site: int, result_TD: Tensor) -> None:
        """Blocks of 1: source ``site`` from the later sites of its group, and before that its group from all others."""
        ledger, plan = self.ledger, self.ledger.plan
        group = plan.backward_group(site)
        outside = range(group.stop, plan.num_sites)
        if outside and site == group.stop - 1:
            if ledger.partial_KTD is None or ledger.radial_KTH is None:
                size = max(len(group), len(plan.backward_group(0)))
                ledger.partial_KTD = self.bank.new_empty((size, *self.bank.shape[1:]))
                ledger.radial_KTH = self.lse.new_empty((size, *self.lse.shape[1:]))
            for start in range(outside.start, outside.stop, MAX_GROUP_SITES):
                sites = range(start, min(start + MAX_GROUP_SITES, outside.stop))
                self.grouped(group, sites, ledger.partial_KTD, ledger.radial_KTH, add=start > outside.start)
        local = site - group.start
        shape = (len(group), len(group), *self.lse.shape[1:])
        if plan.group > 1 and site == group.stop - 1:
            ledger.coefficient_KMTH = self.bank.new_empty(shape)
        coefficients = ledger.coefficient_KMTH
        self.single(
            value_TD=self.bank[site],
            factor_T=self.factor[site],
            sites=range(site, group.stop),
            partial_TD=ledger.partial_KTD[local] if outside and ledger.partial_KTD is not None else None,
            radial_TH=ledger.radial_KTH[local] if outside and ledger.radial_KTH is not None else None,
            result_TD=result_TD,
            coefficient_MTH=None if coefficients is None else coefficients[local, local:],
        )
        if coefficients is not None and site == group.start:
            source_step, site_step, token_step, head_step = coefficients.stride()
            query_gradient(
                coefficient=coefficients,
                steps=(token_step, head_step, site_step, source_step),
                value_KTD=self.bank[group.start : group.stop],
                result_PSD=self.query_gradient,
                sites=group,
                heads=self.lse.shape[-1],
                triangle=True,
            )
            ledger.coefficient_KMTH = None

    def block(self, site: int, source_TD: Tensor | None, result_TD: Tensor) -> None:
        """Larger blocks: a running sum is read by its own site alone, a finished one by all later sites."""
        ledger, plan = self.ledger, self.ledger.plan
        assert source_TD is not None
        row = plan.write_row(site)
        sites = plan.block_sites(site)
        older = plan.rows_before(site)
        grouped = plan.group > 1
        if ledger.partial_KTD is None:
            shape = (plan.num_rows, *self.bank.shape[1:])
            ledger.partial_KTD = self.lse.new_zeros(shape)
            ledger.radial_KTH = self.lse.new_zeros((plan.num_rows, *self.lse.shape[1:])) if grouped else None
        if site == sites.start and older:
            if grouped and ledger.radial_KTH is not None:
                for first in range(0, older, MAX_GROUP_SOURCES):
                    rows = range(first, min(first + MAX_GROUP_SOURCES, older))
                    partial_KTD, radial_KTH = ledger.partial_KTD[rows.start :], ledger.radial_KTH[rows.start :]
                    for start in range(sites.start, sites.stop, MAX_GROUP_SITES):
                        part = range(start, min(start + MAX_GROUP_SITES, sites.stop))
                        self.grouped(rows, part, partial_KTD, radial_KTH, add=True)
            else:
                for index in range(older):
                    self.single(
                        value_TD=self.bank[index],
                        factor_T=self.factor[index],
                        sites=sites,
                        partial_TD=ledger.partial_KTD[index],
                        radial_TH=None,
                        result_TD=ledger.partial_KTD[index],
                    )
        self.single(
            value_TD=source_TD.contiguous(),
            factor_T=None if row is None else self.factor[row],
            sites=range(site, site + 1) if row is None else sites,
            partial_TD=None if row is None else ledger.partial_KTD[row],
            radial_TH=None if row is None or ledger.radial_KTH is None else ledger.radial_KTH[row],
            result_TD=result_TD,
        )

    def single(
        self,
        *,
        value_TD: Tensor,
        factor_T: Tensor | None,
        sites: range,
        partial_TD: Tensor | None,
        radial_TH: Tensor | None,
        result_TD: Tensor,
        coefficient_MTH: Tensor | None = None,
    ) -> None:
        """Gradient of one source over some sites, and their query gradients unless the coefficients are to be kept."""
        slot = self.ledger.plan.gradient_slot(sites.start)
        readers = self.ledger.plan.readers
        sites = range(sites.start * readers, sites.stop * readers)
        keep = coefficient_MTH is not None
        if coefficient_MTH is None:
            coefficient_MTH = self.bank.new_empty((len(sites), *self.lse.shape[1:]))
        gather(
            value_TD=value_TD,
            value_factor_T=factor_T,
            gradient_MTD=self.bank[slot : slot + len(sites)],
            query_SD=self.query,
            lse_STH=self.lse,
            delta_STH=self.delta,
            partial_TD=partial_TD,
            partial_radial_TH=radial_TH,
            coefficient_MTH=coefficient_MTH,
            result_TD=result_TD,
            sites=sites,
            eps=self.eps,
            per_head=self.factor.dim() == 3,
        )
        if keep:
            return
        site_step, token_step, head_step = coefficient_MTH.stride()
        query_gradient(
            coefficient=coefficient_MTH,
            steps=(token_step, head_step, site_step, 0),
            value_KTD=value_TD[None],
            result_PSD=self.query_gradient,
            sites=sites,
            heads=self.lse.shape[-1],
        )

    def grouped(self, rows: range, sites: range, partial_KTD: Tensor, radial_KTH: Tensor, *, add: bool) -> None:
        """Contribution of some sites to a group of rows, and those sites' query gradients from them."""
        _, tokens, heads = self.lse.shape
        slot = self.ledger.plan.gradient_slot(sites.start)
        values_KTD = self.bank[rows.start : rows.stop]
        coefficient_THMK = self.bank.new_empty((tokens, heads, len(sites), len(rows)))
        gather_group(
            value_KTD=values_KTD,
            factor_KT=self.factor[rows.start : rows.stop],
            gradient_MTD=self.bank[slot : slot + len(sites)],
            query_SD=self.query,
            lse_STH=self.lse,
            delta_STH=self.delta,
            result_KTD=partial_KTD,
            radial_KTH=radial_KTH,
            coefficient_THMK=coefficient_THMK,
            sites=sites,
            add=add,
        )
        query_gradient(
            coefficient=coefficient_THMK,
            steps=coefficient_THMK.stride(),
            value_KTD=values_KTD,
            result_PSD=self.query_gradient,
            sites=sites,
            heads=heads,
        )
