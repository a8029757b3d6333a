"""The report's first screen in plain words: what these runs show, what they do not, and what it would take to know.

After the analyses, before ``page``: reads a ``Findings``, writes sentences; computes nothing but counts and
comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaling.analysis import digits
from scaling.analysis.cautions import SAME_TOKENS
from scaling.analysis.findings import NOISE, Findings, grouped
from scaling.analysis.readings import OVER_SIZES, Delta, Speedup


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Three lists of sentences, and one line above them."""

    headline: str
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]
    needed: tuple[str, ...]


_TWO_RUNS = 1.96 * math.sqrt(2)  # SDs within which 95 of 100 differences of two equal runs lie
_FEW_SCALES = 5
_FEW_SEEDS = 3
_MOST_LINES = 8
_MOST_PLACES = 4
_MOST_NAMES = 8


def summarize(found: Findings) -> Summary:
    """Sentences for a reader who knows nothing of the tool."""
    shown: list[str] = []
    unknown: list[str] = []
    for item in found.speedups:
        _speedup(item, found.baseline or "", shown, unknown)
    _deltas(found, shown, unknown)
    seed = next((noise for noise in found.noises if noise.counts_for_methods), None)
    if seed is not None:
        band = (
            f"{digits.number(seed.low, digits=2)} to {digits.number(seed.high, digits=2)}, "
            if seed.low and seed.high
            else ""
        )
        shown.append(
            f"Runs that differ in the seed alone differ by a standard deviation of {digits.number(seed.sd, digits=2)} "
            f"nats per token ({band}from {seed.n:,} runs). Two single runs less than about "
            f"{digits.number(_TWO_RUNS * seed.sd, digits=2)} apart may be of equal methods; means over several seeds, "
            "and pairs of one seed, tell smaller differences."
        )
    else:
        unknown.append(f"The noise between seeds is unknown: {_why_no_noise(found)}.")
    decided = any(delta.verdict != "undecided" for delta in found.deltas)
    unknown = [*_budgets(found), *unknown] if decided else [*unknown, *_budgets(found)]
    unknown.extend(grouped([failure for failure in found.failures if seed is not None or failure.what != NOISE]))
    return Summary(
        headline=_headline(found),
        shown=_cut(shown),
        not_shown=_cut([*unknown, *_scope(found)]),
        needed=_cut(_needed(found)),
    )


def _why_no_noise(found: Findings) -> str:
    floor = found.results.get("noise floor")
    equal = [item.message for item in floor.warnings if item.code == "identical-losses"] if floor else []
    return equal[0] if equal else "no method was run twice at the same size and settings"


def _headline(found: Findings) -> str:
    runs = len(found.table)
    methods = found.methods
    counted = f"{runs:,} run{'s' if runs != 1 else ''} of {len(methods)} method{'s' if len(methods) != 1 else ''}"
    sizes = f", {len(found.sizes)} size{'s' if len(found.sizes) != 1 else ''}" if found.sizes else ""
    seeds = f", {found.num_seeds} seed{'s' if found.num_seeds != 1 else ''}" if found.num_seeds else ""
    versus = f", compared with {found.baseline}" if found.baseline else ""
    return f"{counted}{sizes}{seeds}{versus}."


def _speedup(item: Speedup, baseline: str, shown: list[str], unknown: list[str]) -> None:
    if math.isfinite(item.mean) and item.why:
        unknown.append(
            f"How much compute {item.method} saves against {baseline}: {digits.speedup(item.mean)}, without an "
            f"interval, since {item.why}."
        )
        return
    if item.low is None or item.high is None or not math.isfinite(item.mean):
        unknown.append(
            f"How much compute {item.method} saves against {baseline} could not be determined ({item.status}): the "
            f"runs do "
            "not pin the loss down as a function of compute."
        )
        return
    bounds = f"{digits.share(item.level)} interval {digits.speedup(item.low)} to {digits.speedup(item.high)}"
    text = f"{digits.speedup(item.mean)} ({bounds})"
    outside = sum(scale.extrapolated for scale in item.scales)
    far = f" Beyond the baseline's runs: {outside} of {len(item.scales)} scales." if outside else ""
    if item.low > 1:
        shown.append(f"{item.method} reaches {baseline}'s loss with less compute: a speedup of {text}.{far}")
    elif item.high < 1:
        shown.append(f"{item.method} needs more compute than {baseline} for the same loss: a speedup of {text}.{far}")
    else:
        unknown.append(
            f"Whether {item.method} saves compute: the speedup is {text}, which holds 1×, no difference to "
            f"{baseline}.{far}"
        )


