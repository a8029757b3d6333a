"""The report's parts in reading order: what stands in each, and the prose between tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from scaling.analysis import catalog
from scaling.analysis.findings import Findings, grouped
from scaling.analysis.gallery import Picture
from scaling.analysis.page import Section
from scaling.analysis.tables import beside, core
from scaling.analysis.tables.table import Table
from scaling.config.residual import METHODS

GLOSSARY: Final = (
    (
        "nat",
        "Unit of loss: the mean of minus the natural logarithm of the probability given to each next token. Less "
        "is better.",
    ),
    (
        "iso-loss speedup",
        "How many times the compute the baseline needs to reach the loss that the method has. 1× is no difference.",
    ),
    ("law", "A curve, loss = E + A · compute^−a, fitted to the runs of one method. It is inverted to get a speedup."),
    (
        "paired seeds",
        "Runs of two methods that saw the same tokens in the same order and started from the same values of shared "
        "weights; their differences vary less than the runs do.",
    ),
    (
        "interval",
        "A range made by a procedure that holds the true value in 95 of 100 such experiments, if its assumptions hold.",
    ),
    (
        "seed noise",
        "How much the final loss varies when nothing but the seed changes. The only noise that judges methods.",
    ),
    ("N, non-embedding", "Parameters without the token embedding table."),
    ("D", "Tokens a run was trained on; text that is read again counts again."),
    (
        "FLOPs",
        "Floating-point operations of training, counted exactly from the shapes (matrix products, causal "
        "attention, logits, routing), not measured.",
    ),
    ("6ND", "The rule of thumb 6 × non-embedding parameters × tokens, kept in a column of its own."),
)


_MOST_ALIKE: Final = 2
_PUBLISHED: Final = (
    "Numbers that papers published for methods of the same name. They were measured on other data, with other "
    "budgets and "
    "precisions, mostly with one seed; they stand here to be looked at, and enter no calculation."
)


def sections(found: Findings, pictures: Sequence[Picture], origin: Mapping[str, str]) -> list[Section]:
    """Everything after the summary; parts with nothing in them are left out."""

    def shown(name: str) -> tuple[Picture, ...]:
        return tuple(picture for picture in pictures if picture.section == name)

    def tables(*names: str) -> tuple[Table, ...]:
        return tuple(built for name in names if (built := catalog.TABLES[name].build(found)) is not None)

    topics = [f"published-{topic}" for topic in beside.relevant(found)]
    parts = [
        Section(
            anchor="speedups",
            title="Compute saved at equal loss",
            intro=tuple(_failed(found, "compute")),
            pictures=shown("speedups"),
            tables=tables("speedups", "speedups-by-scale"),
        ),
        Section(
            anchor="seeds",
            title="Loss differences, seed by seed",
            pictures=shown("seeds"),
            tables=tables("seed-deltas"),
        ),
        Section(anchor="noise", title="Noise", pictures=shown("noise"), tables=tables("noise")),
        Section(
            anchor="grids",
            title="Methods by size" if found.sizes else "Methods",
            pictures=shown("grids"),
            tables=tables("configurations", "main", "heads", "heads-kv", "variants", "lr"),
        ),
        Section(anchor="losses", title="Loss curves", pictures=shown("losses")),
        Section(anchor="downstream", title="Downstream", tables=tables("tasks", "items")),
        Section(
            anchor="routing",
            title="Inside the routing",
            pictures=shown("routing"),
            tables=tables("disagreement"),
        ),
        Section(
            anchor="costs",
            title="What methods cost",
            pictures=shown("costs"),
            tables=tables("throughput", "steps", "kernels", "added", *(("traffic",) if _routes(found) else ())),
        ),
        Section(anchor="fits", title="How good the laws are", pictures=shown("fits"), tables=tables("intervals")),
        Section(anchor="runs", title="All runs", tables=tables("runs")),
        Section(
            anchor="published",
            title="Published values beside these",
            intro=(_PUBLISHED,) if topics else (),
            tables=tables(*topics),
        ),
        Section(
            anchor="methods",
            title="Methods and conventions",
            intro=_methods(found),
            entries=(*_own_methods(found), *GLOSSARY),
        ),
        Section(
            anchor="dropped",
            title="Runs left out",
            intro=() if found.dropped else ("No run was left out.",),
            tables=tables("dropped"),
        ),
        Section(anchor="provenance", title="Provenance", entries=tuple(origin.items()), is_code=True),
    ]
    return [part for part in parts if not part.is_empty]


def _routes(found: Findings) -> bool:
    """Whether a method of these runs is one whose memory accesses the accounting knows."""
    return bool(set(found.table["method"].dropna()) & (set(METHODS) - {"baseline"}))


def _failed(found: Findings, word: str) -> list[str]:
    return grouped([failure for failure in found.failures if word in failure.what.lower()])


def _methods(found: Findings) -> tuple[str, ...]:
    lines = []
    for kind, what in (("speedup", "Speedups"), ("seeds", "Loss differences"), ("noise", "Noise")):
        if told := found.conventions_of(kind):
            lines.append(f"{what}. {core.convention_text(told)}")
    return (*lines, *_cautions(found))


def _cautions(found: Findings) -> list[str]:
    """Cautions of one kind together, however many comparisons make them: two in full, with whose they are."""
    kinds: dict[str, dict[str, list[str]]] = {caution.code: {caution.message: []} for caution in found.cautions}
    for name, result in found.results.items():
        for caution in result.warnings:
            kinds.setdefault(caution.code, {}).setdefault(caution.message, []).append(name)
    lines = []
    for code, messages in kinds.items():
        shown = list(messages.items())[:_MOST_ALIKE]
        for message, names in shown:
            more = f" and {len(names) - _MOST_ALIKE} more" if len(names) > _MOST_ALIKE else ""
            whose = f" ({', '.join(names[:_MOST_ALIKE])}{more})" if names else ""
            lines.append(f"Caution{whose}: {message}.")
        if len(messages) > _MOST_ALIKE:
            rest = len(messages) - _MOST_ALIKE
            lines.append(f"Caution: {rest} more like the last; results.json has them under the code {code}.")
    return lines


def _own_methods(found: Findings) -> list[tuple[str, str]]:
    """What the methods of runs trained with this tool are, from the first lines of their options' descriptions."""
    if found.table["data_fingerprint"].isna().all():  # a table of another tool, whose names may mean something else
        return []
    there = set(found.table["method"].dropna())
    told = {name: " ".join((options.__doc__ or "").split("\n\n")[0].split()) for name, options in METHODS.items()}
    return [(name, text.replace("``", "'")) for name, text in told.items() if name in there and text]
