"""Everything about the kernels that needs a GPU, in calls of less than ten minutes each.

    python tests/gpu/measure_kernels.py plan                        # prints the calls below, in order
    python tests/gpu/measure_kernels.py correct --part bank         # tests/kernels, compiled; streams, hyper, models
    python tests/gpu/measure_kernels.py sanitize                    # compute-sanitizer on the smallest shapes
    torchrun --nproc-per-node 2 tests/gpu/measure_kernels.py spread # DDP and FSDP2 against one process, with kernels
    python tests/gpu/measure_kernels.py warm                        # compiles for all shapes, side by side
    python tests/gpu/measure_kernels.py kernels --shape d1024       # bench kernels
    python tests/gpu/measure_kernels.py train --shape d1024         # bench train, all methods; --implementation ...
    python tests/gpu/measure_kernels.py profile --shape d1024       # ncu where the ceiling is missed by over 15%
    python tests/gpu/measure_kernels.py table                       # all train rows so far as one CSV

Results are JSON files in ``--out`` (default ``kernel-measurements``), named by call, so that a lost session loses one
call. ``once`` runs each kernel once and is what the sanitizer watches. On a machine without a GPU ``once`` and
``spread`` run in Triton's interpreter, to try this script before a device is paid for.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

CUDA = torch.cuda.is_available()
ROOT = Path(__file__).resolve().parents[2]
PARTS = {
    "bank": "test_bank.py test_misuse.py test_dispatch.py test_products.py",
    "streams": "test_streams.py test_stream_fold.py",
    "hyper": "test_hyper.py",
    "models": "test_models.py test_joining.py",
}
METHODS = (("attnres", "mhar", "block"), ("block-attnres", "delta"), ("msar", "hc", "mhc"))
SHAPES = ("d512", "d1024", "d1280", "d2048")
MISSED = 0.85  # below this share of the copy rate a kernel is profiled
NCU_METRICS = "gpu__time_duration.sum,dram__throughput.avg.pct_of_peak_sustained_elapsed," + ",".join(
    (
        "sm__throughput.avg.pct_of_peak_sustained_elapsed",
        "smsp__inst_executed_pipe_fma.avg.pct_of_peak_sustained_active",
        "smsp__issue_active.avg.pct_of_peak_sustained_active",
        "l1tex__throughput.avg.pct_of_peak_sustained_elapsed",
        "sm__warps_active.avg.pct_of_peak_sustained_active",
        "launch__registers_per_thread",
    )
)


def plan(_: argparse.Namespace) -> None:
    """Print all calls in order."""
    script = "tests/gpu/measure_kernels.py"
    for part in PARTS:  # a kernel compiles in seconds to tens of seconds, and every case is a kernel of its own
        for keyword in ("float32 or gradients", "not float32 and not gradients"):
            print(f"python {script} correct --part {part} --keyword '{keyword}'")
    print(f"python {script} sanitize")
    print(f"torchrun --nproc-per-node 2 {script} spread")
    print(f"python {script} warm")
    for shape in SHAPES:
        print(f"python {script} kernels --shape {shape}")
        for implementation in ("kernels", "compiled", "eager"):
            for methods_of_call in METHODS:  # few enough that compiling them fits a call
                chosen = " ".join(f"--method {name}" for name in methods_of_call)
                repeats = "" if implementation == "kernels" else " --repeats 5"
                print(f"python {script} train --shape {shape} --implementation {implementation} {chosen}{repeats}")
        for implementation in ("fla", "liger"):
            print(f"python {script} train --shape {shape} --implementation {implementation} --repeats 5")
        print(f"python {script} profile --shape {shape}")
    print(f"python {script} table")


def save(args: argparse.Namespace, name: str, result: object) -> None:
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def run(command: list[str], **more: Any) -> subprocess.CompletedProcess[str]:
    print("$", " ".join(command), flush=True)
    return subprocess.run(command, cwd=ROOT, text=True, check=False, **more)


def correct(args: argparse.Namespace) -> None:
    """The kernels' tests, compiled: outputs and gradients against float64, 16 bits, shapes, determinism, models."""
    files = [f"tests/kernels/{name}" for name in PARTS[args.part].split()]
    done = run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--durations=10", "-k", args.keyword, *files]
    )
    save(args, f"correct-{args.part}-{args.keyword.replace(' ', '-')}", {"return_code": done.returncode})
    sys.exit(done.returncode)


def once(_: argparse.Namespace) -> None:
    """Forward and backward of every operator at the smallest shapes, tiles that are not full included."""
    from scaling.config.model import ModelConfig
    from scaling.models.transformer import Transformer

    device = "cuda" if CUDA else "cpu"
    for name, residual in methods():
        config = ModelConfig(
            residual=residual, num_layers=1, d_model=48, num_heads=3, num_kv_heads=3, d_ffn=16, vocab_size=7
        )
        model = Transformer(config)
        model.init_weights(0)
        model.to(device)
        tokens = torch.arange(5, device=device).view(1, 5)
        loss = model.logits(model(tokens)).float().square().mean()
        loss.backward()
        assert bool(torch.isfinite(loss)), name
        print(f"{name}: {float(loss.detach()):.6f}", flush=True)


