"""``msar``: multi-stream attention residuals.

Each source v (block summaries as in ``attnres``; the partial sum too) is seen as m streams: X^(0) = v and causal
depthwise convolutions X^(j)_t = sum_(tau < k_j) c_(j,tau) * v_(t-tau). Site s has a query a stream, and a mixer:

    o^(j) = sum_i softmax_i( w^(j)_s . (RMSNorm(X_i^(j)) * g_s) ) X_i^(j)
    a = sigma(g x phi + b),  x = RMS(vec o),    h_s = sum_j a_j o^(j)

The head reads the plain sum of the block summaries. Only single-stream sources are state; in plain PyTorch their
expansions are kept for the backward pass, the kernels make them anew. Defaults m = 4, k = 4, 8, 12, about 8 blocks.

The paper's summary leaves open, and options decide: kernels belong to a source (default: the streams are "functions of
the summaries", the same for all sites that read them), to all, or to a site; they start as the identity (default: with
queries 0 and equal mixer weights the model then starts as the pre-norm function) or random; one gain for the streams of
a site (default: the plainest) or one each. The mixer starts at phi = 0, b = logit(1 / m), the mean of the streams; with
one stream there is none. Streams part because their kernels differ in width.

Parameters a sublayer: m d queries, d (or m d) gains, with m > 1 m^2 d + m + 1 for the mixer; kernels d sum_j k_j times
the sources N (embedding and blocks), 1, or the sublayers. FLOPs a token: a site 4 d m N_s and 2 m^2 d + 2 m d for the
mixer; an expansion 2 d sum_j k_j + 2 d m.

Shapes: B batch, T time, D width, M streams, S sublayers, K kernel width, N sources.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import cast

import torch
from torch import Tensor, nn

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.kernels import dispatch
from scaling.models.initialisation import Constant, Normal, Rule, Values
from scaling.models.residual.banked import bank_dtype
from scaling.models.residual.convolution import causal_convolution
from scaling.models.residual.method import Residual, State
from scaling.models.residual.routing import depth_logits, mix, routing_weights, widen

Streams = tuple[Tensor, ...]  # M tensors (B, T, D)


class Kernels(nn.Module):
    """Kernels of one convolution stream, one for each of ``count`` owners."""

    def __init__(self, count: int, taps: int, width: int, *, identity: bool) -> None:
        super().__init__()
        self.identity = identity
        self.kernel_OKD = nn.Parameter(torch.empty(count, taps, width))

    def initial_values(self) -> Mapping[str, Rule]:
        count, taps, width = self.kernel_OKD.shape
        if not self.identity:
            return {"kernel_OKD": Normal(std=taps**-0.5)}
        return {"kernel_OKD": Values(torch.eye(taps)[0].view(1, taps, 1).expand(count, taps, width))}


class MsarState(State):
    """Single-stream block summaries; their streams and logits where every site sees the same streams."""

    def __init__(self, embedding_BTD: Tensor, document_BT: Tensor | None, method: Msar) -> None:
        self.method, self.document_BT = method, document_BT
        self.keys_SMD = method.query_SMD * method.gain_SGD
        self.sources: list[Tensor] = []
        self.expanded: list[tuple[Streams, int, list[tuple[Tensor, ...]]]] = []  # streams, first site, logits[j][site]
        self.partial_BTD: Tensor | None = None
        self._add_source(embedding_BTD, first_site=0)

    def _logits(self, streams: Streams, sites: slice) -> list[tuple[Tensor, ...]]:
        keys_SMD = self.keys_SMD[sites]
        eps = self.method.eps
        return [depth_logits(x, keys_SMD[:, j].unsqueeze(1), eps=eps) for j, x in enumerate(streams)]

    def _add_source(self, source_BTD: Tensor, *, first_site: int) -> None:
        self.sources.append(source_BTD)
        if self.method.conv_scope != "site" and first_site < self.method.num_sublayers:
            streams = self.method.expand(source_BTD, len(self.sources) - 1, self.document_BT)
            self.expanded.append((streams, first_site, self._logits(streams, slice(first_site, None))))

    def _visible(self, site: int) -> tuple[list[Streams], list[list[Tensor]]]:
        """Streams that a site sees and, for each, the logit of every stream."""
        here = slice(site, site + 1)
        if self.method.conv_scope == "site":
            sources = self.sources if self.partial_BTD is None else [*self.sources, self.partial_BTD]
            visible = [self.method.expand(source, site, self.document_BT) for source in sources]
            return visible, [[by_site[0] for by_site in self._logits(streams, here)] for streams in visible]
        visible = [streams for streams, _, _ in self.expanded]
        logits = [[by_site[site - first] for by_site in by_stream] for _, first, by_stream in self.expanded]
        if self.partial_BTD is not None:
            visible.append(self.method.expand(self.partial_BTD, len(self.sources), self.document_BT))
            logits.append([by_site[0] for by_site in self._logits(visible[-1], here)])
        return visible, logits

    def read(self, site: int) -> Tensor:
        if site == self.method.num_sublayers:
            return sum(self.sources[1:], start=self.sources[0])
        visible, logits = self._visible(site)
        retrieved = []
        for j in range(self.method.streams):
            weights = routing_weights([by_stream[j] for by_stream in logits])
            retrieved.append(mix(weights, [streams[j] for streams in visible]))
        return self.method.fuse(retrieved, site)

    def write(self, site: int, out_BTD: Tensor) -> None:
        block_BTD = out_BTD if self.partial_BTD is None else self.partial_BTD + out_BTD
        if self.method.ends_block(site):
            self.partial_BTD = None
            self._add_source(block_BTD, first_site=site + 1)
        else:
            self.partial_BTD = block_BTD


class BankedStreams(State):
    """The newest source, the sum of the finished ones for the head, and the kernels' bank, which expands on the fly."""

    def __init__(self, embedding_BTD: Tensor, document_BT: Tensor | None, method: Msar) -> None:
        self.method = method
        self.newest_BTD = embedding_BTD.to(bank_dtype(embedding_BTD))
        self.update_BTD: Tensor | None = None  # of the newest source, to come: the next site's kernel adds it
        self.total_BTD = embedding_BTD
        self.within_block = False
        mixer = (method.mixer_project_SVM, method.mixer_gate_S, method.mixer_bias_SM) if method.mixes else None
        self.bank = dispatch.open_streams(
            method.query_SMD.float() * method.gain_SGD.float(),
            [cast(Kernels, stream).kernel_OKD for stream in method.kernels],
            mixer,
            self.newest_BTD,
            document_BT,
            block=method.block_sublayers,
            scope=method.conv_scope,
            eps=method.eps,
        )

    def read(self, site: int) -> Tensor:
        if site == self.method.num_sublayers:
            return self.total_BTD
        if self.update_BTD is None:
            return self.bank.site(site, self.newest_BTD)
        self.newest_BTD, routed_BTD = self.bank.add_site(site, self.newest_BTD, self.update_BTD)
        self.update_BTD = None
        return routed_BTD

    def write(self, site: int, out_BTD: Tensor) -> None:
        ends = self.method.ends_block(site)
        if self.within_block and not ends:
            self.update_BTD = out_BTD
        else:
            self.newest_BTD = self.newest_BTD + out_BTD if self.within_block else out_BTD
        self.within_block = not ends
        if ends:
            self.total_BTD = self.total_BTD + self.newest_BTD


