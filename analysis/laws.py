"""Scaling laws as classes: what a loss is assumed to be as a function of parameters, tokens, compute and other axes.

Stands before ``solver``: a law names its variables and parameters and gives the logarithm of the predicted loss. Adding
a law is one class with the `register` decorator: a sum of power terms only lists its `Term` s (its derivatives are then
exact), any other law writes ``log_loss`` and ``starts`` and gets derivatives by central differences.

Shapes: R refits, n rows, P parameters. Parameters are solved for as logarithms (``E`` and amplitudes, which are
therefore positive) or as they are (exponents and others).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import numpy as np
from numpy.typing import NDArray

from scaling.analysis.starts import variable_projection
from scaling.errors import UsageError, nearest

Floats = NDArray[np.float64]
Kind = Literal["asymptote", "amplitude", "exponent", "other"]

# Exponents outside are not power laws of a loss; a fit that ends there is reported as bound-hit.
EXPONENT_RANGE = (1e-4, 8.0)
# A positive term may fall to this share (in logarithms) of the smallest loss; there it is reported as bound-hit.
VANISHING_LOG = -16.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Parameter:
    """One unknown of a law: its name, how it is solved for, and where it may go."""

    name: str
    kind: Kind
    low: float = -np.inf
    high: float = np.inf

    @property
    def is_log(self) -> bool:
        """Whether the solver sees the logarithm."""
        return self.kind in ("asymptote", "amplitude")


@dataclass(frozen=True, slots=True)
class Term:
    """``amplitude * product(variable ** -exponent)``; without variables it is the asymptote."""

    amplitude: str
    exponents: Mapping[str, str] = field(default_factory=dict)


class Law:
    """Base of every law; see the module's text for what a subclass writes."""

    name: ClassVar[str]
    formula: ClassVar[str]
    variables: ClassVar[tuple[str, ...]]
    parameters: ClassVar[tuple[Parameter, ...]]

    def log_loss(self, theta_RP: Floats, x: Mapping[str, Floats]) -> Floats:
        """Logarithm of the predicted loss, shape (R, n); ``x`` holds one array of n numbers a variable."""
        raise NotImplementedError

    def starts(self, x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
        """Starting points computed from the data, shape (k, P), best first."""
        raise NotImplementedError

    @classmethod
    def names(cls) -> tuple[str, ...]:
        """Names of the parameters in order."""
        return tuple(p.name for p in cls.parameters)

    def natural(self, theta_RP: Floats) -> Floats:
        """From what the solver sees to natural units."""
        logs = np.array([p.is_log for p in self.parameters])
        return np.where(logs, np.exp(np.where(logs, theta_RP, 0.0)), theta_RP)


REGISTRY: dict[str, type[Law]] = {}


def register(law: type[Law]) -> type[Law]:
    """Make ``law`` available to `get_law`, ``fit_law(form=...)`` and the command line under its name."""
    assert law.name not in REGISTRY, law.name
    REGISTRY[law.name] = law
    return law


def get_law(name: str) -> Law:
    """The law of that name.

    Raises
    ------
    UsageError
        When there is none; the message lists those that exist.
    """
    import scaling.analysis.extra_laws  # noqa: F401  (registers the laws that are not sums of power terms)

    if name not in REGISTRY:
        raise UsageError(f"form {name!r} is unknown; {nearest(name, REGISTRY)}")
    return REGISTRY[name]()


def power_parameters(terms: tuple[Term, ...]) -> tuple[Parameter, ...]:
    """Parameters of a sum of power terms: each amplitude, then its exponents, shared names once."""
    found: dict[str, Parameter] = {}
    for term in terms:
        kind: Kind = "amplitude" if term.exponents else "asymptote"
        found[term.amplitude] = Parameter(name=term.amplitude, kind=kind)
        for exponent in term.exponents.values():
            found[exponent] = Parameter(name=exponent, kind="exponent", low=EXPONENT_RANGE[0], high=EXPONENT_RANGE[1])
    return tuple(found.values())


class PowerSum(Law):
    """A law that is a sum of `Term` s."""

    terms: ClassVar[tuple[Term, ...]]

    def __init_subclass__(cls) -> None:
        cls.parameters = power_parameters(cls.terms)
        cls.variables = tuple(dict.fromkeys(v for t in cls.terms for v in t.exponents))

    def log_loss(self, theta_RP: Floats, x: Mapping[str, Floats]) -> Floats:
        at = {p.name: theta_RP[:, [k]] for k, p in enumerate(self.parameters)}
        logs = []
        for term in self.terms:
            u_Rn = at[term.amplitude] - sum(
                (at[e] * np.log(x[v])[None, :] for v, e in term.exponents.items()), np.zeros((1, 1))
            )
            logs.append(u_Rn)
        out: Floats = np.logaddexp.reduce(np.broadcast_arrays(*logs), axis=0)
        return out

    def starts(self, x: Mapping[str, Floats], y_n: Floats, w_n: Floats) -> Floats:
        return variable_projection(self, x, y_n, w_n)


@register
class Power(PowerSum):
    """Loss against compute with an irreducible part."""

    name = "power"
    formula = "L = E + A C^-a"
    terms = (Term("E"), Term("A", {"C": "a"}))


@register
class PurePower(PowerSum):
    """Loss against compute without an irreducible part (a straight line in logarithms)."""

    name = "pure-power"
    formula = "L = A C^-a"
    terms = (Term("A", {"C": "a"}),)


@register
class Chinchilla(PowerSum):
    """Approach 3 of Hoffmann et al. (2022), equation 2."""

    name = "chinchilla"
    formula = "L = E + A N^-alpha + B D^-beta"
    terms = (Term("E"), Term("A", {"N": "alpha"}), Term("B", {"D": "beta"}))


@register
class ChinchillaTied(PowerSum):
    """Chinchilla with one exponent for both terms (Muennighoff et al. 2023; Gadre et al. 2024 in other letters)."""

    name = "chinchilla-tied"
    formula = "L = E + A N^-alpha + B D^-alpha"
    terms = (Term("E"), Term("A", {"N": "alpha"}), Term("B", {"D": "alpha"}))
