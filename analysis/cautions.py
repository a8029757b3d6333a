"""What a reader must know before using a comparison, each with a stable code.

Between ``isoloss`` and the results of ``speedup`` and ``seeds``: extrapolation, missing scales, few seeds, budgets.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from scaling.analysis.cells import Cell, constant_pairs, paired, scale_labels
from scaling.analysis.inversion import Inverse
from scaling.analysis.isoloss import IDENTICAL, Arms, Bools, Floats, Noise
from scaling.analysis.noise import CONFIGURATION
from scaling.analysis.paired import TTest
from scaling.analysis.power import detectable_paired
from scaling.analysis.result import Caution, Result
from scaling.analysis.screen import Screened

if TYPE_CHECKING:
    import pandas as pd

# Cost beyond the baseline's range from which an extrapolation is called far.
FAR = 10.0
# One-sided level at which seeds count as positively correlated; without it (or `OPPOSED`) the test is unpaired.
CORRELATED = 0.05
# Level of the test that cells have one variance; below it the pooled SD is not to be trusted.
HOMOGENEOUS = 0.05
# Numbers of tokens within this factor count as one budget.
SAME_TOKENS = 1.01
IDENTICAL_TEXT = (
    "runs that differ by seed have equal losses: copies of one run, or seeds that change nothing; no interval"
)

SAME_DIFFERENCE = "pairs of one seed all differ by the same amount: one arm's losses moved by a constant, or copies"
SAME_DIFFERENCE_TEXT = f"{SAME_DIFFERENCE}; no interval"
NO_INTERVAL = ("identical-losses", "no-common-seeds", "one-seed", "no-degrees-of-freedom")
"""Codes of the cautions that say why a comparison has no interval."""


def refuse(kind: str, text: str, screened: Screened, **conventions: str) -> Result:
    """A result that says why there is none; the code is the text's first word where that ends with a colon."""
    code, _, rest = text.partition(": ")
    known = rest and " " not in code
    caution = Caution(code=code if known else "refused", message=rest if known else text)
    return Result(
        kind=kind,
        estimate={},
        n=len(screened.frame),
        status="refused",
        conventions=conventions,
        warnings=(*screened.cautions, caution),
        dropped=screened.dropped,
    )


def speedup_cautions(arms: Arms, inverse: Inverse, log_s: Floats, usable: Bools, noise: Noise) -> list[Caution]:
    out = []
    missing = [c.scale for c in arms.method if c.scale not in {b.scale for b in arms.baseline}]
    if missing:
        text = (
            f"baseline {arms.baseline[0].method!r} has no run at {', '.join(missing)}: its cost there comes from "
            "its law alone"
        )
        out.append(Caution(code="baseline-missing-at-scale", message=text))
    factors = extrapolation(arms, log_s)
    beyond = [f"{c.scale} ({f:.3g}x)" for c, f, ok in zip(arms.method, factors, usable, strict=True) if ok and f > 1]
    if beyond:
        text = f"the baseline's law is extrapolated beyond its largest or smallest cost at {', '.join(beyond)}"
        out.append(Caution(code="extrapolated", message=text))
    if np.any(factors[usable] > FAR):
        text = f"the baseline's law is extrapolated more than {FAR:g}x: the speedup there is a guess; run the backtest"
        out.append(Caution(code="extrapolation-10x", message=text))
    if noise.source == IDENTICAL:
        out.append(Caution(code="identical-losses", message=IDENTICAL_TEXT))
    elif noise.df == 0 or np.isnan(noise.sd):
        text = "one seed a cell, no given noise floor and no degrees of freedom left by the law: no interval"
        out.append(Caution(code="no-degrees-of-freedom", message=text))
    elif noise.source == "lack of fit":
        text = (
            f"one seed a cell: the noise is taken from the lack of fit of the laws ({noise.df:g} df); a noise "
            "floor is better"
        )
        out.append(Caution(code="one-seed", message=text))
    elif noise.source == "pooled cells" and noise.df < 4:
        text = f"seed noise rests on {noise.df:g} degrees of freedom: the interval is wide and depends on normal noise"
        out.append(Caution(code="few-seeds", message=text))
    flat = [arms.cells[i].scale for i, j in arms.pairs if constant_pairs(paired(arms.cells[i], arms.cells[j]))]
    if flat and noise.source != IDENTICAL:
        text = f"at {', '.join(flat)} {SAME_DIFFERENCE}; their correlation is not used; check the method's losses"
        out.append(Caution(code="constant-pairs", message=text))
    if np.sum(usable) < 3:
        text = f"{int(np.sum(usable))} scale{'s' * int(np.sum(usable) != 1)} of the method: no trend can be tested"
        out.append(Caution(code="few-scales", message=text))
    if inverse.curve["E"] < 1e-5 * min(c.mean for c in arms.cells):
        text = (
            "the fitted asymptote is zero: the data show no curvature in log loss; extrapolated speedups depend on that"
        )
        out.append(Caution(code="bound-hit", message=text))
    out += mixed_budgets(arms.cells)
    return out


