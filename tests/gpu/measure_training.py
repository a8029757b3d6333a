"""Measure training on GPUs: MFU, packing, the loss, memory, equality and speed over processes, resume to the bit.

    python tests/gpu/measure_training.py mfu loss packing resume checkpointing experts corpus --store STORE --out DIR
    torchrun --nproc-per-node 2 tests/gpu/measure_training.py spread --out DIR
    torchrun --nproc-per-node 2 tests/gpu/measure_training.py scale --out DIR

Each part prints a line a figure and writes ``DIR/<part>.json``. ``--tiny`` runs the same code at sizes that a CPU
finishes in seconds, to try it before a device is paid for. ``test_training.py`` beside this asserts what must hold.
"""

from __future__ import annotations

import argparse
import gc
import json
import logging
import os
import shutil
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from scaling.config.strict import build
from scaling.config.tree import RunConfig, to_dict
from scaling.identity import run_key
from scaling.loop import Loop
from scaling.loss import linear_cross_entropy
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.stop import STOP
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


def mfu(args: argparse.Namespace) -> dict[str, Any]:
    """Baseline, compiled, optimiser included, journal and all: the last logged intervals of a real run."""
    random_store(args.scratch / "random", vocab=512 if args.tiny else 32768, tokens=400_000 if args.tiny else 4_000_000)
    results: dict[str, Any] = {}
    for size in args.sizes or LADDER:
        start_s = time.perf_counter()
        try:
            figures = speed(args, "mfu", size, steps=6 if args.tiny else 24, seed=list(LADDER).index(size))
        except Exception as error:  # the other sizes are still worth measuring
            results[size] = {"error": str(error)[:500]}
            print(f"mfu {size}: {error}")
            continue
        results[size] = figures | {"whole_s": time.perf_counter() - start_s, "rows": LADDER[size][1]}
        print(f"mfu {size}: {results[size]}", flush=True)
    return results


def corpus(args: argparse.Namespace) -> dict[str, Any]:
    """``scaling train``, 100m, 200 steps on the given store, by the command itself."""
    model = dict(TINY, vocab_size=32768) if args.tiny else {"size": "100m"}
    config = configure(
        args.store,
        model=model,
        data={"path": str(args.store), "seq_len": 64 if args.tiny else SEQ_LEN, "batch_size": 8 if args.tiny else 64},
        optimizer={"lr": 1e-3},
        schedule={"steps": 6 if args.tiny else 200},
        evaluation={"every_steps": 100, "num_sequences": 16 if args.tiny else 128},
        run={"log_every_steps": 2 if args.tiny else 20, "compile": CUDA, "save_weights": False},
    )
    path = args.scratch / "corpus.json"
    path.write_text(json.dumps(to_dict(config)), encoding="utf-8")  # JSON is YAML
    command = [sys.executable, "-m", "scaling", "train", str(path), "--out", str(args.scratch / "corpus"), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stderr[-3000:])
    if done.returncode:
        return {"error": done.stderr[-1500:]}
    end = json.loads(done.stdout)
    lines = points(config, args.scratch / "corpus")
    return {
        "status": end["status"],
        "step": end["step"],
        "final": end["final"],
        "loss": [(p["step"], p["train/loss"]) for p in lines if "train/loss" in p],
        "mfu": [p["perf/mfu"] for p in lines if "perf/mfu" in p],
    }


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


