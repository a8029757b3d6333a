"""What drawings and tables need from result objects, under names of their own.

Stands between the computing modules and ``tables`` and ``figures``: the only place that knows where in
``Result.details`` a curve, a pair or a noise component is kept. Nothing is estimated here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Final, Literal

from scaling.analysis.cautions import NO_INTERVAL
from scaling.analysis.result import Result

OVER_SIZES: Final = "all sizes"


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A fitted law drawn over its range: losses (nats a token) at ``x``, with the band of its mean."""

    method: str
    x: tuple[float, ...]
    loss: tuple[float, ...]
    low: tuple[float, ...] = ()
    high: tuple[float, ...] = ()
    formula: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class IsoLoss:
    """One scale of a speedup: the method has ``loss`` at ``compute``, the baseline at ``baseline_compute``."""

    scale: str
    compute: float
    loss: float
    baseline_compute: float
    speedup: float
    low: float | None
    high: float | None
    extrapolated: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class Speedup:
    """A method's speedup over the baseline: geometric mean over scales, interval, trend over compute."""

    method: str
    mean: float
    low: float | None
    high: float | None
    level: float
    scales: tuple[IsoLoss, ...]
    trend: float | None  # change of log speedup for each tenfold of compute
    trend_p: float | None
    n: int
    df: float | None
    currency: str
    status: str
    interval_method: str
    why: str = ""  # there is no interval


@dataclass(frozen=True, kw_only=True, slots=True)
class Delta:
    """Loss of a method minus the baseline's at one size: each pair, their mean with its interval."""

    method: str
    size: str
    seeds: tuple[int | None, ...]
    deltas: tuple[float, ...]
    mean: float
    low: float | None
    high: float | None
    level: float
    n: int
    df: float | None
    p: float | None
    p_adjusted: float | None
    rho: float | None
    paired: bool
    smallest_sign_flip_p: float | None
    token_ratio: float | None = None  # training tokens over the baseline's, where both are known
    why: str = ""  # there is no interval

    @property
    def verdict(self) -> Literal["lower", "higher", "undecided"]:
        """Whether the interval lies below zero, above it, or holds it."""
        if self.low is None or self.high is None:
            return "undecided"
        return "lower" if self.high < 0 else "higher" if self.low > 0 else "undecided"


@dataclass(frozen=True, kw_only=True, slots=True)
class Noise:
    """One kind of noise as a standard deviation of the loss, with its interval."""

    kind: str
    label: str
    sd: float
    low: float | None
    high: float | None
    n: int
    df: float | None
    counts_for_methods: bool  # only seed noise does
    note: str = ""


def read_speedup(method: str, result: Result) -> Speedup:
    """A ``compare speedup`` result under this module's names."""
    interval = result.interval
    trend = _finite(result.estimate.get("trend_per_decade"))
    return Speedup(
        method=method,
        mean=float(result.estimate["speedup"]),
        low=_finite(interval.low.get("speedup")) if interval else None,
        high=_finite(interval.high.get("speedup")) if interval else None,
        level=interval.level if interval else 0.95,
        scales=tuple(_scale(entry) for entry in result.details["scales"] if entry["speedup"] is not None),
        trend=trend,
        trend_p=_finite(result.details.get("trend_p")),
        n=result.n,
        df=result.df,
        currency=result.conventions.get("currency", "flops"),
        status=result.status,
        interval_method=interval.method if interval else "",
        why="" if interval else _why(result),
    )


def read_deltas(method: str, result: Result) -> tuple[Delta, ...]:
    """A ``compare seeds`` result: one delta a scale, then their mean over scales under the size ``OVER_SIZES``."""
    details, interval = result.details, result.interval
    paired = details["pairing"]["used"] == "paired"
    rho = _finite(details["pairing"]["rho"])
    multiple = details.get("multiplicity", {})
    found = []
    for entry in details["scales"]:
        test = entry["paired" if paired else "pooled"]
        name = f"delta[{entry['scale']}]"
        seeds = (
            entry["seeds"] if len(entry["seeds"]) == len(entry["pair_deltas"]) else [None] * len(entry["pair_deltas"])
        )
        found.append(
            Delta(
                method=method,
                size=str(entry["scale"]),
                seeds=tuple(seeds),
                deltas=tuple(map(float, entry["pair_deltas"])),
                mean=float(entry["delta"]),
                low=_finite(interval.low.get(name)) if interval else None,
                high=_finite(interval.high.get(name)) if interval else None,
                level=interval.level if interval else 0.95,
                n=min(entry["n_method"], entry["n_baseline"]),
                df=test["df"] if test else None,
                p=_finite(test["p"]) if test else None,
                p_adjusted=None,
                rho=rho,
                paired=paired,
                smallest_sign_flip_p=_finite(entry["sign_flip_floor"]),
                token_ratio=_finite(entry["token_ratio"]),
                why="" if interval and name in interval.low else _why(result) or "fewer than two pairs of one seed",
            )
        )
    joint = details.get("joint")
    if len(found) == 1 and multiple.get("methods", 1) > 1:
        found[0] = replace(found[0], p_adjusted=_finite(multiple.get("dunnett")))
    if len(found) > 1:
        found.append(
            Delta(
                method=method,
                size=OVER_SIZES,
                seeds=(),
                deltas=(),
                mean=float(result.estimate["delta"]),
                low=_finite(interval.low.get("delta")) if interval else None,
                high=_finite(interval.high.get("delta")) if interval else None,
                level=interval.level if interval else 0.95,
                n=sum(delta.n for delta in found),
                df=joint["df"] if joint else None,
                p=_finite(joint["p"]) if joint else None,
                p_adjusted=_finite(multiple.get("dunnett")) if multiple.get("methods", 1) > 1 else None,
                rho=rho,
                paired=paired,
                smallest_sign_flip_p=_finite(details["sign_flip"]["smallest_possible_p"]),
                why="" if interval else _why(result),
            )
        )
    return tuple(found)


def read_noise(result: Result) -> tuple[Noise, ...]:
    """A ``noise floor`` result: spread over seeds, and over repeats of one seed where there were any."""
    interval = result.interval
    kinds = (
        ("seed_sd", "between seeds", True, "runs that differ in the seed alone; pooled over methods and sizes"),
        ("same_seed_sd", "same seed again", False, "what the machine adds; part of the spread between seeds"),
    )
    return tuple(
        Noise(
            kind=key,
            label=label,
            sd=float(result.estimate[key]),
            low=_finite(interval.low.get(key)) if interval else None,
            high=_finite(interval.high.get(key)) if interval else None,
            n=result.n,
            df=result.df if key == "seed_sd" else float(result.details["same_seed"]["df"]),
            counts_for_methods=counts,
            note=note,
        )
        for key, label, counts, note in kinds
        if key in result.estimate
    )


def _why(result: Result) -> str:
    """Why a comparison has no interval: its caution up to what that may come from; empty where none says so."""
    found = (item.message for item in result.warnings if item.code in NO_INTERVAL)
    return next(found, "").partition(":")[0]


def _scale(entry: Mapping[str, Any]) -> IsoLoss:
    return IsoLoss(
        scale=str(entry["scale"]),
        compute=float(entry["cost"]),
        loss=float(entry["loss"]),
        baseline_compute=float(entry["cost"]) * float(entry["speedup"]),
        speedup=float(entry["speedup"]),
        low=_finite(entry.get("low")),
        high=_finite(entry.get("high")),
        extrapolated=bool(entry.get("extrapolated")),
    )


def _finite(value: Any) -> float | None:
    return None if value is None or not math.isfinite(value) else float(value)
