"""Has everything computed that a report says about a table, and keeps the refusals.

After the computing modules, before ``summary`` and ``report``; it estimates nothing itself. What the data cannot
support is no error here: a refusal becomes a ``Failure`` with its reason, which the report prints.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import pandas as pd

from scaling.analysis import digits
from scaling.analysis.arms import at_best_rate, by_condition, by_option, natural
from scaling.analysis.findings import NOISE, Failure, Findings, by_parameters
from scaling.analysis.readings import OVER_SIZES, Curve, Delta, Noise, Speedup, read_deltas, read_noise, read_speedup
from scaling.analysis.result import Caution, Result
from scaling.analysis.supplements import Supplements
from scaling.analysis.tails import tail_noises
from scaling.analysis.whole import complete, pick_baseline
from scaling.errors import ScalingError

if TYPE_CHECKING:
    from scaling.analysis.cells import Cell

T = TypeVar("T")
_Speedups = tuple[tuple[Speedup, ...], Mapping[str, Curve]]
BEST_RATE = Caution(
    code="best-learning-rate",
    message="laws and speedups see each method at the learning rate with its least mean loss at each size; the "
    "least of "
    "several noisy means is a little too low, and for more rates lower",
)
_MOST_NEEDS = 3
_FEWEST_FOR_LAW = 4  # scales: three parameters and a degree of freedom
_FEWEST_FOR_BACKTEST = 5
LAW_DRAWS = 400  # ten beyond each limit of a 95% interval
_FEWEST_FOR_PROFILE = 4  # sizes at one budget


class _Log:
    """Collects results, cautions and failures of one inquiry."""

    def __init__(self) -> None:
        self.results: dict[str, Result] = {}
        self.failures: list[Failure] = []

    def ask(self, what: str, question: Callable[[], T], default: T) -> T:
        """The answer, or ``default`` with the refusal noted."""
        try:
            return question()
        except ScalingError as error:
            self.failures.append(Failure(what=what, reason=str(error).rstrip(".")))
            return default

    def keep(self, name: str, what: str, question: Callable[[], Result]) -> None:
        """The result under ``name``, or the refusal noted."""
        try:
            self.results[name] = question()
        except ScalingError as error:
            self.failures.append(Failure(what=what, reason=str(error).rstrip(".")))


def inquire(
    table: pd.DataFrame,
    histories: pd.DataFrame | None = None,
    *,
    baseline: str | None = None,
    dropped: Sequence[tuple[str, str]] = (),
    supplements: Supplements | None = None,
    rng: int = 0,
) -> Findings:
    """Laws, speedups, paired deltas and noise of a tidy table.

    Parameters
    ----------
    table, histories
        Tidy runs and their metrics; missing columns are taken as empty.
    baseline
        Method that the others are compared with; default ``"baseline"`` where there is one, else no comparison.
    dropped
        Runs left out before, as (run, reason).
    supplements
        Probes, timings, answers and scores to show beside the runs.
    rng
        Seed of every bootstrap.

    Raises
    ------
    TableError
        If the table has no run, no ``val_loss``, or not the baseline named.
    """
    runs = complete(table)
    named = by_option(runs)
    best, compared = by_condition(at_best_rate(named)), by_condition(named)
    base = pick_baseline(named, baseline)
    log = _Log()
    found: _Speedups = ((), {})
    others = named["method"].dropna().nunique() > 1
    if base is not None and others and runs["flops"].notna().any():
        found = log.ask("The compute saved at equal loss", lambda: _speedups(best, base, rng, log), found)
    deltas: tuple[Delta, ...] = ()
    if base is not None and others:
        deltas = log.ask("The differences of loss", lambda: _by_size(_deltas(compared, base, log), compared), deltas)
    noises: tuple[Noise, ...] = ()
    noises = log.ask(NOISE, lambda: _noises(runs, log), noises)
    if runs["flops"].notna().any():
        _fits(best, base, rng, log)
    given = supplements or Supplements()
    lost, unusable = {*dropped}, _screened(runs, log)
    cautions: dict[str, Caution] = {}
    if len(best) < len(runs):
        cautions[BEST_RATE.message] = BEST_RATE
    for result in log.results.values():
        lost |= {_lost(runs, item.row, item.run, item.reason) for item in result.dropped}
        cautions |= {caution.message: caution for caution in result.warnings}
    return Findings(
        table=runs,
        histories=_plain(histories),
        baseline=base,
        x="flops",
        curves=found[1],
        speedups=found[0],
        deltas=deltas,
        noises=(*noises, *tail_noises(runs, histories), *_evaluation_noise(runs)),
        failures=tuple(log.failures),
        cautions=tuple(cautions.values()),
        dropped=tuple(sorted(lost)),
        unusable=frozenset(unusable),
        needs=tuple(_needs(deltas, log)),
        results={**log.results, **{f"items {name}": result for name, result in given.items.items()}},
        supplements=given,
    )


def _plain(histories: pd.DataFrame | None) -> pd.DataFrame | None:
    """Histories with text where ingestion keeps categories, whose groups would include those without rows."""
    if histories is None:
        return None
    return histories.assign(run_key=histories["run_key"].astype(str), metric=histories["metric"].astype(str))


def _screened(runs: pd.DataFrame, log: _Log) -> set[int]:
    """Rows that every analysis leaves out."""
    from scaling.analysis.screen import screen

    try:
        kept = screen(runs, needs=["method", "loss"], analysis="report").frame["row"]
    except ScalingError as error:
        log.failures.append(Failure(what="Which runs count", reason=str(error).rstrip(".")))
        return set()
    return set(range(len(runs))) - {int(row) for row in kept}


def _refused(question: str, reason: str, method: str) -> Failure:
    return Failure(what=question.replace("*", method, 1), reason=reason.rstrip("."), method=method, question=question)


def _lost(runs: pd.DataFrame, row: int | None, run: str | None, reason: str) -> tuple[str, str]:
    if run is None and row is not None and 0 <= row < len(runs):
        name = runs["name"].iloc[row]
        run = str(runs["run_key"].iloc[row]) if pd.isna(name) else f"{name} ({runs['run_key'].iloc[row]})"
    return (run or f"row {row}", reason)


def _speedups(runs: pd.DataFrame, baseline: str, rng: int, log: _Log) -> _Speedups:
    from scaling.analysis.cells import make_cells
    from scaling.analysis.screen import screen
    from scaling.analysis.speedup import compare_speedup

    found = compare_speedup(runs, baseline=baseline, rng=rng)
    log.results |= {f"speedup {method}": result for method, result in found.items()}
    frame = screen(runs, needs=["method", "loss", "C"], analysis="report").frame
    cells = make_cells(frame, cost="C")
    curves: dict[str, Curve] = {}
    for method, result in found.items():
        if result.status == "refused":
            reason = result.warnings[-1].message if result.warnings else "refused"
            log.failures.append(_refused("The compute that * saves", reason, method))
            continue
        nothing: tuple[Curve, ...] = ()
        pair = log.ask(f"The law of {method}", partial(_pair, cells, baseline, method, result), nothing)
        for curve in pair:
            curves.setdefault(curve.method, curve)
    return tuple(read_speedup(m, r) for m, r in found.items() if r.status != "refused"), curves


def _pair(cells: Mapping[str, Mapping[str, Cell]], baseline: str, method: str, result: Result) -> tuple[Curve, ...]:
    from scaling.analysis.band import pair_curves

    noise = result.details["noise_floor"]
    first, second = pair_curves(
        list(cells[baseline].values()),
        list(cells[method].values()),
        shared=result.conventions.get("asymptote") == "shared",
        sd=float(noise["sd_loss"]),
        df=float(noise["df"]),
        level=result.interval.level if result.interval else 0.95,
    )
    return (first,) if second is None else (first, second)


def _deltas(runs: pd.DataFrame, baseline: str, log: _Log) -> tuple[Delta, ...]:
    from scaling.analysis.seeds import compare_seeds

    found = compare_seeds(runs, baseline=baseline)
    log.results |= {f"seeds {method}": result for method, result in found.items()}
    kept: list[Delta] = []
    for method, result in found.items():
        if result.status == "refused":
            reason = result.warnings[-1].message if result.warnings else "refused"
            log.failures.append(_refused("The difference of *", reason, method))
        else:
            kept.extend(read_deltas(method, result))
    return tuple(kept)


def _by_size(deltas: tuple[Delta, ...], runs: pd.DataFrame) -> tuple[Delta, ...]:
    """Methods in order of name, sizes smallest first, the mean over them last."""
    methods = sorted({delta.method for delta in deltas}, key=natural)
    order = {size: place for place, size in enumerate(by_parameters(runs))}
    last = len(order)

    def place(delta: Delta) -> tuple[int, int]:
        return methods.index(delta.method), last + 1 if delta.size == OVER_SIZES else order.get(delta.size, last)

    return tuple(sorted(deltas, key=place))


def _noises(runs: pd.DataFrame, log: _Log) -> tuple[Noise, ...]:
    from scaling.analysis.noise import noise_floor

    found = noise_floor(runs)
    log.results["noise floor"] = found
    return read_noise(found)


def _evaluation_noise(runs: pd.DataFrame) -> tuple[Noise, ...]:
    """The evaluation set's own sampling noise, as the runs recorded it: the median over runs."""
    errors = runs["val_loss_se"].dropna().astype(float)
    errors = errors[errors > 0]
    if errors.empty:
        return ()
    return (
        Noise(
            kind="evaluation",
            label="evaluation set",
            sd=float(errors.median()),
            low=None,
            high=None,
            n=len(errors),
            df=None,
            counts_for_methods=False,
            note="standard error over held-out documents; common to all runs on one set, so it cancels in differences",
        ),
    )


