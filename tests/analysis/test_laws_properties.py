"""Laws that fits must obey whatever the numbers, and what the solver must never do."""

from __future__ import annotations

import time
import tracemalloc
from itertools import product

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import curve_fit, minimize

from scaling.analysis.certify import solve
from scaling.analysis.fit import fit_law
from scaling.analysis.frontier import compute_frontier, optimal_split
from scaling.analysis.laws import REGISTRY, PowerSum, Term, get_law, register
from scaling.analysis.model import bind
from scaling.analysis.robust import curvature, huber, majorant, slope
from scaling.analysis.solver import residuals
from scaling.analysis.uncertainty import cluster_bootstrap
from scaling.analysis.vertex import vertex_gradient

TRUTH = {"E": 1.7, "A": 400.0, "alpha": 0.34, "B": 1000.0, "beta": 0.29}


def grid(truth: dict[str, float] = TRUTH, *, sd: float = 0.0, seed: int = 0, sizes: int = 6) -> pd.DataFrame:
    rng = np.random.default_rng(seed)
    n, d = (a.ravel() for a in np.meshgrid(np.geomspace(2e7, 2e9, sizes), np.geomspace(5e8, 5e10, sizes)))
    loss = truth["E"] + truth["A"] * n ** -truth["alpha"] + truth["B"] * d ** -truth["beta"]
    return pd.DataFrame({"N": n, "D": d, "C": 6 * n * d, "loss": loss * np.exp(rng.normal(0, sd, len(n)))})


@settings(max_examples=15)
@given(
    e=st.floats(0.5, 2.5), alpha=st.floats(0.15, 0.7), beta=st.floats(0.15, 0.7), near=st.floats(0.1, 1.0),
    far=st.floats(0.1, 1.0),
    loss=st.sampled_from(["huber", "l2", "l1"]),
)  # fmt: skip
def test_exact_data_recover_the_law(e: float, alpha: float, beta: float, near: float, far: float, loss: str) -> None:
    truth = {"E": e, "A": near * 2e8**alpha, "alpha": alpha, "B": far * 5e9**beta, "beta": beta}
    result = fit_law(grid(truth), loss=loss, interval="none")
    for name, value in truth.items():
        assert result.estimate[name] == pytest.approx(value, rel=1e-5), (name, result.status)


@settings(max_examples=10)
@given(c=st.floats(1e-6, 1e6), k=st.floats(1e-3, 1e3))
def test_units_do_not_matter(c: float, k: float) -> None:
    """Rescaling N by c rescales A by c^alpha, and D by k rescales B by k^beta; all else stays."""
    table = grid(sd=0.003)
    here = fit_law(table, interval="none").estimate
    there = fit_law(table.assign(N=table["N"] * c, D=table["D"] * k), interval="none").estimate
    for name in ("E", "alpha", "beta"):
        assert there[name] == pytest.approx(here[name], rel=1e-6)
    assert there["A"] == pytest.approx(here["A"] * c ** here["alpha"], rel=1e-5)
    assert there["B"] == pytest.approx(here["B"] * k ** here["beta"], rel=1e-5)


@settings(max_examples=10)
@given(order=st.permutations(range(36)))
def test_order_of_rows_does_not_matter(order: list[int]) -> None:
    table = grid(sd=0.003)
    here = fit_law(table, interval="none")
    there = fit_law(table.iloc[order], interval="none")
    assert list(there.estimate.values()) == pytest.approx(list(here.estimate.values()), rel=1e-7)


@pytest.mark.parametrize("loss", ["huber", "l2", "l1"])
def test_a_weight_is_a_duplicate(loss: str) -> None:
    table = grid(sd=0.003)
    weight = np.random.default_rng(1).integers(1, 4, len(table))
    by_weight = fit_law(table.assign(weight=weight), weights="weight", loss=loss, interval="none")
    copies = table.loc[table.index.repeat(weight)].assign(copy=lambda t: range(len(t)))
    by_copy = fit_law(copies, loss=loss, interval="none")
    assert list(by_weight.estimate.values()) == pytest.approx(list(by_copy.estimate.values()), rel=1e-6)
    assert by_weight.objective == pytest.approx(by_copy.objective, rel=1e-9)


