"""What every analysis returns: one frozen object that carries its uncertainty, its n and its conventions.

Stands between the computing modules of ``analysis`` (which build it) and ``tables``, ``figures``, ``report`` and the
command line (which only read it). It imports neither pandas nor plotting.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

Status = Literal["converged", "unmoved", "multimodal", "undetermined", "bound-hit", "max-iter", "refused"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A two-sided interval for each estimated name; ``method`` says how it was made (t, delta, bootstrap...)."""

    level: float
    method: str
    low: Mapping[str, float]
    high: Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Caution:
    """Something the reader must know before using the numbers; ``code`` is stable, ``message`` is one line."""

    code: str
    message: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Dropped:
    """A row or run left out, and why."""

    row: int | None = None
    run: str | None = None
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Result:
    """An estimate with everything needed to judge and reproduce it.

    Parameters
    ----------
    kind
        What was computed, e.g. ``"fit law"`` or ``"compare speedup"``.
    estimate, standard_error
        Name -> number, unrounded; natural units, the unit in the name where there is one.
    interval
        The headline interval; further ones by name in ``intervals``.
    n, df
        Rows (or pairs, or items) used, and degrees of freedom of the interval (``None`` where none applies).
    status
        ``"converged"`` or the reason why not; closed-form results are ``"converged"``.
    objective
        The minimised value, where something was minimised.
    certificate
        Convergence evidence of a fit (gradient norm, distance moved, second start, condition number...).
    conventions
        Which N, which FLOPs, which loss, which residual: name -> word.
    details
        Everything else that tables and figures draw from: JSON-able.
    """

    kind: str
    estimate: Mapping[str, float]
    standard_error: Mapping[str, float] = field(default_factory=dict)
    interval: Interval | None = None
    intervals: Mapping[str, Interval] = field(default_factory=dict)
    n: int
    df: float | None = None
    status: Status = "converged"
    objective: float | None = None
    certificate: Mapping[str, float | str | bool | None] = field(default_factory=dict)
    conventions: Mapping[str, str] = field(default_factory=dict)
    warnings: tuple[Caution, ...] = ()
    dropped: tuple[Dropped, ...] = ()
    checklist: Mapping[str, str] = field(default_factory=dict)
    details: Mapping[str, Any] = field(default_factory=dict)

    def to_dict(self) -> dict[str, Any]:
        """Plain nested dictionaries and lists; NaN and infinities become ``None`` (JSON has no word for them)."""
        tree = asdict(self)
        tree["dropped"] = [{k: v for k, v in d.items() if v is not None} for d in tree["dropped"]]
        plain = _plain(tree)
        assert isinstance(plain, dict)
        return plain

    def to_json(self, *, indent: int | None = 2) -> str:
        """One JSON object, numbers unrounded."""
        return json.dumps(self.to_dict(), indent=indent, allow_nan=False)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(v) for v in value]
    if isinstance(value, bool) or value is None or isinstance(value, (str, int)):
        return value
    if hasattr(value, "tolist"):
        return _plain(value.tolist())
    number = float(value)
    return number if math.isfinite(number) else None