def _needs(deltas: Sequence[Delta], log: _Log) -> list[str]:
    """What deciding the open comparisons would take, from the measured noise."""
    from scaling.analysis.designs import noise_power

    floor = log.results.get("noise floor")
    open_ = [delta for delta in _overall(deltas) if delta.verdict == "undecided" and delta.mean != 0]
    sd = _sd(log)
    if floor is None or sd is None or not open_:
        return []
    lines = []
    for delta in sorted(open_, key=lambda delta: -abs(delta.mean))[:_MOST_NEEDS]:
        scales = max(1, sum(other.method == delta.method and other.size != OVER_SIZES for other in deltas))
        question = partial(noise_power, sd=sd, difference=abs(delta.mean), scales=(scales,), seeds=(3,))
        power = log.ask(f"What it takes to judge {delta.method}", question, floor)
        for needed in power.details.get("needed", ()):
            seeds = needed["seeds_to_find_difference"]
            often = "More than 1,000" if seeds > 1000 else f"About {seeds:,}"
            lines.append(
                f"{often} seeds of each method at each size to find, 8 times out of 10, a difference as small as "
                f"the one measured for {delta.method} ({digits.number(abs(delta.mean), digits=2)} nats), if it is real."
            )
    return lines


def _overall(deltas: Sequence[Delta]) -> list[Delta]:
    """One delta a method: the mean over sizes, or the only size."""
    methods = dict.fromkeys(delta.method for delta in deltas)
    found = []
    for method in methods:
        mine = [delta for delta in deltas if delta.method == method]
        found.append(next((delta for delta in mine if delta.size == OVER_SIZES), mine[0]))
    return found


