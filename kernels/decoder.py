"""The decoder that ``scaling bench train`` times: one backbone, its sublayers joined in different ways.

Self-contained, because ``kernels`` comes before ``models`` in the flow; sizes and definitions are those of
:mod:`scaling.models`. The baseline is compiled as well as it can be: one compiled region a sublayer that holds the
residual addition, the norm, the projections and SDPA, and a loss that never holds the logits of more than a chunk of
tokens. (Queries, keys and values as one product, gate and up as one, measured slower: NOTES.md.) Every contender uses
the same regions; :mod:`scaling.kernels.joining` has what is between them. Input gradients of the maps of one input are
added up inside the products (:mod:`scaling.kernels.products`) or by the compiler, each method as measured fastest for
it: where a compiled norm can take the sum, feed-forwards inside, attention by the compiler.

Shape legend: B batch, T time, D width, S sites, V vocabulary.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from scaling.kernels.products import products

EPS = 1e-6  # RMSNorm epsilon of Qwen3
_ROPE_BASE = 1e4  # arXiv 2607.27230, training details
_LOGIT_BYTES = 2**30  # logits held at a time by the loss


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """A row of the benchmark: sizes of the decoder and of a step."""

    name: str
    width: int
    layers: int
    query_heads: int
    kv_heads: int
    ffn: int
    batch: int
    time: int

    @property
    def head_width(self) -> int:
        """Width of an attention head."""
        return self.width // self.query_heads


SHAPES = (
    Shape(name="d512", width=512, layers=12, query_heads=8, kv_heads=4, ffn=1536, batch=16, time=2048),
    Shape(name="d1024", width=1024, layers=24, query_heads=16, kv_heads=8, ffn=4096, batch=16, time=1024),
    Shape(name="d1280", width=1280, layers=36, query_heads=16, kv_heads=8, ffn=5120, batch=8, time=1024),
    Shape(name="d2048", width=2048, layers=20, query_heads=16, kv_heads=8, ffn=5632, batch=8, time=1024),
)
VOCABULARIES = (32_768, 151_936)


def rms_norm(x: Tensor, gain: Tensor) -> Tensor:
    """RMSNorm over the last axis with a gain."""
    return F.rms_norm(x, (x.shape[-1],), gain, EPS)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)


Inner = Callable[..., tuple[Tensor, ...]]  # the maps of a sublayer's input: separate, or products


def separate(x: Tensor, *weights: Tensor) -> tuple[Tensor, ...]:
    """Linear maps of one input; what sums their input gradients is the compiler's choice."""
    return tuple(F.linear(x, weight) for weight in weights)


def inner_of(function: Callable[..., Tensor]) -> Inner:
    """The maps that measured best where a compiled norm's backward kernel can take the sum of input gradients."""
    return separate if function is attention else products


def attention(
    inner: Inner,
    x: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor,
    query_gain: Tensor,
    key_gain: Tensor,
    cos: Tensor,
    sin: Tensor,
) -> Tensor:
    """Grouped-query attention of a normed input: norms on query and key heads, rotary positions, causal SDPA."""
    q, k, v = (y.unflatten(-1, (-1, query_gain.shape[0])) for y in inner(x, query, key, value))
    q = _rotate(rms_norm(q, query_gain).transpose(1, 2), cos, sin)
    k = _rotate(rms_norm(k, key_gain).transpose(1, 2), cos, sin)
    mixed = F.scaled_dot_product_attention(q, k, v.transpose(1, 2), is_causal=True, enable_gqa=True)
    return F.linear(mixed.transpose(1, 2).flatten(-2), out)