def _deltas(found: Findings, shown: list[str], unknown: list[str]) -> None:
    """What the differences of loss decide, and what they leave open; methods of which the same holds stand together."""
    methods = list(dict.fromkeys(delta.method for delta in found.deltas))
    baseline = found.baseline or ""
    together = len(methods) > 1 and all(delta.size == found.deltas[0].size for delta in found.deltas)
    if together:
        _at_one_place(found, shown)
    open_: dict[tuple[str, str], list[Delta]] = {}
    for method in methods:
        sizes = [d for d in found.deltas if d.method == method and d.size != OVER_SIZES]
        overall = next((d for d in found.deltas if d.method == method and d.size == OVER_SIZES), None)
        if overall is not None and overall.verdict != "undecided":
            alone = sum(delta.verdict == overall.verdict for delta in sizes)
            shown.append(
                f"{method} ends with a {overall.verdict} loss than {baseline}: by {_size(overall)} nats per token on "
                f"average over {len(sizes)} sizes; taken alone, {alone} of the {len(sizes)} show it."
            )
            continue
        for verdict in ("lower", "higher"):
            sure = [delta for delta in sizes if delta.verdict == verdict]
            if sure and not together:
                where = [f"{d.size} ({_size(d)})" for d in sure]
                shown.append(f"{method} ends with a {verdict} loss than {baseline} at {_listed(where, _MOST_PLACES)}.")
        rest = [delta for delta in sizes if delta.verdict == "undecided"]
        if rest:
            why = "the interval holds zero" if all(d.low is not None for d in rest) else "no interval leaves out zero"
            if all(d.low is None and d.why for d in rest):
                why = f"there is no interval, since {rest[0].why}"
            place = f" at {_listed([d.size for d in rest], _MOST_PLACES)}" if found.sizes else ""
            open_.setdefault((place, why), []).append(min(rest, key=lambda delta: delta.n))
    for (place, why), deltas in open_.items():
        counts = sorted({delta.n for delta in deltas})
        runs = f"{counts[0]} run" if counts == [1] else f"{counts[0]} runs" if len(counts) == 1 else ""
        runs = runs or f"{counts[0]} to {counts[-1]} runs"
        who = "each method" if len(counts) == 1 else f"the method or of {baseline}, whichever has fewer"
        each = "each of " if len(deltas) > 1 else ""
        names = _listed([delta.method for delta in deltas], _MOST_NAMES)
        unknown.append(f"Whether {each}{names} differs from {baseline}{place}: with {runs} of {who}, {why}.")


def _at_one_place(found: Findings, shown: list[str]) -> None:
    """Several methods at one size (or without sizes): who is better and worse, most first, and luck's share."""
    for verdict, sign in (("lower", 1.0), ("higher", -1.0)):
        sure = sorted((d for d in found.deltas if d.verdict == verdict), key=lambda delta: sign * delta.mean)
        if sure:
            names = _listed([f"{delta.method} ({_size(delta)})" for delta in sure], _MOST_NAMES)
            count = f"{len(sure)} of {len(found.deltas)} methods"
            shown.append(f"A {verdict} loss than {found.baseline} by more than the noise: {count}. {names}.")
    alpha = 1 - found.deltas[0].level
    expected = alpha * len(found.deltas)
    decided = [delta for delta in found.deltas if delta.verdict != "undecided"]
    if expected >= 1 and decided:
        left = [delta for delta in decided if delta.p_adjusted is not None and delta.p_adjusted < alpha]
        adjusted = any(delta.p_adjusted is not None for delta in found.deltas)
        shown.append(
            f"{len(found.deltas)} methods were compared: if all were equal, about {expected:.0f} would stand here "
            f"by luck" + (f"; p adjusted for that leaves {len(left)} of these {len(decided)}." if adjusted else ".")
        )


