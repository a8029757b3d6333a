"""Probes of a trained model on its own held-out text; the command line's ``scaling probe`` calls them.

After ``trained`` and ``loader`` in the flow.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from scaling.errors import UsageError
from scaling.loader import held_out_batches
from scaling.models.probe import Disagreement, disagreement
from scaling.record import CONFIG, RunFolder
from scaling.tokens import TokenStore
from scaling.trained import load_model


def probe_disagreement(
    checkpoint: Path,
    *,
    data: Path | None = None,
    seq_len: int | None = None,
    sequences: int = 32,
    batch_size: int = 8,
    heads: int | None = None,
    draws: int = 4,
    seed: int = 0,
) -> Disagreement:
    """Measure the routing of a checkpoint on held-out sequences.

    ``data`` and ``seq_len`` default to what the run was trained with.

    Raises
    ------
    UsageError
        If ``data`` is not given and the checkpoint does not know its token store, or the vocabularies differ.
    """
    model = load_model(checkpoint)
    run = next((f for f in (checkpoint, *checkpoint.resolve().parents[:3]) if (f / CONFIG).is_file()), None)
    config = RunFolder(run).config() if run is not None else None
    path = data if data is not None else (Path(config.data.path) if config and config.data.path else None)
    if path is None:
        raise UsageError(f"{checkpoint}: does not say which token store it was trained on; give --data STORE")
    length = seq_len if seq_len is not None else (config.data.seq_len if config else 1024)
    store = TokenStore.open(path)
    if store.vocab_size > model.config.vocab_size:
        raise UsageError(
            f"{path}: has {store.vocab_size} token ids, the model {model.config.vocab_size}; give the store it was "
            "trained on with --data"
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)

    def batches() -> Iterator[Tensor]:
        for batch in held_out_batches(store, length, sequences, batch_size=batch_size):
            yield torch.from_numpy(batch.tokens_BT.astype(np.int64)).to(device)

    return disagreement(model, batches(), heads=heads, draws=draws, seed=seed)


def save_arrays(probe: Disagreement, path: Path) -> None:
    """Write the probe's arrays as ``.npz``: learned, random, weights, sites."""
    np.savez_compressed(path, learned=probe.learned, random=probe.random, weights=probe.weights, sites=probe.sites)
