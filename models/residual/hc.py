"""``hc``: hyper-connections (arXiv 2409.19606).

State X of n streams (n, d) a token, all the embedding at first. Sublayer s reads a^T X and the streams become

    X <- A^T X + b f_s(a^T X),    a, b of n, A of n x n;    after the last sublayer h = sum of the streams.

Static: a = the s mod n-th unit vector, A = 1, b = 1 at the start, all learned. Dynamic (the default, n = 4): to each
entry of row i of (a | A) comes 0.01 tanh(norm(X_i) W), to b_i 0.01 tanh(norm(X_i) w), with W, w = 0 and the factors
0.01 learned. Both start as the pre-norm function, scaled by n before the final norm.

``variant="mhar_comparison"``: the static variant that the MHAR paper compared with, which is not the above. It reads
softmax(0) = the mean of the streams, A = 1 + 0.02 N, b = e_0 + 0.02 N, and the head reads the mean. It does not start
as the pre-norm function (the embedding in streams 1..n-1 dominates), so margins over it are margins over something
weaker.

Parameters a sublayer: n (n + 2), dynamic d (n + 2) + 2 more and with LayerNorm 2 d. FLOPs a token and sublayer:
2 d (2n + n^2), dynamic 2 d n (n + 2) more.

Shapes: B batch, T time, N streams, D width, S sublayers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.kernels import dispatch
from scaling.models.initialisation import Constant, Normal, Rule, Values
from scaling.models.residual.method import Residual, State
from scaling.models.residual.routing import widen

_GATE_START: Final = 0.01  # arXiv 2409.19606, section 4
_COMPARISON_STD: Final = 0.02  # the MHAR authors' code


class HyperState(State):
    """n streams; a read decides the mixing that the next write applies."""

    def __init__(self, embedding_BTD: Tensor, method: HyperConnections) -> None:
        self.method = method
        self.streams_BTND = embedding_BTD.unsqueeze(2).expand(-1, -1, method.streams, -1)
        self.mixing = method.static_mixing()
        self.coefficients: tuple[Tensor, Tensor] | None = None

    def read(self, site: int) -> Tensor:
        method = self.method
        if site == method.num_sublayers:
            total_BTD = self.streams_BTND.sum(dim=2)
            return total_BTD / method.streams if method.comparison else total_BTD
        mixing, write = self.mixing[0][site], self.mixing[1][site]  # (N, 1 + N), (N,)
        if method.dynamic:
            more_mixing, more_write = method.dynamic_coefficients(self.streams_BTND, site)
            mixing, write = mixing + more_mixing, write + more_write
        self.coefficients = (mixing[..., 1:], write)
        return (mixing[..., :1] * self.streams_BTND).sum(dim=-2)

    def write(self, site: int, out_BTD: Tensor) -> None:
        assert self.coefficients is not None, "write before read"
        mixing, write = self.coefficients
        mixed_BTND = torch.matmul(mixing.transpose(-1, -2), self.streams_BTND)
        self.streams_BTND = mixed_BTND + write.unsqueeze(-1) * out_BTD.unsqueeze(2)
        self.coefficients = None


class FusedHyperState(State):
    """n streams behind the kernels: a site writes the last sublayer's output and reads in one step."""

    def __init__(self, embedding_BTD: Tensor, method: HyperConnections) -> None:
        self.method = method
        self.streams = dispatch.open_hyper(embedding_BTD, method.streams)
        self.rule = dispatch.hyper_rule(
            kind="hc",
            projects=method.dynamic,
            tanh=method.tanh,
            centred=method.norm_gain_SD is not None,
            eps=method.eps,
        )
        mixing_SNM, write_SN = method.static_mixing()
        self.static_SK = torch.cat((mixing_SNM, write_SN.unsqueeze(-1)), dim=-1).flatten(1)
        self.out_BTD: Tensor | None = None

    def read(self, site: int) -> Tensor:
        method = self.method
        if site == method.num_sublayers:
            total_BTD = self.streams.step(dispatch.hyper_rule(kind="sum"), self.out_BTD)
            return total_BTD / method.streams if method.comparison else total_BTD
        weights = method.projections(site) if method.dynamic else {}
        return self.streams.step(self.rule, self.out_BTD, bias_K=self.static_SK[site], **weights)

    def write(self, site: int, out_BTD: Tensor) -> None:
        self.out_BTD = out_BTD


