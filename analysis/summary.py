"""The report's first screen in plain words: what these runs show, what they do not, and what it would take to know.

After the analyses, before ``page``: reads a ``Findings``, writes sentences; computes nothing but counts and
comparisons.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from scaling.analysis import digits
from scaling.analysis.findings import Findings, grouped
from scaling.analysis.readings import OVER_SIZES, Delta, Speedup


@dataclass(frozen=True, kw_only=True, slots=True)
class Summary:
    """Three lists of sentences, and one line above them."""

    headline: str
    shown: tuple[str, ...]
    not_shown: tuple[str, ...]
    needed: tuple[str, ...]


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
    open_: dict[str, list[str]] = {}
    for method in dict.fromkeys(delta.method for delta in found.deltas):
        mine = [d for d in found.deltas if d.method == method]
        told = _deltas(method, mine, found.baseline or "", shown)
        if told:
            open_.setdefault(told, []).append(method)
    for told, methods in open_.items():
        names = ", ".join(methods[:_MOST_NAMES]) + (
            f" and {len(methods) - _MOST_NAMES} more methods" if len(methods) > _MOST_NAMES else ""
        )
        each = "" if len(methods) == 1 else "each of "
        unknown.append(f"Whether {each}{names} differs from {found.baseline} {told}")
    seed = next((noise for noise in found.noises if noise.counts_for_methods), None)
    if seed is not None:
        band = (
            f" ({digits.number(seed.low, digits=2)} to {digits.number(seed.high, digits=2)})"
            if seed.low and seed.high
            else ""
        )
        shown.append(
            f"Runs that differ in the seed alone differ by a standard deviation of {digits.number(seed.sd, digits=2)} "
            f"nats per token{band} (from {seed.n} runs). Smaller differences between methods mean nothing."
        )
    else:
        unknown.append("The noise between seeds is unknown: no method was run twice at the same size and settings.")
    unknown.extend(grouped(found.failures))
    return Summary(
        headline=_headline(found),
        shown=_cut(shown),
        not_shown=_cut([*unknown, *_scope(found)]),
        needed=_cut(_needed(found)),
    )


def _headline(found: Findings) -> str:
    runs = len(found.table)
    methods = found.methods
    counted = f"{runs:,} run{'s' if runs != 1 else ''} of {len(methods)} method{'s' if len(methods) != 1 else ''}"
    sizes = f", {len(found.sizes)} size{'s' if len(found.sizes) != 1 else ''}" if found.sizes else ""
    seeds = f", {found.num_seeds} seed{'s' if found.num_seeds != 1 else ''}" if found.num_seeds else ""
    versus = f", compared with {found.baseline}" if found.baseline else ""
    return f"{counted}{sizes}{seeds}{versus}."


def _speedup(item: Speedup, baseline: str, shown: list[str], unknown: list[str]) -> None:
    if item.low is None or item.high is None or not math.isfinite(item.mean):
        unknown.append(
            f"How much compute {item.method} saves against {baseline} could not be determined ({item.status}): the "
            f"runs do "
            "not pin the loss down as a function of compute."
        )
        return
    bounds = f"{item.level:.0%} interval {digits.speedup(item.low)} to {digits.speedup(item.high)}"
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


def _deltas(method: str, deltas: Sequence[Delta], baseline: str, shown: list[str]) -> str:
    """Adds what is shown; returns what is left open, for methods of which the same is open to be named together."""
    sizes = [delta for delta in deltas if delta.size != OVER_SIZES]
    overall = next((delta for delta in deltas if delta.size == OVER_SIZES), None)
    if overall is not None and overall.verdict != "undecided":
        alone = sum(delta.verdict == overall.verdict for delta in sizes)
        size = digits.estimate(overall.mean, overall.low, overall.high)
        shown.append(
            f"{method} ends with a {overall.verdict} loss than {baseline}: by {size} nats per token on average over "
            f"{len(sizes)} sizes; taken alone, {alone} of the {len(sizes)} show it."
        )
        return ""
    for verdict in ("lower", "higher"):
        sure = [delta for delta in sizes if delta.verdict == verdict]
        if sure:
            places = ", ".join(f"{d.size} ({digits.estimate(d.mean, d.low, d.high)})" for d in sure[:_MOST_PLACES])
            more = f" and {len(sure) - _MOST_PLACES} more" if len(sure) > _MOST_PLACES else ""
            shown.append(f"{method} ends with a {verdict} loss than {baseline} at {places}{more}.")
    open_ = [delta for delta in sizes if delta.verdict == "undecided"]
    if open_:
        places = ", ".join(delta.size for delta in open_[:_MOST_PLACES])
        more = f" and {len(open_) - _MOST_PLACES} more" if len(open_) > _MOST_PLACES else ""
        fewest = min(delta.n for delta in open_)
        why = "the interval holds zero" if all(d.low is not None for d in open_) else "no interval leaves out zero"
        return f"at {places}{more}: with {fewest} run{'s' if fewest != 1 else ''} of each, {why}."
    return ""


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
    lines = list(found.needs)
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
