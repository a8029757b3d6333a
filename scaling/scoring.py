"""Log-likelihoods and greedy continuations of token sequences under a trained model.

After ``trained`` in the flow; :mod:`scaling.downstream` asks. Sequences are padded on the right to one of few lengths,
and batches to one number of rows a length, so that a score depends on its own sequence and that length alone: not on
what else is asked for, nor on its order (in 16 bits both change scores elsewhere).

Shapes: R rows, T positions, D width, V vocabulary, P scored positions.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from scaling import precision
from scaling.config.training import PrecisionConfig
from scaling.errors import UsageError
from scaling.models.transformer import Transformer

logger = logging.getLogger(__name__)

_STEP = 64  # lengths are multiples of it
_TOKENS_PER_BATCH = {"cuda": 2**15, "cpu": 2**10}
_TELL_S = 10.0
_LOGITS = 2**26  # held at a time: 256 MiB in float32

Request = tuple[Sequence[int], Sequence[int]]


class Scorer:
    """A model that scores and continues sequences, without gradients.

    Parameters
    ----------
    model
        With its weights.
    arithmetic
        What the run was trained with: products in bfloat16 on a GPU where it is ``mixed``.
    device
        Where to compute.
    max_length
        Positions that the model sees at most; contexts are cut from the left.
    pad
        Token id to pad with. Attention is causal, so that padding on the right changes nothing.
    say
        Told now and then how far it is.
    """

    def __init__(
        self,
        model: Transformer,
        *,
        arithmetic: PrecisionConfig,
        device: torch.device,
        max_length: int,
        pad: int,
        say: Callable[[str], None] = logger.info,
    ) -> None:
        self.model = model.to(device).eval()
        self.arithmetic, self.device, self.max_length, self.pad = arithmetic, device, max_length, pad
        self.tokens_per_batch, self._say = _TOKENS_PER_BATCH[device.type], say

    def log_likelihoods(self, requests: Sequence[Request]) -> list[tuple[float, bool]]:
        """For each (context, continuation): the continuation's log-likelihood in nats, and whether it is greedy.

        Raises
        ------
        UsageError
            If a context is empty, or a continuation longer than the model's positions.
        """
        inputs = []
        for context, continuation in requests:
            if not context or not continuation:
                raise UsageError("a scored continuation and its context need a token each; start the context with one")
            if len(continuation) > self.max_length:
                raise UsageError(
                    f"a continuation of {len(continuation)} tokens does not fit into {self.max_length} positions; "
                    "raise --seq-len"
                )
            inputs.append([*context, *continuation][-self.max_length - 1 : -1])
        answers: list[tuple[float, bool]] = [(0.0, False)] * len(requests)
        done, told_s = 0, time.monotonic()
        for part, hidden_RTD in self._passes(inputs):
            ends = [len(inputs[index]) for index in part]
            wanted = [requests[index][1] for index in part]
            for index, answer in zip(part, self._score(hidden_RTD, ends, wanted), strict=True):
                answers[index] = answer
            done += len(part)
            if time.monotonic() - told_s > _TELL_S:
                told_s = time.monotonic()
                self._say(f"scored {done:,} of {len(requests):,} sequences")
        return answers

    def continuations(
        self,
        prompts: Sequence[Sequence[int]],
        counts: Sequence[int],
        finished: Callable[[int, list[int]], bool],
    ) -> list[list[int]]:
        """Greedy continuations of at most ``counts`` tokens; ``finished(prompt, tokens so far)`` ends one earlier.

        Every token is one forward pass over all that is before it, many prompts at a time.
        """
        made: list[list[int]] = [[] for _ in prompts]
        active = [index for index in range(len(prompts)) if counts[index] > 0]
        while active:
            inputs = [[*prompts[index], *made[index]][-self.max_length :] for index in active]
            for part, hidden_RTD in self._passes(inputs):
                last = torch.tensor([len(inputs[member]) - 1 for member in part], device=self.device)
                row = torch.arange(len(part), device=self.device)
                for member, token in zip(part, self._logits(hidden_RTD[row, last]).argmax(-1).tolist(), strict=True):
                    made[active[member]].append(token)
            active = [i for i in active if len(made[i]) < counts[i] and not finished(i, made[i])]
        return made

    def _passes(self, inputs: Sequence[Sequence[int]]) -> Iterator[tuple[list[int], Tensor]]:
        """Batches of sequences of one padded length, and their hidden states; longest first, to fail at once."""
        members: dict[int, list[int]] = {}
        for index, tokens in enumerate(inputs):
            length = min(self.max_length, -(-len(tokens) // _STEP) * _STEP)
            members.setdefault(length, []).append(index)
        for length, indices in sorted(members.items(), reverse=True):
            rows = max(1, self.tokens_per_batch // length)
            for start in range(0, len(indices), rows):
                part = indices[start : start + rows]
                yield part, self._hidden([inputs[index] for index in part], rows, length)

    @torch.no_grad()
    def _hidden(self, sequences: Sequence[Sequence[int]], rows: int, length: int) -> Tensor:
        tokens_RT = torch.full((rows, length), self.pad, dtype=torch.long)
        for row, sequence in enumerate(sequences):
            tokens_RT[row, : len(sequence)] = torch.tensor(sequence)
        with precision.autocast(self.arithmetic, self.device):
            hidden_RTD: Tensor = self.model(tokens_RT.to(self.device))
        return hidden_RTD

    @torch.no_grad()
    def _logits(self, hidden_PD: Tensor) -> Tensor:
        with precision.autocast(self.arithmetic, self.device):
            return self.model.logits(hidden_PD).float()

    def _score(
        self, hidden_RTD: Tensor, ends: Sequence[int], wanted: Sequence[Sequence[int]]
    ) -> list[tuple[float, bool]]:
        """Scores of the last tokens of each row: the log-softmax in float32, sums in float64."""
        rows = torch.tensor([row for row, tokens in enumerate(wanted) for _ in tokens], device=self.device)
        places = [end - len(tokens) + i for end, tokens in zip(ends, wanted, strict=True) for i in range(len(tokens))]
        hidden_PD = hidden_RTD[rows, torch.tensor(places, device=self.device)]
        target_P = torch.tensor([token for tokens in wanted for token in tokens], device=self.device)
        scores, greedy = [], []
        chunk = max(1, _LOGITS // self.model.config.vocab_size)
        for start in range(0, len(places), chunk):
            logits_PV = self._logits(hidden_PD[start : start + chunk])
            target = target_P[start : start + chunk]
            scores.append(logits_PV.log_softmax(-1).gather(-1, target.unsqueeze(-1)).squeeze(-1).double().cpu())
            greedy.append((logits_PV.argmax(-1) == target).cpu())
        counts = [len(tokens) for tokens in wanted]
        return [
            (float(score.sum()), bool(match.all()))
            for score, match in zip(torch.cat(scores).split(counts), torch.cat(greedy).split(counts), strict=True)
        ]
