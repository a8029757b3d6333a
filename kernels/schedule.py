"""Which rows, groups and order a forward and backward pass use, and the ledger that refuses every other order.

Pure bookkeeping between the routing kernels and the operators of :mod:`scaling.kernels.bank`; nothing is launched here.

The bank holds one row a source. Site s reads the rows written before it and its own newest source. In backward, the
rows of a group of sources are dead once the gradients of the group are done, and the gradients G of the sites before
them appear right after: they take those rows' places, so that both passes need only a group more rows than sources.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from scaling.errors import KernelError

_MAX_GROUP_QUERIES = 16  # pull_group.MAX_GROUP_QUERIES; that module imports triton, which planning must not need
MAX_GROUP_SOURCES = 16  # rows of the tensor-core tile of gather_group
MAX_GROUP_SITES = 64  # sites of one launch of gather_group


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """The schedule of one bank: a function of three numbers, the same in every pass.

    Parameters
    ----------
    num_sites
        Sites that mix sources: one before every sublayer, one before the final norm.
    block
        Sublayers whose outputs are summed into one source; 1 makes every output a source.
    group
        Sites that share one read of all older rows; 1 reads them for every site.
    readers
        Mixes that each site makes of its sources, with a query each; more than 1 only without groups.
    """

    num_sites: int
    block: int
    group: int
    readers: int = 1

    def __post_init__(self) -> None:
        assert self.readers == 1 or self.group == 1
        if self.num_sites < 1 or self.block < 1 or not 1 <= self.group <= _MAX_GROUP_QUERIES - 1:
            raise KernelError(
                f"bank with {self.num_sites} sites, blocks of {self.block}, groups of {self.group}: "
                f"sites and blocks must be at least 1, groups 1 to {_MAX_GROUP_QUERIES - 1}; choose other sizes"
            )

    @property
    def num_rows(self) -> int:
        """Rows that hold sources."""
        return self.num_sites if self.block == 1 else max(1, -(-(self.num_sites - 1) // self.block))

    @property
    def num_slots(self) -> int:
        """Rows of the bank with those for partial results and gradients."""
        if self.readers > 1:
            return self.num_rows + self.readers * (self.num_sites if self.block == 1 else self.block)
        return self.num_rows + (self.shift if self.block == 1 else self.block)

    @property
    def shift(self) -> int:
        """With blocks of 1: rows between a source and the G that takes its place, as many as the largest group has."""
        return 1 if self.group == 1 else max(self.group, len(self.backward_group(0)))

    def write_row(self, site: int) -> int | None:
        """Row that takes the site's newest source, or None if it is a running sum that later sites do not see."""
        if self.block == 1:
            return site
        return site // self.block if site % self.block == 0 and site // self.block < self.num_rows else None

    def rows_before(self, site: int) -> int:
        """Rows written before the site, all of which it reads."""
        return site if self.block == 1 else min(-(-site // self.block), self.num_rows)

    def block_sites(self, site: int) -> range:
        """Sites of the block that the site belongs to; the last site stands alone."""
        last = self.num_sites - 1
        if site == last:
            return range(last, last + 1)
        start = site - site % self.block
        return range(start, min(start + self.block, last))

    def forward_group(self, site: int) -> range:
        """Sites that share the read of ``rows_before(start)`` rows with this one."""
        if self.group == 1:
            return range(site, site + 1)
        if self.block == 1:
            start = site - site % self.group
            # A short last group joins the one before it, if its queries still fit into one tile.
            remainder = self.num_sites % self.group
            if start and start + self.group > self.num_sites and self.group + remainder <= _MAX_GROUP_QUERIES:
                start -= self.group
            stop = start + self.group
            if self.num_sites - stop < self.group and self.num_sites - start <= _MAX_GROUP_QUERIES:
                stop = self.num_sites
            return range(start, stop)
        sites = self.block_sites(site)
        if site == sites.start:
            return range(site, site + 1)
        start = sites.start + 1 + (site - sites.start - 1) // _MAX_GROUP_QUERIES * _MAX_GROUP_QUERIES
        return range(start, min(start + _MAX_GROUP_QUERIES, sites.stop))

    def backward_group(self, site: int) -> range:
        """With blocks of 1: sources whose gradients share one read of all later G with that of this source."""
        assert self.block == 1
        if self.group == 1:
            return range(self.num_sites)
        # Groups are counted from the last source; a short first one joins the next, if both fit into one tile.
        remainder = self.num_sites % self.group
        first = remainder
        if remainder and remainder + self.group <= MAX_GROUP_SOURCES:
            first = min(remainder + self.group, self.num_sites)
        if site < first:
            return range(first)
        start = first + (site - first) // self.group * self.group
        return range(start, start + self.group)

    def partial_slot(self, site: int) -> int:
        """Row that holds the partial mix of a site until the site runs."""
        return site if self.block == 1 else self.num_rows + site - self.block_sites(site).start

    def gradient_slot(self, site: int) -> int:
        """Row that holds G of a site, the first of as many as it has readers."""
        if self.readers > 1:
            local = site if self.block == 1 else site - self.block_sites(site).start
            return self.num_rows + self.readers * local
        return site + self.shift if self.block == 1 else self.num_rows + site - self.block_sites(site).start


@dataclasses.dataclass(kw_only=True, slots=True)
class Order:
    """How far the two passes over the sites of one bank have come, and the refusal of every other order.

    ``written`` counts the sites of the forward pass; the gradients of sites ``frontier`` and above are done.
    """

    num_sites: int
    written: int = 0
    frontier: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.frontier = self.num_sites

    def enter_site(self, site: int, *, in_backward: bool) -> bool:
        """Admit the forward pass of a site; say whether it is a recomputation.

        Raises
        ------
        KernelError
            If the site is neither the next one nor, in backward after a complete forward pass, one whose gradient is
            still to come.
        """
        if not 0 <= site < self.num_sites:
            raise KernelError(
                f"source bank: site {site} of {self.num_sites}; allowed are 0 to {self.num_sites - 1}; open the bank "
                "with a query for every site"
            )
        if site == self.written:
            self.written += 1
            return False
        if self.written < self.num_sites:
            raise KernelError(
                f"source bank: site {site} ran when site {self.written} was next; a bank serves one forward pass of "
                "one model, sites in order; open a new bank for every forward pass and model"
            )
        if not in_backward:
            raise KernelError(
                f"source bank: site {site} ran again after all {self.num_sites} sites, outside of backward; a bank "
                "serves one forward pass of one model; open a new bank for every forward pass and model"
            )
        if site >= self.frontier:
            raise KernelError(
                f"source bank: site {site} was recomputed, but backward has passed it and reused its row; allowed are "
                f"sites below {self.frontier}; run the forward pass again"
            )
        return True

    def enter_backward(self, site: int) -> None:
        """Admit the backward pass of a site.

        Raises
        ------
        KernelError
            If it is not the highest site whose gradient is still to come: a second backward pass, ``retain_graph``, or
            a loss that leaves out later sites.
        """
        if self.written < self.num_sites:
            raise KernelError(
                f"source bank: backward of site {site} after a forward pass of {self.written} of {self.num_sites} "
                "sites; run all sites before backward"
            )
        if site != self.frontier - 1:
            expected = f"site {self.frontier - 1} is next" if self.frontier else "its backward pass is already done"
            raise KernelError(
                f"source bank: backward of site {site}, but {expected}; rows are reused during backward, so that a "
                "second backward pass, retain_graph or another order cannot be right; run the forward pass again"
            )
        self.frontier = site

    def require_end(self) -> None:
        """Admit the end of the backward pass.

        Raises
        ------
        KernelError
            If the gradient of a site is missing.
        """
        if self.frontier:
            raise KernelError(
                f"source bank: the queries' gradient was asked for while {self.frontier} sites had none; "
                "run the forward pass again"
            )


@dataclasses.dataclass(kw_only=True, slots=True)
class Ledger(Order):
    """What has been done to one bank, and the buffers its backward pass needs.

    ``lse_moved`` says that a gradient came for a site's log-sum-exp, on which even a query with one source acts.
    """

    num_sites: int = dataclasses.field(init=False)
    plan: Plan
    lse_moved: bool = False
    delta_STH: Tensor | None = None
    query_gradient_PSD: Tensor | None = None
    coefficient_KMTH: Tensor | None = None
    partial_KTD: Tensor | None = None
    radial_KTH: Tensor | None = None

    def __post_init__(self) -> None:
        self.num_sites = self.frontier = self.plan.num_sites

    def finish(self) -> Tensor:
        """Close the backward pass: return the queries' gradient ``(S, D)`` and drop the buffers."""
        self.require_end()
        assert self.query_gradient_PSD is not None
        gradient_SD = self.query_gradient_PSD.sum(0)
        if (
            not self.lse_moved
        ):  # the first site has one source: its weight is 1 whatever the query, all else is rounding
            gradient_SD[: self.plan.readers] = 0.0
        self.query_gradient_PSD = self.delta_STH = self.coefficient_KMTH = self.partial_KTD = self.radial_KTH = None
        return gradient_SD


def grouping(head_width: int) -> int:
    """Group size that measured best, or 1 where a head is too wide for one tensor-core tile (see NOTES.md)."""
    return 1 if head_width > 256 else 8


def in_backward() -> bool:
    """Whether this runs inside autograd's backward pass, where checkpointed sublayers are recomputed."""
    # the same question as torch.utils.checkpoint asks, of the same function; there is no public one
    return bool(torch._C._current_graph_task_id() != -1)


def check_source(what: str, source_BTD: Tensor, bank: Tensor) -> None:
    """Refuse a source of other sizes or another kind of number than those the bank was opened for.

    Raises
    ------
    KernelError
        If the tokens, the width or the dtype differ; float32 sums may enter a bank of 16 bits.
    """
    tokens, width = bank.shape[1:]
    kind = source_BTD.dtype
    narrow = kind.is_floating_point and kind.itemsize <= 4
    if source_BTD.dim() < 2 or source_BTD.shape[-1] != width or source_BTD.numel() != tokens * width or not narrow:
        raise KernelError(
            f"{what}: a source of shape {tuple(source_BTD.shape)} in {kind}; the bank was opened for {tokens} tokens "
            f"of width {width}; hand in what it was opened for, floating point in 32 bits at most"
        )
