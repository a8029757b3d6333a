"""How a number is written: digits follow its interval, never more; a number without an interval gets four digits.

Stands before ``tables`` and ``figures``, which write every number through it. Files for machines (CSV, JSON) do not:
they keep numbers unrounded.
"""

from __future__ import annotations

import math
from typing import Final

MISSING: Final = "–"
MINUS: Final = "\u2212"
_PLAIN_BELOW: Final = 1e6  # from here on numbers are written with an exponent
_PLAIN_ABOVE: Final = 1e-4


def decimals(half_width: float, *, digits: int = 2) -> int:
    """Decimals that show ``digits`` significant digits of an uncertainty.

    >>> decimals(0.0123), decimals(1.4), decimals(140.0)
    (3, 1, 0)
    """
    if not math.isfinite(half_width) or half_width <= 0:
        return 4
    return max(0, digits - 1 - math.floor(math.log10(half_width)))


def share(level: float) -> str:
    """A level of an interval as a percentage with all its digits.

    >>> share(0.95), share(0.999), share(0.9545)
    ('95%', '99.9%', '95.45%')
    """
    return f"{100 * level:.10g}%"


def number(value: float | None, *, digits: int = 4) -> str:
    """A number that has no interval, to ``digits`` significant digits.

    >>> number(3.14159), number(-0.00012345), number(2.5e18), number(1234567), number(33730), number(None)
    ('3.142', '−0.0001234', '2.5e18', '1.235e6', '33,730', '–')
    """
    if value is None or math.isnan(value):
        return MISSING
    if math.isinf(value):
        return "∞" if value > 0 else f"{MINUS}∞"
    if value == 0:
        return "0"
    size = abs(value)
    if size >= _PLAIN_BELOW or size < _PLAIN_ABOVE:
        mantissa, exponent = f"{value:.{digits - 1}e}".split("e")
        mantissa = mantissa.rstrip("0").rstrip(".") if "." in mantissa else mantissa
        return _sign(f"{mantissa}e{int(exponent)}")
    places = max(0, digits - 1 - math.floor(math.log10(size)))
    return _sign(f"{value:,.{places}f}")


def general(value: float | None, *, digits: int = 4) -> str:
    """A number that is exact as given (a learning rate, a count of scales): no trailing zeros.

    >>> general(0.001), general(3e-5), general(12.0)
    ('0.001', '3e−5', '12')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    if value != 0 and not 1e-4 <= abs(value) < _PLAIN_BELOW:
        return number(value, digits=digits)
    return _sign(f"{value:.{digits}g}") if abs(value) < 10**digits else _sign(f"{value:,.0f}")


def integer(value: float | None) -> str:
    """A count, in groups of three.

    >>> integer(1234567), integer(None)
    ('1,234,567', '–')
    """
    return MISSING if value is None or math.isnan(value) else _sign(f"{int(value):,}")


def words(count: float) -> str:
    """A large count as it is spoken.

    >>> words(1_681_138), words(600_000), words(2.5e9), words(640)
    ('1.7 million', '600 thousand', '2.5 billion', '640')
    """
    for name, size in (("billion", 1e9), ("million", 1e6), ("thousand", 1e3)):
        if count >= size:
            return f"{float(f'{count / size:.2g}'):g} {name}"
    return f"{count:.0f}"


def fixed(value: float | None, places: int) -> str:
    """A number to a given number of decimals.

    >>> fixed(-0.5, 2), fixed(2.5e18, 0), fixed(-0.0004, 2)
    ('−0.50', '2.5e18', '0.00')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    if abs(value) >= _PLAIN_BELOW or (value != 0 and places > 6):
        return number(value, digits=3)
    text = f"{value:.{places}f}"
    return _sign(text[1:] if text.startswith("-") and float(text) == 0 else text)


def estimate(value: float | None, low: float | None, high: float | None) -> str:
    """A number with its interval, both to two significant digits of the interval's half-width.

    >>> estimate(-0.06123, -0.0701, -0.0523), estimate(1.5831, None, None), estimate(1.1, 0.2, math.inf)
    ('−0.0612 [−0.0701, −0.0523]', '1.583', '1.100 [0.2000, ∞]')
    """
    if value is None or math.isnan(value):
        return MISSING
    if low is None or high is None or math.isnan(low) or math.isnan(high):
        return number(value)
    if math.isinf(low) or math.isinf(high):
        return f"{number(value)} [{number(low)}, {number(high)}]"
    places = decimals((high - low) / 2)
    return f"{fixed(value, places)} [{fixed(low, places)}, {fixed(high, places)}]"


def speedup(value: float | None) -> str:
    """A factor, ``1.58x`` with the multiplication sign.

    >>> speedup(1.58312), speedup(12345.0)
    ('1.58×', '1.23e4×')
    """
    if value is None or not math.isfinite(value):
        return number(value)
    return f"{fixed(value, 2)}×" if 0.01 <= abs(value) < 1000 else f"{_exponent(value)}×"


def _exponent(value: float) -> str:
    mantissa, exponent = f"{value:.2e}".split("e")
    return _sign(f"{mantissa}e{int(exponent)}")


def _sign(text: str) -> str:
    return text.replace("-", MINUS)
