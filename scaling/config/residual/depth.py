"""Options of the methods that attend over depth: softmax weights over the outputs of earlier sublayers.

Beside ``stream`` and ``dense`` in ``scaling.config.residual``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from scaling.config.residual.base import Blocked, check_heads, check_positive
from scaling.errors import ConfigError

QueryInit = Literal["zero", "random"]


@dataclass(frozen=True, kw_only=True, slots=True)
class AttnRes(Blocked):
    """Attention residuals, one query a site over the full width (arXiv 2603.15031)."""

    method: ClassVar[str] = "attnres"
    query_init: QueryInit = "zero"


@dataclass(frozen=True, kw_only=True, slots=True)
class Mhar(Blocked):
    """Multi-head attention residuals, ``heads`` queries a site over slices of the width (arXiv 2607.27230).

    ``key_norm``: over the full width before slicing (equation and code) or over each slice (the paper's listing).
    ``source``: each sublayer's output, or the stream as it stands after it. ``align``: heads are slices of the width,
    or at attention sites one full-width query for each key/value group (the paper's null result).
    """

    method: ClassVar[str] = "mhar"
    heads: int = 8
    query_init: QueryInit = "zero"
    key_norm: Literal["full", "per_head"] = "full"
    source: Literal["output", "cumulative"] = "output"
    align: Literal["slices", "kv_groups"] = "slices"

    def __post_init__(self) -> None:
        Blocked.__post_init__(self)
        if self.heads < 1:
            raise ConfigError(f"heads={self.heads} is not positive; allowed: a divisor of model.d_model")

    def check(self, *, d_model: int, num_layers: int) -> None:
        Blocked.check(self, d_model=d_model, num_layers=num_layers)
        check_heads(self.heads, d_model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta(Blocked):
    """Delta attention residuals: the ordinary stream plus routed deltas (arXiv 2605.18855).

    ``gate="fixed"`` adds them with weight 1 (training from scratch), ``"learned"`` with a scalar a site that starts at
    0, so that a converted model starts as it was. ``null_source`` puts a learned vector, 0 at first, before the
    sources. ``block_delta``: a block's source is the change of the stream over it (the paper's text), or the stream
    minus the previous *source* (the released code).
    """

    method: ClassVar[str] = "delta"
    heads: int = 8
    query_init: QueryInit = "zero"
    gate: Literal["fixed", "learned"] = "fixed"
    null_source: bool = False
    block_delta: Literal["change", "recursive"] = "change"

    def __post_init__(self) -> None:
        Blocked.__post_init__(self)
        check_positive(self, "heads")

    def check(self, *, d_model: int, num_layers: int) -> None:
        Blocked.check(self, d_model=d_model, num_layers=num_layers)
        check_heads(self.heads, d_model)


@dataclass(frozen=True, kw_only=True, slots=True)
class Msar(Blocked):
    """Multi-stream attention residuals: m = ``streams`` views of each source by causal convolutions.

    ``kernels`` are the widths in tokens of the m - 1 convolutions (stream 0 is the source itself); the default is
    4, 8, 12, ... ``convolution=False`` keeps m identical replicas and ``mixer="mean"`` drops the sigmoid mixer: the
    paper's two ablations. What the paper's summary leaves open is an option: ``conv_scope`` (a kernel for each source,
    one for all, or one for each site), ``conv_start`` (the identity, which keeps the start at the pre-norm function, or
    random), ``gain`` (of the key norm: one for all streams of a site or one each).
    """

    method: ClassVar[str] = "msar"
    default_blocks: ClassVar[int | None] = 8
    streams: int = 4
    kernels: tuple[int, ...] | None = None
    convolution: bool = True
    mixer: Literal["sigmoid", "mean"] = "sigmoid"
    conv_scope: Literal["source", "global", "site"] = "source"
    conv_start: Literal["identity", "random"] = "identity"
    gain: Literal["shared", "stream"] = "shared"
    query_init: QueryInit = "zero"
    mixer_gate_start: float = 0.01

    def __post_init__(self) -> None:
        Blocked.__post_init__(self)
        check_positive(self, "streams")
        if self.kernels is not None and (len(self.kernels) != self.streams - 1 or min(self.kernels, default=1) < 1):
            raise ConfigError(
                f"kernels={list(self.kernels)} must be {self.streams - 1} positive widths: one for each stream but the "
                f"first, streams={self.streams}"
            )

    @property
    def kernel_widths(self) -> tuple[int, ...]:
        """Widths of the convolutions, none where they are off."""
        if not self.convolution:
            return ()
        # {4, 8, 12} for m = 4 is the paper's; the same step for other m is ours.
        return self.kernels if self.kernels is not None else tuple(4 * j for j in range(1, self.streams))