def seed_cautions(
    arms: Sequence[tuple[Cell, Cell]], pairs: Sequence[tuple[Floats, Floats]], baseline: Mapping[str, Cell],
    method: Mapping[str, Cell], joint: TTest | None, sd: float, details: Mapping[str, Any],
) -> list[Caution]:  # fmt: skip
    """Cautions of one comparison of seeds; ``arms`` are the method's and the baseline's cell of each scale."""
    out = []
    lone = [s for s in method if s not in baseline] + [s for s in baseline if s not in method]
    if lone:
        out.append(Caution(code="unmatched-scales", message=f"scales of one arm only, left out: {', '.join(lone)}"))
    smallest = min(len(m) for m, _ in pairs)
    if joint is None:
        out.append(_why_no_interval(arms, pairs, details))
    elif 2 <= smallest < 6:
        effect = detectable_paired(smallest, 0.05, 0.8)
        text = (
            f"{smallest} seeds: the smallest two-sided sign-flip p at one scale is {2.0 ** (1 - smallest):.3g}; a "
            "paired t at one "
            f"scale finds with 80% power only differences of {effect:.2f} SDs of the pair differences"
        )
        out.append(Caution(code="few-seeds", message=text))
    flat = [m.scale for (m, _), pair in zip(arms, pairs, strict=True) if constant_pairs(pair)]
    if joint is not None and details["pairing"]["used"] == "paired" and flat:
        text = f"at {', '.join(flat)} {SAME_DIFFERENCE_TEXT} there"
        out.append(Caution(code="identical-losses", message=text))
    if joint is not None and details["pairing"]["used"] == "unpaired" and details["sign_flip"]["pairs"]:
        rho, p = details["pairing"]["rho"], details["pairing"]["p_one_sided"]
        why = "the given noise is of single runs" if p < CORRELATED else "not shown to differ from 0"
        text = f"runs of one seed correlate by {rho:.2f}, {why}: the unpaired test is used"
        if np.isnan(rho):
            text = (
                "whether runs of one seed correlate cannot be measured (it takes 3 pairs that differ at one scale, or "
                "2 at each of two): the unpaired test is used"
            )
        out.append(Caution(code="pairing-not-used", message=text))
    p = details["pooled_sd"]["homogeneity_p"]
    if p is not None and p < HOMOGENEOUS:
        text = f"cells differ in spread (Levene p {p:.2g}): the pooled SD {sd:.3g} misstates single scales"
        out.append(Caution(code="unequal-variances", message=text))
    return out + mixed_budgets([cell for arm in arms for cell in arm])


def repeated_seeds(frame: pd.DataFrame, methods: Sequence[str]) -> list[Caution]:
    """Caution where a method was run more than once with one seed at one scale: repeats, or settings that are mixed.

    Parameters
    ----------
    frame
        Screened runs.
    methods
        The arms that are compared.
    """
    if "seed" not in frame.columns:
        return []
    runs = frame.assign(scale=scale_labels(frame))
    runs = runs[runs["method"].isin(methods) & runs["seed"].notna()]
    found = [part for _, part in runs.groupby(["method", "scale", "seed"], sort=False) if len(part) > 1]
    if not found:
        return []
    method, scale, seed = found[0][["method", "scale", "seed"]].iloc[0]
    settings = [c for c in CONFIGURATION if c in runs.columns and c not in ("method", "size", "N", "D")]
    mixed = [c for c in settings if any(part[c].nunique(dropna=False) > 1 for part in found)]
    what = f"but differ in {', '.join(mixed)}" if mixed else "and one configuration"
    more = f" (and {len(found) - 1} more such)" if len(found) > 1 else ""
    text = (
        f"{len(found[0])} runs of {method} at {scale} share seed {str(seed).removesuffix('.0')} {what}{more}: each "
        "counts in the means, none is paired; keep one of them with --where"
    )
    return [Caution(code="repeated-seeds", message=text)]


