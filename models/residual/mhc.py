"""``mhc``: manifold-constrained hyper-connections (arXiv 2512.24880).

State X of m streams (m, d) a token, all the embedding at first. With x = RMS(vec X) over m d entries, sublayer s has

    H^pre = sigma(g_1 x phi^pre + b^pre) of m,   H^post = 2 sigma(g_2 x phi^post + b^post) of m,
    H^res = Sinkhorn(exp(g_3 mat(x phi^res) + b^res)) of m x m, doubly stochastic,

reads H^pre X, and the streams become H^res X + H^post f_s(H^pre X). The head reads the sum of the streams, or with
``read_out="learned"`` sigma(g x phi + b) X. Gates g start at 0.01 (Megatron's default).

The starts of phi and b are not published. ``start="prenorm"``, ours: phi = 0, b^post = 0, and b^pre is +1 on stream
s mod m and -1 on the others; the model is then the pre-norm function (all streams stay equal whatever H^pre and H^res
are), and unequal reads let the streams part. ``"random"``: phi = N(0, 0.02^2), b = 0. With phi = 0 and b = 0 nothing
would ever tell the streams apart. ``mixing_start``: b^res = 0 (H^res uniform) or -8 off the diagonal (near identity).
Switches where public code disagrees: order of the norms, Sinkhorn's start, transposition, factor of H^post.

Parameters a sublayer: m d (m^2 + 2m) + m^2 + 2m + 3; learned read-out m^2 d + m + 1. FLOPs a token and sublayer:
2 m d (m^2 + 2m) + 2 d (m^2 + 2m) + 4 m^2 t for t Sinkhorn iterations.

Shapes: B batch, T time, M streams, D width, S sublayers, K = M^2 + 2M coefficients.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.kernels import dispatch
from scaling.models.initialisation import Constant, Normal, Rule, Values
from scaling.models.residual.method import Residual, State
from scaling.models.residual.routing import widen

_OFF_DIAGONAL: Final = -8.0  # mhc-lite (arXiv 2601.05732), public code
_EPS: Final = 1e-6  # keeps a row softmax's zeros from dividing zero by zero, as in TileKernels


def sinkhorn(logits: Tensor, *, iterations: int, order: str = "column_row", start: str = "exp") -> Tensor:
    """Doubly stochastic matrix near exp(logits) (Sinkhorn and Knopp 1967).

    The axis normed last sums to 1 up to rounding. The other is off by at most exp(D tanh(D / 4)^(2 t - 1)) - 1 after t
    iterations, D the largest logarithm of a cross ratio of the entries: for 4 x 4 unit-normal logits and t = 20 below
    1e-4, in the median below 1e-7.

    Parameters
    ----------
    logits
        (..., M, M).
    iterations
        Times that both axes are normed.
    order
        ``"column_row"`` norms columns first (sums along a row are then exactly 1 at the end), ``"row_column"`` rows.
    start
        ``"exp"``, or ``"softmax"``: a row softmax plus 1e-6, then columns, then iterations - 1 times both axes.
    """
    if start == "softmax":
        matrix = torch.softmax(logits, dim=-1) + _EPS
        matrix = matrix / matrix.sum(dim=-2, keepdim=True)
        iterations -= 1
    else:
        matrix = torch.exp(logits - logits.amax(dim=(-2, -1), keepdim=True).detach())
    axes = (-2, -1) if order == "column_row" else (-1, -2)  # dividing by sums over axis -2 norms columns
    for _ in range(iterations):
        for axis in axes:
            matrix = matrix / matrix.sum(dim=axis, keepdim=True)
    return matrix


class MhcState(State):
    """m streams; a read decides the mixing and writing that the next write applies."""

    def __init__(self, embedding_BTD: Tensor, method: Mhc) -> None:
        self.method = method
        self.streams_BTMD = embedding_BTD.unsqueeze(2).expand(-1, -1, method.streams, -1)
        self.coefficients: tuple[Tensor, Tensor] | None = None

    def read(self, site: int) -> Tensor:
        method = self.method
        if site == method.num_sublayers:
            return method.read_out(self.streams_BTMD)
        pre_BTM, post_BTM, mixing_BTMM = method.coefficients(self.streams_BTMD, site)
        self.coefficients = (post_BTM, mixing_BTMM)
        return (pre_BTM.unsqueeze(-1) * self.streams_BTMD).sum(dim=2)

    def write(self, site: int, out_BTD: Tensor) -> None:
        assert self.coefficients is not None, "write before read"
        post_BTM, mixing_BTMM = self.coefficients
        mixed_BTMD = torch.matmul(mixing_BTMM.to(self.streams_BTMD.dtype), self.streams_BTMD)
        self.streams_BTMD = mixed_BTMD + post_BTM.unsqueeze(-1) * out_BTD.unsqueeze(2)
        self.coefficients = None


class FusedMhcState(State):
    """m streams behind the kernels: a site writes the last sublayer's output and reads in one step."""

    def __init__(self, embedding_BTD: Tensor, method: Mhc) -> None:
        self.method, choice = method, method.choice
        self.streams = dispatch.open_hyper(embedding_BTD, method.streams)
        self.rule = dispatch.hyper_rule(
            kind="mhc",
            iterations=choice.sinkhorn_iterations,
            rows_first=choice.order == "row_column",
            softmax_start=choice.sinkhorn_start == "softmax",
            transposed=choice.transpose,
            post_scale=choice.post_scale,
            eps=method.eps,
        )
        self.out_BTD: Tensor | None = None

    def read(self, site: int) -> Tensor:
        method, m = self.method, self.method.streams
        if site < method.num_sublayers:
            gates = method.gate_S3[site]
            scale_K = torch.cat([gate.expand(count) for gate, count in zip(gates, (m, m, m * m), strict=True)])
            weights = {"phi": method.project_SVK[site], "scale_K": scale_K, "bias_K": method.bias_SK[site]}
            return self.streams.step(self.rule, self.out_BTD, **weights)
        if method.head_project_VM is None:
            return self.streams.step(dispatch.hyper_rule(kind="sum"), self.out_BTD)
        assert method.head_gate is not None and method.head_bias_M is not None
        weights = {"phi": method.head_project_VM, "scale_K": method.head_gate.expand(m), "bias_K": method.head_bias_M}
        return self.streams.step(dispatch.hyper_rule(kind="read", eps=method.eps), self.out_BTD, **weights)

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.out_BTD = out_BTD