class Msar(Residual):
    """Queries, kernels and mixers."""

    def __init__(self, config: ModelConfig, choice: options.Msar) -> None:
        super().__init__(config)
        d, m, sublayers = config.d_model, choice.streams, config.num_sublayers
        self.streams, self.eps, self.conv_scope = m, config.norm_eps, choice.conv_scope
        self.gate_start = choice.mixer_gate_start
        self.query_start: Rule = Normal(std=config.init_std) if choice.query_init == "random" else Constant(value=0.0)
        self.block_sublayers = choice.sublayers_per_block(sublayers)
        self.query_SMD = nn.Parameter(torch.empty(sublayers, m, d))
        self.gain_SGD = nn.Parameter(torch.empty(sublayers, m if choice.gain == "stream" else 1, d))
        num_sources = 1 + -(-sublayers // self.block_sublayers)
        owners = {"global": 1, "source": num_sources, "site": sublayers}[choice.conv_scope]
        identity = choice.conv_start == "identity"
        self.kernels = nn.ModuleList(Kernels(owners, taps, d, identity=identity) for taps in choice.kernel_widths)
        self.mixes = choice.mixer == "sigmoid" and m > 1
        if self.mixes:
            self.mixer_project_SVM = nn.Parameter(torch.empty(sublayers, m * d, m))
            self.mixer_bias_SM = nn.Parameter(torch.empty(sublayers, m))
            self.mixer_gate_S = nn.Parameter(torch.empty(sublayers))

    def initial_values(self) -> Mapping[str, Rule]:
        mean = 1 / self.streams
        return {
            "query_SMD": self.query_start,
            "gain_SGD": Constant(value=1.0),
            "mixer_project_SVM": Constant(value=0.0),
            "mixer_bias_SM": Constant(value=math.log(mean / (1 - mean)) if self.streams > 1 else 0.0),
            "mixer_gate_S": Constant(value=self.gate_start),
        }

    def expand(self, source_BTD: Tensor, owner: int, document_BT: Tensor | None) -> Streams:
        """The m streams of a source; ``owner`` is the source's or the site's number."""
        index = 0 if self.conv_scope == "global" else owner
        kernels = [cast(Kernels, stream).kernel_OKD[index] for stream in self.kernels]
        convolved = [causal_convolution(source_BTD, kernel_KD, document_BT) for kernel_KD in kernels]
        replicas = [source_BTD] * (self.streams - len(convolved))
        return (*replicas, *convolved)

    def fuse(self, retrieved_BTD: list[Tensor], site: int) -> Tensor:
        """The site's input from what its streams retrieved."""
        if self.streams == 1:
            return retrieved_BTD[0]
        if not self.mixes:
            return sum(retrieved_BTD[1:], start=retrieved_BTD[0]) / self.streams
        flat_BTV = widen(torch.cat(retrieved_BTD, dim=-1))
        scale_BT1 = torch.rsqrt(flat_BTV.square().mean(dim=-1, keepdim=True) + self.eps)
        with torch.autocast(flat_BTV.device.type, enabled=False):
            projected_BTM = torch.matmul(flat_BTV, widen(self.mixer_project_SVM[site])) * scale_BT1
        weights_BTM = torch.sigmoid(self.mixer_gate_S[site] * projected_BTM + self.mixer_bias_SM[site])
        return mix(weights_BTM.permute(2, 0, 1).unsqueeze(-1), retrieved_BTD)

    def ends_block(self, site: int) -> bool:
        """Whether sublayer ``site`` is the last of its block."""
        return (site + 1) % self.block_sublayers == 0 or site + 1 == self.num_sublayers

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> State:
        if dispatch.choose("streams", embedding_BTD.device).runs == "triton":
            return BankedStreams(embedding_BTD, document_BT, self)
        return MsarState(embedding_BTD, document_BT, self)
