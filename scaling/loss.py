"""Cross-entropy of a tied output matrix without the logits of all tokens in memory.

Reads a model's final hidden states and its output matrix; ``scaling.train`` and ``scaling.evaluate`` use it. At 131,072
tokens and a vocabulary of 151,936 the logits alone are 40 GB in bf16. Here they exist for one chunk of tokens at a
time, and the gradients with respect to hidden states and matrix are formed in the forward pass while the chunk is at
hand, so that nothing is computed twice. Measurements against libraries that do the same are in TRAINING.md.

Shapes: B batch, T time, N tokens (B * T), D model width, V vocabulary.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Final, cast

import torch
from torch import Tensor, nn

IGNORED: Final = -100  # target of a position that does not count

# Bytes of one chunk's logits. CUDA: large enough that the products run at full speed (7,067 tokens of a 151,936-token
# vocabulary in bf16), small beside the activations. CPU: within the cache.
CHUNK_BYTES: Final = {"cuda": 2**31, "cpu": 2**23}

Pieces = tuple[Tensor, Tensor, Tensor]


def negative_log_likelihood(hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor) -> Tensor:
    """Per-token -log p(target) in nats, fp32, 0 where the target is ignored; no gradients.

    Parameters
    ----------
    hidden_ND
        Final hidden states.
    weight_VD
        Output matrix.
    target_N
        Token ids, or ``IGNORED``.
    """
    dtype = _compute_dtype(hidden_ND, weight_VD)
    hidden_ND, weight_VD = hidden_ND.detach().to(dtype), weight_VD.detach().to(dtype)
    losses = []
    with torch.no_grad(), torch.autocast(hidden_ND.device.type, enabled=False):
        for rows in _chunks(len(target_N), weight_VD):
            target = target_N[rows]
            logits = (hidden_ND[rows] @ weight_VD.t()).float()
            label = logits.gather(1, target.clamp_min(0).unsqueeze(1)).squeeze(1)
            losses.append((logits.logsumexp(1) - label).masked_fill_(target == IGNORED, 0.0))
    return torch.cat(losses)


def linear_cross_entropy(
    hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, *, z_loss: float = 0.0, compiled: bool = False
) -> tuple[Tensor, Tensor]:
    """Summed training objective and summed cross-entropy.

    The objective is sum_n [-log p(target_n) + z_loss * log(Z_n)^2] with Z the partition function of the logits; the
    second term keeps logits from drifting (PaLM, arXiv 2204.02311, section 5).

    Parameters
    ----------
    hidden_ND, weight_VD, target_N
        As in ``negative_log_likelihood``. Products are formed in autocast's precision where it is on, else in the
        matrix's; the softmax and all sums in fp32.
    z_loss
        Weight of the squared log-partition.
    compiled
        Fuse the element-wise work with ``torch.compile``.

    Returns
    -------
    tuple of Tensor
        Objective (differentiable) and cross-entropy (not), in nats, both sums over the tokens that count.
    """
    apply = cast(Any, _LinearCrossEntropy.apply)
    return cast(tuple[Tensor, Tensor], apply(hidden_ND, weight_VD, target_N, z_loss, compiled))


class TrainingLoss(nn.Module):
    """A Transformer and its loss as one module, so that wrappers (DDP, FSDP2) see every use of the output matrix."""

    def __init__(self, transformer: nn.Module, *, z_loss: float, compiled: bool) -> None:
        super().__init__()
        self.transformer = transformer
        self.z_loss = z_loss
        self.compiled = compiled

    def forward(self, tokens_BT: Tensor, targets_BT: Tensor, document_BT: Tensor | None = None) -> Any:
        """In training mode ``linear_cross_entropy``'s pair; in evaluation mode per-token losses of shape (B, T)."""
        hidden_BTD = self.transformer(tokens_BT, document_BT)
        weight_VD = cast(Tensor, self.transformer.output_weight_VD)
        hidden_ND, target_N = hidden_BTD.flatten(0, 1), targets_BT.flatten()
        if self.training:
            return linear_cross_entropy(hidden_ND, weight_VD, target_N, z_loss=self.z_loss, compiled=self.compiled)
        return negative_log_likelihood(hidden_ND, weight_VD, target_N).view_as(targets_BT)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden_ND: Tensor, weight_VD: Tensor, target_N: Tensor, z_loss: float, compiled: bool
    ) -> tuple[Tensor, Tensor]:
        dtype = _compute_dtype(hidden_ND, weight_VD)
        pieces = _compiled_pieces() if compiled else _pieces
        h_ND, w_VD = hidden_ND.detach().to(dtype), weight_VD.detach().to(dtype)
        wide = dtype if dtype == torch.float64 else torch.float32
        loss = h_ND.new_zeros((), dtype=wide)
        square = h_ND.new_zeros((), dtype=wide)
        grad_ND = torch.empty_like(h_ND)
        grad_VD: Tensor | None = None
        with torch.autocast(h_ND.device.type, enabled=False):
            for rows in _chunks(len(target_N), w_VD):
                h = h_ND[rows]
                loss_n, square_n, grad_nV = pieces(h @ w_VD.t(), target_N[rows], z_loss)
                loss, square = loss + loss_n.sum(), square + square_n.sum()
                torch.mm(grad_nV, w_VD, out=grad_ND[rows])
                if grad_VD is None:
                    grad_VD = _wide_mm(grad_nV.t(), h, wide)
                elif dtype == wide:
                    grad_VD.addmm_(grad_nV.t(), h)
                else:
                    grad_VD += _wide_mm(grad_nV.t(), h, wide)
        assert grad_VD is not None, "no tokens"
        ctx.save_for_backward(grad_ND.to(hidden_ND.dtype), grad_VD.to(weight_VD.dtype))
        ctx.mark_non_differentiable(loss)
        return loss + z_loss * square, loss

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        grad_ND, grad_VD = ctx.saved_tensors
        return grad_ND * grads[0].to(grad_ND.dtype), grad_VD * grads[0].to(grad_VD.dtype), None, None, None