def _fits(runs: pd.DataFrame, baseline: str | None, rng: int, log: _Log) -> None:
    """The joint law with its residuals, the backtest of one method's law, and IsoFLOP profiles where budgets repeat."""
    from scaling.analysis.backtest import backtest
    from scaling.analysis.fit import fit_law
    from scaling.analysis.isoflop import fit_isoflop

    several = runs["method"].nunique() > 1
    scales = runs.dropna(subset=["flops"]).groupby("method")["flops"].nunique()
    # All kinds of interval: the report shows them beside each other.
    law = partial(
        fit_law, runs, form="power", by="method" if several else None, share="test" if several else "free",
        loss="l2", interval="all", draws=LAW_DRAWS, rng=rng,
    )  # fmt: skip
    if scales.max() >= _FEWEST_FOR_LAW:
        log.keep("law", "A law for all methods", law)
    method = baseline or str(scales.idxmax())
    if scales.get(method, 0) >= _FEWEST_FOR_BACKTEST:
        mine = runs[runs["method"] == method]
        log.keep("backtest", "The backtest of the law", partial(backtest, mine, form="power", loss="l2"))
    sizes = runs.dropna(subset=["flops", "n_params_non_embedding"])
    budgets = sizes.groupby(sizes["flops"].map(lambda c: round(math.log(c) / 0.2) if c > 0 else 0))
    if int((budgets["n_params_non_embedding"].nunique() >= _FEWEST_FOR_PROFILE).sum()) >= 2:
        log.keep("isoflop", "The IsoFLOP analysis", partial(fit_isoflop, runs, noise=_sd(log), rng=rng))


def _sd(log: _Log) -> float | None:
    floor = log.results.get("noise floor")
    return None if floor is None else floor.estimate.get("seed_sd")