def loss(args: argparse.Namespace) -> dict[str, Any]:
    """Forward and backward of the last layer at the 100m shape: ours, ours uncompiled, Liger's."""
    device = "cuda" if CUDA else "cpu"
    n, d, v = (256, 32, 512) if args.tiny else (32_768, 512, 151_936)
    hidden = torch.randn(n, d, device=device, dtype=torch.bfloat16, requires_grad=True)
    weight = (torch.randn(v, d, device=device) * 0.02).requires_grad_()
    target = torch.randint(0, v, (n,), device=device)

    def run(function: Callable[[Tensor, Tensor], Tensor]) -> Callable[[], None]:
        def call() -> None:
            hidden.grad = weight.grad = None
            with torch.autocast(device, dtype=torch.bfloat16):
                objective = function(hidden, weight)
            torch.autograd.backward(objective / n)

        return call

    variants: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
        "own, eager": lambda h, w: linear_cross_entropy(h, w, target)[0],
    }
    if CUDA:
        variants["own, compiled"] = lambda h, w: linear_cross_entropy(h, w, target, compiled=True)[0]
        try:
            from liger_kernel.ops.fused_linear_cross_entropy import LigerFusedLinearCrossEntropyFunction as Liger

            def liger(h: Tensor, w: Tensor) -> Tensor:
                out = Liger.apply(h, w.to(torch.bfloat16), target, None, None, -100, 0.0, 0.0, "sum")
                result: Tensor = out[0] if isinstance(out, tuple) else out
                return result

            variants["liger"] = liger
        except ImportError as error:
            print(f"no Liger: {error}")
    results: dict[str, Any] = {"shape": [n, d, v]}
    for name, function in variants.items():
        try:
            if CUDA:
                torch.cuda.reset_peak_memory_stats()
                base = torch.cuda.memory_allocated()
            seconds = timed(run(function), 1 if args.tiny else 5)
            peak = (torch.cuda.max_memory_allocated() - base) / 2**30 if CUDA else 0.0
            results[name] = {
                "ms": seconds * 1e3,
                "flops_fraction": 6 * n * d * v / seconds / 989.5e12,
                "peak_gib": peak,
                "loss": float(function(hidden, weight).detach()) / n,
            }
        except Exception as error:
            results[name] = {"error": str(error)[:300]}
        print(f"loss {name}: {results[name]}", flush=True)
    return results


def packing(args: argparse.Namespace) -> dict[str, Any]:
    """Runs of about 1.3M parameters: N processes on one GPU against one after another, without and with MPS."""
    store = random_store(args.scratch / "small", vocab=512 if args.tiny else 4096, tokens=400_000)
    steps = 6 if args.tiny else 600
    counts = (1, 2) if args.tiny else (1, 8, 16)
    results: dict[str, Any] = {}
    for mps in (False, True):
        if mps and (shutil.which("nvidia-cuda-mps-control") is None or not CUDA):
            results["mps"] = "nvidia-cuda-mps-control is not here"
            continue
        env = {**os.environ, "OMP_NUM_THREADS": "1"}
        if mps:
            pipe = args.scratch / "mps"
            pipe.mkdir(exist_ok=True)
            env |= {"CUDA_MPS_PIPE_DIRECTORY": str(pipe), "CUDA_MPS_LOG_DIRECTORY": str(pipe)}
            started = subprocess.run(
                ["nvidia-cuda-mps-control", "-d"], env=env, capture_output=True, text=True, check=False
            )
            if started.returncode:
                results["mps"] = f"did not start: {started.stdout} {started.stderr}"[:300]
                continue
        try:
            for number in counts if not mps else counts[1:]:
                key = f"{number} at once{', MPS' if mps else ''}"
                results[key] = pack(args, store, number, steps, env, tag=f"{number}{mps}")
                print(f"packing {key}: {results[key]}", flush=True)
        finally:
            if mps:
                subprocess.run(
                    ["nvidia-cuda-mps-control"], input="quit\n", env=env, text=True, check=False, capture_output=True
                )
    alone = results.get("1 at once", {}).get("tokens_per_s")
    if alone:
        for value in results.values():
            if isinstance(value, dict) and "tokens_per_s" in value:
                value["times_one_after_another"] = value["tokens_per_s"] / alone
    return results