def _budgets(found: Findings) -> list[str]:
    """Where methods saw other numbers of tokens than the baseline, a difference of loss is not theirs alone."""
    apart: dict[str, list[float]] = {}
    for delta in found.deltas:
        if delta.token_ratio is not None and not 1 / SAME_TOKENS < delta.token_ratio < SAME_TOKENS:
            apart.setdefault(delta.method, []).append(delta.token_ratio)
    if not apart:
        return []
    ratios = [ratio for of_method in apart.values() for ratio in of_method]
    low, high = digits.speedup(min(ratios)), digits.speedup(max(ratios))
    times = low if low == high else f"{low} to {high}"
    methods = len({delta.method for delta in found.deltas})
    who = f"{len(apart)} of {methods} methods" if len(apart) > _MOST_PLACES else _listed(list(apart), _MOST_PLACES)
    where = " at the same size" if found.sizes else ""
    return [
        f"Whether a difference of loss is the method's alone: {who} saw {times} the tokens of {found.baseline}{where}, "
        "and more tokens lower the loss too."
    ]


def _size(delta: Delta) -> str:
    return digits.estimate(delta.mean, delta.low, delta.high)


def _listed(names: Sequence[str], most: int) -> str:
    """The first names, and how many more there are."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def _scope(found: Findings) -> list[str]:
    lines = []
    if found.baseline is None and len(found.methods) > 1:
        lines.append("Which method is better: no baseline was named, so nothing was compared.")
    elif len(found.methods) < 2:
        lines.append("Whether another method would do better: all runs are of one method.")
    if found.table[found.x].isna().all():
        lines.append("How much compute a method saves: the table has no FLOPs.")
    largest = found.largest_parameters
    if largest is not None and largest < 1e8:
        lines.append(
            f"Anything about models people use: the largest here has {digits.words(largest)} parameters. A tiny grid "
            "shows that the method of comparison works, and proves nothing about the methods compared."
        )
    if 0 < len(found.sizes) < _FEW_SCALES and found.speedups:
        lines.append(
            f"That a speedup holds at larger scale: with {len(found.sizes)} "
            f"size{'s' if len(found.sizes) != 1 else ''} its "
            "trend with compute is hardly determined."
        )
    return lines


def _needed(found: Findings) -> list[str]:
    cautions = [caution for result in found.results.values() for caution in result.warnings]
    copied = dict.fromkeys(caution.message for caution in cautions if caution.code == "copied-runs")
    lines = [*found.needs, *(f"{text[0].upper()}{text[1:]}." for text in copied)]
    if found.baseline is None:
        names = ", ".join(found.methods[:6]) + (", …" if len(found.methods) > 6 else "")
        lines.append(f"Name the method that the others are compared with: --baseline NAME (there are: {names}).")
    if found.speedups and len(found.sizes) < _FEW_SCALES:
        lines.append(
            f"At least {_FEW_SCALES} sizes over two decades of compute for a law whose exponent is pinned down."
        )
    if found.num_seeds and found.num_seeds < _FEW_SEEDS:
        lines.append(
            f"At least {_FEW_SEEDS} seeds a cell for a useful interval, 6 before a sign-flip test can fall below 0.05."
        )
    if not lines:
        lines.append("The same grid at a larger scale, to see whether what is shown here lasts.")
    return lines


def _cut(lines: Sequence[str]) -> tuple[str, ...]:
    if len(lines) <= _MOST_LINES:
        return tuple(lines)
    return (*lines[: _MOST_LINES - 1], f"And {len(lines) - _MOST_LINES + 1} more; see the tables below.")
