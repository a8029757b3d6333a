"""Every metric's name, unit and meaning, in one table: the trainer journals under these names, MLflow shows them.

First module of ``scaling.tracking``. Names are ``prefix/name``, so that MLflow's charts group by prefix. Tokens and
FLOPs are metrics at the same steps as the losses, so that an axis can be changed without joining by time.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

MAX_NAME: Final = 250  # MLflow 3.17, mlflow/utils/validation.py: MAX_ENTITY_KEY_LENGTH
_FORBIDDEN: Final = re.compile(r"[^\w\-. /:]")  # MLflow 3.17 takes letters, digits, _ - . space : and /


@dataclass(frozen=True, kw_only=True, slots=True)
class Metric:
    """One row of the table; ``better`` says which direction is an improvement, where one is."""

    unit: str
    meaning: str
    better: str = ""


METRICS: Final[dict[str, Metric]] = {
    "train/loss": Metric(unit="nats/token", meaning="training cross-entropy of the step's batch", better="lower"),
    "train/grad_norm": Metric(unit="1", meaning="global gradient norm before clipping"),
    "train/lr": Metric(unit="1", meaning="learning rate of the step"),
    "train/tokens": Metric(unit="tokens", meaning="training tokens seen so far"),
    "train/flops": Metric(unit="FLOP", meaning="training FLOPs so far, routing included"),
    "train/skipped_steps": Metric(unit="steps", meaning="steps left out so far, their gradient was not finite"),
    "train/aux_loss": Metric(unit="nats/token", meaning="auxiliary losses added to the objective"),
    "val/loss": Metric(unit="nats/token", meaning="held-out cross-entropy", better="lower"),
    "val/loss_se": Metric(unit="nats/token", meaning="standard error of val/loss over held-out sequences"),
    "val/loss_ema": Metric(unit="nats/token", meaning="held-out cross-entropy of averaged weights", better="lower"),
    "val/bpb": Metric(unit="bits/byte", meaning="held-out cross-entropy per byte of text", better="lower"),
    "val/loss_tail": Metric(unit="nats/token", meaning="mean of the last evaluations", better="lower"),
    "perf/tokens_per_s": Metric(unit="tokens/s", meaning="training throughput of the whole job", better="higher"),
    "perf/step_time_s": Metric(unit="s", meaning="wall time of one optimiser step", better="lower"),
    "perf/data_wait_s": Metric(unit="s", meaning="wall time of a step spent waiting for data", better="lower"),
    "perf/eval_time_s": Metric(unit="s", meaning="wall time of an evaluation"),
    "perf/mfu": Metric(unit="1", meaning="achieved over peak model FLOP/s", better="higher"),
    "perf/wall_time_s": Metric(unit="s", meaning="wall time of all attempts that count"),
    "perf/gpu_seconds": Metric(unit="GPU s", meaning="wall time times devices"),
    "mem/peak_gib": Metric(unit="GiB", meaning="peak device memory allocated"),
}

PREFIXES: Final[dict[str, str]] = {
    "val/loss/": "held-out cross-entropy of one source of the data",
    "route/": "statistics of residual routing (weights, entropy, distance reached)",
    "moe/": "statistics of expert routing (load, dropped tokens, bias)",
    "system/": "host and device metrics, logged by option",
}


def unit(name: str) -> str:
    """The unit of a metric; ``"1"`` for most open families of ``PREFIXES``, ``""`` for a name the table does not know.

    >>> unit("val/loss")
    'nats/token'
    >>> unit("val/loss/python"), unit("route/entropy_mean"), unit("my/number")
    ('nats/token', '1', '')
    """
    if name.startswith("val/loss/"):
        return METRICS["val/loss"].unit
    known = METRICS.get(name)
    if known is not None:
        return known.unit
    return "1" if name.startswith(tuple(PREFIXES)) else ""


def store_name(name: str) -> str:
    """The name under which MLflow takes a metric or parameter: characters and path parts it refuses become ``_``.

    >>> store_name("val/loss"), store_name("route/head[3]@layer"), store_name("../x//y")
    ('val/loss', 'route/head_3__layer', '_/x/_/y')
    """
    parts = _FORBIDDEN.sub("_", name).split("/")
    return "/".join("_" if part in ("", ".", "..") else part for part in parts)[:MAX_NAME]