def pack(
    args: argparse.Namespace, store: Path, number: int, steps: int, env: dict[str, str], *, tag: str
) -> dict[str, Any]:
    out = args.scratch / f"pack{tag}"
    running, configs = [], []
    for seed in range(number):
        config = configure(
            store,
            model=dict(TINY) if args.tiny else dict(SMALL),
            data={"path": str(store), "seq_len": 64 if args.tiny else 256, "batch_size": 8 if args.tiny else 32},
            schedule={"steps": steps, "warmup_steps": 2},
            evaluation={"every_steps": 10_000, "num_sequences": 8},
            run={"log_every_steps": max(1, steps // 12), "seed": seed, "save_weights": False, "threads": 1},
        )
        configs.append(config)
        path = args.scratch / f"pack{tag}-{seed}.json"
        path.write_text(json.dumps(to_dict(config)), encoding="utf-8")
        command = [sys.executable, "-m", "scaling", "train", str(path), "--out", str(out), "--json"]
        running.append(subprocess.Popen(command, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True))
    errors = [process.communicate()[1] for process in running]
    failed = [error[-300:] for process, error in zip(running, errors, strict=True) if process.returncode]
    if failed:
        return {"error": failed[0]}
    # the time in which all were training: from the last first line to the first last line
    journals = []
    for config in configs:
        folder = RunFolder(out / run_key(resolve(config)))
        journals.append([point for point in folder.points() if "train/loss" in point.metrics])
    first = max(journal[0].time_ms for journal in journals)
    last = min(journal[-1].time_ms for journal in journals)
    tokens = 0.0
    for journal in journals:
        inside = [point for point in journal if first <= point.time_ms <= last]
        if len(inside) > 1:
            rate = (inside[-1].metrics["train/tokens"] - inside[0].metrics["train/tokens"]) / (
                (inside[-1].time_ms - inside[0].time_ms) / 1e3
            )
            tokens += rate
    return {"tokens_per_s": tokens, "overlap_s": (last - first) / 1e3}


def interrupted(config: RunConfig, out: Path, updates: int) -> None:
    """Train, asked to leave after a number of updates."""
    import signal

    advance = Loop._advance
    made = 0

    def counted(self: Loop, feed: Any) -> None:
        nonlocal made
        advance(self, feed)
        made += 1
        if made == updates:
            STOP.signal = signal.SIGTERM

    Loop._advance = counted  # type: ignore[method-assign]
    try:
        end = train(config, out=out)
        assert end.status == "cancelled" and end.step == updates, end
    finally:
        Loop._advance = advance  # type: ignore[method-assign]
        STOP.signal = None


def resume(args: argparse.Namespace) -> dict[str, Any]:
    """Interrupted and resumed, in deterministic mode: every journal value of an uninterrupted run, to the bit."""
    store = random_store(args.scratch / "small", vocab=512 if args.tiny else 4096, tokens=400_000)
    results: dict[str, Any] = {}
    for method in ({"method": "baseline"}, {"method": "mhar", "heads": 4}):
        config = configure(
            store,
            model={**(TINY if args.tiny else SMALL), "residual": method},
            data={"path": str(store), "seq_len": 64 if args.tiny else 256, "batch_size": 16, "micro_batch_size": 8},
            optimizer={"ema_decay": 0.99, "z_loss": 1e-4},
            schedule={"steps": 30, "warmup_steps": 3},
            evaluation={"every_steps": 10, "num_sequences": 16},
            run={"log_every_steps": 5, "deterministic": True},
        )
        name = method["method"]
        train(config, out=args.scratch / f"whole-{name}")
        interrupted(config, args.scratch / f"parts-{name}", 13)
        train(config, out=args.scratch / f"parts-{name}")
        curves = []
        for part in ("whole", "parts"):
            lines = points(config, args.scratch / f"{part}-{name}")
            curves.append([{k: v for k, v in line.items() if not k.startswith(("perf/", "mem/"))} for line in lines])
        results[str(name)] = {"equal_to_the_bit": curves[0] == curves[1], "lines": len(curves[0])}
        print(f"resume {name}: {results[str(name)]}", flush=True)
    return results


def spread(args: argparse.Namespace) -> dict[str, Any]:
    """Under torchrun: the same run with DDP and FSDP2, and alone on the first process, in fp32 and mixed precision."""
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    vocab = 512 if args.tiny else 32768
    store = args.scratch / "spread"
    if rank == 0:
        random_store(store, vocab=vocab, tokens=1_000_000)
    while not (store / META).exists():
        time.sleep(0.2)
    results: dict[str, Any] = {"processes": size}
    # one group for all runs: a second one in the same processes would read the first one's addresses from the store
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    dense: dict[str, Any] = dict(TINY) if args.tiny else {"size": "5m"}
    sparse = {**dense, "moe": {"num_experts": 8, "top_k": 2, "d_expert": 64, "bias_update_rate": 0.0}}
    for mode, model, kind in (("fp32", dense, ""), ("mixed", dense, ""), ("fp32", sparse, " experts")):
        curves: dict[str, dict[str, float]] = {}
        for parallel in ("ddp", "fsdp2", "none"):
            config = configure(
                store,
                model=model,
                data={"path": str(store), "seq_len": 64 if args.tiny else 512, "batch_size": 15, "micro_batch_size": 4},
                precision={"mode": mode},
                schedule={"steps": 30, "warmup_steps": 3},
                evaluation={"every_steps": 15, "num_sequences": 16},
                run={"log_every_steps": 5, "parallel": parallel, "save_weights": False},
            )
            out = args.scratch / f"spread-{mode}{kind.strip()}-{parallel}"
            if parallel != "none":
                train(config, out=out)
            elif rank == 0:
                kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
                train(config, out=out)
                os.environ.update(kept)
            if rank == 0:
                curves[parallel] = {
                    f"{line['step']:.0f} {key}": line[key]
                    for line in points(config, out)
                    for key in ("train/loss", "train/grad_norm", "val/loss")
                    if key in line
                }
        if rank == 0:
            for parallel in ("ddp", "fsdp2"):
                gaps = [abs(curves[parallel][key] - curves["none"][key]) for key in curves["none"]]
                results[f"{mode} {parallel}{kind}"] = {"largest_difference": max(gaps), "values": len(gaps)}
                print(f"spread {mode} {parallel}{kind}: {results[f'{mode} {parallel}{kind}']}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return results if rank == 0 else {}


def experts(args: argparse.Namespace) -> dict[str, Any]:
    """Mixture of experts, compiled and mixed precision: experts as one grouped product against one after another."""
    from scaling.models import moe

    store = random_store(
        args.scratch / "random", vocab=512 if args.tiny else 32768, tokens=400_000 if args.tiny else 4_000_000
    )
    options = {"num_experts": 8, "top_k": 2, "d_expert": 16} if args.tiny else {"num_experts": 64, "top_k": 6}
    has_grouped = moe._has_grouped_product
    results: dict[str, Any] = {}
    for name in ("grouped", "loop", "grouped, not compiled"):
        config = configure(
            store,
            model={**(TINY if args.tiny else {"size": "5m"}), "moe": options},
            data={"path": str(store), "seq_len": 64 if args.tiny else 512, "batch_size": 8 if args.tiny else 64},
            schedule={"steps": 6 if args.tiny else 30, "warmup_steps": 3},
            evaluation={"every_steps": 1000, "num_sequences": 16},
            run={
                "log_every_steps": 2 if args.tiny else 10,
                "compile": CUDA and "not" not in name,
                "save_weights": False,
            },
        )
        torch._dynamo.reset()
        if name == "loop":
            moe._has_grouped_product = lambda x: False
        try:
            end = train(config, out=args.scratch / f"experts-{name.replace(', ', '-').replace(' ', '-')}")
        finally:
            moe._has_grouped_product = has_grouped
        lines = points(config, args.scratch / f"experts-{name.replace(', ', '-').replace(' ', '-')}")
        lines = [line for line in lines if "perf/tokens_per_s" in line]
        keys = [key for key in lines[-1] if key.startswith("route/") or key in ("perf/tokens_per_s", "perf/mfu")]
        results[name] = {
            "status": end.status,
            "loss": [line["train/loss"] for line in lines],
            **{key: lines[-1][key] for key in keys[:12]},
        }
        print(f"experts {name}: {results[name]}", flush=True)
    return results


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


def checkpointing(args: argparse.Namespace) -> dict[str, Any]:
    """What activation checkpointing costs in speed and saves in memory, on one device."""
    random_store(args.scratch / "random", vocab=512 if args.tiny else 32768, tokens=400_000 if args.tiny else 4_000_000)
    results: dict[str, Any] = {}
    for kind in ("none", "selective", "full"):
        results[kind] = speed(args, f"ac-{kind}", "350m", activation_checkpointing=kind)
        print(f"checkpointing {kind}: {results[kind]}", flush=True)
    return results


def scale(args: argparse.Namespace) -> dict[str, Any]:
    """Under torchrun: tokens/s of DDP and FSDP2 over all processes, and of one process alone."""
    rank = int(os.environ["RANK"])
    store = args.scratch / "random"
    if rank == 0:
        random_store(store, vocab=512 if args.tiny else 32768, tokens=400_000 if args.tiny else 4_000_000)
    while not (store / META).exists():
        time.sleep(0.2)
    if CUDA:
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("cpu:gloo,cuda:nccl" if CUDA else "gloo")
    results: dict[str, Any] = {"processes": dist.get_world_size()}
    for size in args.sizes or ("350m", "1b"):
        for parallel in ("ddp", "fsdp2"):
            figures = speed(args, f"scale-{size}-{parallel}", size, parallel=parallel)
            if rank == 0:
                results[f"{size} {parallel}"] = figures
                print(f"scale {size} {parallel}: {figures}", flush=True)
        if rank == 0:
            kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
            results[f"{size} alone"] = speed(args, f"scale-{size}-alone", size)
            os.environ.update(kept)
            print(f"scale {size} alone: {results[f'{size} alone']}", flush=True)
        dist.barrier()
    dist.destroy_process_group()
    return results if rank == 0 else {}


def public(args: argparse.Namespace) -> dict[str, Any]:
    """The step of Hugging Face's Qwen3, the same shape and optimiser, compiled, beside ours (part mfu)."""
    import transformers

    from scaling.accounting import count_flops
    from scaling.config import ladder
    from scaling.config.model import ModelConfig

    shape = dict(TINY) if args.tiny else ladder.shape("100m")
    device = "cuda" if CUDA else "cpu"
    rows, length = (4, 64) if args.tiny else (16, SEQ_LEN)
    public_library: Any = transformers  # its configuration classes take more keywords than they declare
    qwen = public_library.Qwen3Config(
        vocab_size=shape["vocab_size"],
        hidden_size=shape["d_model"],
        intermediate_size=shape["d_ffn"],
        num_hidden_layers=shape["num_layers"],
        num_attention_heads=shape["num_heads"],
        num_key_value_heads=shape["num_kv_heads"],
        head_dim=shape["d_model"] // shape["num_heads"],
        tie_word_embeddings=True,
        use_cache=False,
        attn_implementation="sdpa",
    )
    model = public_library.Qwen3ForCausalLM(qwen).to(device)
    step_model = torch.compile(model) if CUDA else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    tokens = torch.randint(0, shape["vocab_size"], (rows, length), device=device)
    pieces = 1 if args.tiny else 4

    def step() -> None:
        for _ in range(pieces):
            with torch.autocast(device, dtype=torch.bfloat16):
                loss = step_model(input_ids=tokens, labels=tokens).loss
            (loss / pieces).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    seconds = timed(step, 1 if args.tiny else 5)
    tokens_per_s = rows * pieces * length / seconds
    flops = count_flops(build(ModelConfig, shape), length).training
    result = {
        "tokens_per_s": tokens_per_s,
        "mfu": flops * tokens_per_s / 989.5e12,
        "rows": rows,
        "peak_gib": torch.cuda.max_memory_allocated() / 2**30 if CUDA else 0.0,
    }
    print(f"public: {result}", flush=True)
    return result


_PARTS = (mfu, corpus, loss, packing, resume, checkpointing, experts, spread, scale, public)
PARTS = {part.__name__: part for part in _PARTS}


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("parts", nargs="+", choices=sorted(PARTS))
    parser.add_argument("--store", type=Path, help="token store of part corpus")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--scratch", type=Path, help="where runs go (default: OUT/scratch)")
    parser.add_argument("--sizes", nargs="*", default=[])
    parser.add_argument("--tiny", action="store_true")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    args.scratch = args.scratch or args.out / "scratch"
    args.scratch.mkdir(parents=True, exist_ok=True)
    logging.basicConfig(level=logging.WARNING)
    failed = 0
    for name in args.parts:
        start_s = time.perf_counter()
        try:
            result = PARTS[name](args)
        except Exception:  # the parts after it are still worth measuring
            traceback.print_exc()
            result, failed = {"error": traceback.format_exc()[-1500:]}, 1
        if result:
            suffix = f"-{'-'.join(args.sizes)}" if args.sizes else ""
            text = json.dumps({**result, "seconds": time.perf_counter() - start_s}, indent=1)
            (args.out / f"{name}{suffix}.json").write_text(text, encoding="utf-8")
        print(f"{name}: {time.perf_counter() - start_s:.0f} s", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
