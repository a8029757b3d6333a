"""The lines of a result that belong to its kind: tests, scales, noise floors, designs.

Between ``judging``, which prints what every result has, and ``Result.details``, which the computing modules fill.
Nothing here computes; a number that is absent is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from scaling.analysis.result import Result

MOST_ROWS: Final = 12


def highlights(result: Result) -> list[str]:
    """What a reader of this kind of result looks for beyond its estimates, one line each."""
    make = _MAKERS.get(result.kind)
    return make(result.details) if make and result.status != "refused" else []


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows under their heads, columns as wide as their widest entry, numbers to the right."""
    shown = [list(head), *(list(row) for row in rows[:MOST_ROWS])]
    widths = [max(len(row[k]) for row in shown) for k in range(len(head))]
    lines = ["  " + "  ".join(cell.rjust(w) for cell, w in zip(row, widths, strict=True)) for row in shown]
    return lines + ([f"  ... and {len(rows) - MOST_ROWS} more (--json has all)"] if len(rows) > MOST_ROWS else [])


def _number(value: Any, digits: int = 3) -> str:
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.{digits}g}"


def _known(value: Any) -> bool:
    return value is not None and math.isfinite(float(value))


def _speedup(details: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            row["scale"],
            _number(row["cost"], 4),
            str(row["seeds"]),
            _number(row["loss_baseline"], 5),
            _number(row["loss"], 5),
            _number(row["speedup"], 4),
            f"[{_number(row['low'], 4)}, {_number(row['high'], 4)}]" if _known(row["low"]) else "none",
            f"{_number(row['extrapolation_factor'])}x" if row["extrapolated"] else "no",
        ]
        for row in details["scales"]
    ]
    head = ["scale", "cost", "seeds", "loss, baseline", "loss, method", "speedup", "interval", "extrapolated"]
    lines = table(head, rows)
    floor, pairing = details["noise_floor"], details["pairing"]
    if _known(floor["sd_loss"]):
        percent = 100 * math.expm1(floor["log_speedup_single_run"])
        lines.append(
            f"  noise floor: SD {_number(floor['sd_loss'])} nats of one run ({floor['source']}), "
            f"{_number(percent)}% of speedup"
        )
    if _known(details["trend_p"]):
        lines.append(f"  trend over scales: p {_number(details['trend_p'], 2)}")
    if _known(details["asymptotes_equal_p"]):
        lines.append(f"  equal asymptotes: p {_number(details['asymptotes_equal_p'], 2)}")
    if _known(pairing["rho"]):
        used = "used" if pairing["used"] else "not used"
        lines.append(
            f"  runs of one seed correlate by {pairing['rho']:.2f} (p {_number(pairing['p_one_sided'], 2)}), {used}"
        )
    return lines


def _seeds(details: Mapping[str, Any]) -> list[str]:
    pairing, flip, pooled = details["pairing"], details["sign_flip"], details["pooled_sd"]
    joint, several = details["joint"], details.get("multiplicity", {})
    lines = []
    if joint:
        lines.append(f"  {pairing['used']} t over all scales: p {_number(joint['p'])}")
    if several.get("methods", 1) > 1:
        lines.append(
            f"  corrected for {several['methods']} methods: Dunnett {_number(several['dunnett'])}, Holm "
            f"{_number(several['holm'])}, Benjamini-Hochberg {_number(several['benjamini_hochberg'])}"
        )
    if _known(flip["p"]):
        lines.append(
            f"  exact sign flips of {flip['pairs']} pairs: p {_number(flip['p'])}; smallest possible "
            f"{_number(flip['smallest_possible_p'])}"
        )
    if _known(details["hodges_lehmann"]):
        lines.append(f"  Hodges-Lehmann difference {_number(details['hodges_lehmann'], 5)}")
    if _known(pairing["rho"]):
        lines.append(f"  runs of one seed correlate by {pairing['rho']:.2f} (p {_number(pairing['p_one_sided'], 2)})")
    if _known(pooled["sd"]):
        lines.append(f"  SD of one run, pooled over cells: {_number(pooled['sd'])} nats, {pooled['df']:g} df")
    mixed = details["mixed_model"]
    if mixed and mixed.get("fitted"):
        done = "" if mixed.get("converged") else ", did not converge"
        lines.append(f"  mixed-effects model over scales: {_number(mixed['delta'], 5)}, p {_number(mixed['p'])}{done}")
    return lines