@settings(max_examples=20)
@given(
    budget=st.floats(1e18, 1e26),
    alpha=st.floats(0.1, 0.9),
    beta=st.floats(0.1, 0.9),
    a=st.floats(1.0, 1e4),
    b=st.floats(1.0, 1e5),
)
def test_the_optimum_lies_on_the_isoflop_line(budget: float, alpha: float, beta: float, a: float, b: float) -> None:
    names = ["E", "A", "alpha", "B", "beta"]
    n, d = optimal_split(np.array([[1.7, a, alpha, b, beta]]), names, budget, 6.0)
    assert 6 * n[0] * d[0] == pytest.approx(budget, rel=1e-9)

    def loss(size: float) -> float:
        return float(a * size**-alpha + b * (budget / 6 / size) ** -beta)

    assert loss(n[0]) <= min(loss(n[0] * 1.01), loss(n[0] / 1.01)) * (1 + 1e-12)


def test_frontier_of_a_known_law() -> None:
    result = compute_frontier(grid(), budgets=[1e20], draws=50)
    assert result.estimate["N_exponent"] == pytest.approx(0.29 / 0.63, rel=1e-6)
    assert result.estimate["tokens_per_parameter[1e+20]"] == pytest.approx(
        result.estimate["D*[1e+20]"] / result.estimate["N*[1e+20]"]
    )


def test_derivatives_of_power_sums_are_exact() -> None:
    table = grid(sd=0.003)
    x = {v: table[v].to_numpy() for v in ("N", "D")}
    model = bind(get_law("chinchilla"), x)
    phi = model.internal(np.array([1.7, 400.0, 0.34, 1000.0, 0.29]))[None] + 0.03
    exact = model.jacobian(phi)[0]
    for k in range(5):
        up, down = phi.copy(), phi.copy()
        up[0, k] += 1e-6
        down[0, k] -= 1e-6
        assert exact[:, k] == pytest.approx(
            (model.prepare(up)[0] - model.prepare(down)[0])[0] / 2e-6, rel=1e-6, abs=1e-9
        )
    _, cache = model.prepare(phi)
    v = np.random.default_rng(0).normal(size=(1, 36))
    _, hessian = model.system(cache, v, np.zeros_like(v), v)
    numeric = np.empty((5, 5))
    for k in range(5):
        up, down = phi.copy(), phi.copy()
        up[0, k] += 1e-5
        down[0, k] -= 1e-5
        numeric[k] = v[0] @ (model.jacobian(up)[0] - model.jacobian(down)[0]) / 2e-5
    assert hessian[0] == pytest.approx(numeric, rel=1e-6, abs=1e-8)


@settings(max_examples=30)
@given(r=st.floats(-10, 10), delta=st.floats(1e-3, 5))
def test_huber_and_its_majorant(r: float, delta: float) -> None:
    x = np.array([r])
    assert slope(x, delta)[0] == pytest.approx((huber(x + 1e-7, delta) - huber(x - 1e-7, delta))[0] / 2e-7, abs=1e-5)
    for other in np.linspace(-12, 12, 25):
        touching = huber(x, delta)[0] + 0.5 * majorant(x, delta)[0] * (other**2 - r**2)
        assert huber(np.array([other]), delta)[0] <= touching + 1e-9
    assert curvature(x, delta)[0] == float(abs(r) <= delta)


