"""``mhar``: multi-head attention residuals (arXiv 2607.27230).

As ``attnres``, with the site's query cut into H slices that each have their own softmax over depth:

    h_(s,[h]) = sum_i softmax_i( w_(s,[h]) . (RMSNorm(v_i) * g_s)_[h] ) v_(i,[h])

The norm is taken over the full width before slicing: the paper's equation and released code say so, its listing norms
each slice. No parameters and no FLOPs beyond ``attnres``; H = 1 is ``attnres`` bit for bit. Queries start at 0 (the
released code's default), gains at 1.
"""

from __future__ import annotations

from scaling.config.model import ModelConfig
from scaling.config.residual import AttnRes, Mhar
from scaling.models.residual.attnres import DepthRouting


def make_mhar(config: ModelConfig, options: Mhar) -> DepthRouting:
    """Depth routing in ``options.heads`` slices."""
    return DepthRouting(config, options, heads=options.heads, query_init=options.query_init)


def make_attnres(config: ModelConfig, options: AttnRes) -> DepthRouting:
    """Depth routing over the full width."""
    return DepthRouting(config, options, heads=1, query_init=options.query_init)
