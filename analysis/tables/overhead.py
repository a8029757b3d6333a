"""What each residual method costs by the accounting alone: parameters, FLOPs, and memory traffic of the residual.

Reads ``scaling.accounting`` alone. The traffic is the count of numbers read and written by an ideal fused kernel, in
units of the width; its conventions stand in the caption.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import pandas as pd

from scaling.accounting.flops import count_flops
from scaling.accounting.parameters import count_parameters
from scaling.accounting.residual import source_counts
from scaling.analysis.tables.table import Column, Table
from scaling.config.ladder import SIZES
from scaling.config.model import ModelConfig
from scaling.config.residual import METHODS
from scaling.config.strict import build
from scaling.config.tree import RunConfig

PAPER_SIZES: Final = ("100m", "350m", "1b")
_SEQ_LEN: Final = 1024
_MHC_STREAMS: Final = 4
_MSAR_STREAMS: Final = 4
_FEWEST_LAYERS: Final = 8  # below, eight blocks are no blocks
_BYTES: Final = 2  # of a number in bfloat16
_BASELINE_TRAFFIC: Final = 3.0  # read stream and output, write stream


def overhead(*, sizes: Sequence[str] = PAPER_SIZES, methods: Sequence[str] | None = None) -> Table:
    """Parameters and training FLOPs of every method, and what it adds to the baseline."""
    rows = []
    for size in sizes:
        base = _model(size, "baseline")
        parameters, flops = count_parameters(base).total, count_flops(base, _SEQ_LEN).training
        for method in methods or METHODS:
            model = _model(size, method)
            own, spent = count_parameters(model), count_flops(model, _SEQ_LEN)
            rows.append(
                {
                    "size": size,
                    "size_sort": parameters,
                    "method": method,
                    "parameters": own.total,
                    "parameters_added": 100 * (own.total / parameters - 1),
                    "flops": spent.training,
                    "flops_added": 100 * (spent.training / flops - 1),
                }
            )
    columns = (
        Column(key="size", label="size"),
        Column(key="method", label="method"),
        Column(key="parameters", label="parameters", kind="integer"),
        Column(key="parameters_added", label="added (%)", kind="number", digits=2),
        Column(key="flops", label="training FLOPs a token", kind="number"),
        Column(key="flops_added", label="added (%)", kind="number", digits=2),
    )
    caption = (
        f"Counted from the shapes at sequence length {_SEQ_LEN}, each method with its default options; FLOPs: 2 a "
        "multiply-add, causal attention, 3 forward passes, routing included. No run is needed for this table."
    )
    return Table(
        name="overhead", title="Parameters and FLOPs added", caption=caption, columns=columns, frame=pd.DataFrame(rows)
    )


def traffic(*, size: str = "1b", blocks: int = 8) -> Table:
    """Numbers read and written for the residual path, a token and layer, in units of the width."""
    model = _model(size, "baseline")
    sublayers = model.num_sublayers
    span = max(1, -(-sublayers // blocks))
    rows = [
        ("baseline", "read stream and output, write stream", _BASELINE_TRAFFIC),
        ("hc, mhc", f"{_MHC_STREAMS} streams, unfused: 8m + 2", 8.0 * _MHC_STREAMS + 2),
        ("mhc", f"{_MHC_STREAMS} streams, fused: 3m + 2", 3.0 * _MHC_STREAMS + 2),
        ("attnres, mhar", "every source read at every site", _pull(source_counts(sublayers, 1))),
        ("attnres, mhar", f"blocks of {span} sublayers", _pull(source_counts(sublayers, span))),
        ("attnres, mhar", f"blocks of {span}, two phases", _two_phase(sublayers, span)),
        ("msar", f"blocks of {span}, two phases, {_MSAR_STREAMS} streams expanded on the fly",
         _two_phase(sublayers, span) + 2.0 * (_MSAR_STREAMS - 1)),
    ]  # fmt: skip
    frame = pd.DataFrame(
        [
            {
                "method": m,
                "how": how,
                "sublayer": value,
                "layer": 2 * value,
                "kib": 2 * value * model.d_model * _BYTES / 2**10,
                "over": value / _BASELINE_TRAFFIC,
            }
            for m, how, value in rows
        ]
    )
    columns = (
        Column(key="method", label="method"),
        Column(key="how", label="how"),
        Column(key="sublayer", label="a sublayer (units of d)", kind="number", digits=3),
        Column(key="layer", label="a layer (units of d)", kind="number", digits=3),
        Column(key="kib", label="a token and layer (KiB, bf16)", kind="number", digits=3),
        Column(key="over", label="times the baseline", kind="number", digits=3),
    )
    caption = (
        f"Memory accesses of the residual path, a token and layer: forward pass of {size} ({sublayers} sublayers, "
        f"d = {model.d_model:,}), counted: each tensor of width d read or written once is 1, the same "
        "however many heads. Two phases: sources of earlier blocks are read once a block and give each of its "
        "sites a "
        "partial result; then each site reads that and its block's own sum. MSAR's streams are retrieved (written) "
        "and "
        "mixed (read) besides; its kernels are not public, so that row is this project's count."
    )
    return Table(name="traffic", title="Memory accesses of the residual", caption=caption, columns=columns, frame=frame)


def on_ladder(sizes: Sequence[str]) -> str:
    """The largest of these sizes that has a name of the ladder and layers enough for blocks; else the papers' 1B."""
    deep = [size for size in sizes if size in SIZES and SIZES[size]["num_layers"] >= _FEWEST_LAYERS]
    return deep[-1] if deep else PAPER_SIZES[-1]


def _pull(sources: Sequence[int]) -> float:
    """Read every source, write the result; the mean over sites."""
    return sum(count + 1 for count in sources) / len(sources)


def _two_phase(sublayers: int, span: int) -> float:
    """Earlier blocks once a block; a site: a partial written and read, the block's sum read and updated, the result."""
    blocks = -(-sublayers // span)
    earlier = sum(1 + block for block in range(blocks)) / sublayers
    return earlier + 2 + 2 + 1


def _model(size: str, method: str) -> ModelConfig:
    tree = {"model": {"size": size, "residual": {"method": method}}}
    return build(RunConfig, tree, source="options").model