@pytest.mark.parametrize(
    "form", ["chinchilla-gamma", "kaplan", "chinchilla-tied", "pure-power", "power", "repetition", "chinchilla-lr"]
)
def test_every_form_recovers_its_own_data(form: str) -> None:
    law = get_law(form)
    rng = np.random.default_rng(0)
    table = grid(sizes=9)
    table["U"] = np.minimum(table["D"], rng.choice([1e9, 4e9, 2e10], len(table)))
    table["lr"] = np.exp(rng.uniform(-8, -4, len(table)))
    truth = {
        "chinchilla-gamma": [1.7, 2000.0, 0.42, 9000.0, 0.40, 0.8],
        "kaplan": [8.8e13, 5.4e13, 0.076, 0.095],
        "chinchilla-tied": [1.7, 400.0, 0.33, 1800.0],
        "pure-power": [30.0, 0.05],
        "power": [1.7, 1500.0, 0.16],
        "repetition": [1.7, 400.0, 0.34, 1000.0, 0.30, 15.0],
        "chinchilla-lr": [1.7, 400.0, 0.34, 1000.0, 0.29, 0.02, 1.0, -0.4, 0.1],
    }[form]
    kinds = np.array([p.is_log for p in law.parameters])
    theta = np.where(kinds, np.log(np.where(kinds, truth, 1.0)), truth)[None]
    table["loss"] = np.exp(law.log_loss(theta, {v: table[v].to_numpy() for v in law.variables})[0])
    result = fit_law(table, form=form, interval="none")
    predicted = np.array(result.details["rows"]["predicted"])
    assert predicted == pytest.approx(table["loss"].to_numpy(), rel=2e-5), result.certificate
    assert list(result.estimate.values()) == pytest.approx(truth, rel=0.02)


def test_a_new_law_is_one_class() -> None:
    @register
    class TwoTerms(PowerSum):
        name = "test-two-compute-terms"
        formula = "L = A C^-a + B N^-b"
        terms = (Term("A", {"C": "a"}), Term("B", {"N": "b"}))

    try:
        table = grid()
        table["loss"] = 40 * table["C"] ** -0.1 + 30 * table["N"] ** -0.2
        result = fit_law(table, form="test-two-compute-terms", interval="delta")
        assert result.estimate == pytest.approx({"A": 40, "a": 0.1, "B": 30, "b": 0.2}, rel=1e-5)
    finally:
        del REGISTRY["test-two-compute-terms"]


def methods_table(
    sd: float, *, e: tuple[float, float] = (1.8, 1.8), a: tuple[float, float] = (0.15, 0.15)
) -> pd.DataFrame:
    rng = np.random.default_rng(0)
    rows = []
    for m, method in enumerate(("base", "new")):
        for c in np.geomspace(1e17, 1e20, 7):
            for seed in range(3):
                loss = e[m] + 1.8 * (c / 1e17) ** -a[m] * (0.97 if m else 1.0) + rng.normal(0, sd)
                rows.append({"method": method, "C": c, "seed": seed, "loss": loss})
    return pd.DataFrame(rows)


def test_which_sharing_is_warranted() -> None:
    alike = fit_law(
        methods_table(0.001), form="power", loss="l2", residual="raw", by="method", share="test", interval="delta"
    )
    assert alike.details["shared"] == "E+exponents"
    assert set(alike.estimate) == {"E", "A[base]", "A[new]", "a"}
    assert alike.estimate["A[new]"] / alike.estimate["A[base]"] == pytest.approx(0.97, abs=0.003)
    other = fit_law(
        methods_table(0.001, a=(0.15, 0.18)),
        form="power",
        loss="l2",
        residual="raw",
        by="method",
        share="test",
        interval="delta",
    )
    assert other.details["shared"] in ("E", "free")
    p = {t["share"]: t["p"] for t in other.details["sharing_tests"]}
    assert p["exponents"] < 1e-3 and p["E+exponents"] < 1e-3


@pytest.mark.slow
def test_sharing_test_is_the_f_test_for_squares() -> None:
    """Size of the test under the null, by simulation."""
    rejected = 0
    for seed in range(20):
        table = methods_table(0.0)
        table["loss"] += np.random.default_rng(seed).normal(0, 0.002, len(table))
        result = fit_law(table, form="power", loss="l2", residual="raw", by="method", interval="none")
        rejected += next(t["p"] for t in result.details["sharing_tests"] if t["share"] == "E") < 0.05
    assert rejected <= 4


