"""Held-out loss with its error: the same sequences each time, every token once, clustered by document.

Read by ``train``. An evaluation is one pass over fixed batches. Tokens of a document are not independent, so the
standard error counts documents: with s_c and n_c a document's summed loss and tokens, L = sum s_c / sum n_c and
se^2 = C / (C - 1) * sum (s_c - L n_c)^2 / (sum n_c)^2 (ratio estimator; Cochran, Sampling Techniques, 3rd ed., 2.11).
Losses of each sequence and document are stored, so that two runs can be compared pair by pair.

Shapes: S sequences, T tokens in each.
"""

from __future__ import annotations

import hashlib
import io
import logging
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from scaling import precision
from scaling.config.tree import RunConfig
from scaling.distributed import World
from scaling.errors import RecordError
from scaling.loader import Batch, held_out_batches, papers_batches
from scaling.loss import IGNORED
from scaling.tokens import TokenStore

logger = logging.getLogger(__name__)

TARGET_SE: Final = 0.005  # nat a token: half of what residual methods typically differ by at equal size
TOKENS_PER_BATCH: Final = {"cuda": 2**15, "cpu": 2**12}

Array = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """One evaluation. Losses in nats a token; ``loss_se`` clusters by document; ``bpb`` counts bytes of text.

    ``by_source`` maps a source to its loss. ``sequence_loss_S`` and ``document_loss`` are sums, beside token counts.
    """

    step: int
    loss: float
    loss_se: float
    bpb: float
    by_source: dict[str, float]
    sequence_loss_S: Array
    sequence_tokens_S: Array
    document: Array
    document_loss: Array
    document_tokens: Array

    def metrics(self) -> dict[str, float]:
        """Journal names."""
        named = {f"val/loss/{source}": loss for source, loss in self.by_source.items()}
        return {"val/loss": self.loss, "val/loss_se": self.loss_se, "val/bpb": self.bpb, **named}

    def write(self, folder: Path) -> None:
        """Store the losses as ``step-<step>.npz``, atomically."""
        buffer = io.BytesIO()
        np.savez(
            buffer,
            sequence_loss=self.sequence_loss_S,
            sequence_tokens=self.sequence_tokens_S,
            document=self.document,
            document_loss=self.document_loss,
            document_tokens=self.document_tokens,
        )
        path = folder / f"step-{self.step:08d}.npz"
        beside = path.with_name(f".{path.name}")
        try:
            folder.mkdir(exist_ok=True)
            beside.write_bytes(buffer.getvalue())
            os.replace(beside, path)
        except OSError as error:
            beside.unlink(missing_ok=True)
            raise RecordError(
                f"{path}: cannot be written ({error.strerror}); free space or choose another --out"
            ) from None


def ratio_estimate(sum_C: Array, count_C: Array) -> tuple[float, float]:
    """``sum / count`` over clusters and its standard error (the module's formula); NaN of fewer than two clusters."""
    total = count_C.sum()
    value = float(sum_C.sum() / total)
    deviation_C = sum_C - value * count_C
    clusters = int(np.count_nonzero(count_C))
    spread = math.sqrt(float((deviation_C**2).sum())) / total
    return value, spread * math.sqrt(clusters / (clusters - 1)) if clusters > 1 else math.nan


