"""Timings of the routing kernels and of whole training steps, side by side in one run on one GPU.

``scaling bench`` prints what these functions measure, row by row, and :mod:`scaling.kernels.table` writes it. A
kernel's time is set against the bytes it must move at the copy rate measured in the same run; a step's time against the
compiled pre-norm baseline of the same shape and vocabulary, timed in the same call. Steps are timed twice: launched one
kernel at a time, and replayed as one CUDA graph, which takes the host's launch time out of both sides.

Shape legend: N rows, S sites, T tokens, D width, H heads, K sources of a group.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
import triton
from torch import Tensor

from scaling.errors import KernelError, UsageError, nearest
from scaling.kernels.decoder import SHAPES, VOCABULARIES, Decoder, Shape
from scaling.kernels.joining import IMPLEMENTATIONS, METHODS
from scaling.kernels.timed import OPERATIONS, cases

_LOG = logging.getLogger(__name__)
Row = dict[str, Any]
Each = Callable[[Row, dict[str, str]], None]  # called with a row and the versions it was measured with

_PACKAGES = {"fla": "flash-linear-attention", "liger": "liger-kernel"}
_QUANTILES = (0.2, 0.5, 0.8)
_CEILING_BYTES = 2**32  # far beyond the 60 MB of an H200's L2


def bench_train(
    *,
    shapes: Iterable[str] | None = None,
    vocabularies: Iterable[int] = VOCABULARIES,
    methods: Iterable[str] | None = None,
    implementations: Iterable[str] = ("kernels",),
    repeats: int = 10,
    each: Each | None = None,
) -> dict[str, Any]:
    """Time whole steps of every method at every shape and vocabulary, by each implementation that it has here.

    Parameters
    ----------
    each
        Called with every row as soon as it is measured, and with the versions.

    Returns
    -------
    dict
        ``versions`` and ``rows``: one row a (shape, vocabulary, method, implementation, pass, launch), with ``ms``
        quantiles in milliseconds, ``baseline_ms`` (median of the compiled baseline timed in this call), ``ratio`` of
        it to this row's median, ``peak_bytes``, ``baseline_peak_bytes`` and ``peak_ratio`` of the former to the
        latter.

    Raises
    ------
    UsageError
        If a shape, method or implementation is unknown, no method asked for has an implementation asked for, or a
        vocabulary has fewer than two tokens.
    KernelError
        If there is no CUDA device.
    """
    named = _pick(tuple(methods or ()), tuple(METHODS), "method") or None
    wanted = _pick(tuple(implementations), IMPLEMENTATIONS, "implementation")
    names = [shape.name for shape in SHAPES]
    sizes = [shape for shape in SHAPES if shape.name in _pick(tuple(shapes or names), tuple(names), "shape")]
    vocabularies = tuple(vocabularies)
    for vocabulary in vocabularies:
        if vocabulary < 2:
            raise UsageError(f"bench: vocabulary {vocabulary}; allowed: 2 and above, such as {VOCABULARIES[0]}")
    lacking = _lacking(named, wanted)
    _need_gpu()
    if lacking:
        _LOG.warning("bench: left out: %s", "; ".join(lacking))
    others = [
        (name, run)
        for name in named or METHODS
        for run in METHODS[name].runs
        if run in wanted and (name, run) != ("baseline", "compiled")
    ]
    rows: list[Row] = []
    versions = _versions()
    for shape in sizes:
        for vocabulary in vocabularies:
            base: dict[tuple[str, str], Row] = {}
            for method, implementation in (("baseline", "compiled"), *others):
                for row in _step_rows(shape, vocabulary, method, implementation, repeats):
                    key = row["pass"], row["launch"]
                    if (method, implementation) == ("baseline", "compiled"):
                        base[key] = row
                    if "ms" in row and key in base and "ms" in base[key]:
                        row["baseline_ms"] = base[key]["ms"][1]
                        row["ratio"] = row["baseline_ms"] / row["ms"][1]
                        row["baseline_peak_bytes"] = base[key]["peak_bytes"]
                        row["peak_ratio"] = row["peak_bytes"] / row["baseline_peak_bytes"]
                    _keep(row, rows, versions, each)
    return {"versions": versions, "rows": rows}


def make_decoder(shape: Shape, vocabulary: int, method: str, implementation: str) -> Decoder:
    """The decoder of one row."""
    chosen = METHODS[method]
    return Decoder(
        shape,
        vocabulary,
        joining=chosen.parameters(shape),
        run=chosen.runs[implementation],
        compiled=implementation != "eager",
    )


def bench_kernels(
    *,
    shapes: Iterable[str] | None = None,
    operations: Iterable[str] | None = None,
    each: Each | None = None,
) -> dict[str, Any]:
    """Time kernels in bfloat16 at the geometry of every shape: all, or those whose name's first word is given.

    Parameters
    ----------
    each
        Called with every row as soon as it is measured, and with the versions.

    Returns
    -------
    dict
        ``versions``, ``ceiling_bytes_per_s`` (a large copy, read and write counted) and ``rows``: operation, shape,
        dtype, pass, ``ms`` quantiles in milliseconds, ``bytes`` counted, ``ceiling_share`` of the copy rate reached.

    Raises
    ------
    UsageError
        If a shape or operation is unknown.
    KernelError
        If there is no CUDA device.
    """
    names = [shape.name for shape in SHAPES]
    wanted = _pick(tuple(shapes or names), tuple(names), "shape")
    kinds = _pick(tuple(operations or OPERATIONS), OPERATIONS, "operation")
    _need_gpu()
    ceiling = _copy_rate()
    rows: list[Row] = []
    versions = _versions()
    for shape in SHAPES:
        if shape.name not in wanted:
            continue
        for operation, direction, count, run in cases(shape):
            if operation.split()[0] not in kinds:
                continue
            times = _time_alone(run)
            row: Row = {
                "operation": operation,
                "shape": shape.name,
                "dtype": "bfloat16",
                "pass": direction,
                "ms": times,
                "bytes": count,
                "ceiling_share": count / (times[1] * 1e-3) / ceiling,
            }
            _keep(row, rows, versions, each)
    return {"versions": versions, "ceiling_bytes_per_s": ceiling, "rows": rows}


def _keep(row: Row, rows: list[Row], versions: dict[str, str], each: Each | None) -> None:
    rows.append(row)
    _LOG.info("%s", row)
    if each is not None:
        each(row, versions)


def _step_rows(shape: Shape, vocabulary: int, method: str, implementation: str, repeats: int) -> Iterator[Row]:
    """Rows of one method: launched and graph, without and with the optimiser; what fails is a row that says so."""
    row = {"shape": shape.name, "vocabulary": vocabulary, "method": method, "implementation": implementation}
    row["dtype"] = "bfloat16"
    torch._dynamo.reset()
    # PyTorch's versions take lists of sources, so that every number of sources is a graph of its own
    torch._dynamo.config.recompile_limit = torch._dynamo.config.accumulated_recompile_limit = 1024
    gc.collect()  # what an earlier method left in cycles would count to this one's peak
    torch._C._cuda_clearCublasWorkspaces()  # and so would these, one for each stream that a step was captured on
    torch.cuda.empty_cache()
    torch.manual_seed(0)
    try:
        with torch.device("cuda"):
            model = make_decoder(shape, vocabulary, method, implementation).bfloat16()
            tokens = torch.randint(vocabulary, (shape.batch, shape.time))
        optimiser = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True, capturable=True)
        target = tokens.roll(-1, 1)

        def step(*, update: bool) -> Tensor:
            loss: Tensor = model(tokens, target)
            loss.backward()
            if update:
                optimiser.step()
            optimiser.zero_grad(set_to_none=True)
            return loss.detach()

        step(update=True)  # compiles, and gives the optimiser its state before memory is measured
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        loss = float(step(update=False))
        row["peak_bytes"] = torch.cuda.max_memory_allocated()
        row["loss"] = loss
        for update, name in ((False, "forward+backward"), (True, "forward+backward+optimiser")):
            yield {**row, "pass": name, "launch": "eager", "ms": _events(partial(step, update=update), repeats)}
        for update, name in ((False, "forward+backward"), (True, "forward+backward+optimiser")):
            graph = _capture(partial(step, update=update))
            yield {**row, "pass": name, "launch": "graph", "ms": _events(graph.replay, repeats)}
            del graph
    except torch.cuda.OutOfMemoryError:
        yield {**row, "pass": "forward+backward", "launch": "eager", "failed": "out of memory"}
    except Exception as error:
        if implementation not in ("fla", "liger"):
            raise
        # another project's kernel that refuses a shape is a result; ours must not fail
        yield {**row, "pass": "forward+backward", "launch": "eager", "failed": str(error).split("\n")[0][:200]}


def _capture(step: Callable[[], object]) -> torch.cuda.CUDAGraph:
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph


def _events(run: Callable[[], object], repeats: int) -> list[float]:
    """Quantiles of single runs, milliseconds, after two that are not counted."""
    times = []
    for index in range(repeats + 2):
        first, last = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        first.record()
        run()
        last.record()
        torch.cuda.synchronize()
        if index >= 2:
            times.append(first.elapsed_time(last))
    return [float(q) for q in torch.tensor(times).quantile(torch.tensor(_QUANTILES))]


def _time(run: Callable[[], object]) -> list[float]:
    return list(triton.testing.do_bench(run, warmup=5, rep=25, quantiles=list(_QUANTILES)))


def _time_alone(run: Callable[[], Any]) -> list[float]:
    """Without the host, which takes longer to launch a short kernel than the kernel runs."""
    return _time(_capture(run).replay)


def _copy_rate() -> float:
    source = torch.randint(255, (_CEILING_BYTES,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * _CEILING_BYTES / (_time(lambda: target.copy_(source))[1] * 1e-3)


def _pick(wanted: tuple[str, ...], known: tuple[str, ...], what: str) -> tuple[str, ...]:
    for name in wanted:
        if name not in known:
            raise UsageError(f"bench: unknown {what} {name!r}; {nearest(name, known)}")
    return wanted


def _lacking(named: tuple[str, ...] | None, wanted: tuple[str, ...]) -> list[str]:
    """What of ``named`` methods (``None``: all) cannot be timed by the implementations ``wanted``, one phrase each.

    Raises
    ------
    UsageError
        If that is everything that was asked for.
    """
    chosen = tuple(name for name in METHODS if name != "baseline") if named is None else named
    # the baseline stands beside our kernels without having any
    can = {run: [name for name in METHODS if run in METHODS[name].runs] for run in wanted}
    lacking, anything = [], False
    for run in wanted:
        without = [name for name in chosen if name not in can[run] and (name, run) != ("baseline", "kernels")]
        anything |= len(without) < len(chosen)
        if not can[run]:
            lacking.append(f"{run} is not installed here (pip install {_PACKAGES[run]})")
        elif without:
            lacking.append(f"no implementation {run} of {', '.join(without)} (there is one of {', '.join(can[run])})")
    if not anything:
        raise UsageError(f"bench: {'; '.join(lacking)}; give another --method or --implementation")
    return lacking


def _need_gpu() -> None:
    if not torch.cuda.is_available():
        raise KernelError("bench: no CUDA device; timings of the interpreter mean nothing; run on a machine with a GPU")


def _versions() -> dict[str, str]:
    return {
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": str(torch.version.cuda),
    }