def feed_forward(inner: Inner, x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> Tensor:
    """SwiGLU of a normed input."""
    gated, raised = inner(x, gate, up)
    return F.linear(F.silu(gated) * raised, down)


class Sublayer(nn.Module):
    """Weights of one sublayer; ``run`` is the function of a normed input, without its norm."""

    def __init__(self, shape: Shape, kind: str) -> None:
        super().__init__()
        self.kind = kind
        d, head = shape.width, shape.head_width
        self.gain = nn.Parameter(torch.ones(d))
        if kind == "attention":
            wide = shape.query_heads * head
            outputs: tuple[int, ...] = (wide, shape.kv_heads * head, shape.kv_heads * head)
            self.head_gains = nn.ParameterList(torch.ones(head) for _ in ("query", "key"))
        else:
            wide = shape.ffn
            outputs = (wide, wide)
        self.inner = nn.ParameterList(torch.empty(size, d) for size in outputs)
        self.outer = nn.Parameter(torch.empty(d, wide))

    def weights(self, cos: Tensor, sin: Tensor) -> tuple[Any, ...]:
        """What :meth:`function` needs after the input."""
        if self.kind == "attention":
            return (*self.inner, self.outer, *self.head_gains, cos, sin)
        return (*self.inner, self.outer)

    @property
    def function(self) -> Callable[..., Tensor]:
        """What the sublayer does with the maps of its input (:data:`Inner`), the normed input and its weights."""
        return attention if self.kind == "attention" else feed_forward


# Regions: plain functions, so that torch.compile builds each once and every layer reuses it.
def stream_region(
    function: Callable[..., Tensor], stream: Tensor, update: Tensor, gain: Tensor, *weights: Any
) -> tuple[Tensor, Tensor]:
    """Pre-norm: add the last update to the stream, norm, run."""
    stream = stream + update
    return stream, function(inner_of(function), rms_norm(stream, gain), *weights)


def normed_region(function: Callable[..., Tensor], x: Tensor, gain: Tensor, *weights: Any) -> Tensor:
    """Norm, run."""
    return function(inner_of(function), rms_norm(x, gain), *weights)


def plain_region(function: Callable[..., Tensor], x: Tensor, *weights: Any) -> Tensor:
    """Run on an input that routing has normed; the norm is not there to take the sum of input gradients."""
    return function(products, x, *weights)


Inputs = list[tuple[Callable[..., Tensor], Tensor, tuple[Any, ...]]]


class Decoder(nn.Module):
    """Embedding, sublayers joined by ``run``, final norm and tied loss.

    Parameters
    ----------
    shape, vocabulary
        Sizes.
    joining
        Parameters of what joins the sublayers, as they start.
    run
        Takes this model, the embedding, and for each sublayer and the head its :attr:`Sublayer.function`, the gain of
        its norm and its weights; returns the head's normed input.
    compiled
        Whether regions are compiled.
    """

    def __init__(
        self,
        shape: Shape,
        vocabulary: int,
        *,
        joining: Mapping[str, Tensor],
        run: Callable[[Decoder, Tensor, Inputs], Tensor],
        compiled: bool = True,
    ) -> None:
        super().__init__()
        self.shape, self.compiled = shape, compiled
        self.embedding = nn.Parameter(torch.empty(vocabulary, shape.width))
        kinds = ("attention", "feed-forward") * shape.layers
        self.sublayers = nn.ModuleList(Sublayer(shape, kind) for kind in kinds)
        self.gain = nn.Parameter(torch.ones(shape.width))
        with torch.no_grad():
            for parameter in self.parameters():
                if parameter.dim() > 1:
                    parameter.normal_(0, 0.02)
        self.joining = nn.ParameterDict({name: nn.Parameter(value) for name, value in joining.items()})
        self._run = run
        self._regions: dict[Callable[..., Any], Callable[..., Any]] = {}
        self._tables: tuple[Tensor, Tensor] | None = None

    def region(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """The function, compiled once where regions are."""
        if not self.compiled:
            return function
        if function not in self._regions:
            self._regions[function] = torch.compile(function, dynamic=False, fullgraph=True)
        return self._regions[function]

    def forward(self, tokens_BT: Tensor, target_BT: Tensor) -> Tensor:
        """Mean cross-entropy of the targets."""
        embedding = F.embedding(tokens_BT, self.embedding)
        if self._tables is None:
            half = torch.arange(0, self.shape.head_width, 2, device=tokens_BT.device) / self.shape.head_width
            angle = torch.outer(torch.arange(tokens_BT.shape[1], device=tokens_BT.device), _ROPE_BASE**-half)
            self._tables = angle.cos().to(embedding.dtype), angle.sin().to(embedding.dtype)
        sublayers = cast(Iterable[Sublayer], self.sublayers)
        inputs: Inputs = [(sub.function, sub.gain, sub.weights(*self._tables)) for sub in sublayers]
        inputs.append((_nothing, self.gain, ()))
        hidden = self._run(self, embedding, inputs)
        return linear_loss(hidden.flatten(0, 1), self.embedding, target_BT.flatten(), compiled=self.compiled)


def _nothing(inner: Inner, x: Tensor) -> Tensor:
    return x


def linear_loss(hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, *, compiled: bool = True) -> Tensor:
    """Mean cross-entropy of ``hidden @ weight.T``, holding the logits of one chunk of tokens at a time."""
    return cast(Tensor, _LinearLoss.apply(hidden_TD, weight_VD, target_T, compiled))  # type: ignore[no-untyped-call]


class _LinearLoss(torch.autograd.Function):
    """Loss and both gradients chunk by chunk in the forward pass; backward scales them."""

    @staticmethod
    def forward(ctx: Any, hidden_TD: Tensor, weight_VD: Tensor, target_T: Tensor, compiled: bool) -> Tensor:
        tokens, vocabulary = hidden_TD.shape[0], weight_VD.shape[0]
        rows = max(256, _LOGIT_BYTES // (vocabulary * hidden_TD.element_size()) // 256 * 256)
        total = torch.zeros((), device=hidden_TD.device)
        hidden_gradient = torch.empty_like(hidden_TD)
        weight_gradient = torch.zeros_like(weight_VD)
        for start in range(0, tokens, rows):
            chunk = hidden_TD[start : start + rows]
            loss_of = _compiled_loss_of_logits if compiled else _loss_of_logits
            losses, logit_gradient = loss_of(chunk @ weight_VD.t(), target_T[start : start + rows], 1.0 / tokens)
            total += losses
            torch.mm(logit_gradient, weight_VD, out=hidden_gradient[start : start + rows])
            weight_gradient.addmm_(logit_gradient.t(), chunk)
        ctx.save_for_backward(hidden_gradient, weight_gradient)
        return total

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        return hidden_gradient.mul_(gradient), weight_gradient.mul_(gradient), None, None


def _loss_of_logits(logits: Tensor, target: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    wide = logits.float()
    top = wide.amax(-1, keepdim=True)
    shifted = wide - top
    total = shifted.exp().sum(-1, keepdim=True)
    loss = (total.log() - shifted.gather(-1, target[:, None])).sum() * scale
    hot = torch.arange(logits.shape[-1], device=logits.device) == target[:, None]
    return loss, ((shifted.exp() / total - hot.float()) * scale).to(logits.dtype)


_compiled_loss_of_logits = torch.compile(_loss_of_logits, dynamic=False)