@pytest.mark.parametrize("kind", ["delta", "profile", "parametric", "two-level", "pairs", "cluster"])
def test_intervals_hold_the_estimate(kind: str) -> None:
    rng = np.random.default_rng(2)
    table = pd.concat([grid(sd=0.003, seed=s) for s in range(2)]).assign(
        run_key=lambda t: [str(k % 36) for k in range(len(t))]
    )
    result = fit_law(table, loss="l2", interval=kind, draws=200, rng=rng, level=0.999)
    assert result.interval is not None
    for name, value in result.estimate.items():
        assert result.interval.low[name] < value < result.interval.high[name], name
        assert result.interval.low[name] < TRUTH[name] < result.interval.high[name], name


def test_profile_and_delta_agree_where_the_law_is_nearly_linear() -> None:
    table = grid(sd=0.0005)
    profile = fit_law(table, loss="l2", interval="profile").interval
    delta = fit_law(table, loss="l2", interval="delta").interval
    assert profile is not None and delta is not None
    for name in ("E", "alpha", "beta", "A", "B"):
        assert profile.high[name] - profile.low[name] == pytest.approx(delta.high[name] - delta.low[name], rel=0.1)


def test_scipy_stops_at_its_start_where_we_do_not() -> None:
    """L-BFGS-B's absolute tolerance: on an objective of 1e-3 it says CONVERGENCE without moving."""
    table = grid(sd=0.005)
    law = get_law("chinchilla")
    x, y = {v: table[v].to_numpy() for v in law.variables}, table["loss"].to_numpy()
    start = np.array([np.log(1.69337), np.log(406.4), 0.339, np.log(410.7), 0.285])

    def objective(theta: np.ndarray) -> float:
        return float(np.sum(huber(np.log(y) - law.log_loss(theta[None], x)[0], 1e-3)))

    theirs = minimize(objective, start, method="L-BFGS-B")
    ours = solve(law, x, y, np.ones(len(y)))
    assert theirs.success
    assert theirs.fun > ours.objective * 1.001
    assert ours.status == "converged"


# Compute, and losses of two seeds each, of a quickstart's baseline: noise forty times the Huber delta.
NOISY = {2.014426e10: (5.772804, 5.432667), 6.699074e10: (5.469414, 4.997236), 1.954775e11: (4.278633, 4.379791),
         6.569448e11: (3.886846, 3.895550)}  # fmt: skip


def test_noise_far_above_delta_still_converges() -> None:
    """The optimum lies where few rows are within delta: a curved valley that reweighting alone crawls along."""
    table = pd.DataFrame([(c, loss) for c, pair in NOISY.items() for loss in pair], columns=["C", "loss"])
    result = fit_law(table, form="power", interval="delta")
    assert result.status == "converged" and "delta-small" in {w.code for w in result.warnings}
    # Lowest value of 30 Nelder-Mead runs.
    assert result.objective == pytest.approx(1.9368437068854666e-4, rel=1e-12)
    rng = np.random.default_rng(0)
    statuses = []
    for _ in range(12):
        noisy = table.assign(loss=(1.7 + 266 * table["C"] ** -0.1757) * np.exp(rng.normal(0, 0.04, 8)))
        statuses.append(fit_law(noisy, form="power", interval="none").status)
    assert set(statuses) <= {"converged", "multimodal", "bound-hit"}, statuses


def test_absolute_values_are_certified_at_their_vertex() -> None:
    cost = np.repeat(list(NOISY), 2)
    losses = (1.7 + 266 * cost**-0.1757) * np.exp(np.random.default_rng(2).normal(0, 0.04, 8))
    fitted = solve(get_law("power"), {"C": cost}, losses, np.ones(8), loss="l1")
    assert fitted.status == "converged" and fitted.certificate["passes_through_rows"] is True
    assert float(fitted.certificate["gradient"] or 0) < 1e-12
    free = np.ones(3, dtype=bool)
    for k, step in product(range(3), (-1e-3, 1e-3)):
        moved = fitted.phi_P.copy()
        moved[k] += step
        left = vertex_gradient(fitted.model, fitted.y_n, fitted.w_n, moved, free, log=True)
        assert left > 1e-3
        worse = float(np.sum(np.abs(residuals(fitted.model, moved[None], fitted.y_n[None], log=True))))
        assert worse > fitted.objective