class Evaluator:
    """The fixed evaluation set of a run, read once and kept on the host."""

    def __init__(self, store: TokenStore, config: RunConfig, world: World) -> None:
        settings, data = config.evaluation, config.data
        rows = settings.batch_size or max(1, TOKENS_PER_BATCH[world.device.type] // data.seq_len)
        rows = min(rows, settings.num_sequences)
        self._config = config
        self._world = world
        self._store = store
        if settings.protocol == "papers":
            batches = papers_batches(
                store,
                data.seq_len,
                settings.num_sequences,
                seed=config.run.seed,
                batch_size=rows,
                document_masking=data.document_masking,
            )
        else:
            batches = held_out_batches(
                store, data.seq_len, settings.num_sequences, batch_size=rows, document_masking=data.document_masking
            )
        self._batches = list(batches)
        digest = hashlib.sha256(f"{settings.protocol} {data.seq_len} {store.fingerprint}".encode())
        for batch in self._batches:
            digest.update(batch.start_B.tobytes())
            digest.update(batch.targets_BT.tobytes())
        self.fingerprint = digest.hexdigest()[:16]
        self._targets_ST = np.concatenate([batch.targets_BT for batch in self._batches])
        documents_ST = np.concatenate([_documents(batch) for batch in self._batches])
        self._counts_ST = self._targets_ST != IGNORED
        self._document, self._document_of_ST = np.unique(documents_ST, return_inverse=True)
        self._text_bytes = int(store.token_bytes_V[self._targets_ST[self._counts_ST]].sum(dtype=np.int64))

    def run(self, module: nn.Module, step: int, poll: Callable[[], bool] = lambda: False) -> Evaluation | None:
        """Evaluate the module (``TrainingLoss``, wrapped or not) as it stands.

        ``poll`` is asked before each batch whether to break off, alike on all processes; then ``None`` is returned.
        """
        size, rank = self._world.size, self._world.rank
        losses: dict[int, Array] = {}
        module.eval()
        try:
            for first in range(0, len(self._batches), size):
                if poll():
                    return None
                number = first + rank
                # every process makes the same number of passes, since sharded weights are gathered in each
                loss_BT = self.token_losses(module, self._batches[number if number < len(self._batches) else 0])
                if number < len(self._batches):
                    losses[number] = loss_BT
        finally:
            module.train()
        merged = {number: array for part in self._world.gather(losses) for number, array in part.items()}
        return self._summary(step, np.concatenate([merged[number] for number in sorted(merged)]))

    def warm_up(self, module: nn.Module) -> None:
        """Make one pass, so that compilation is done before the first step."""
        module.eval()
        self.token_losses(module, self._batches[0])
        module.train()

    def token_losses(self, module: nn.Module, batch: Batch) -> Array:
        """Per-token losses of one batch in nats, 0 where a target does not count."""
        device = self._world.device
        tokens, targets = torch.from_numpy(batch.tokens_BT), torch.from_numpy(batch.targets_BT)
        document = None
        if self._config.data.document_masking:
            document = torch.from_numpy(_documents(batch)).to(device)
        with torch.no_grad(), precision.autocast(self._config.precision, device):
            loss_BT = module(tokens.to(device), targets.to(device), document)
        array: Array = loss_BT.cpu().numpy()
        return array

    def _summary(self, step: int, loss_ST: Array) -> Evaluation:
        loss_ST = loss_ST.astype(np.float64)
        number = len(self._document)
        of_token = self._document_of_ST.reshape(-1)
        document_loss = np.bincount(of_token, weights=loss_ST.reshape(-1), minlength=number)
        document_tokens = np.bincount(of_token, weights=self._counts_ST.reshape(-1), minlength=number)
        loss, error = ratio_estimate(document_loss, document_tokens)
        source_of = self._store.source_of(self._document)
        by_source = {
            name: float(document_loss[source_of == i].sum() / document_tokens[source_of == i].sum())
            for i, name in enumerate(self._store.sources)
            if document_tokens[source_of == i].sum() > 0
        }
        return Evaluation(
            step=step,
            loss=loss,
            loss_se=float(error),
            bpb=float(document_loss.sum()) / math.log(2) / self._text_bytes if self._text_bytes else math.nan,
            by_source=by_source,
            sequence_loss_S=loss_ST.sum(1),
            sequence_tokens_S=self._counts_ST.sum(1),
            document=self._document,
            document_loss=document_loss,
            document_tokens=document_tokens.astype(np.int64),
        )


def advice(evaluation: Evaluation, num_sequences: int) -> str | None:
    """What to say about an evaluation whose error is too large to tell methods apart; ``None`` where it is not."""
    if not evaluation.loss_se > TARGET_SE:
        return None
    needed = math.ceil(num_sequences * (evaluation.loss_se / TARGET_SE) ** 2)
    return (
        f"the held-out loss has a standard error of {evaluation.loss_se:.4f} nat over {len(evaluation.document):,} "
        "documents; "
        f"{TARGET_SE} nat takes about evaluation.num_sequences={needed:,}"
    )


def _documents(batch: Batch) -> npt.NDArray[np.int32]:
    assert batch.document_BT is not None, "evaluation batches name their documents"
    return batch.document_BT
