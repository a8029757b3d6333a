"""What other tools were found to do with such data, and what is said here instead; levels and draws of intervals."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from scipy.optimize import OptimizeWarning, curve_fit

from scaling.analysis.certify import certify, solve
from scaling.analysis.columns import load_table
from scaling.analysis.fit import fit_law
from scaling.analysis.frontier import compute_frontier
from scaling.analysis.isoflop import fit_isoflop
from scaling.analysis.laws import Law, get_law
from scaling.analysis.result import Result
from scaling.errors import FitError, TableError, UsageError
from tests.analysis.synthetic import sweep
from tests.analysis.test_laws_properties import grid


def codes(result: Result) -> set[str]:
    return {w.code for w in result.warnings}


def test_a_column_of_losses_is_not_broadcast() -> None:
    """(n, 1) minus (n,) is n x n: a stored R2 of -325 came of it."""
    table = grid(sd=0.003)
    law = get_law("chinchilla")
    x, y = {v: table[v].to_numpy() for v in law.variables}, table["loss"].to_numpy()
    message = r"losses have shape \(36, 1\) beside N, D of shape \(36,\): one number a row is needed"
    with pytest.raises(FitError, match=message):
        solve(law, x, y[:, None], np.ones(36))
    with pytest.raises(FitError, match=message):
        certify(law, x, y[:, None], {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 1000.0, "beta": 0.29})
    with pytest.raises(FitError, match=r"weights have shape \(35,\)"):
        solve(law, x, y, np.ones(35))
    with pytest.raises(FitError, match=r"D have shape \(35,\)"):
        solve(law, x | {"D": x["D"][1:]}, y, np.ones(36))


def test_a_delta_that_no_residual_reaches_is_not_called_robust() -> None:
    """Huber with delta 1 on residuals of 0.01 is least squares."""
    table = grid(sd=0.003)
    wide, squares = fit_law(table, delta=1.0, interval="none"), fit_law(table, loss="l2", interval="none")
    assert list(wide.estimate.values()) == pytest.approx(list(squares.estimate.values()), rel=1e-9)
    text = next(w.message for w in wide.warnings if w.code == "delta-large")
    assert "acts as squares" in text
    assert not {"delta-large", "delta-small"} & codes(fit_law(table, interval="none"))
    assert not {"delta-large", "delta-small"} & codes(squares)
    # Exact data have residuals of rounding errors only: nothing to be robust against.
    assert "delta-large" not in codes(fit_law(grid(), interval="none"))


@pytest.fixture(scope="module")
def points(shared: Path) -> tuple[Law, dict[str, np.ndarray], np.ndarray]:
    """The law, variables and losses of the 240 Chinchilla points."""
    table = load_table(
        shared / "data/chinchilla-epoch/svg_extracted_data.csv", columns="N=Model Size,C=Training FLOP,D=C/(6*N)"
    )
    table = table[table["loss"] < sorted(table["loss"])[-5]]
    law = get_law("chinchilla")
    return law, {v: table[v].to_numpy() for v in law.variables}, table["loss"].to_numpy()


def test_the_default_start_of_curve_fit_is_unmoved(points: tuple[Law, dict[str, np.ndarray], np.ndarray]) -> None:
    """scipy returns its start of ones with a warning about the covariance, without an exception."""
    law, x, y = points

    def model(_: object, e: float, a: float, alpha: float, b: float, beta: float) -> np.ndarray:
        return np.asarray(law.log_loss(np.array([[e, a, alpha, b, beta]]), x)[0])

    with pytest.warns(OptimizeWarning, match="Covariance of the parameters could not be estimated"):
        theirs, _ = curve_fit(model, np.arange(len(y)), np.log(y))
    assert theirs == pytest.approx(np.ones(5))
    given = dict(zip(law.names(), (*np.exp(theirs[:2]), theirs[2], np.exp(theirs[3]), theirs[4]), strict=True))
    graded = certify(law, x, y, given, loss="l2")
    assert graded.status == "unmoved" and float(graded.certificate["excess"] or 0) > 10
    assert solve(law, x, y, np.ones(len(y)), loss="l2").status == "converged"


def test_an_asymptote_of_another_estimator_is_no_fit(points: tuple[Law, dict[str, np.ndarray], np.ndarray]) -> None:
    """E of the Huber fit beside A and B of the absolute values, as printed: 1.8172 where that row has 1.8169."""
    law, x, y = points
    own = {"A": 482.00572, "B": 2085.43420, "E": 1.81686, "alpha": 0.34781, "beta": 0.36585}
    assert certify(law, x, y, own, loss="l1").status == "converged"
    assert certify(law, x, y, own | {"E": 1.8172}, loss="l1").status == "unmoved"


def bowl(budget: float, best: float, *, curve: float = 0.1) -> pd.DataFrame:
    n = np.geomspace(1e7, 1e9, 7)
    return pd.DataFrame({"N": n, "C": budget, "loss": 3 + curve * (np.log(n) - np.log(best)) ** 2})


@pytest.mark.parametrize("curve", ["akima", "parabola"])
def test_no_minimum_is_made_of_a_maximum_or_an_edge(curve: str) -> None:
    falling = bowl(1e19, 1e12)
    parts = [bowl(1e18, 1e8), falling, bowl(1e20, 1e8, curve=-0.1), bowl(1e21, 2e8)]
    result = fit_isoflop(pd.concat(parts), curve=curve)
    reasons = {d.run: d.reason for d in result.dropped}
    outside, dome = {
        "akima": ("the smallest loss is at the edge of the sizes tried",) * 2,
        "parabola": ("the minimum lies outside the sizes tried", "the parabola opens downwards"),
    }[curve]
    assert reasons == {"budget 1e+19": outside, "budget 1e+20": dome}
    assert [p["optimum"] is None for p in result.details["profiles"]] == [False, True, True, False]
    assert result.n == 2 and {"refused-minima", "approach-2-bias"} <= codes(result)
    # The spline finds its minimum on a grid 25 times finer than the sizes.
    assert result.estimate["N_exponent"] == pytest.approx(
        np.log(2) / np.log(1000), abs=1e-9 if curve != "akima" else 5e-3
    )


def test_isoflop_with_noise_that_reaches_the_edge() -> None:
    """Ten budgets whose draws often end at an edge: each keeps its inner draws, and the result says so."""
    table = pd.concat([bowl(c, 1e8, curve=0.01) for c in 10.0 ** np.arange(18, 28)])
    result = fit_isoflop(table, noise=0.3, draws=200)
    assert result.interval is not None and "noisy-minima" in codes(result)
    assert result.interval.low["N_exponent"] < 0 < result.interval.high["N_exponent"]
    shares = [p["draws_at_edge"] for p in result.details["profiles"]]
    assert max(shares) > 0.05 and np.prod(1 - np.array(shares)) * 200 < 100
    assert "noisy-minima" not in codes(fit_isoflop(table, noise=0.003, draws=200))


def test_isoflop_noise_falls_with_repeats() -> None:
    table = pd.concat([bowl(c, 1e8) for c in (1e18, 1e19, 1e20)])
    once = fit_isoflop(table, noise=0.02, draws=400)
    four = fit_isoflop(pd.concat([table.assign(seed=s) for s in range(4)]), noise=0.02, draws=400)
    ratio = four.standard_error["N_exponent"] / once.standard_error["N_exponent"]
    assert ratio == pytest.approx(0.5, abs=0.06)


def test_isoflop_needs_budgets() -> None:
    with pytest.raises(FitError, match="too-few-budgets: 1 of 1 budgets .*the runs have one budget C"):
        fit_isoflop(bowl(1e18, 1e8))
    spread = pd.concat([bowl(c, 1e8) for c in 1e18 * 1.2 ** np.arange(12)])
    with pytest.raises(FitError, match=r"its runs spread from C = 1e\+18 to 7.43e\+18 without a gap: no single budget"):
        fit_isoflop(spread)


def test_methods_may_have_any_names() -> None:
    """A column of groups is text or numbers; labels are as written."""
    table = grid(sd=0.003).assign(метод=["база", "новый"] * 18, kv=[1, 8] * 18)
    assert {"A[база]", "A[новый]"} <= set(fit_law(table, by="метод", interval="delta").estimate)
    assert {"A[1]", "A[8]"} <= set(fit_law(table, by="kv", interval="delta").estimate)


def test_rows_of_no_weight_are_no_rows() -> None:
    table = grid(sd=0.003)
    weight = np.r_[np.ones(30), np.zeros(6)]
    weighed = fit_law(table.assign(w=weight), weights="w", interval="delta")
    alone = fit_law(table.iloc[:30], interval="delta")
    assert weighed.n == 30 and weighed.df == alone.df and len(weighed.dropped) == 6
    assert {d.reason for d in weighed.dropped} == {"weight w is 0"} and weighed.dropped[0].row == 30
    assert list(weighed.estimate.values()) == pytest.approx(list(alone.estimate.values()), rel=1e-7)
    with pytest.raises((FitError, TableError), match="distinct"):
        fit_law(table.assign(w=np.r_[np.ones(3), np.zeros(33)]), weights="w")


def test_losses_of_any_size() -> None:
    """Squares of 1e-300 vanish; the starts do not square them."""
    table = grid(sd=0.003)
    here = fit_law(table, interval="none").estimate
    small = fit_law(table.assign(loss=table["loss"] * 1e-300), interval="none").estimate
    assert small["alpha"] == pytest.approx(here["alpha"], rel=1e-6)
    assert small["E"] == pytest.approx(here["E"] * 1e-300, rel=1e-6)


def test_a_frontier_says_what_its_law_says(monkeypatch: pytest.MonkeyPatch) -> None:
    along = sweep(np.random.default_rng(0), scales=6).query("method == 'baseline'")
    result = compute_frontier(along, budgets=[1e20], draws=200)  # D is 20 N in every row
    assert result.status == "undetermined" and "undetermined" in codes(result)
    five = compute_frontier(grid().iloc[[0, 4, 14, 21, 35]], budgets=[1e20])
    assert "no-degrees-of-freedom" in codes(five) and five.interval is None
    for budget in (np.inf, np.nan, 0.0, -1e20):
        with pytest.raises(UsageError, match="budgets must be positive numbers of FLOPs"):
            compute_frontier(grid(), budgets=[1e20, budget])
    cut = grid(sd=0.003).assign(schedule_finished=lambda t: np.arange(len(t)) > 5)
    assert compute_frontier(cut, budgets=[1e20], draws=200).n == 30
    assert compute_frontier(cut, budgets=[1e20], draws=200, keep_unfinished=True).n == 36
    monkeypatch.setattr("scaling.analysis.solver.MAX_ITERATIONS", 1)
    none = compute_frontier(grid(sd=0.003), budgets=[1e20], draws=20)
    assert none.interval is None and "refits-failed" in codes(none) and np.isfinite(none.estimate["N*[1e+20]"])


@pytest.mark.parametrize("kind", ["delta", "profile", "parametric", "two-level", "pairs", "cluster"])
def test_a_higher_level_is_a_wider_interval_by_its_quantile(kind: str) -> None:
    """99.9% against 95%: the ratio of two quantiles of t (or of the normal), whatever the kind."""
    table = pd.concat([grid(sd=0.001, seed=s) for s in range(2)]).assign(run_key=lambda t: [*map(str, range(len(t)))])
    half = {}
    for level in (0.95, 0.999):
        interval = fit_law(table, loss="l2", interval=kind, draws=6000, level=level).interval
        assert interval is not None and interval.level == level
        half[level] = 0.5 * (interval.high["alpha"] - interval.low["alpha"])
    df = {"two-level": 36, "parametric": 36, "delta": 67, "profile": 67}.get(kind, np.inf)
    wanted = stats.t.ppf(0.9995, df) / stats.t.ppf(0.975, df)
    exact = kind in ("delta", "two-level", "parametric")
    assert half[0.999] / half[0.95] == pytest.approx(wanted, rel=1e-9 if exact else 0.08)


def test_few_draws_are_said() -> None:
    table = grid(sd=0.003)
    low = fit_law(table, level=0.999, draws=1000)
    text = next(w.message for w in low.warnings if w.code == "few-draws")
    assert text.startswith("1000 draws leave 0.5 beyond each limit at level 0.999") and "use 10000 draws" in text
    assert "few-draws" not in codes(fit_law(table, level=0.99, draws=1000))
    assert "few-draws" not in codes(fit_law(table, level=0.999, interval="parametric", draws=300))
    assert "few-draws" in codes(compute_frontier(table, budgets=[1e20], level=0.999, draws=300))
    bowls = pd.concat([bowl(c, 1e8) for c in (1e18, 1e19, 1e20)])
    assert "few-draws" in codes(fit_isoflop(bowls, noise=0.01, level=0.999, draws=300))


def test_two_seeds_a_cell_are_drawn_with_their_whole_spread() -> None:
    """Drawn with replacement two seeds vary by half their variance: the two-level bootstrap makes up for it."""
    ratios = []
    for k in range(4):
        table = pd.concat([grid(sd=0.003, seed=2 * k + s) for s in range(2)])
        two, known = (fit_law(table, loss="l2", interval=kind, draws=400) for kind in ("two-level", "parametric"))
        ratios.append(two.standard_error["alpha"] / known.standard_error["alpha"])
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.12)
