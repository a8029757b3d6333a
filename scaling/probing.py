"""Probes of a trained model on its own held-out text; the command line's ``scaling probe`` calls them.

After ``trained`` and ``loader`` in the flow.
"""

from __future__ import annotations

import io
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from scaling.errors import RecordError
from scaling.identity import label, size_label
from scaling.loader import held_out_batches
from scaling.models.probe import Disagreement, disagreement
from scaling.record import RunFolder
from scaling.trained import load_model, run_of, store_of


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
    run = run_of(checkpoint)
    config = run.config() if run is not None else None
    store = store_of(checkpoint, model, data)
    length = seq_len if seq_len is not None else (config.data.seq_len if config else 1024)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model.to(device)

    def batches() -> Iterator[Tensor]:
        for batch in held_out_batches(store, length, sequences, batch_size=batch_size):
            yield torch.from_numpy(batch.tokens_BT.astype(np.int64)).to(device)

    return disagreement(model, batches(), heads=heads, draws=draws, seed=seed)


def save_arrays(probe: Disagreement, path: Path, run: RunFolder | None = None) -> None:
    """Write the probe's arrays as ``.npz``: learned, random, weights, sites; and which run they are of, as JSON.

    Raises
    ------
    RecordError
        If the file cannot be written.
    """
    arrays: dict[str, NDArray[Any]] = {
        "learned": probe.learned,
        "random": probe.random,
        "weights": probe.weights,
        "sites": probe.sites,
    }
    if run is not None:
        config = run.config()
        told = {
            "run_key": run.key,
            "name": config.run.name or label(config),
            "method": config.model.residual.method,
            "size": size_label(config.model),
            "seed": config.run.seed,
        }
        arrays["run"] = np.array(json.dumps(told))
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]  # numpy types the keywords as its own option
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        beside.write_bytes(buffer.getvalue())
        os.replace(beside, path)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise RecordError(f"{path}: cannot be written ({error.strerror}); choose another --out") from None
