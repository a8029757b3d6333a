"""``realformer``: a residual path for attention scores (arXiv 2012.11747).

S_l = Q_l K_l^T / sqrt(C) + S_(l-1), attention_l = softmax(S_l) V_l. No parameters; (T + 1) / 2 additions a head. The
scores of every layer exist as T x T tensors, so fused attention is given up: activations grow with T^2.

The paper norms behind the addition (h <- norm(h + f(h)), no final norm); ``norm="pre"`` keeps the backbone's placement.
"""

from __future__ import annotations

from torch import Tensor, nn

from scaling.config import residual as options
from scaling.config.model import ModelConfig
from scaling.models.layers import Context, RMSNorm
from scaling.models.residual.baseline import Stream
from scaling.models.residual.method import Residual
from scaling.models.residual.rescaled import PostNormStream


def _step_with_scores(state: ScoreStream | PostNormScoreStream, site: int, sublayer: nn.Module, ctx: Context) -> None:
    if site % 2:
        state.write(site, sublayer(state.read(site), ctx))
    else:
        out_BTD, state.scores_BHTT = sublayer(state.read(site), ctx, state.scores_BHTT)
        state.write(site, out_BTD)


class ScoreStream(Stream):
    """The running sum, and the last attention scores."""

    scores_BHTT: Tensor | None = None

    def step(self, site: int, sublayer: nn.Module, context: Context) -> None:
        _step_with_scores(self, site, sublayer, context)


class PostNormScoreStream(PostNormStream):
    """The normed stream, and the last attention scores."""

    scores_BHTT: Tensor | None = None

    def step(self, site: int, sublayer: nn.Module, context: Context) -> None:
        _step_with_scores(self, site, sublayer, context)


class RealFormer(Residual):
    """Residual attention with norms in front, as in the backbone."""

    attention = "scores"

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> Stream:
        return ScoreStream(embedding_BTD)


class PostNormRealFormer(Residual):
    """Residual attention with norms behind the additions, as in the paper."""

    attention = "scores"
    norm_placement = "own"

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.final_norm = False
        self.norms = nn.ModuleList(RMSNorm(config.d_model, eps=config.norm_eps) for _ in range(config.num_sublayers))

    def connection_parameters(self) -> set[str]:
        return set()

    def start(self, embedding_BTD: Tensor, document_BT: Tensor | None) -> Stream:
        return PostNormScoreStream(embedding_BTD, self.norms, alpha=1.0)


def make_realformer(config: ModelConfig, choice: options.RealFormer) -> Residual:
    """Residual attention with the norm placement that ``choice`` asks for."""
    return PostNormRealFormer(config) if choice.norm == "post" else RealFormer(config)
