"""A small token store with learnable text, and configurations of models that train in seconds on one core."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from scaling.config.strict import build
from scaling.config.tree import RunConfig
from scaling.tokens import (
    FORMAT,
    HASHES,
    META,
    OFFSETS,
    TOKEN_BYTES,
    TOKENS,
    VERSION,
    Part,
    StoreMeta,
    dump_meta,
    token_dtype,
)

VOCAB = 64


def write_store(folder: Path, *, documents: int = 120, seed: int = 0) -> Path:
    """A store of two sources whose tokens follow a noisy successor rule, a fifth of the documents held out."""
    generator = np.random.default_rng(seed)
    texts: dict[tuple[str, str], list[npt.NDArray[np.int64]]] = {}
    for number in range(documents):
        length = int(generator.integers(60, 400))
        walk = np.cumsum(generator.choice([1, 1, 1, 2, 7], size=length)) % (VOCAB - 1) + 1
        split = "held_out" if number % 10 in (0, 5) else "train"
        source = "ab"[number % 2]
        texts.setdefault((split, source), []).append(np.append(walk, 0))
    order = [(split, source) for split in ("train", "held_out") for source in "ab" if (split, source) in texts]
    pieces = [piece for key in order for piece in texts[key]]
    offsets = np.concatenate([[0], np.cumsum([len(piece) for piece in pieces])]).astype(np.int64)
    parts, document = [], 0
    for split, source in order:
        number = len(texts[split, source])
        parts.append(
            Part(
                split=split,  # type: ignore[arg-type]
                source=source,
                first_token=int(offsets[document]),
                last_token=int(offsets[document + number]),
                first_document=document,
                last_document=document + number,
                text_bytes=int(offsets[document + number] - offsets[document]) - number,
            )
        )
        document += number
    folder.mkdir(parents=True, exist_ok=True)
    np.concatenate(pieces).astype(token_dtype(VOCAB)).tofile(folder / TOKENS)
    np.save(folder / OFFSETS, offsets)
    np.save(folder / HASHES, generator.integers(0, 2**63, size=(len(pieces), 2)).astype(np.uint64))
    token_bytes = np.ones(VOCAB, dtype=np.uint16)
    token_bytes[0] = 0
    np.save(folder / TOKEN_BYTES, token_bytes)
    meta = StoreMeta(
        format=FORMAT,
        version=VERSION,
        fingerprint=f"test{seed}{documents}",
        vocab_size=VOCAB,
        end_of_document=0,
        num_tokens=int(offsets[-1]),
        num_documents=len(pieces),
        text_bytes=int(offsets[-1]) - len(pieces),
        bytes_per_token=1.0,
        held_out_fraction=0.2,
        tokenizer=None,
        tokenizer_sha256="",
        parts=tuple(parts),
    )
    (folder / META).write_text(dump_meta(meta), encoding="utf-8")
    return folder


def configure(store: Path, **sections: dict[str, Any]) -> RunConfig:
    """A two-layer model on a store; ``sections`` are merged over it, e.g. ``schedule={"steps": 5}``."""
    tree: dict[str, dict[str, Any]] = {
        "model": {
            "num_layers": 2,
            "d_model": 16,
            "num_heads": 2,
            "num_kv_heads": 1,
            "d_ffn": 32,
            "vocab_size": VOCAB,
        },
        "data": {"path": str(store), "seq_len": 32, "batch_size": 8},
        "optimizer": {"lr": 1e-2},
        "schedule": {"steps": 12, "warmup_steps": 2},
        "evaluation": {"every_steps": 5, "num_sequences": 12},
        "run": {"device": "cpu", "log_every_steps": 2, "threads": 1},
    }
    for name, section in sections.items():
        tree[name] = {**tree.get(name, {}), **section}
    return build(RunConfig, tree)


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_store(tmp_path_factory.mktemp("store"))


@pytest.fixture
def make_config() -> Callable[..., RunConfig]:
    """``make_config(store, section={...}, ...)``."""
    return configure


@pytest.fixture(autouse=True)
def _one_thread() -> None:
    torch.set_num_threads(1)
