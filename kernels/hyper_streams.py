"""The streams of hyper-connections in one forward pass: the interface over the operator, and what it refuses.

Last of the hyper-connection modules: :mod:`scaling.kernels.dispatch` opens it, :mod:`scaling.kernels.hyper_step` has
the operator.

Shape legend: as in :mod:`scaling.kernels.hyper`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from scaling.errors import KernelError, nearest
from scaling.kernels.hyper import KINDS, Rule
from scaling.kernels.hyper_step import encode

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_STREAMS = 8  # beyond, a token's tile no longer fits the registers


class HyperStreams:
    """The streams of one forward pass, and the coefficients that the last read decided.

    Parameters
    ----------
    embedding_BTD
        Every stream at first.
    streams
        M.

    Raises
    ------
    KernelError
        If a size or dtype is not supported.
    """

    def __init__(self, embedding_BTD: Tensor, streams: int) -> None:
        width = embedding_BTD.shape[-1]
        if width % 16 or embedding_BTD.dtype not in _DTYPES or not 1 <= streams <= _MAX_STREAMS:
            raise KernelError(
                f"hyper-connections: {streams} streams of width {width} in {embedding_BTD.dtype}; allowed are 1 to "
                f"{_MAX_STREAMS} streams, multiples of 16, float32, bfloat16 and float16; choose others, or set "
                "ISOLOSS_KERNELS=reference"
            )
        self._shape = embedding_BTD.shape
        self._stream_TMD = embedding_BTD.flatten(0, -2).unsqueeze(1).expand(-1, streams, -1).contiguous()
        empty = embedding_BTD.new_empty(0, dtype=torch.float32)
        self._post_TM, self._mix_TMM = empty, empty

    def step(
        self,
        rule: Rule,
        update_BTD: Tensor | None,
        *,
        phi: Tensor | None = None,
        scale_K: Tensor | None = None,
        bias_K: Tensor | None = None,
        shift_F: Tensor | None = None,
        offset_F: Tensor | None = None,
    ) -> Tensor:
        """Write the last sublayer's output, none before the first, and return what the next reads.

        Parameters
        ----------
        rule
            How coefficients follow from projections.
        update_BTD
            Output of the last sublayer.
        phi
            Weights of the projections, ``(M * D, K)``; for ``hc`` ``(D, M + 2)``, gains of the norm multiplied in.
        scale_K, bias_K
            Of the coefficients' logits; for ``hc`` stream by stream.
        shift_F, offset_F
            For ``hc`` with LayerNorm: sums over the width of ``phi``, and the projections of the norm's bias.

        Raises
        ------
        KernelError
            If a weight that the rule needs is missing, or a size is another than the streams' and the rule's.
        """
        self._check(
            rule, update_BTD, {"phi": phi, "scale": scale_K, "bias": bias_K, "shift": shift_F, "offset": offset_F}
        )
        empty = self._stream_TMD.new_empty(0, dtype=torch.float32)
        weights = [
            empty if weight is None else weight.float().contiguous()
            for weight in (phi, shift_F, offset_F, scale_K, bias_K)
        ]
        if phi is not None and shift_F is None:
            weights[1] = weights[2] = empty.new_zeros(phi.shape[-1])
        update_TD = None if update_BTD is None else update_BTD.flatten(0, -2)
        read_TD: Tensor
        out_TMD, read_TD, self._post_TM, self._mix_TMM, _, _ = torch.ops.isoloss.hyper_step(
            self._stream_TMD, update_TD, self._post_TM, self._mix_TMM, *weights, *encode(rule)
        )
        if update_TD is not None:
            self._stream_TMD = out_TMD
        return read_TD.view(self._shape)

    def _check(self, rule: Rule, update_BTD: Tensor | None, weights: dict[str, Tensor | None]) -> None:
        """Refuse what has other sizes than the streams: kernels read memory by these sizes."""
        _, streams, width = self._stream_TMD.shape
        if rule.kind not in KINDS:
            raise KernelError(f"hyper-connections: kind {rule.kind!r}; {nearest(rule.kind, KINDS)}")
        coefficients = rule.coefficients(streams)
        phi = (width, streams + 2) if rule.kind == "hc" else (streams * width, coefficients)
        sizes = {"phi": phi, "scale": (coefficients,), "bias": (coefficients,), "shift": phi[1:], "offset": phi[1:]}
        needed = [] if rule.kind == "sum" else ["bias", "phi", "scale"] if rule.projects else ["bias"]
        if rule.kind == "hc" and rule.projects and rule.centred:
            needed += ["shift", "offset"]
        for name, weight in weights.items():
            found = "none" if weight is None else str(tuple(weight.shape))
            if name in needed if weight is None else needed and found != str(sizes[name]):
                raise KernelError(
                    f"hyper-connections: {name} of shape {found} for {streams} streams of width {width}, kind "
                    f"{rule.kind!r}; needed is {sizes[name]}; hand in weights of one model"
                )
        if update_BTD is not None and update_BTD.shape != self._shape:
            raise KernelError(
                f"hyper-connections: an update of shape {tuple(update_BTD.shape)}; the streams were opened for "
                f"{tuple(self._shape)}; hand in a sublayer's output for the same tokens"
            )
