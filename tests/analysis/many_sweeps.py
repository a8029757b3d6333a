"""The interval of a speedup for thousands of simulated sweeps at once.

The same arithmetic as ``compare_speedup(asymptote="auto")``, the test of the pairing and that of equal asymptotes
included, with the sweeps along a leading axis: the laws of all sweeps are fitted in one call of the solver. A sweep
that ends anywhere unusual (a bound, a fit that did not converge) goes through `interval_of_core`, one by one.
``test_coverage`` holds the two paths against each other.

Shapes: R sweeps, 2 arms (baseline first), k scales, S seeds, P parameters.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray
from scipy import stats

from scaling.analysis.cells import OPPOSED, Cell
from scaling.analysis.inversion import SHARE_LEVEL, fit_baseline
from scaling.analysis.isoloss import PAIRING_LEVEL, Arms, log_covariance, loss_gradient, measure_noise
from scaling.analysis.laws import Power
from scaling.analysis.model import Model, bind
from scaling.analysis.solver import Goal, minimise
from tests.analysis.synthetic import EXPONENT, FIRST_LOSS, E

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]

SPEEDUP = 1.25
SD = 0.002
TRUTH = float(np.log(SPEEDUP))


@dataclass(frozen=True, slots=True)
class Many:
    """Limits of log speedup, whether one asymptote and whether pairs were used, and how many went one by one."""

    low_R: Floats
    high_R: Floats
    shared_R: Bools
    paired_R: Bools
    one_by_one: int

    @property
    def coverage(self) -> float:
        """Share of the intervals that hold the truth."""
        return float(np.mean((self.low_R <= TRUTH) & (self.high_R >= TRUTH)))


def draw_sweeps(
    rng: np.random.Generator, count: int, scales: int, seeds: int, *, rho: float = 0.0
) -> tuple[Floats, Floats]:
    """Losses (R, 2, k, S) and costs (k,) of sweeps as `synthetic.sweep` makes them; runs of a seed correlate by rho."""
    costs = 1e17 * np.logspace(0, 2, scales)
    amplitude = (FIRST_LOSS - E) * costs[0] ** EXPONENT
    truth = np.array([E + amplitude * (costs * s) ** -EXPONENT for s in (1.0, SPEEDUP)])
    noise = rng.normal(0.0, SD, size=(count, 2, scales, seeds))
    noise[:, 1] = rho * noise[:, 0] + np.sqrt(1 - rho**2) * noise[:, 1]
    return truth[None, :, :, None] + noise, costs


def arms_of(losses_akS: Floats, costs_k: Floats) -> Arms:
    """One sweep as the cells of both arms."""
    names = tuple(str(s) for s in range(losses_akS.shape[2]))
    arms = [
        [Cell(method=m, scale=f"s{i}", x=float(c), losses=losses_akS[a, i], seeds=names) for i, c in enumerate(costs_k)]
        for a, m in enumerate(("baseline", "new"))
    ]
    return Arms(baseline=arms[0], method=arms[1])


def interval_of_core(arms: Arms, noise_sd: float | None) -> tuple[float, float]:
    """What compare_speedup reports for one sweep, without tables and details (a tenth of the time)."""
    noise = measure_noise(arms, noise_sd)
    inverse = fit_baseline(arms.baseline, arms.method, asymptote="auto", sd=noise.sd, sd_df=noise.sd_df)
    if np.isnan(noise.sd):
        sd = float(np.sqrt(inverse.noise_rss / inverse.noise_df))
        noise = replace(noise, sd=sd, sd_df=inverse.noise_df, df=inverse.noise_df, used_rho=0.0)
    losses = np.array([c.mean for c in arms.method])
    usable = np.ones(len(losses), dtype=bool)
    log_s = inverse.log_cost(losses[None], inverse.phi_P[None])[0] - np.log([c.x for c in arms.method])
    cov = log_covariance(loss_gradient(inverse, arms, losses, usable), arms, noise)
    half = stats.t.ppf(0.975, noise.df) * np.sqrt(cov.mean())
    return float(log_s.mean() - half), float(log_s.mean() + half)


def intervals_of_many(losses_RakS: Floats, costs_k: Floats, noise_sd: float | None) -> Many:
    """The interval of every sweep."""
    _, _, k, seeds = losses_RakS.shape
    means_Rak = losses_RakS.mean(axis=3)
    sd_R, df_R, rho_R = _noise(losses_RakS, noise_sd)
    arms = [_Fits(means_Rak[:, [a]], costs_k, seeds) for a in range(2)]
    both = _Fits(means_Rak, costs_k, seeds)
    if seeds == 1 and noise_sd is None:
        df_R = np.full(len(df_R), 2.0 * (k - 3))
        sd_R = np.sqrt((arms[0].rss_R + arms[1].rss_R) / df_R)
    rise_R = np.maximum(both.rss_R - arms[0].rss_R - arms[1].rss_R, 0.0) / sd_R**2
    # The test of equal asymptotes has the degrees of freedom of the SD, also where those of the pairs are used later.
    pooled_df = 2.0 * k * (seeds - 1) if seeds > 1 else 2.0 * (k - 3)
    sd_df = pooled_df if noise_sd is None else np.inf
    p_R = stats.f.sf(rise_R, 1, sd_df) if np.isfinite(sd_df) else stats.chi2.sf(rise_R, 1)
    limits = []
    for fits in (both, arms[0]):
        log_s_Rk, gradient_Rkc = fits.log_speedups(means_Rak[:, 1])
        sigma_Rcc = np.broadcast_to(np.eye(2 * k) / seeds, (len(sd_R), 2 * k, 2 * k)).copy()
        at = np.arange(k)
        sigma_Rcc[:, at, k + at] = sigma_Rcc[:, k + at, at] = rho_R[:, None] / seeds
        mean_Rc = gradient_Rkc.mean(axis=1)
        variance_R = np.einsum("rc,rcd,rd->r", mean_Rc, sigma_Rcc, mean_Rc) * sd_R**2
        half_R = stats.t.ppf(0.975, df_R) * np.sqrt(variance_R)
        centre_R = log_s_Rk.mean(axis=1)
        limits.append(np.stack([centre_R - half_R, centre_R + half_R]))
    low_R, high_R = np.where(p_R > SHARE_LEVEL, limits[0], limits[1])
    odd = np.flatnonzero(~(arms[0].good_R & arms[1].good_R & both.good_R))
    for r in odd:
        low_R[r], high_R[r] = interval_of_core(arms_of(losses_RakS[r], costs_k), noise_sd)
    return Many(low_R, high_R, p_R > SHARE_LEVEL, rho_R != 0, len(odd))


def _noise(losses_RakS: Floats, noise_sd: float | None) -> tuple[Floats, Floats, Floats]:
    """SD of one run, degrees of freedom, and the correlation used (0 where it is not significant), each (R,)."""
    count, _, k, seeds = losses_RakS.shape
    deviation = losses_RakS - losses_RakS.mean(axis=3, keepdims=True)
    rho = np.zeros(count)
    pair_df = k * (seeds - 1)
    if pair_df >= 2:
        x, y = deviation[:, 0].reshape(count, -1), deviation[:, 1].reshape(count, -1)
        xy, xx, yy = (np.sum(product, axis=1) for product in (x * y, x * x, y * y))
        r = xy / np.sqrt(xx * yy)
        p = stats.t.sf(r * np.sqrt((pair_df - 1) / (1 - r**2)), pair_df - 1)
        rho = np.where((p < PAIRING_LEVEL) | (p > 1 - OPPOSED), 2 * xy / (xx + yy), 0.0)
    if noise_sd is not None:
        return np.full(count, noise_sd), np.full(count, np.inf), rho
    df = 2 * k * (seeds - 1)
    sd = np.sqrt(np.sum(deviation**2, axis=(1, 2, 3)) / df) if df else np.full(count, np.nan)
    return sd, np.where(rho != 0, float(pair_df), float(df)), rho


class _Fits:
    """Laws of one arm, or of both with one asymptote, fitted to the cell means of all sweeps."""

    def __init__(self, means_Rak: Floats, costs_k: Floats, seeds: int) -> None:
        count, arms, k = means_Rak.shape
        groups = ["baseline"] * k + ["method"] * k if arms == 2 else ["baseline"] * k
        self.model: Model = bind(Power(), {"C": np.tile(costs_k, arms)}, groups=groups, shared=("E",))
        self.means_Rc = means_Rak.reshape(count, -1)
        self.costs_k = costs_k
        bounds = [self.model.bounds(float(y)) for y in self.means_Rc.min(axis=1)]
        low_RP, high_RP = np.array([b[0] for b in bounds]), np.array([b[1] for b in bounds])
        self.weights_c = np.full(arms * k, float(seeds))
        # The truth is a start as near as variable projection gives, and one for all sweeps.
        amplitude = (FIRST_LOSS - E) * costs_k[0] ** EXPONENT
        start_P = self.model.pack(np.tile([np.log(E), np.log(amplitude), EXPONENT], (arms, 1)))
        goal = Goal(loss="l2", log=False, low_P=low_RP, high_P=high_RP)
        found = minimise(self.model, self.means_Rc, self.weights_c[None], np.tile(start_P, (count, 1)), goal)
        self.phi_RP, self.rss_R = found.phi_RP, 2 * found.objective_R
        inside = np.all((found.phi_RP > low_RP + 1e-9) & (found.phi_RP < high_RP - 1e-9), axis=1)
        self.good_R: Bools = found.converged_R & inside

    def log_speedups(self, losses_Rk: Floats) -> tuple[Floats, Floats]:
        """Log speedups (R, k) and their derivatives by the mean of every cell of both arms (R, k, 2 k)."""
        count, k = losses_Rk.shape
        theta = self.model.from_solver(self.phi_RP)
        e, a, slope = (theta[:, [c]] for c in self.model.columns[0])
        above = losses_Rk - np.exp(e)
        self.good_R = self.good_R & np.all(above > 0, axis=1)
        above = np.where(above > 0, above, 1.0)
        by_theta = np.zeros((count, k, theta.shape[1]))
        for column, value in zip(
            self.model.columns[0],
            (np.exp(e) / (slope * above), np.broadcast_to(1 / slope, above.shape), -(a - np.log(above)) / slope**2),
            strict=True,
        ):
            by_theta[:, :, column] = value
        by_phi = by_theta @ self.model.from_solver(np.eye(theta.shape[1])).T
        predicted = np.exp(self.model.prepare(self.phi_RP)[0])
        jacobian = self.model.jacobian(self.phi_RP) * predicted[:, :, None]
        weighted = jacobian * self.weights_c[:, None]
        gram = np.einsum("rnp,rnq->rpq", weighted, jacobian)
        response = np.linalg.pinv(gram, hermitian=True) @ weighted.transpose(0, 2, 1)
        out = np.zeros((count, k, 2 * k))
        out[:, :, : response.shape[2]] = by_phi @ response
        out[:, np.arange(k), k + np.arange(k)] += -1.0 / (slope * above)
        return (a - np.log(above)) / slope - np.log(self.costs_k), out
