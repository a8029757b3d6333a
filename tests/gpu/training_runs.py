"""Stores and short runs that the measurements of training share, and their clocks."""

from __future__ import annotations

import argparse
import gc
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from scaling.config.strict import build
from scaling.config.tree import RunConfig
from scaling.identity import run_key
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.tokens import FORMAT, HASHES, META, OFFSETS, TOKEN_BYTES, TOKENS, VERSION, Part, StoreMeta, dump_meta
from scaling.train import train

CUDA = torch.cuda.is_available()
# one step holds enough tokens for full speed (65,536 or more) and few enough for a quick measurement
LADDER = {"100m": (64, 64), "350m": (64, 32), "1b": (96, 48)}  # size -> sequences a step, a micro-batch
SEQ_LEN = 1024
# about 1.3M parameters, the size at which one run cannot fill a GPU
SMALL = {"num_layers": 4, "d_model": 128, "num_heads": 4, "num_kv_heads": 2, "d_ffn": 352, "vocab_size": 4096}
TINY = {"num_layers": 2, "d_model": 32, "num_heads": 2, "num_kv_heads": 1, "d_ffn": 64, "vocab_size": 512}


def random_store(folder: Path, *, vocab: int, tokens: int) -> Path:
    """A store of random tokens in documents of 1,000, for speeds, where content does not matter."""
    if (folder / META).exists():
        return folder
    folder.mkdir(parents=True)
    generator = np.random.default_rng(0)
    dtype = np.dtype("<u2" if vocab <= 2**16 else "<u4")
    ids = generator.integers(1, vocab, size=tokens).astype(dtype)
    ids[999::1000] = 0
    documents = tokens // 1000
    held = documents // 10
    ids.tofile(folder / TOKENS)
    np.save(folder / OFFSETS, np.arange(documents + 1, dtype=np.int64) * 1000)
    np.save(folder / HASHES, generator.integers(0, 2**63, size=(documents, 2)).astype(np.uint64))
    np.save(folder / TOKEN_BYTES, np.full(vocab, 3, dtype=np.uint16))
    cut = documents - held
    parts = (
        Part(
            split="train",
            source="random",
            first_token=0,
            last_token=cut * 1000,
            first_document=0,
            last_document=cut,
            text_bytes=cut * 3000,
        ),
        Part(
            split="held_out",
            source="random",
            first_token=cut * 1000,
            last_token=tokens,
            first_document=cut,
            last_document=documents,
            text_bytes=held * 3000,
        ),
    )
    meta = StoreMeta(
        format=FORMAT,
        version=VERSION,
        fingerprint=f"random{vocab}-{tokens}",
        vocab_size=vocab,
        end_of_document=0,
        num_tokens=tokens,
        num_documents=documents,
        text_bytes=tokens * 3,
        bytes_per_token=3.0,
        held_out_fraction=0.1,
        tokenizer=None,
        tokenizer_sha256="",
        parts=parts,
    )
    (folder / META).write_text(dump_meta(meta), encoding="utf-8")
    return folder


def configure(store: Path, **sections: dict[str, Any]) -> RunConfig:
    return build(RunConfig, {"data": {"path": str(store)}, **sections})


def points(config: RunConfig, out: Path) -> list[dict[str, float]]:
    folder = RunFolder(out / run_key(resolve(config)))
    return [{"step": float(point.step), **point.metrics} for point in folder.points()]


def timed(function: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, the best of three groups."""
    function()
    best = float("inf")
    for _ in range(3):
        if CUDA:
            torch.cuda.synchronize()
        start_s = time.perf_counter()
        for _ in range(repeats):
            function()
        if CUDA:
            torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start_s) / repeats)
    return best


def speed(args: argparse.Namespace, tag: str, size: str, *, steps: int | None = None, **run: Any) -> dict[str, Any]:
    """The last logged interval of a short compiled run of a ladder size, and the MFU of all."""
    steps = steps or (6 if args.tiny else 15)
    batch, rows = (8, 4) if args.tiny else LADDER[size]
    store = args.scratch / "random"
    config = configure(
        store,
        model=dict(TINY) if args.tiny else {"size": size},
        data={
            "path": str(store),
            "seq_len": 64 if args.tiny else SEQ_LEN,
            "batch_size": batch * int(os.environ.get("WORLD_SIZE", "1")),
            "micro_batch_size": rows,
        },
        schedule={"steps": steps, "warmup_steps": 2},
        evaluation={"every_steps": 1000, "num_sequences": 16},
        run={"log_every_steps": steps // 3, "compile": CUDA, "save_weights": False, **run},
    )
    gc.collect()  # the model of the run before, whose memory would count in this one's peak
    if CUDA:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    end = train(config, out=args.scratch / tag)
    lines = [point for point in points(config, args.scratch / tag) if "perf/tokens_per_s" in point]
    keys = ("perf/mfu", "perf/tokens_per_s", "perf/step_time_s", "perf/data_wait_s", "mem/peak_gib", "train/loss")
    figures: dict[str, Any] = {key: lines[-1].get(key) for key in keys}
    return {"status": end.status, **figures, "mfu_by_interval": [line.get("perf/mfu") for line in lines]}
