"""Everything a report says, computed: the laws, speedups, paired deltas and noise of one tidy table, refusals kept.

After the computing modules, before ``summary``, ``page`` and ``report``. An analysis that the data cannot support is
not an error here: it becomes a ``Failure`` with its reason, which the report prints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pandas as pd

from scaling.analysis.cells import size_key
from scaling.analysis.readings import Curve, Delta, Noise, Speedup
from scaling.analysis.result import Caution, Result


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """An analysis that was not possible, in words: what it would have told, and why it could not."""

    what: str
    reason: str


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

    @property
    def usable(self) -> pd.DataFrame:
        """Runs that analyses may use."""
        return self.table.drop(index=sorted(self.unusable))

    @property
    def methods(self) -> list[str]:
        """Methods, the baseline first."""
        return sorted(self.table["method"].dropna().unique(), key=lambda name: (name != self.baseline, name))

    @property
    def sizes(self) -> list[str]:
        """Sizes, smallest first."""
        known = self.table.dropna(subset=["size"])
        parameters = known.groupby("size")["n_params"].median()
        return sorted(
            parameters.index,
            key=lambda name: (float(parameters[name]) if pd.notna(parameters[name]) else 0.0, size_key(str(name))),
        )

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