def _pieces(logits_nV: Tensor, target_n: Tensor, z_loss: float) -> Pieces:
    """Loss and squared log-partition of each token, and the objective's gradient with respect to the logits."""
    counts = target_n != IGNORED
    index = target_n.clamp_min(0).unsqueeze(1)
    wide = logits_nV if logits_nV.dtype == torch.float64 else logits_nV.float()
    log_z = wide.logsumexp(1)
    loss = torch.where(counts, log_z - wide.gather(1, index).squeeze(1), 0.0)
    square = torch.where(counts, log_z.square(), 0.0)
    # d/dlogits = (1 + 2 z log Z) softmax - onehot(target)
    scale = torch.where(counts, 1.0 + 2.0 * z_loss * log_z, 0.0)
    grad = wide.sub_(log_z.unsqueeze(1)) if wide is logits_nV else wide - log_z.unsqueeze(1)
    grad = grad.exp_().mul_(scale.unsqueeze(1))
    grad.scatter_add_(1, index, -counts.to(grad.dtype).unsqueeze(1))
    return loss, square, grad.to(logits_nV.dtype)


def _fusible_pieces(logits_nV: Tensor, target_n: Tensor, z_loss: float) -> Pieces:
    """``_pieces`` without writes in place, so that the compiler makes one pass of the gradient."""
    counts = target_n != IGNORED
    wide = logits_nV.float()
    log_z = wide.logsumexp(1)
    label = wide.gather(1, target_n.clamp_min(0).unsqueeze(1)).squeeze(1)
    loss = torch.where(counts, log_z - label, 0.0)
    square = torch.where(counts, log_z.square(), 0.0)
    scale = torch.where(counts, 1.0 + 2.0 * z_loss * log_z, 0.0).unsqueeze(1)
    column = torch.arange(logits_nV.shape[1], device=logits_nV.device)
    grad = (wide - log_z.unsqueeze(1)).exp() * scale - (column == target_n.unsqueeze(1)).float()
    return loss, square, grad.to(logits_nV.dtype)


@functools.cache
def _compiled_pieces() -> Callable[[Tensor, Tensor, float], Pieces]:
    return cast(Callable[[Tensor, Tensor, float], Pieces], torch.compile(_fusible_pieces, dynamic=False))


def _compute_dtype(hidden: Tensor, weight: Tensor) -> torch.dtype:
    device = hidden.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else weight.dtype


def _wide_mm(a: Tensor, b: Tensor, wide: torch.dtype) -> Tensor:
    """``a @ b`` of narrow operands, summed and returned in a wide type."""
    if a.dtype == wide:
        return a @ b
    return torch.mm(a, b, out_dtype=wide) if a.is_cuda else (a @ b).to(wide)


def _chunks(num_tokens: int, weight_VD: Tensor) -> list[slice]:
    """Slices of equal size (the last may be shorter) whose logits stay within ``CHUNK_BYTES``."""
    row_bytes = weight_VD.shape[0] * weight_VD.element_size()
    most = max(1, CHUNK_BYTES.get(weight_VD.device.type, CHUNK_BYTES["cpu"]) // row_bytes)
    number = -(-num_tokens // most)
    size = -(-num_tokens // number) if number else 0
    return [slice(first, min(first + size, num_tokens)) for first in range(0, num_tokens, size)] if size else []
