"""What is measured of training in one process: MFU, the corpus, the loss, packing, resume, checkpointing, experts."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from scaling.config.strict import build
from scaling.config.tree import RunConfig, to_dict
from scaling.identity import run_key
from scaling.loop import Loop
from scaling.loss import linear_cross_entropy
from scaling.record import RunFolder
from scaling.resolve import resolve
from scaling.stop import STOP
from scaling.train import train
from tests.gpu.training_runs import CUDA, LADDER, SEQ_LEN, SMALL, TINY, configure, points, random_store, speed, timed


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


def checkpointing(args: argparse.Namespace) -> dict[str, Any]:
    """What activation checkpointing costs in speed and saves in memory, on one device."""
    random_store(args.scratch / "random", vocab=512 if args.tiny else 32768, tokens=400_000 if args.tiny else 4_000_000)
    results: dict[str, Any] = {}
    for kind in ("none", "selective", "full"):
        results[kind] = speed(args, f"ac-{kind}", "350m", activation_checkpointing=kind)
        print(f"checkpointing {kind}: {results[kind]}", flush=True)
    return results


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
