"""How a model is trained: data, optimiser, schedule, precision, evaluation and run settings.

Sections of the configuration tree. Which fields count towards a run's identity is decided in ``scaling.identity``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, Literal

from scaling.errors import ConfigError

_SERVER: Final = re.compile(r"https?://[^\s/@?#]+(/[^\s@?#]*)?")  # without user and password: the folder keeps it


def _positive(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 < value < math.inf:
            raise ConfigError(f"{name}={value} is not {'finite' if value == math.inf else 'positive'}")


def _fraction(owner: object, *names: str) -> None:
    for name in names:
        value = getattr(owner, name)
        if value is not None and not 0 <= value <= 1:
            raise ConfigError(f"{name}={value} is outside 0..1")


@dataclass(frozen=True, kw_only=True, slots=True)
class DataConfig:
    """Tokens and batches. ``path`` is a token store (``scaling data prepare``); ``fingerprint`` pins its content.

    ``batch_size`` counts sequences of ``seq_len`` tokens in one optimiser step over all devices; ``micro_batch_size``
    those in one forward pass on one device (``None``: as many as the batch allows), which never changes the result.
    """

    path: str = ""
    fingerprint: str | None = None
    seq_len: int = 1024
    batch_size: int = 32
    micro_batch_size: int | None = None
    document_masking: bool = False
    weights: Mapping[str, float] | None = None

    def __post_init__(self) -> None:
        _positive(self, "seq_len", "batch_size", "micro_batch_size")
        for source, weight in (self.weights or {}).items():
            if not weight >= 0:
                raise ConfigError(f"weights.{source}={weight} is negative")

    @property
    def tokens_per_step(self) -> int:
        return self.seq_len * self.batch_size


@dataclass(frozen=True, kw_only=True, slots=True)
class OptimizerConfig:
    """AdamW. ``decay`` chooses what weight decay applies to: ``matrices`` (default) or ``all`` (the papers' recipe).

    ``decay_connections`` adds the residual method's own parameters to the decayed group. ``z_loss`` weighs the squared
    log-partition of the logits; ``ema_decay`` keeps an exponential moving average of the weights.
    """

    lr: float = 1e-3
    beta1: float = 0.9
    beta2: float = 0.95
    eps: float = 1e-8
    weight_decay: float = 0.1
    decay: Literal["matrices", "all"] = "matrices"
    decay_connections: bool = False
    grad_clip: float | None = 1.0
    z_loss: float = 0.0
    ema_decay: float | None = None
    skip_nonfinite: bool = False

    def __post_init__(self) -> None:
        _positive(self, "lr", "eps", "grad_clip")
        _fraction(self, "beta1", "beta2", "ema_decay")
        for name in ("beta1", "beta2", "ema_decay"):
            if getattr(self, name) == 1:
                raise ConfigError(f"{name}=1 never forgets; allowed are numbers below 1")
        for name in ("weight_decay", "z_loss"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ConfigError(f"{name}={getattr(self, name)} is not a finite number of 0 or more")


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleConfig:
    """Length and learning-rate shape. Give ``steps``, or ``tokens_per_parameter`` to derive them.

    ``parameters`` says which count ``tokens_per_parameter`` multiplies. The rate rises linearly over ``warmup_steps``
    (or ``warmup_fraction`` of the steps), then falls to ``min_lr_ratio`` of its peak: along a cosine, or linearly over
    the last ``decay_fraction`` (``wsd``), or not at all (``constant``).
    """

    kind: Literal["cosine", "wsd", "constant"] = "cosine"
    steps: int | None = None
    tokens_per_parameter: float | None = None
    parameters: Literal["total", "non_embedding"] = "non_embedding"
    warmup_steps: int | None = None
    warmup_fraction: float = 0.02
    min_lr_ratio: float = 0.1
    decay_fraction: float = 0.2

    def __post_init__(self) -> None:
        _positive(self, "steps", "tokens_per_parameter")
        _fraction(self, "warmup_fraction", "min_lr_ratio", "decay_fraction")
        if self.warmup_steps is not None and self.warmup_steps < 0:
            raise ConfigError(f"warmup_steps={self.warmup_steps} is negative")


@dataclass(frozen=True, kw_only=True, slots=True)
class PrecisionConfig:
    """``mixed``: fp32 master weights with bf16 compute; ``bf16``: everything bf16 (the papers' recipe); ``fp32``."""

    mode: Literal["mixed", "bf16", "fp32"] = "mixed"


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluationConfig:
    """Held-out loss every ``every_steps`` and at the end, over the same ``num_sequences`` sequences each time.

    ``tail`` evaluations at the end are averaged into the tail mean. ``protocol="papers"`` imitates the MHAR paper (the
    training corpus reshuffled with seed + 9999, not held out).
    """

    every_steps: int = 500
    num_sequences: int = 512
    batch_size: int | None = None
    tail: int = 11
    protocol: Literal["held_out", "papers"] = "held_out"

    def __post_init__(self) -> None:
        _positive(self, "every_steps", "num_sequences", "batch_size", "tail")


@dataclass(frozen=True, kw_only=True, slots=True)
class RunSettings:
    """The seed, and everything about where and how a run executes that must not change its result.

    ``track`` is the address of an MLflow server that the training itself writes to, from a thread that never holds it
    up; without it the run folder is synced from outside (``scaling runs sync``).
    """

    seed: int = 0
    name: str | None = None
    sweep: str | None = None
    out: str = "runs"
    log_every_steps: int = 10
    system_metrics: bool = False
    track: str | None = None
    checkpoint_every_steps: int | None = None
    checkpoint_every_minutes: float | None = 10.0
    keep_checkpoints: int = 2
    permanent_every_steps: int | None = None
    save_weights: bool = True
    device: Literal["auto", "cpu", "cuda"] = "auto"
    threads: int | None = None
    compile: bool = False
    parallel: Literal["none", "ddp", "fsdp2"] = "none"
    activation_checkpointing: Literal["none", "selective", "full"] = "none"
    deterministic: bool = False

    def __post_init__(self) -> None:
        _positive(
            self,
            "log_every_steps",
            "checkpoint_every_steps",
            "checkpoint_every_minutes",
            "keep_checkpoints",
            "permanent_every_steps",
            "threads",
        )
        if self.seed < 0:
            raise ConfigError(f"seed={self.seed} is negative")
        if self.track is not None and not _SERVER.fullmatch(self.track):
            shown = re.sub(r"//[^/]*@", "//***@", self.track)
            raise ConfigError(
                f"track={shown} is no address that a training can write to; give http(s)://HOST:PORT of an MLflow "
                "server, user and password in MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD (or a token in "
                "MLFLOW_TRACKING_TOKEN); a database is filled by `scaling runs sync`"
            )
