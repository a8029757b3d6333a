"""From a probe of routing heads to a result with intervals: do trained heads disagree more than random ones?

After ``scaling.models.probe``, which measures; ``scaling probe disagreement`` prints it, figures draw the details.
Sequences are the unit of the intervals: sites and tokens of one sequence are not independent.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.result import Caution, Interval, Result

Floats = NDArray[np.float64]


class Measured(Protocol):
    """A probe as ``scaling.models.probe`` makes it, or as its file holds it; shapes there."""

    @property
    def learned(self) -> Floats: ...
    @property
    def random(self) -> Floats: ...
    @property
    def weights(self) -> Floats: ...
    @property
    def excess(self) -> Floats: ...
    @property
    def sites(self) -> NDArray[Any]: ...
    @property
    def heads(self) -> int: ...


def judge_disagreement(probe: Measured, *, level: float = 0.95) -> Result:
    """Learned and random disagreement and their difference, the mean over sites, with t intervals over sequences.

    Parameters
    ----------
    probe
        From ``scaling.models.probe.disagreement``, or read from its file.
    level
        Of the intervals.
    """
    values = {
        "learned": probe.learned.mean(axis=1),
        "random": probe.random.mean(axis=(1, 2)),
        "excess": probe.excess,
    }
    n = len(probe.learned)
    means = {name: float(sample.mean()) for name, sample in values.items()}
    warnings: tuple[Caution, ...] = ()
    errors: dict[str, float] = {}
    interval = None
    if n > 1:
        errors = {name: float(sample.std(ddof=1) / np.sqrt(n)) for name, sample in values.items()}
        factor = float(stats.t.ppf((1 + level) / 2, n - 1))
        interval = Interval(
            level=level,
            method="t over sequences",
            low={name: means[name] - factor * errors[name] for name in means},
            high={name: means[name] + factor * errors[name] for name in means},
        )
    else:
        warnings = (Caution(code="one-sequence", message="one sequence gives no interval; probe at least two"),)
    return Result(
        kind="probe disagreement",
        estimate=means,
        standard_error=errors,
        interval=interval,
        n=n,
        df=n - 1 if n > 1 else None,
        conventions={
            "measure": "mean over pairs of heads of the total variation distance between their weights over sources",
            "null": f"random directions of the trained norms, {probe.random.shape[2]} draws a head and site",
            "sites": "those with two sources or more, equally weighted",
        },
        warnings=warnings,
        details={
            "heads": probe.heads,
            "site": probe.sites,
            "learned_by_site": probe.learned.mean(axis=0),
            "random_by_site": probe.random.mean(axis=(0, 2)),
            "weights_by_site_source_head": probe.weights,
        },
    )


def describe(result: Result) -> str:
    """The result as text: the three numbers with their intervals, then one row a site."""
    lines = [
        f"{result.details['heads']} heads, {result.n} sequences; 0 = all heads read alike, 1 = no source in common"
    ]
    for name, value in result.estimate.items():
        bounds = ""
        if result.interval is not None:
            low, high = result.interval.low[name], result.interval.high[name]
            bounds = f"   {100 * result.interval.level:g} % [{low:.4f}, {high:.4f}]"
        lines.append(f"  {name:<8} {value:.4f}{bounds}")
    lines += [f"  warning: {caution.message}" for caution in result.warnings]
    lines += ["", "  site   learned   random"]
    rows = zip(result.details["site"], result.details["learned_by_site"], result.details["random_by_site"], strict=True)
    lines += [f"  {site:>4}   {learned:.4f}    {random:.4f}" for site, learned, random in rows]
    return "\n".join(lines)