class HyperConnections(Residual):
    """Read, mixing and write weights for every sublayer."""

    def __init__(self, config: ModelConfig, choice: options.HyperConnections) -> None:
        super().__init__(config)
        n, d, sublayers = choice.streams, config.d_model, config.num_sublayers
        self.streams, self.eps, self.tanh = n, config.norm_eps, choice.tanh
        self.dynamic = choice.variant == "dynamic"
        self.comparison = choice.variant == "mhar_comparison"
        self.read_SN = nn.Parameter(torch.empty(sublayers, n))
        self.mixing_SNN = nn.Parameter(torch.empty(sublayers, n, n))
        self.write_SN = nn.Parameter(torch.empty(sublayers, n))
        if self.dynamic:
            self.project_SDM = nn.Parameter(torch.empty(sublayers, d, n + 2))
            self.gate_S2 = nn.Parameter(torch.empty(sublayers, 2))
        affine = self.dynamic and choice.norm == "layer"
        self.norm_gain_SD = nn.Parameter(torch.empty(sublayers, d)) if affine else None
        self.norm_bias_SD = nn.Parameter(torch.empty(sublayers, d)) if affine else None

    def initial_values(self) -> Mapping[str, Rule]:
        sublayers, n = self.read_SN.shape
        unit_NN = torch.eye(n)
        if self.comparison:
            return {
                "read_SN": Constant(value=0.0),
                "mixing_SNN": Normal(std=_COMPARISON_STD, mean=unit_NN),
                "write_SN": Normal(std=_COMPARISON_STD, mean=unit_NN[0]),
            }
        return {
            "read_SN": Values(unit_NN[torch.arange(sublayers) % n]),
            "mixing_SNN": Values(unit_NN.expand(sublayers, n, n)),
            "write_SN": Constant(value=1.0),
            "project_SDM": Constant(value=0.0),
            "gate_S2": Constant(value=_GATE_START),
            "norm_gain_SD": Constant(value=1.0),
            "norm_bias_SD": Constant(value=0.0),
        }

    def static_mixing(self) -> tuple[Tensor, Tensor]:
        """(a | A) as (S, N, 1 + N) and b as (S, N)."""
        read_SN = self.read_SN.softmax(dim=-1) if self.comparison else self.read_SN
        return torch.cat((read_SN.unsqueeze(-1), self.mixing_SNN), dim=-1), self.write_SN

    def dynamic_coefficients(self, streams_BTND: Tensor, site: int) -> tuple[Tensor, Tensor]:
        """What the streams add to (a | A), (B, T, N, 1 + N), and to b, (B, T, N)."""
        x_BTND, width = widen(streams_BTND), streams_BTND.shape[-1:]
        if self.norm_gain_SD is not None and self.norm_bias_SD is not None:
            gain_D, bias_D = widen(self.norm_gain_SD[site]), widen(self.norm_bias_SD[site])
            normed = F.layer_norm(x_BTND, width, gain_D, bias_D, self.eps)
        else:
            normed = F.rms_norm(x_BTND, width, None, self.eps)
        projected = torch.matmul(normed, widen(self.project_SDM[site]))  # (B, T, N, N + 2)
        projected = torch.tanh(projected) if self.tanh else projected
        gates = self.gate_S2[site]
        return gates[0] * projected[..., :-1], gates[1] * projected[..., -1]

    def projections(self, site: int) -> dict[str, Tensor]:
        """The dynamic part as the kernels take it: the norm's gain and bias within the projections."""
        phi_DM, gates = self.project_SDM[site], self.gate_S2[site]
        scale_M = torch.cat((gates[:1].expand(self.streams + 1), gates[1:]))
        weights = {"phi": phi_DM, "scale_K": scale_M.repeat(self.streams)}
        if self.norm_gain_SD is None or self.norm_bias_SD is None:
            return weights
        gained_DM = self.norm_gain_SD[site].unsqueeze(-1) * phi_DM
        offset_M = (self.norm_bias_SD[site].unsqueeze(-1) * phi_DM).sum(dim=0)  # no product that autocast would narrow
        return {**weights, "phi": gained_DM, "shift_F": gained_DM.sum(dim=0), "offset_F": offset_M}

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> State:
        if dispatch.choose("hyper", embedding_BTD.device).runs == "triton":
            return FusedHyperState(embedding_BTD, self)
        return HyperState(embedding_BTD, self)
