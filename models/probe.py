"""How much routing heads disagree about which sources to read, against random queries of the same norm.

After ``transformer`` in the flow; ``scaling probe disagreement`` uses it. The MHAR paper (arXiv
2607.27230, appendix D) reports that trained queries disagree far more across the width than matched-norm random ones;
its summary does not define the measure. Here it is, at a site and token, the mean over pairs of heads of the total
variation distance between their weights over the sources, 0 (the same reading) to 1 (no source in common). The null
replaces each head's u = query * gain by a random direction of the same length; the sources stay those of the trained
model. Sites with one source are left out. A single-head model is probed in slices too: what its one query would do if
the slices could choose for themselves.

Shapes: B batch, T time, D width, H heads, S sites, N sources, K random draws.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaling.errors import ConfigError
from scaling.models.layers import Context, make_context
from scaling.models.residual.attnres import DepthRouting, DepthState
from scaling.models.residual.routing import depth_logits, routing_weights
from scaling.models.transformer import Transformer

Array = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class Disagreement:
    """Routing of a model on some sequences.

    Attributes
    ----------
    learned
        (sequences, S) disagreement of the trained queries, the mean over tokens.
    random
        (sequences, S, K) the same for random queries of the same norms.
    weights
        (S, N, H) mean weight that a head of a site gives a source; NaN where the site does not see it.
    sites
        (S,) numbers of the probed sites: 0 feeds the first sublayer, the number of sublayers feeds the head.
    heads
        Slices of the width.
    """

    learned: Array
    random: Array
    weights: Array
    sites: NDArray[np.int64]
    heads: int

    @property
    def excess(self) -> Array:
        """(sequences,) learned minus random disagreement, the mean over sites and draws."""
        difference: Array = self.learned.mean(axis=1) - self.random.mean(axis=(1, 2))
        return difference


def pairwise_distance(weights_NBTH: Tensor) -> Tensor:
    """Mean total variation distance over pairs of heads (B, T).

    Sorting the heads' weights of a source turns the sum over pairs into one over order statistics:
    sum_(g < h) |p_g - p_h| = sum_k (2 k - H - 1) p_(k).
    """
    heads = weights_NBTH.shape[-1]
    ordered = weights_NBTH.sort(dim=-1).values
    factors = torch.arange(1, heads + 1, device=ordered.device, dtype=ordered.dtype) * 2 - heads - 1
    return 0.5 * (ordered * factors).sum(dim=(0, -1)) / (heads * (heads - 1) / 2)


@torch.no_grad()
def disagreement(
    model: Transformer, batches: Iterable[Tensor], *, heads: int | None = None, draws: int = 4, seed: int = 0
) -> Disagreement:
    """Run the model on token batches and measure its routing.

    Parameters
    ----------
    model
        A model that attends over depth in slices of the width: ``attnres``, ``mhar``, ``delta``.
    batches
        tokens_BT.
    heads
        Slices; default the model's heads, 8 for a single-head model.
    draws
        Random queries a head and site.
    seed
        Of the random queries.

    Raises
    ------
    ConfigError
        If the method does not route in slices, or ``heads`` does not divide the width or is below 2.
    """
    method, config = model.residual, model.config
    if not isinstance(method, DepthRouting) or method.attention != "one":
        raise ConfigError(
            f"model.residual.method={config.residual.method!r} does not route slices of the width over depth; "
            "allowed: attnres, delta, mhar (align: slices)"
        )
    slices = heads if heads is not None else (method.heads if method.heads > 1 else 8)
    if slices < 2 or config.d_model % slices:
        raise ConfigError(f"heads={slices} must be at least 2 and divide model.d_model={config.d_model}")
    key_SHC = (method.query_SD * method.gain_SD).view(len(method.query_SD), slices, -1)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(draws, *key_SHC.shape, generator=generator, dtype=torch.float64).to(key_SHC)
    random_KSHC = noise / noise.norm(dim=-1, keepdim=True) * key_SHC.norm(dim=-1)[None, ..., None]
    probe = _Probe(method, torch.cat((key_SHC[None], random_KSHC)))
    training = model.training
    model.eval()
    try:
        for tokens_BT in batches:
            embedding_BTD = model.embedding(tokens_BT)
            context = make_context(tokens_BT, None, config, embedding_BTD.dtype)
            probe.follow(model, method.eager(embedding_BTD), context)
    finally:
        model.train(training)
    return probe.result(slices)


class _Probe:
    """Collects distances and weights, site by site."""

    def __init__(self, method: DepthRouting, queries_QSHC: Tensor) -> None:
        self.method, self.queries_QSHC = method, queries_QSHC  # the first of Q is the trained one
        self.distances: list[Array] = []  # one a batch: (B, S, Q)
        self.weights: dict[int, Tensor] = {}  # site: sum over tokens (N, H)

    def follow(self, model: Transformer, state: DepthState, context: Context) -> None:
        """One forward pass."""
        by_site: list[Tensor] = []
        num_sites = self.queries_QSHC.shape[1]
        for site, sublayer in enumerate([*model.sublayers(), None]):
            sources, _ = state.visible(site) if site < num_sites else ([], [])
            if len(sources) > 1:
                by_site.append(self._measure(site, sources))
            if sublayer is not None:
                state.step(site, sublayer, context)
        self.distances.append(torch.stack(by_site, dim=1).double().cpu().numpy())

    def _measure(self, site: int, sources: list[Tensor]) -> Tensor:
        queries_QHC = self.queries_QSHC[:, site]
        eps, per_head = self.method.eps, self.method.norm_per_head
        logits = [depth_logits(source, queries_QHC, eps=eps, norm_per_head=per_head) for source in sources]
        distances = []
        for q in range(len(queries_QHC)):
            weights_NBTH = routing_weights([by_query[q] for by_query in logits])
            if q == 0:
                total_NH = weights_NBTH.double().sum(dim=(1, 2)).cpu()
                self.weights[site] = self.weights.get(site, torch.zeros_like(total_NH)) + total_NH
            distances.append(pairwise_distance(weights_NBTH).mean(dim=-1))
        return torch.stack(distances, dim=-1)  # (B, Q)

    def result(self, heads: int) -> Disagreement:
        """What was collected."""
        measured = np.concatenate(self.distances)
        sites = sorted(self.weights)
        widest = max(len(total) for total in self.weights.values())
        weights = np.full((len(sites), widest, heads), np.nan)
        for row, site in enumerate(sites):
            total_NH = self.weights[site]
            weights[row, : len(total_NH)] = (total_NH / total_NH.sum(dim=0)).numpy()
        return Disagreement(
            learned=measured[..., 0],
            random=measured[..., 1:],
            weights=weights,
            sites=np.array(sites, dtype=np.int64),
            heads=heads,
        )
