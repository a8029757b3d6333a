"""Laws that are not plain sums of power terms.

Registered beside those of ``laws``; each is one class with the logarithm of its prediction and its starts, which also
shows what adding a law takes.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.laws import EXPONENT_RANGE, Chinchilla, Law, Parameter, register

Floats = NDArray[np.float64]


def _exponent(name: str) -> Parameter:
    return Parameter(name=name, kind="exponent", low=EXPONENT_RANGE[0], high=EXPONENT_RANGE[1])


def _chinchilla_starts(x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
    return Chinchilla().starts(x, y_n, w_n)


@register
class ChinchillaGamma(Law):
    """Chinchilla with an exponent on the sum of its terms (Busbridge et al. 2025; the xLSTM laws)."""

    name = "chinchilla-gamma"
    formula = "L = E + (A N^-alpha + B D^-beta)^gamma"
    variables = ("N", "D")
    parameters = (*Chinchilla.parameters, Parameter(name="gamma", kind="other", low=0.05, high=20.0))

    def log_loss(self, theta_RP: Floats, x: Mapping[str, Floats]) -> Floats:
        e, a, alpha, b, beta, gamma = (theta_RP[:, [k]] for k in range(6))
        inner = np.logaddexp(a - alpha * np.log(x["N"]), b - beta * np.log(x["D"]))
        out: Floats = np.logaddexp(e, gamma * inner)
        return out

    def starts(self, x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
        base = _chinchilla_starts(x, y_n, w_n)
        out = []
        for gamma in (1.0, 0.6, 1.6):
            # (A N^-alpha)^gamma keeps the size of each term when its amplitude and exponent are divided by gamma.
            scaled = base.copy()
            scaled[:, 1:] /= gamma
            out.append(np.column_stack([scaled, np.full(len(base), gamma)]))
        return np.concatenate(out)


@register
class Kaplan(Law):
    """Equation 1.5 of Kaplan et al. (2020), ``L = [(N_c/N)^(alpha_N/alpha_D) + D_c/D]^alpha_D``."""

    name = "kaplan"
    formula = "L = [(N_c/N)^(alpha_N/alpha_D) + D_c/D]^alpha_D"
    variables = ("N", "D")
    parameters = (
        Parameter(name="N_c", kind="amplitude"),
        Parameter(name="D_c", kind="amplitude"),
        _exponent("alpha_N"),
        _exponent("alpha_D"),
    )

    def log_loss(self, theta_RP: Floats, x: Mapping[str, Floats]) -> Floats:
        n_c, d_c, alpha_n, alpha_d = (theta_RP[:, [k]] for k in range(4))
        by_size = alpha_n / alpha_d * (n_c - np.log(x["N"]))
        by_data = d_c - np.log(x["D"])
        out: Floats = alpha_d * np.logaddexp(by_size, by_data)
        return out

    def starts(self, x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
        # L^(1/alpha_D) is linear in N_c^(alpha_N/alpha_D) and D_c: two amplitudes in closed form at each
        # pair of exponents.
        found = []
        for alpha_n in np.geomspace(0.02, 0.6, 10):
            for alpha_d in np.geomspace(0.02, 0.6, 10):
                z = np.exp((np.log(y_n) - np.log(y_n).mean()) / alpha_d)
                basis = np.column_stack(
                    [np.exp(-(alpha_n / alpha_d) * np.log(x["N"] / np.exp(np.log(x["N"]).mean()))),
                     np.exp(-np.log(x["D"] / np.exp(np.log(x["D"]).mean())))]
                ) / z[:, None]  # fmt: skip
                value = np.linalg.lstsq(basis * np.sqrt(w_n)[:, None], np.sqrt(w_n), rcond=None)[0]
                value = np.maximum(value, 1e-6)
                rss = float(np.sum(w_n * (alpha_d * np.log(basis @ value)) ** 2))
                level = np.log(y_n).mean() / alpha_d
                n_c = (np.log(value[0]) + level) * alpha_d / alpha_n + np.log(x["N"]).mean()
                d_c = np.log(value[1]) + level + np.log(x["D"]).mean()
                found.append((rss, (n_c, d_c, alpha_n, alpha_d)))
        found.sort(key=lambda item: item[0])
        return np.array([point for _, point in found[:4]])


@register
class LearningRate(Law):
    """Chinchilla with a parabola in log learning rate whose minimum moves with N and D (Step Law)."""

    name = "chinchilla-lr"
    formula = "L = E + A N^-alpha + B D^-beta + Q (ln lr - c - p ln N - q ln D)^2"
    variables = ("N", "D", "lr")
    parameters = (
        *Chinchilla.parameters,
        Parameter(name="Q", kind="amplitude", low=-30.0, high=10.0),
        Parameter(name="c", kind="other"),
        Parameter(name="p", kind="other"),
        Parameter(name="q", kind="other"),
    )

    def log_loss(self, theta_RP: Floats, x: Mapping[str, Floats]) -> Floats:
        e, a, alpha, b, beta, q_log, c, p, q = (theta_RP[:, [k]] for k in range(9))
        base = np.logaddexp(np.logaddexp(e, a - alpha * np.log(x["N"])), b - beta * np.log(x["D"]))
        off = np.log(x["lr"]) - c - p * np.log(x["N"]) - q * np.log(x["D"])
        out: Floats = base + np.log1p(np.exp(np.minimum(q_log - base, 50.0)) * off**2)
        return out

    def starts(self, x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
        base = _chinchilla_starts(x, y_n, w_n)[:1]
        predicted = np.exp(Chinchilla().log_loss(base, x)[0])
        log_n, log_d, log_lr = np.log(x["N"]), np.log(x["D"]), np.log(x["lr"])
        ones = np.ones_like(log_lr)
        # Residual on 1, u, u log N, u log D, u^2 with u = log lr: the vertex gives c, p, q.
        basis = np.column_stack([ones, log_lr, log_lr * log_n, log_lr * log_d, log_lr**2, log_n, log_d])
        k = np.linalg.lstsq(basis, y_n - predicted, rcond=None)[0]
        out = []
        for curve in (max(float(k[4]), 1e-3), 1e-2):
            vertex = -k[1:4] / (2 * curve) if k[4] > 0 else np.array([log_lr.mean(), 0.0, 0.0])
            out.append(np.concatenate([base[0], [np.log(curve)], vertex]))
        shrunk = base[0].copy()
        shrunk[0] = np.log(min(np.exp(shrunk[0]), 0.9 * float(np.min(y_n))))
        out.append(np.concatenate([shrunk, [np.log(0.01), float(log_lr.mean()), 0.0, 0.0]]))
        return np.array(out)


@register
class Repetition(Law):
    """Chinchilla in effective tokens when ``U`` unique tokens are repeated (Muennighoff et al. 2023, eq. 5)."""

    name = "repetition"
    formula = "L = E + A N^-alpha + B D'^-beta, D' = U + U R* (1 - exp(-(D/U - 1)/R*))"
    variables = ("N", "D", "U")
    parameters = (*Chinchilla.parameters, Parameter(name="R*", kind="amplitude", low=-4.0, high=9.0))

    def log_loss(self, theta_RP: Floats, x: Mapping[str, Floats]) -> Floats:
        e, a, alpha, b, beta, r_log = (theta_RP[:, [k]] for k in range(6))
        repeats = np.maximum(x["D"] / x["U"] - 1.0, 0.0)
        half_life = np.exp(r_log)
        effective = x["U"] * (1.0 - half_life * np.expm1(-repeats / half_life))
        out: Floats = np.logaddexp(np.logaddexp(e, a - alpha * np.log(x["N"])), b - beta * np.log(effective))
        return out

    def starts(self, x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
        out = []
        for half_life in (2.0, 8.0, 30.0):
            repeats = np.maximum(x["D"] / x["U"] - 1.0, 0.0)
            effective = x["U"] * (1.0 - half_life * np.expm1(-repeats / half_life))
            base = _chinchilla_starts({"N": x["N"], "D": effective}, y_n, w_n)[:2]
            out.append(np.column_stack([base, np.full(len(base), np.log(half_life))]))
        return np.concatenate(out)
