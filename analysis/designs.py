"""What designs of an experiment can show, given the noise of one run.

After ``noise``, whose floor it takes, with the arithmetic of ``power``: detectable differences and precision of every
design, the seeds or scales that a wanted one takes, in nats or in log speedup.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from scaling.analysis.options import check_level, generator
from scaling.analysis.power import (
    Design,
    detectable,
    fewest,
    power_of,
    power_table,
    precision,
    seeds_for_precision,
    seeds_needed,
    simulated_power,
)
from scaling.analysis.result import Result
from scaling.errors import UsageError


def noise_power(
    *,
    sd: float,
    difference: float | None = None,
    half_width: float | None = None,
    seeds: Sequence[int] = (2, 3, 5, 8, 10, 20),
    scales: Sequence[int] = (1, 4, 5),
    rho: float = 0.0,
    known_sd: bool = False,
    log_speedup_per_loss: float | None = None,
    log_speedup: float | None = None,
    log_speedup_half_width: float | None = None,
    level: float = 0.95,
    power: float = 0.8,
    rng: int | np.random.Generator = 0,
) -> Result:
    """What designs can show, given the noise of one run.

    Parameters
    ----------
    sd
        Seed standard deviation of one run, in nats.
    difference
        A difference of loss to find: the seeds it takes at each number of scales are added, and the scales at each
        number of seeds.
    half_width
        A wanted half-width of the interval of the difference: likewise.
    rho
        Correlation of runs that share a seed.
    known_sd
        Whether the noise is known from elsewhere (z instead of t).
    log_speedup_per_loss
        ``d log s / d L`` (a speedup result's ``details.noise_floor.log_speedup_per_loss``): adds everything in speedup.

    log_speedup, log_speedup_half_width
        Instead of ``difference`` and ``half_width``: a logarithm of a speedup to find, or its wanted half-width
        (0.02 is 2%).

    Raises
    ------
    UsageError
        When a number is out of range.
    FitError
        When a wanted difference or precision takes more than 10,000 seeds.
    """
    for name, value in (
        ("sd", sd), ("difference", difference), ("half_width", half_width), ("log_speedup", log_speedup),
        ("log_speedup_half_width", log_speedup_half_width), ("log_speedup_per_loss", log_speedup_per_loss),
    ):  # fmt: skip
        if value is not None and not 0 < value < np.inf:
            raise UsageError(f"{name} must be positive and finite, got {value!r}")
    for name, counts in (("seeds", seeds), ("scales", scales)):
        if not counts or min(counts) < 1:
            raise UsageError(f"{name} must be whole numbers from 1, got {list(counts)}")
    if not -1 < rho < 1:
        raise UsageError(f"rho must lie between -1 and 1, got {rho!r}")
    difference = _in_loss("difference", difference, "log_speedup", log_speedup, log_speedup_per_loss)
    half_width = _in_loss(
        "half_width", half_width, "log_speedup_half_width", log_speedup_half_width, log_speedup_per_loss
    )
    check_level(level)
    check_level(power, "power")
    alpha = 1 - level
    rows = power_table(seeds, scales, rho=rho, known_sd=known_sd, alpha=alpha, power=power)
    random = generator(rng)
    table = []
    for row in rows:
        entry: dict[str, Any] = {k: (v * sd if "able" in k or "width" in k else int(v)) for k, v in row.items()}
        design = Design(seeds=int(row["seeds"]), scales=int(row["scales"]), known_sd=known_sd)
        effect = detectable(design, alpha, power)
        if np.isfinite(effect):
            entry["simulated_power"] = simulated_power(design, effect, random, alpha)
        pairs = Design(seeds=int(row["seeds"]), scales=int(row["scales"]), rho=rho, paired=True)
        effect = detectable(pairs, alpha, power)
        if np.isfinite(effect):
            entry["simulated_power_paired"] = simulated_power(pairs, effect, random, alpha)
        if log_speedup_per_loss is not None:
            entry["detectable_log_speedup"] = entry["detectable_unpaired"] * log_speedup_per_loss
            entry["half_width_log_speedup"] = entry["half_width_unpaired"] * log_speedup_per_loss
        table.append(entry)
    wanted = {
        "difference": None if difference is None else difference / sd,
        "half_width": None if half_width is None else half_width / sd,
    }
    needed = [_needed_seeds(k, wanted, known_sd=known_sd, alpha=alpha, power=power) for k in scales]
    needed_scales = [_needed_scales(n, wanted, known_sd=known_sd, alpha=alpha, power=power) for n in seeds]
    estimate = {
        f"detectable[{row['seeds']} seeds, {row['scales']} scales]": float(row["detectable_unpaired"]) for row in table
    }
    for rows_of, axis in ((needed, "scales"), (needed_scales, "seeds")):
        for counted in rows_of:
            for name, value in counted.items():
                if name != axis and value is not None:
                    estimate[f"{name}[{counted[axis]} {axis}]"] = float(value)
    return Result(
        kind="noise power",
        estimate=estimate,
        n=2 * int(table[0]["seeds"]) * int(table[0]["scales"]),
        conventions={"unit": "nats", "test": "two-sided", "level": f"{level:g}", "power": f"{power:g}"},
        warnings=(),
        details={
            "sd": sd,
            "rho": rho,
            "known_sd": known_sd,
            "designs": table,
            "needed": needed,
            "needed_scales": needed_scales,
        },
    )


def parse_counts(option: str, text: str) -> list[int]:
    """Positive whole numbers separated by commas.

    >>> parse_counts("--seeds", "3,5")
    [3, 5]
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(part.isdigit() and int(part) > 0 for part in parts):
        raise UsageError(f"{option}: {text!r} is not whole numbers separated by commas, e.g. 3,5,10")
    return [int(part) for part in parts]


def _in_loss(name: str, value: float | None, other: str, speedup: float | None, per_loss: float | None) -> float | None:
    """What is wanted, in nats, given as a loss or as a log speedup."""
    if speedup is None:
        return value
    if value is not None:
        raise UsageError(f"give {name} or {other}, not both")
    if per_loss is None:
        raise UsageError(f"{other} needs log_speedup_per_loss (in a speedup's details.noise_floor)")
    return speedup / per_loss


def _needed_seeds(
    scales: int, wanted: dict[str, float | None], *, known_sd: bool, alpha: float, power: float
) -> dict[str, int | None]:
    out: dict[str, int | None] = {"scales": scales}
    base = Design(seeds=2, scales=scales, known_sd=known_sd)
    if wanted["difference"] is not None:
        out["seeds_to_find_difference"] = seeds_needed(wanted["difference"], base, alpha, power)
    if wanted["half_width"] is not None:
        out["seeds_for_half_width"] = seeds_for_precision(wanted["half_width"], base, 1 - alpha)
    return out


def _needed_scales(
    seeds: int, wanted: dict[str, float | None], *, known_sd: bool, alpha: float, power: float
) -> dict[str, int | None]:
    """Fewest scales with that many seeds each; ``None`` where no number does (one seed and an unknown SD)."""
    out: dict[str, int | None] = {"seeds": seeds}

    def design(scales: int) -> Design:
        return Design(seeds=seeds, scales=scales, known_sd=known_sd)

    difference, half_width = wanted["difference"], wanted["half_width"]
    if difference is not None:
        out["scales_to_find_difference"] = fewest(lambda k: power_of(design(k), difference, alpha) >= power, 1)
    if half_width is not None:
        out["scales_for_half_width"] = fewest(lambda k: precision(design(k), 1 - alpha) <= half_width, 1)
    return out
