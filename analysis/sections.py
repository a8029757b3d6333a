"""The report's parts in reading order: what stands in each, and the prose between tables and figures."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from scaling.analysis.findings import Findings
from scaling.analysis.gallery import Picture
from scaling.analysis.page import Section
from scaling.analysis.tables import core

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
    (
        "FLOPs",
        "Floating-point operations of training, counted exactly from the shapes (matrix products, causal "
        "attention, logits, routing), not measured.",
    ),
    ("6ND", "The rule of thumb 6 × non-embedding parameters × tokens, kept in a column of its own."),
)


def sections(found: Findings, pictures: Sequence[Picture], origin: Mapping[str, str]) -> list[Section]:
    """Everything after the summary; parts with nothing in them are left out."""
    baseline = found.baseline or ""

    def shown(name: str) -> tuple[Picture, ...]:
        return tuple(picture for picture in pictures if picture.section == name)

    speed = []
    if found.speedups:
        speed.append(
            core.speedups(found.speedups, baseline=baseline, conventions=found.conventions, dropped=len(found.dropped))
        )
        if any(item.scales for item in found.speedups):
            speed.append(core.speedups_by_scale(found.speedups, baseline=baseline))
    parts = [
        Section(
            anchor="speedups",
            title="Compute saved at equal loss",
            intro=tuple(_failed(found, "speedup")),
            pictures=shown("speedups"),
            tables=tuple(speed),
        ),
        Section(
            anchor="seeds",
            title="Loss differences, seed by seed",
            pictures=shown("seeds"),
            tables=(core.seed_deltas(found.deltas, baseline=baseline, dropped=len(found.dropped)),)
            if found.deltas
            else (),
        ),
        Section(
            anchor="noise",
            title="Noise",
            pictures=shown("noise"),
            tables=(core.noise(found.noises),) if found.noises else (),
        ),
        Section(anchor="losses", title="Loss curves", pictures=shown("losses")),
        Section(anchor="runs", title="All runs", tables=(core.runs(found.table),)),
        Section(anchor="methods", title="Methods and conventions", intro=_methods(found), entries=GLOSSARY),
        Section(
            anchor="dropped",
            title="Runs left out",
            intro=() if found.dropped else ("No run was left out.",),
            tables=(core.dropped(found.dropped),) if found.dropped else (),
        ),
        Section(anchor="provenance", title="Provenance", entries=tuple(origin.items()), is_code=True),
    ]
    return [part for part in parts if not part.is_empty]


def _failed(found: Findings, word: str) -> list[str]:
    return [f"{failure.what}: {failure.reason}." for failure in found.failures if word in failure.what.lower()]


def _methods(found: Findings) -> tuple[str, ...]:
    lines = []
    for kind, what in (("speedup", "Speedups"), ("seeds", "Loss differences"), ("noise", "Noise")):
        if told := found.conventions_of(kind):
            lines.append(f"{what}. {core.convention_text(told)}")
    lines += [f"{name}: {caution}" for name, caution in _cautions(found)]
    return tuple(lines)


def _cautions(found: Findings) -> list[tuple[str, str]]:
    return [("Caution", f"{caution.message}") for caution in found.cautions[:20]]