def methods() -> Iterator[tuple[str, Any]]:
    """One configuration of each set of kernels."""
    from scaling.config.residual import Delta, HyperConnections, Mhar, Mhc, Msar

    yield "mhar", Mhar(heads=3)
    yield "mhar-block", Mhar(heads=3, block_sublayers=2)
    yield "mhar-groups", Mhar(heads=3, align="kv_groups", key_norm="per_head")
    yield "delta", Delta(heads=3, gate="learned", null_source=True)
    yield "msar", Msar(streams=3, kernels=(2, 3), block_sublayers=2)
    yield "hc", HyperConnections(streams=2)
    yield "mhc", Mhc(streams=2, sinkhorn_iterations=3)


def sanitize(args: argparse.Namespace) -> None:
    """compute-sanitizer's memory and race checks over ``once``."""
    tool = shutil.which("compute-sanitizer") or next(
        (str(path) for path in Path(sys.prefix).rglob("compute-sanitizer") if os.access(path, os.X_OK)), None
    )
    if tool is None:
        sys.exit("compute-sanitizer is not here; install the CUDA toolkit's (package nvidia-cuda-sanitizer-api)")
    result: dict[str, Any] = {}
    for check in ("memcheck", "racecheck"):
        # PyTorch's caching allocator would hide reads beyond a tensor.
        environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        command = [tool, "--tool", check, "--error-exitcode", "9", sys.executable, __file__, "once"]
        done = run(command, capture_output=True, env=environment)
        print(done.stdout[-2000:], done.stderr[-2000:])
        result[check] = {"return_code": done.returncode, "tail": done.stdout[-500:]}
    save(args, "sanitize", result)
    sys.exit(max(part["return_code"] for part in result.values()))


def spread(args: argparse.Namespace) -> None:
    """Gradients of DDP and FSDP2 over the processes against one process that has all sequences."""
    import torch.distributed as dist

    from scaling.config.model import ModelConfig
    from scaling.config.training import RunSettings
    from scaling.distributed import as_sharded, join, prepare, wrap
    from scaling.loss import TrainingLoss
    from scaling.models.transformer import Transformer

    result: dict[str, float] = {}
    kinds: tuple[Any, ...] = ("ddp", "fsdp2")
    for parallel in kinds:
        for name, residual in methods():
            if args.method and name not in args.method:
                continue
            settings = RunSettings(parallel=parallel, compile=False)
            world = join(settings)
            config = ModelConfig(
                residual=residual, num_layers=1, d_model=48, num_heads=3, num_kv_heads=3, d_ffn=16, vocab_size=11
            )
            tokens = torch.arange(4 * world.size, device=world.device).view(2 * world.size, 2) % 11
            gradients = []
            for alone in (True, False):
                with torch.device(world.device):
                    model = Transformer(config)
                model.init_weights(0)
                generator = torch.Generator().manual_seed(1)
                with torch.no_grad():
                    for parameter in model.residual.parameters():
                        noise = torch.randn(parameter.shape, generator=generator)
                        parameter.add_(noise.to(world.device), alpha=0.1)
                loss: torch.nn.Module = TrainingLoss(model, z_loss=0.0, compiled=False)
                part = tokens
                if not alone:
                    prepare(model, settings)
                    loss = wrap(loss, model, settings, world)
                    part = tokens[2 * world.rank : 2 * world.rank + 2]
                objective, _ = loss(part, part.roll(-1, 1), None)
                (objective * ((1 if alone else world.size) / tokens.numel())).backward()
                found = {}
                for key, parameter in model.named_parameters():
                    if parameter.grad is not None:
                        sharded = as_sharded(parameter.grad)
                        found[key] = parameter.grad if sharded is None else sharded.full_tensor()
                gradients.append(found)
            one, many = gradients
            largest = max(float(g.abs().max()) for g in one.values())
            difference = max(float((many[key] - gradient).abs().max()) for key, gradient in one.items())
            result[f"{name} {parallel}"] = difference / largest
            if world.is_first:
                print(f"{name} {parallel}: {difference / largest:.1e} of the largest gradient", flush=True)
    if dist.get_rank() == 0:
        save(args, "spread", result)
    dist.destroy_process_group()
    assert all(value < 1e-5 for value in result.values()), result


def kernels(args: argparse.Namespace) -> None:
    """Times, bytes and share of the copy rate of every kernel at one shape."""
    from scaling.kernels.benchmark import bench_kernels

    result = bench_kernels(shapes=[args.shape])
    save(args, f"kernels-{args.shape}", result)
    for row in result["rows"]:
        print(f"{row['operation']:40} {row['pass']:9} {row['ms'][1]:8.3f} ms {row['ceiling_share']:6.1%}", flush=True)


