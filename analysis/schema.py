"""The tidy run table: one row a run, these columns, these units. The contract between ``ingest`` and every analysis.

Ingestion (from a store or from run folders) must produce exactly these columns; analyses read them through the short
names of ``CANONICAL``. Plain Python, no pandas: the dtypes are pandas' names.
"""

from __future__ import annotations

from typing import Final

VERSION: Final = 1

COLUMNS: Final[dict[str, str]] = {
    "run_key": "string",  # scaling.identity.run_key; for runs of other tools the store's run id
    "sweep": "string",
    "name": "string",  # scaling.identity.label
    "method": "string",
    "size": "string",
    "n_params": "Int64",  # all parameters
    "n_params_non_embedding": "Int64",
    "heads": "Int64",  # routing heads H, missing where the method has none
    "kv": "Int64",  # key-value heads
    "variant": "string",  # scaling.identity.variant: options of the method off their defaults, missing where none is
    "lr": "float64",  # peak learning rate
    "seed": "Int64",
    "batch_tokens": "Int64",  # tokens in one optimiser step
    "steps": "Int64",  # optimiser steps done
    "steps_planned": "Int64",
    "tokens": "Int64",  # training tokens seen
    "flops": "float64",  # exact training FLOPs, routing included
    "flops_6nd": "float64",  # 6 * non-embedding parameters * tokens
    "wall_time_s": "float64",
    "gpu_seconds": "float64",
    "train_loss": "float64",  # nats a token, last logged
    "val_loss": "float64",  # nats a token, held out, at the last step
    "val_loss_se": "float64",  # standard error over documents of the held-out set
    "val_bpb": "float64",  # bits a byte
    "val_loss_tail": "float64",  # mean of the last evaluations
    "status": "string",  # done, diverged, failed, cancelled, running, scheduled, unknown
    "schedule_finished": "boolean",
    "precision": "string",
    "data_fingerprint": "string",
    "eval_fingerprint": "string",
    "curve_hash": "string",  # hash of the whole (step, loss) curve: equal for copies of one run
    "started_ms": "Int64",
    "ended_ms": "Int64",
    "attempts": "Int64",
    "layers": "Int64",
    "width": "Int64",  # of the residual stream
    "ffn_width": "Int64",
    "vocab_size": "Int64",
    "tail_evaluations": "Int64",  # evaluations that val_loss_tail is the mean of
    "experts": "Int64",  # routed experts of a mixture, missing in a dense model
    "reason": "string",  # why it stands as it does, missing where there is nothing to say
}

ADDED: Final = frozenset(
    {"variant", "layers", "width", "ffn_width", "vocab_size", "tail_evaluations", "experts", "reason"}
)
"""Columns that tables written by earlier versions lack; they are read as empty."""

CANONICAL: Final[dict[str, str]] = {
    "N": "n_params_non_embedding",
    "D": "tokens",
    "C": "flops",
    "loss": "val_loss",
    "method": "method",
    "seed": "seed",
    "lr": "lr",
    "H": "heads",
    "kv": "kv",
}
