"""Everything a report says, computed: the laws, speedups, paired deltas and noise of one tidy table, refusals kept.

After the computing modules, before ``summary``, ``page`` and ``report``. An analysis that the data cannot support is
not an error here: it becomes a ``Failure`` with its reason, which the report prints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

import pandas as pd

from scaling.analysis.arms import by_condition, by_option, natural
from scaling.analysis.cells import size_key
from scaling.analysis.readings import Curve, Delta, Noise, Speedup
from scaling.analysis.result import Caution, Result
from scaling.analysis.supplements import Supplements, wide_scores

NOISE: Final = "The noise between seeds"  # what is asked first of all


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An analysis that was not possible, in words: what it would have told, and why it could not."""

    what: str
    reason: str
    method: str = ""  # where the same is asked of every method, and ``question`` has a * in place of its name
    question: str = ""

    @property
    def sentence(self) -> str:
        return f"{self.what}: {self.reason}."


def grouped(failures: Sequence[Failure]) -> list[str]:
    """Sentences on failures, methods that failed for one reason named together.

    >>> asked = "The compute that * saves"
    >>> grouped([Failure(what="", question=asked, reason="two scales", method=m) for m in ("hc", "mhc")])
    ['The compute that each of hc, mhc saves: two scales.']
    """
    alike: dict[tuple[str, str], list[Failure]] = {}
    for failure in failures:
        alike.setdefault((failure.question or failure.what, failure.reason), []).append(failure)
    lines = []
    for (question, _), together in alike.items():
        if len(together) == 1:
            lines.append(together[0].sentence)
            continue
        methods = ", ".join(failure.method for failure in together)
        lines.append(f"{question.replace('*', f'each of {methods}', 1)}: {together[0].reason}.")
    return lines


@dataclass(frozen=True, kw_only=True, slots=True)
class Findings:
    """The computed content of a report.

    Parameters
    ----------
    table, histories
        Tidy runs used (dropped ones left out), and their curves or ``None``.
    baseline
        The method that others are compared with; ``None`` when the table has none of that name.
    unusable
        Rows of ``table`` that analyses leave out (unfinished, diverged, copies); their reasons are in ``dropped``.
    needs
        Sentences on what it would take to decide what is open, from the power calculation.
    results
        Name -> result object behind everything above, for the JSON file and the conventions.
    supplements
        Probes, timings, answers and scores given beside the runs.
    compared
        The runs with methods and sizes named as comparisons see them (``scaling.analysis.arms``).
    """

    table: pd.DataFrame
    histories: pd.DataFrame | None
    baseline: str | None
    x: str
    curves: Mapping[str, Curve] = field(default_factory=dict)
    speedups: tuple[Speedup, ...] = ()
    deltas: tuple[Delta, ...] = ()
    noises: tuple[Noise, ...] = ()
    failures: tuple[Failure, ...] = ()
    cautions: tuple[Caution, ...] = ()
    dropped: tuple[tuple[str, str], ...] = ()
    unusable: frozenset[int] = frozenset()
    needs: tuple[str, ...] = ()
    results: Mapping[str, Result] = field(default_factory=dict)
    supplements: Supplements = field(default_factory=Supplements)
    compared: pd.DataFrame = field(init=False, repr=False, compare=False)

    @property
    def usable(self) -> pd.DataFrame:
        """Runs that analyses may use."""
        return self.table.drop(index=sorted(self.unusable))

    def __post_init__(self) -> None:
        object.__setattr__(self, "compared", by_condition(by_option(self.table)))

    @property
    def compared_usable(self) -> pd.DataFrame:
        """The same without runs that analyses leave out."""
        return self.compared.drop(index=sorted(self.unusable))

    @property
    def methods(self) -> list[str]:
        """Methods as compared, the baseline first."""
        return sorted(
            self.compared["method"].dropna().unique(), key=lambda name: (name != self.baseline, natural(name))
        )

    @property
    def sizes(self) -> list[str]:
        """Sizes, smallest first."""
        return by_parameters(self.table)

    @property
    def places(self) -> list[str]:
        """Sizes as compared, smallest first."""
        return by_parameters(self.compared)

    @property
    def scores(self) -> pd.DataFrame | None:
        """Downstream scores: those given in a file of their own and those in columns of the run table."""
        parts = [part for part in (self.supplements.scores, wide_scores(self.compared_usable)) if part is not None]
        return pd.concat(parts, ignore_index=True) if parts else None

    @property
    def num_seeds(self) -> int:
        return int(self.table["seed"].nunique())

    @property
    def seed_sd(self) -> float | None:
        """Standard deviation of the loss over seeds, where it could be measured."""
        return next((noise.sd for noise in self.noises if noise.counts_for_methods), None)

    @property
    def largest_parameters(self) -> float | None:
        value = self.table["n_params"].max()
        return None if pd.isna(value) else float(value)

    @property
    def conventions(self) -> dict[str, str]:
        """Conventions of the speedups."""
        return self.conventions_of("speedup")

    def conventions_of(self, kind: str) -> dict[str, str]:
        """Conventions of the results whose name begins with ``kind``, put together."""
        found: dict[str, str] = {}
        for name, result in self.results.items():
            if name.startswith(kind):
                found.update(result.conventions)
        return found


def by_parameters(runs: pd.DataFrame) -> list[str]:
    """The sizes of a table by their median number of parameters, smallest first; by name where it is not known."""
    known = runs.dropna(subset=["size"])
    parameters = known.groupby("size")["n_params"].median()
    if parameters.isna().all():
        parameters = known.groupby("size")["n_params_non_embedding"].median()
    return sorted(
        map(str, parameters.index),
        key=lambda name: (float(parameters[name]) if pd.notna(parameters[name]) else 0.0, size_key(name)),
    )