def warm(args: argparse.Namespace) -> None:
    """Fill the compilers' caches with a step of every shape and method, a process each: ``train`` then only times.

    ``--most`` processes run at a time; a step needs up to 25 GiB of the GPU's memory.
    """
    methods_of_call = args.method or [name for group in METHODS for name in group]
    code = (
        "import sys\nfrom scaling.kernels.benchmark import _step_rows\nfrom scaling.kernels.decoder import SHAPES\n"
        "shape = next(s for s in SHAPES if s.name == sys.argv[1])\n"
        "for method, run in (('baseline', 'compiled'), (sys.argv[2], 'kernels')):\n"
        "    next(_step_rows(shape, 32768, method, run, 1))\n"
    )
    waiting = [(shape, method) for method in methods_of_call for shape in SHAPES]
    running: dict[subprocess.Popen[str], tuple[str, str]] = {}
    while waiting or running:
        while waiting and len(running) < args.most:
            job = waiting.pop(0)
            started = subprocess.Popen([sys.executable, "-c", code, *job], cwd=ROOT, stderr=subprocess.PIPE, text=True)
            running[started] = job
        done = next(iter(running))  # they end in about the order in which they started
        error = done.communicate()[1]
        job = running.pop(done)
        print(*job, "compiled" if done.returncode == 0 else error.strip().splitlines()[-1][:200], flush=True)


def train(args: argparse.Namespace) -> None:
    """Whole steps of every method at one shape, by one implementation, beside the baseline."""
    from scaling.kernels.benchmark import bench_train
    from scaling.kernels.decoder import VOCABULARIES

    # other implementations are slow; one vocabulary keeps them within a call
    for vocabulary in VOCABULARIES if args.implementation == "kernels" else VOCABULARIES[:1]:
        result = bench_train(
            shapes=[args.shape],
            vocabularies=[vocabulary],
            methods=args.method,
            implementations=[args.implementation],
            repeats=args.repeats,
        )
        save(args, "-".join(("train", args.shape, str(vocabulary), args.implementation, *(args.method or ()))), result)
        for row in result["rows"]:
            keys = ("vocabulary", "method", "implementation", "pass", "launch", "ratio", "peak_ratio", "failed")
            print(" ".join(str(row.get(key, "-")) for key in keys), flush=True)


def profile(args: argparse.Namespace) -> None:
    """ncu, clocks as they are, over the kernels of one shape that miss the copy rate by over 15%."""
    tool = shutil.which("ncu")
    if tool is None:
        sys.exit("ncu is not here; install Nsight Compute")
    rows = json.loads((args.out / f"kernels-{args.shape}.json").read_text("utf-8"))["rows"]
    missed = sorted({row["operation"] for row in rows if row["ceiling_share"] < MISSED})
    print("missed:", *missed, sep="\n  ")
    result = {}
    for operation in missed[: args.most]:
        code = "from scaling.kernels.timed import cases; from scaling.kernels.decoder import SHAPES; import torch\n"
        code += f"shape = next(s for s in SHAPES if s.name == {args.shape!r})\n"
        code += f"for name, _, _, call in cases(shape):\n    if name == {operation!r}:\n        call(); call()\n"
        code += "torch.cuda.synchronize()\n"
        command = [tool, "--clock-control", "none", "--csv", "--metrics", NCU_METRICS]
        command += ["--kernel-name", "regex:_kernel$", sys.executable, "-c", code]
        done = run(command, capture_output=True)
        result[operation] = done.stdout[-4000:]
        print(done.stdout[-1500:], done.stderr[-500:], flush=True)
        save(args, f"profile-{args.shape}", result)


def table(args: argparse.Namespace) -> None:
    """All rows of whole steps as the committed table."""
    from scaling.kernels.table import STEPS, Table

    path = args.out / "results.csv"
    path.unlink(missing_ok=True)
    written = Table(path, STEPS)
    keys = set()
    for measured in sorted(args.out.glob("train-*.json")):
        result = json.loads(measured.read_text("utf-8"))
        for row in result["rows"]:
            key = tuple(row.get(name) for name in STEPS.key)
            if key not in keys:  # every call times the baseline anew, to compare with; the first stands for all
                keys.add(key)
                written.add(row, result["versions"])
    print(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    calls = {f.__name__: f for f in (plan, correct, once, sanitize, spread, warm, kernels, train, profile, table)}
    parser.add_argument("call", choices=calls)
    parser.add_argument("--out", type=Path, default=Path("kernel-measurements"))
    parser.add_argument("--part", choices=PARTS, default="bank")
    parser.add_argument("--keyword", default="", help="pytest's -k: only these tests")
    parser.add_argument("--shape", choices=SHAPES, default="d1024")
    parser.add_argument("--implementation", default="kernels")
    parser.add_argument("--method", action="append", help="only these methods")
    parser.add_argument("--repeats", type=int, default=10, help="timed steps of a row")
    parser.add_argument("--most", type=int, default=6, help="kernels to profile, processes that compile")
    args = parser.parse_args()
    # not at import, which test collection does too
    if not CUDA:
        os.environ["TRITON_INTERPRET"] = "1"
    os.environ.setdefault("ISOLOSS_KERNELS", "triton")
    calls[args.call](args)


if __name__ == "__main__":
    main()
