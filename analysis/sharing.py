"""Which parameters the laws of several methods have in common, and whether the data allow it.

Between ``certify`` and ``fit``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from scipy import stats

from scaling.analysis.certify import Fitted
from scaling.analysis.laws import Law
from scaling.analysis.uncertainty import dispersion

SHARES = ("free", "E", "exponents", "E+exponents", "test")
SHARING_LEVEL = 0.05


def shared_names(law: Law, share: str) -> tuple[str, ...]:
    """Parameters that groups share under ``share``."""
    kinds = {"E": ("asymptote",), "exponents": ("exponent",), "E+exponents": ("asymptote", "exponent")}.get(share, ())
    return tuple(p.name for p in law.parameters if p.kind in kinds)


def compare_sharing(name: str, restricted: Fitted, full: Fitted) -> dict[str, Any]:
    """Drop-in-dispersion test of shared parameters against free ones (the F test when the loss is squares).

    References
    ----------
    Schrader and Hettmansperger (1980), Robust analysis of variance based upon a likelihood ratio criterion.
    """
    q = len(full.phi_P) - len(restricted.phi_P)
    if full.df <= 0:
        return {"share": name, "statistic": None, "df": [q, full.df], "p": None}
    rise = max(restricted.objective - full.objective, 0.0)
    statistic = 2 * rise / q / max(dispersion(full), 1e-300)
    return {"share": name, "statistic": statistic, "df": [q, full.df], "p": float(stats.f.sf(statistic, q, full.df))}


def pick_sharing(tests: Sequence[Mapping[str, Any]]) -> str:
    """The most shared alternative that is not rejected; ``free`` when all are."""
    for name in ("E+exponents", "exponents", "E"):
        for test in tests:
            if test["share"] == name and (test["p"] is None or test["p"] > SHARING_LEVEL):
                return name
    return "free"