def _items(details: Mapping[str, Any]) -> list[str]:
    lines = [
        f"  only the method right: {details['gains']}; only the baseline right: {details['losses']}",
        f"  McNemar: mid-p {_number(details['mid_p'], 4)}, exact p {_number(details['exact'], 4)}",
    ]
    if _known(details.get("cluster_sign_flip_p")):
        lines.append(f"  sign flips of whole clusters of items: p {_number(details['cluster_sign_flip_p'], 4)}")
    if details.get("tests", 1) > 1:
        lines.append(f"  corrected for {details['tests']} tests (Holm): p {_number(details['holm'], 4)}")
    return lines


def _floor(details: Mapping[str, Any]) -> list[str]:
    lines = []
    if "configurations" in details:
        found = details["configurations"]
        spread = sorted(row["sd"] for row in found)
        measured = any(row["low"] is not None for row in found)
        range_ = f"SD {_number(spread[0])} to {_number(spread[-1])}" if measured else "losses equal within each"
        lines.append(f"  {len(found)} configuration{'s' * (len(found) != 1)}, {range_}")
        tests = details["homogeneity"]
        if _known(tests.get("levene_p")):
            lines.append(f"  one spread for all: Levene p {_number(tests['levene_p'], 2)}")
        if _known(tests.get("shapiro_p")):
            lines.append(f"  normal residuals: Shapiro p {_number(tests['shapiro_p'], 2)}")
    if "effective_evaluations" in details:
        lines.append(
            f"  {details['groups']} groups; the last {details['tail']} evaluations of a run are worth "
            f"{_number(details['effective_evaluations'])} independent ones"
        )
    return lines


def _power(details: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            str(row["scales"]),
            str(row["seeds"]),
            _number(row["detectable_unpaired"]),
            _number(row["detectable_paired"]),
            _number(row["half_width_unpaired"]),
            _number(row.get("simulated_power"), 2),
            *([_number(row["detectable_log_speedup"])] if "detectable_log_speedup" in row else []),
        ]
        for row in details["designs"]
    ]
    head = ["scales", "seeds an arm", "detectable, unpaired", "detectable, paired", "half-width", "power, simulated"]
    if "detectable_log_speedup" in details["designs"][0]:
        head.append("detectable log speedup")
    return table(head, rows)


def _law(details: Mapping[str, Any]) -> list[str]:
    tests = details.get("sharing_tests", [])
    return [f"  sharing {test['share']}: p {_number(test['p'], 2)} against free" for test in tests]


def _backtest(details: Mapping[str, Any]) -> list[str]:
    rows = [
        [
            f"{_number(row['factor_low'])} to {_number(row['factor_high'])}x" if row["factor_high"] else
            f"beyond {_number(row['factor_low'])}x",
            str(row["n"]),
            f"{row['median_error']:.2%}",
            f"{row['quantile_error']:.2%}",
        ]
        for row in details["by_factor"]
    ]  # fmt: skip
    return table(["extrapolated", "predictions", "median error", "its quantile"], rows) if rows else []


_MAKERS: Final[dict[str, Callable[[Mapping[str, Any]], list[str]]]] = {
    "compare speedup": _speedup,
    "compare seeds": _seeds,
    "compare items": _items,
    "noise floor": _floor,
    "noise power": _power,
    "fit law": _law,
    "fit backtest": _backtest,
}
