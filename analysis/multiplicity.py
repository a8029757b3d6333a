"""Corrections for comparing many methods with one baseline.

After ``seeds``: Holm, Benjamini and Hochberg, Dunnett, and what the best of many equal methods gains by luck.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from scaling.analysis.paired import benjamini_hochberg, dunnett, expected_best, holm
from scaling.analysis.result import Caution, Result


def correct(results: dict[str, Result]) -> dict[str, Result]:
    """Add adjusted p-values over methods and what the best of them gains by luck."""
    names = [n for n, r in results.items() if r.details.get("joint")]
    if not names:
        return results
    p = [float(results[n].details["joint"]["p"]) for n in names]
    t = [float(results[n].estimate["delta"] / max(results[n].standard_error["delta"], 1e-300)) for n in names]
    df = min(float(results[n].details["joint"]["df"]) for n in names)
    adjusted = {"holm": holm(p), "benjamini_hochberg": benjamini_hochberg(p), "dunnett": dunnett(t, df)}
    luck = expected_best(len(names))
    best = min(names, key=lambda n: results[n].estimate["delta"])
    out = dict(results)
    for k, n in enumerate(names):
        result = results[n]
        # The baseline's share of the variance is common to all methods: luck acts on the method's own half.
        gain = float(luck * result.standard_error["delta"] / np.sqrt(2))
        extra = {
            "methods": len(names),
            "p": p[k],
            **{name: values[k] for name, values in adjusted.items()},
            "best": n == best,
            "expected_luck_of_best": gain,
            "delta_corrected_for_selection": result.estimate["delta"] + (gain if n == best else 0.0),
        }
        cautions = result.warnings
        if n == best and len(names) > 1:
            text = (
                f"best of {len(names)} methods: equal ones would show a gain of {gain:.3g} by luck; confirm with "
                "fresh seeds"
            )
            cautions = (*cautions, Caution(code="best-of-k", message=text))
        out[n] = replace(result, warnings=cautions, details={**result.details, "multiplicity": extra})
    return out
