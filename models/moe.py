"""Feed-forward of experts, DeepSeekMoE-style: shared experts and fine-grained routed ones, no auxiliary loss.

After ``layers`` in the flow; takes the place of ``SwiGLU`` where ``model.moe`` asks for it. A token's scores are
s = sigmoid(W x) (arXiv 2412.19437, section 2.1.2); it goes to the k experts with the largest s + bias, weighted by s
divided by the sum of the chosen s. The bias of an expert is no parameter: after each optimiser step it rises by
``bias_update_rate`` where the expert got fewer tokens than the average and falls where it got more (arXiv 2408.15664).
No token is dropped. Routed experts run as one grouped matrix product where the device has it (CUDA, bf16), else one
after another.

Shapes: B batch, T time, D width, E routed experts, F expert width, n = B T tokens, k choices a token.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from scaling.config.model import ModelConfig
from scaling.models.initialisation import Normal, Rule
from scaling.models.layers import Context, Linear, Sublayer, SwiGLU


class Experts(nn.Module):
    """E SwiGLU feed-forwards with their weights stacked."""

    def __init__(self, num_experts: int, width: int, hidden: int, *, std: float) -> None:
        super().__init__()
        self.std = std
        self.gate_EFD = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.up_EFD = nn.Parameter(torch.empty(num_experts, hidden, width))
        self.down_EDF = nn.Parameter(torch.empty(num_experts, width, hidden))

    def initial_values(self) -> Mapping[str, Rule]:
        normal = Normal(std=self.std)
        return {"gate_EFD": normal, "up_EFD": normal, "down_EDF": normal}

    def forward(self, x_nD: Tensor, counts_E: Tensor) -> Tensor:
        """Apply expert e to the next ``counts_E[e]`` rows of ``x_nD``, which are sorted by expert."""
        if _has_grouped_product(x_nD):
            ends_E = counts_E.cumsum(0).to(torch.int32)
            hidden = F.silu(_grouped(x_nD, self.gate_EFD, ends_E)) * _grouped(x_nD, self.up_EFD, ends_E)
            return _grouped(hidden, self.down_EDF, ends_E)
        outs = []
        for e, rows in enumerate(torch.split(x_nD, counts_E.tolist())):
            hidden = F.silu(F.linear(rows, self.gate_EFD[e])) * F.linear(rows, self.up_EFD[e])
            outs.append(F.linear(hidden, self.down_EDF[e]))
        return torch.cat(outs)


def _has_grouped_product(x: Tensor) -> bool:
    half = torch.is_autocast_enabled(x.device.type) or x.dtype == torch.bfloat16
    return x.device.type == "cuda" and half and torch.cuda.get_device_capability(x.device) >= (9, 0)


def _grouped(x_nD: Tensor, weight_EOD: Tensor, ends_E: Tensor) -> Tensor:
    """Rows ends[e - 1]..ends[e] times the transposed weight of expert e, in bf16."""
    return F.grouped_mm(x_nD.bfloat16(), weight_EOD.bfloat16().transpose(-2, -1), offs=ends_E)


class MoE(Sublayer):
    """Shared and routed experts with the norm in front of them."""

    bias_E: Tensor

    def __init__(self, config: ModelConfig, *, norm: bool = True) -> None:
        super().__init__(config, norm=norm)
        assert config.moe is not None
        self.options = moe = config.moe
        d, std = config.d_model, config.init_std
        self.router = Linear(d, moe.num_experts, std=std)
        self.experts = Experts(moe.num_experts, d, moe.d_expert, std=std)
        shared = moe.num_shared_experts * moe.d_expert
        self.shared = SwiGLU(config, norm=False, width=shared) if shared else None
        self.register_buffer("bias_E", torch.zeros(moe.num_experts))
        self.load_E: Tensor | None = None  # tokens by expert since the last bias update, on this process

    def transform(self, x_BTD: Tensor, context: Context | None, *, normed: bool) -> Tensor:
        x_nD = x_BTD.flatten(0, 1)
        chosen_nk, weights_nk = self._route(x_nD)
        tokens, k = chosen_nk.shape
        expert_m = chosen_nk.flatten()  # m = n k choices
        order_m = torch.argsort(expert_m, stable=True)
        counts_E = torch.bincount(expert_m, minlength=self.options.num_experts)
        sorted_mD = x_nD.unsqueeze(1).expand(-1, k, -1).reshape(tokens * k, -1)[order_m]
        out_mD = self.experts(sorted_mD, counts_E)
        out_nkD = out_mD[torch.argsort(order_m)].view(tokens, k, -1)
        out_nD = (out_nkD * weights_nk.unsqueeze(-1).to(out_nkD.dtype)).sum(dim=1)
        if self.training:
            self.load_E = counts_E if self.load_E is None else self.load_E + counts_E
        out_BTD: Tensor = out_nD.view_as(x_BTD)
        if self.shared is not None:
            out_BTD = out_BTD + self.shared(x_BTD, context)
        return out_BTD

    def _route(self, x_nD: Tensor) -> tuple[Tensor, Tensor]:
        """Chosen experts (n, k) and their weights (n, k), in float32 at least."""
        wide = x_nD if x_nD.dtype == torch.float64 else x_nD.float()
        with torch.autocast(x_nD.device.type, enabled=False):
            scores_nE = torch.sigmoid(F.linear(wide, self.router.weight.to(wide.dtype)))
        chosen_nk = torch.topk(scores_nE.detach() + self.bias_E, self.options.top_k, dim=-1).indices
        weights_nk = scores_nE.gather(-1, chosen_nk)
        return chosen_nk, weights_nk / weights_nk.sum(dim=-1, keepdim=True)

    @torch.no_grad()
    def update_bias(self, load_E: Tensor) -> None:
        """Move the biases against the load (tokens by expert over all processes) and forget the local load."""
        load = load_E.to(self.bias_E.dtype)
        self.bias_E += self.options.bias_update_rate * torch.sign(load.mean() - load)
        self.load_E = None