# Seeds of noise with which rounded absolute values crawl along a curved valley for 1,000 steps.
@pytest.mark.parametrize(("sd", "seed"), [(0.01, 37), (0.04, 49), (0.1, 40), (0.3, 18), (0.3, 56)])
@pytest.mark.parametrize("log", [True, False])
@pytest.mark.filterwarnings("error")
def test_absolute_values_are_finished_in_a_curved_valley(sd: float, seed: int, log: bool) -> None:
    cost = np.repeat(list(NOISY), 2)
    losses = (1.7 + 266 * cost**-0.1757) * np.exp(np.random.default_rng(seed).normal(0, sd, 8))
    fitted = solve(get_law("power"), {"C": cost}, losses, np.ones(8), loss="l1", log=log)
    assert fitted.status in ("converged", "bound-hit", "multimodal")
    assert fitted.certificate["converged"] is True
    low, high = fitted.goal.low_P, fitted.goal.high_P

    def elsewhere(phi: np.ndarray) -> float:
        clipped = np.clip(phi, low, high)
        return float(np.sum(np.abs(residuals(fitted.model, clipped[None], losses[None], log=log))))

    assert elsewhere(fitted.phi_P) == pytest.approx(fitted.objective, rel=1e-12)
    for step in np.random.default_rng(1).normal(0, 0.1, (2, 3)):
        theirs = minimize(elsewhere, fitted.phi_P + step, method="Nelder-Mead", options={"maxiter": 2000}).fun
        assert fitted.objective <= theirs * (1 + 1e-12)


def test_one_fit_and_many_refits_cost_less_than_scipy() -> None:
    """CPU time against scipy's curve_fit from a good start, in one process: ratios only."""
    table = grid(sd=0.005, sizes=15)
    law = get_law("chinchilla")
    x, y = {v: table[v].to_numpy() for v in law.variables}, table["loss"].to_numpy()
    fitted = solve(law, x, y, np.ones(len(y)))

    def model(_: object, e: float, a: float, alpha: float, b: float, beta: float) -> np.ndarray:
        return np.asarray(law.log_loss(np.array([[e, a, alpha, b, beta]]), x)[0])

    p0 = np.array([np.log(1.7), np.log(400.0), 0.34, np.log(1000.0), 0.29])
    began = time.process_time()
    for _ in range(20):
        curve_fit(model, np.arange(len(y)), np.log(y), p0=p0, method="trf", loss="huber", f_scale=1e-3)
    scipy_s = (time.process_time() - began) / 20
    began = time.process_time()
    for _ in range(5):
        solve(law, x, y, np.ones(len(y)))
    ours_s = (time.process_time() - began) / 5
    began = time.process_time()
    cluster_bootstrap(fitted, None, 512, np.random.default_rng(0))
    refit_s = (time.process_time() - began) / 512
    # A certified fit without a start costs at most a few of scipy's with one; a refit far less than one.
    assert ours_s < 6 * scipy_s
    assert refit_s < 0.25 * scipy_s


def test_refits_stream_in_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """100 times the table: memory grows with the block, not with the number of draws."""
    monkeypatch.setattr("scaling.analysis.uncertainty.BLOCK_NUMBERS", 50_000)
    big = pd.concat([grid()] * 667)
    big["loss"] *= np.exp(np.random.default_rng(0).normal(0, 0.005, len(big)))
    law = get_law("chinchilla")
    fitted = solve(
        law, {v: big[v].to_numpy() for v in law.variables}, big["loss"].to_numpy(), np.ones(len(big)), loss="l2"
    )
    peaks = []
    for draws in (4, 12):
        tracemalloc.start()
        cluster_bootstrap(fitted, None, draws, np.random.default_rng(0))
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
    assert peaks[1] < 1.1 * peaks[0] < 1.1 * 600e6