class Mhc(Residual):
    """Projections, gates and biases for every sublayer."""

    def __init__(self, config: ModelConfig, choice: options.Mhc) -> None:
        super().__init__(config)
        self.choice, self.streams, self.eps = choice, choice.streams, config.norm_eps
        m, sublayers = choice.streams, config.num_sublayers
        self.project_SVK = nn.Parameter(torch.empty(sublayers, m * config.d_model, m * m + 2 * m))
        self.bias_SK = nn.Parameter(torch.empty(sublayers, m * m + 2 * m))
        self.gate_S3 = nn.Parameter(torch.empty(sublayers, 3))
        learned = choice.read_out == "learned"
        self.head_project_VM = nn.Parameter(torch.empty(m * config.d_model, m)) if learned else None
        self.head_bias_M = nn.Parameter(torch.empty(m)) if learned else None
        self.head_gate = nn.Parameter(torch.empty(1)) if learned else None
        self.init_std = config.init_std

    def initial_values(self) -> Mapping[str, Rule]:
        m, sublayers = self.streams, len(self.bias_SK)
        random = self.choice.start == "random"
        bias_SK = torch.zeros(sublayers, m * m + 2 * m)
        if not random:
            bias_SK[:, :m] = 2 * torch.eye(m)[torch.arange(sublayers) % m] - 1
        if self.choice.mixing_start == "identity":
            bias_SK[:, 2 * m :] = (_OFF_DIAGONAL * (1 - torch.eye(m))).flatten()
        project: Rule = Normal(std=self.init_std) if random else Constant(value=0.0)
        gate = Constant(value=self.choice.gate_start)
        return {
            "project_SVK": project,
            "bias_SK": Values(bias_SK),
            "gate_S3": gate,
            "head_project_VM": project,
            "head_bias_M": Constant(value=0.0),
            "head_gate": gate,
        }

    def coefficients(self, streams_BTMD: Tensor, site: int) -> tuple[Tensor, Tensor, Tensor]:
        """H^pre (B, T, M), H^post (B, T, M), H^res (B, T, M, M) of a sublayer."""
        m, choice = self.streams, self.choice
        projected, gates, bias = (
            self._project(streams_BTMD, self.project_SVK[site]),
            self.gate_S3[site],
            self.bias_SK[site],
        )
        pre = torch.sigmoid(gates[0] * projected[..., :m] + bias[:m])
        post = choice.post_scale * torch.sigmoid(gates[1] * projected[..., m : 2 * m] + bias[m : 2 * m])
        logits = (gates[2] * projected[..., 2 * m :] + bias[2 * m :]).view(*projected.shape[:-1], m, m)
        mixing = sinkhorn(
            logits, iterations=choice.sinkhorn_iterations, order=choice.order, start=choice.sinkhorn_start
        )
        return pre, post, mixing.transpose(-1, -2) if choice.transpose else mixing

    def _project(self, streams_BTMD: Tensor, weights: Tensor) -> Tensor:
        flat = widen(streams_BTMD.flatten(-2))
        scale = torch.rsqrt(flat.square().mean(dim=-1, keepdim=True) + self.eps)
        with torch.autocast(flat.device.type, enabled=False):
            return torch.matmul(flat, widen(weights)) * scale

    def read_out(self, streams_BTMD: Tensor) -> Tensor:
        """What the head reads."""
        if self.head_project_VM is None:
            return streams_BTMD.sum(dim=2)
        assert self.head_gate is not None and self.head_bias_M is not None
        weights = torch.sigmoid(self.head_gate * self._project(streams_BTMD, self.head_project_VM) + self.head_bias_M)
        return (weights.unsqueeze(-1) * streams_BTMD).sum(dim=2)

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> State:
        if dispatch.choose("hyper", embedding_BTD.device).runs == "triton":
            return FusedMhcState(embedding_BTD, self)
        return MhcState(embedding_BTD, self)
