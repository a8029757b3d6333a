"""What a reader must know before using the parameters of a fitted law, each with a stable code.

After ``certify`` and ``uncertainty``, for every analysis that shows a law: ``fit`` and ``frontier``.
"""

from __future__ import annotations

from scaling.analysis.certify import Fitted
from scaling.analysis.result import Caution, Interval

# Below this many clusters a bootstrap of clusters often loses the end points of the range.
FEW_CLUSTERS = 20
# A limit of a percentile interval rests on at least this many draws beyond it.
FEWEST_BEYOND = 5
# Residual SDs over delta outside which a Huber loss is another loss in disguise.
ABSOLUTE, SQUARES = 30.0, 0.1
# Residual SDs below are rounding errors of exact data.
EXACT = 1e-9
EQUAL_TEXT = (
    "runs that differ by seed have equal losses: copies of one run, or seeds that change nothing; intervals that need "
    "their noise (two-level, parametric) are not made, and the others count each copy as a run"
)


def fit_cautions(
    fitted: Fitted, headline: Interval | None, *, asked: str, draws: int, equal: bool = False
) -> list[Caution]:
    """Cautions of one fit.

    Parameters
    ----------
    fitted, headline
        The fit and the interval shown with it.
    asked
        Kind of interval that was asked for.
    draws
        Bootstrap draws behind a percentile interval.
    equal
        Whether runs that should differ by their noise are equal.
    """
    return [
        *_status(fitted),
        *_delta(fitted),
        *([] if equal else _clusters(fitted, headline)),  # whose advice is the kinds that are not made
        *few_draws(headline, draws),
        *([Caution(code="identical-losses", message=EQUAL_TEXT)] if equal else _missing(fitted, headline, asked)),
    ]


def few_draws(interval: Interval | None, draws: int) -> list[Caution]:
    """A caution where so few draws lie beyond a percentile limit that it is one of the last of them."""
    if interval is None or not interval.method.endswith("percentile"):
        return []
    beyond = draws * (1 - interval.level) / 2
    if beyond >= FEWEST_BEYOND - 1e-9:
        return []
    text = (
        f"{draws} draws leave {beyond:.2g} beyond each limit at level {interval.level:g}: the limits are those of the "
        f"outermost draws; use {2 * FEWEST_BEYOND / (1 - interval.level):.0f} draws or interval delta"
    )
    return [Caution(code="few-draws", message=text)]


def _status(fitted: Fitted) -> list[Caution]:
    evidence = fitted.certificate
    if fitted.df == 0:
        text = (
            f"{fitted.model.n} rows for {len(fitted.phi_P)} parameters: the law passes through the data, no "
            "interval exists"
        )
        code = "no-degrees-of-freedom"
    elif fitted.status == "bound-hit":
        text = f"{evidence['at_bound']} ended at a bound: the data do not show that term; its interval is one-sided"
        code = "bound-hit"
    elif fitted.status == "multimodal":
        text = f"{evidence['rivals']} other starts end at different parameters that fit as well"
        code = "multimodal"
    elif fitted.status == "undetermined":
        text = f"condition number {evidence['condition']:.2g}: the data do not determine all parameters"
        code = "undetermined"
    elif fitted.status in ("max-iter", "unmoved"):
        text = f"the solver stopped at a scaled gradient of {evidence['gradient']:.2g}; do not use these numbers"
        code = "not-converged"
    else:
        return []
    return [Caution(code=code, message=text)]


def _delta(fitted: Fitted) -> list[Caution]:
    """A Huber loss whose delta the residuals never reach is no robust loss, one far below them no square."""
    spread, ratio = fitted.certificate.get("residual_sd"), fitted.certificate.get("residual_sd_over_delta")
    if not (isinstance(spread, float) and isinstance(ratio, float)):
        return []
    if ratio > ABSOLUTE:
        text = f"residual SD is {ratio:.3g} delta: the Huber loss acts as absolute values"
        return [Caution(code="delta-small", message=text)]
    if EXACT < spread and ratio < SQUARES:
        text = f"residual SD is {ratio:.3g} delta: the Huber loss acts as squares, no outlier counts less"
        return [Caution(code="delta-large", message=text)]
    return []


def _clusters(fitted: Fitted, headline: Interval | None) -> list[Caution]:
    distinct = len({*zip(*(fitted.model.x[v] for v in fitted.model.law.variables), strict=True)})
    if headline is None or not headline.method.startswith(("cluster", "pairs")) or distinct >= FEW_CLUSTERS:
        return []
    text = (
        f"{distinct} distinct points: resampled rows may lose the ends of the range; prefer interval "
        "two-level or parametric"
    )
    return [Caution(code="few-clusters", message=text)]


def _missing(fitted: Fitted, headline: Interval | None, asked: str) -> list[Caution]:
    if headline is not None or asked == "none" or fitted.df <= 0:
        return []
    text = (
        f"no {'cluster' if asked == 'all' else asked} interval: fewer than half of the refits converged; give the law "
        "fewer parameters or more scales"
    )
    return [Caution(code="refits-failed", message=text)]
