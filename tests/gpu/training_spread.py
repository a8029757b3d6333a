"""What is measured of training under torchrun: equality and speed over processes."""

from __future__ import annotations

import argparse
import os
import time
from typing import Any

import torch
import torch.distributed as dist

from scaling.tokens import META
from scaling.train import train
from tests.gpu.training_runs import CUDA, TINY, configure, points, random_store, speed


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