def copied_runs(cells: Sequence[Cell], counted: Sequence[Cell]) -> list[Caution]:
    """Caution where runs of a cell count as one, since their losses are equal while those of other cells differ.

    Parameters
    ----------
    cells, counted
        Cells as they are in the table and as they are counted, in one order.
    """
    found: dict[str, list[str]] = {}
    for cell, one in zip(cells, counted, strict=True):
        if len(one.losses) < len(cell.losses):
            found.setdefault(cell.method, []).append(cell.scale)
    if not found:
        return []
    places = "; ".join(f"{method} at {', '.join(scales)}" for method, scales in found.items())
    text = (
        f"runs that differ by seed have equal losses ({places}): copies of one run, or seeds that change nothing; "
        "each such cell counts as one run and measures no noise; check the runs' seeds, then train with others"
    )
    return [Caution(code="copied-runs", message=text)]


def same_runs(arms: Sequence[tuple[Cell, Cell]]) -> list[Caution]:
    """Caution where runs of one seed have the very same loss in both arms."""
    places = []
    for method, baseline in arms:
        known = set(zip(baseline.seeds, baseline.losses.tolist(), strict=True))
        same = [s for s, loss in zip(method.seeds, method.losses.tolist(), strict=True) if (s, loss) in known]
        if same:
            places.append(f"{method.scale} (seed {', '.join(same)})")
    if not places:
        return []
    names = f"{arms[0][0].method} and {arms[0][1].method}"
    text = (
        f"{names} have equal losses at {', '.join(places)}: one configuration under two names, whose difference is 0 "
        "whatever the method does, or rounded losses"
    )
    return [Caution(code="same-runs", message=text)]


def _why_no_interval(
    arms: Sequence[tuple[Cell, Cell]], pairs: Sequence[tuple[Floats, Floats]], details: Mapping[str, Any]
) -> Caution:
    if details["pooled_sd"]["identical"]:
        return Caution(code="identical-losses", message=IDENTICAL_TEXT)
    several = any(len(c.losses) > 1 for arm in arms for c in arm)
    if details["pairing"]["used"] == "paired" and several and min(len(m) for m, _ in pairs) == 0:
        lone = ", ".join(m.scale for (m, _), (d, _) in zip(arms, pairs, strict=True) if not len(d))
        text = f"no seed of the method was run with the baseline at {lone}: nothing is paired; use pairing unpaired"
        return Caution(code="no-common-seeds", message=text)
    if any(constant_pairs(pair) for pair in pairs):
        return Caution(code="identical-losses", message=SAME_DIFFERENCE_TEXT)
    if details["pairing"]["used"] == "paired" and several:
        text = "no scale has two pairs of runs that are no copies: the difference has no interval; use pairing unpaired"
        return Caution(code="one-seed", message=text)
    text = "one seed a cell and no given noise: the difference has no interval; add seeds or give a noise floor"
    return Caution(code="one-seed", message=text)


def mixed_budgets(cells: Sequence[Cell]) -> list[Caution]:
    """Caution where runs of one scale were trained on different numbers of tokens."""
    known: dict[str, list[float]] = {}
    for cell in cells:
        known.setdefault(cell.scale, []).extend(cell.tokens)
    factors = {scale: max(tokens) / min(tokens) for scale, tokens in known.items() if tokens}
    mixed = [f"{scale} ({factor:.2f}x)" for scale, factor in factors.items() if factor > SAME_TOKENS]
    if not mixed:
        return []
    text = f"runs of one scale saw different numbers of tokens at {', '.join(mixed)}"
    return [Caution(code="mixed-token-budgets", message=text)]


def extrapolation(arms: Arms, log_s: Floats) -> Floats:
    """How far outside the baseline's costs each inverted cost lies, as a factor of at least 1."""
    cost = log_s + np.log([c.x for c in arms.method])
    x = np.log([c.x for c in arms.baseline])
    return np.asarray(np.exp(np.maximum(np.maximum(cost - x.max(), x.min() - cost), 0.0)), dtype=np.float64)
