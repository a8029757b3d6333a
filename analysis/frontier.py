"""The compute-optimal split of a budget between parameters and tokens, from a fitted law.

After ``fit``: N*(C), D*(C) and tokens per parameter of a law in N and D, with intervals from the same refits as the
law's own parameters. ``C = k N D`` is a convention and part of the result (k is 6 by default; it is wrong for small
models, where attention and the vocabulary dominate).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.certify import solve
from scaling.analysis.checklist import conventions, describe_dropped, describe_seeds, make_checklist
from scaling.analysis.laws import get_law
from scaling.analysis.options import check_draws, check_level, generator
from scaling.analysis.result import Caution, Interval, Result
from scaling.analysis.robust import check_loss
from scaling.analysis.screen import check_spread, numbers, screen
from scaling.analysis.uncertainty import cluster_bootstrap
from scaling.analysis.verdict import fit_cautions
from scaling.errors import UsageError

if TYPE_CHECKING:
    import pandas as pd

Floats = NDArray[np.float64]

# FLOPs a parameter and token of a forward and backward pass; Kaplan et al. (2020), section 2.1.
FLOPS_PER_PARAMETER_TOKEN = 6.0
FORMS = ("chinchilla", "chinchilla-tied")
FAR = 10.0


def optimal_split(natural_RP: Floats, names: Sequence[str], budget: float, k: float) -> tuple[Floats, Floats]:
    """N* and D* of each row of parameters at one budget.

    References
    ----------
    Hoffmann et al. (2022), equation 4: ``N* = G (C/k)^(beta/(alpha+beta))``,
    ``G = (alpha A / (beta B))^(1/(alpha+beta))``.
    """
    at = {name: natural_RP[:, k_] for k_, name in enumerate(names)}
    alpha = at["alpha"]
    beta = at.get("beta", alpha)
    log_g = (np.log(alpha * at["A"]) - np.log(beta * at["B"])) / (alpha + beta)
    log_n = log_g + beta / (alpha + beta) * np.log(budget / k)
    return np.exp(log_n), np.exp(np.log(budget / k) - log_n)


def parse_budgets(text: str) -> list[float]:
    """Numbers separated by commas.

    >>> parse_budgets("1e21, 1e22")
    [1e+21, 1e+22]
    """
    try:
        return [float(part) for part in text.split(",")]
    except ValueError as error:
        raise UsageError(f"--budgets: {text!r} is not numbers separated by commas, e.g. 1e21,1e22") from error


def compute_frontier(
    table: pd.DataFrame,
    *,
    budgets: Sequence[float],
    form: str = "chinchilla",
    loss: str = "huber",
    delta: float = 1e-3,
    flops_per_parameter_token: float = FLOPS_PER_PARAMETER_TOKEN,
    level: float = 0.95,
    draws: int = 1000,
    rng: int | np.random.Generator = 0,
    keep_unfinished: bool = False,
) -> Result:
    """Compute-optimal N, D and tokens per parameter at each budget.

    Parameters
    ----------
    table
        Runs with N, D and ``loss``.
    budgets
        Training FLOPs.
    form
        A law in N and D with exponents ``alpha`` and ``beta``.
    flops_per_parameter_token
        k of ``C = k N D``.

    Raises
    ------
    UsageError
        When the form has no such optimum or a budget is not positive.
    """
    check_loss(loss, delta)
    check_level(level)
    check_draws(draws, at_least=2)
    random = generator(rng)
    if form not in FORMS:
        raise UsageError(f"form {form!r} has no closed optimum; allowed: {', '.join(FORMS)}")
    if not budgets or any(not 0 < b < np.inf for b in budgets):
        raise UsageError("budgets must be positive numbers of FLOPs, e.g. --budgets 1e21,1e22")
    law = get_law(form)
    screened = screen(table, needs=["N", "D", "loss"], analysis="frontier", keep_unfinished=keep_unfinished)
    frame = screened.frame
    for name in ("N", "D"):
        check_spread(numbers(frame, name), name, "frontier")
    x = {v: numbers(frame, v) for v in law.variables}
    y_n = numbers(frame, "loss")
    fitted = solve(law, x, y_n, np.ones(len(y_n)), loss=loss, delta=delta)
    names = fitted.model.parameters
    k = flops_per_parameter_token

    def quantities(natural_RP: Floats) -> dict[str, Floats]:
        at = {name: natural_RP[:, j] for j, name in enumerate(names)}
        beta = at.get("beta", at["alpha"])
        out = {"N_exponent": beta / (at["alpha"] + beta), "D_exponent": at["alpha"] / (at["alpha"] + beta)}
        for budget in budgets:
            n, d = optimal_split(natural_RP, names, budget, k)
            out |= {f"N*[{budget:g}]": n, f"D*[{budget:g}]": d, f"tokens_per_parameter[{budget:g}]": d / n}
        return out

    estimate = {name: float(v[0]) for name, v in quantities(fitted.natural_P[None]).items()}
    interval, errors, made = None, {}, None
    if fitted.df > 0:
        clusters = [str(v) for v in frame["run_key"]] if "run_key" in frame.columns else None
        made = cluster_bootstrap(fitted, clusters, draws, random)
    if made is not None and made.enough:
        drawn = quantities(made.kept_RP)
        ends = {name: np.quantile(v, [(1 - level) / 2, (1 + level) / 2]) for name, v in drawn.items()}
        errors = {name: float(np.std(v, ddof=1)) for name, v in drawn.items()}
        low = {n: float(e[0]) for n, e in ends.items()}
        high = {n: float(e[1]) for n, e in ends.items()}
        interval = Interval(level=level, method="cluster bootstrap, percentile", low=low, high=high)
    cautions = [
        *screened.cautions,
        *fit_cautions(fitted, interval, asked="cluster", draws=draws),
        *_far(budgets, k * x["N"] * x["D"]),
    ]
    entries = {
        "form": law.formula,
        "variables": ", ".join(f"{a} = {b}" for a, b in conventions(frame, ["N", "D", "loss"]).items()),
        "conventions": f"C = {k:g} N D",
        "rows": str(len(frame)),
        "dropped": describe_dropped(screened.dropped),
        "seeds": describe_seeds(frame),
        "loss": loss,
        "delta": f"{delta:g}" if loss == "huber" else "does not apply",
        "solver": "damped Newton from variable-projection starts, Huber continuation",
        "convergence": fitted.status,
        "interval": interval.method if interval else "none",
    }
    details: dict[str, Any] = {"law": fitted.estimate, "budgets": list(budgets), "flops_per_parameter_token": k}
    return Result(
        kind="frontier",
        estimate=estimate,
        standard_error=errors,
        interval=interval,
        n=len(frame),
        df=float(fitted.df),
        status=fitted.status,
        objective=fitted.objective,
        certificate=fitted.certificate,
        conventions={"C": f"{k:g} N D"},
        warnings=tuple(cautions),
        dropped=screened.dropped,
        checklist=make_checklist(entries),
        details=details,
    )


def _far(budgets: Sequence[float], computes: Floats) -> list[Caution]:
    factor = max(max(budgets) / float(computes.max()), float(computes.min()) / min(budgets))
    if factor <= FAR:
        return []
    text = f"a budget lies {factor:.3g}x outside the runs: run the backtest for how far this law can be trusted"
    return [Caution(code="extrapolation-10x", message=text)]
