"""Compares two numbers: exactly, whatever their size, or one as the rounding of the other.

Every written decimal is the fraction that it stands for, so that 1.6e-19 is neither 0 nor 2.5e-19. A percent sign is
one hundredth, or only the unit that the other side leaves out: `50\\%` is 0.5 and, where the gold has no sign, 50.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from sympy import Abs, Basic, Expr, Float, Integer, NumberSymbol, Pow, Rational, floor

from mugrpo_megatron.rewards.values import PLAIN_NUMBER, number

_DIGITS = 40
_EQUAL = Float("1e-30")
"""Relative difference of two values at _DIGITS digits that counts as equal."""
_PERCENT = re.compile(r"\s*\\?%\s*\Z")


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number as it was written."""

    value: Expr
    """Exact: without floating-point parts."""
    percent: bool
    decimal: bool
    """Whether a decimal point was written."""
    places: int
    """Digits after the point of a plain decimal, else 0."""
    digits: int
    """Significant digits of a plain decimal, else 0."""


@lru_cache(maxsize=4096)
def read_number(text: str) -> Number | None:
    """The number that text stands for, or None."""
    bare = _PERCENT.sub("", text)
    found = number(bare)
    if found is None:
        return None
    exact = found.xreplace({part: Rational(str(part)) for part in found.atoms(Float)})
    plain = PLAIN_NUMBER.fullmatch(bare) is not None and "." in bare
    places = len(bare.partition(".")[2]) if plain else 0
    digits = len(bare.lstrip("+-").replace(".", "").lstrip("0")) if plain else 0
    return Number(exact, bare != text, found.has(Float), places, digits)


def agree(answer: Number, gold: Number) -> bool:
    """Whether an answer is the gold's value, or one is the other's rounding."""
    if answer.percent == gold.percent:
        return _agree(answer.value, answer, gold.value, gold)
    hundredth = Rational(1, 100)
    as_written = _agree(answer.value, answer, gold.value, gold)
    if answer.percent:
        return as_written or equal(answer.value * hundredth, gold.value)
    return as_written or equal(answer.value, gold.value * hundredth)


def equal(left: Expr, right: Expr) -> bool:
    """Whether two exact numbers are the same."""
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    near, far = left.evalf(_DIGITS), right.evalf(_DIGITS)
    apart, scale = Abs(near - far).evalf(), max(Abs(near).evalf(), Abs(far).evalf())
    return bool(apart <= _EQUAL * scale)


def rounded(value: Any, places: int) -> Any:
    """A sympy object with its roots, fractions and constants rounded, as a gold like `x + 1.414` has them."""
    if not isinstance(value, Basic):
        return value
    parts = [part for part in value.atoms(Pow, Rational, NumberSymbol) if part.is_real and part.is_integer is False]
    return value.xreplace({part: floor(part * 10**places + Rational(1, 2)) / Integer(10) ** places for part in parts})


def is_rounding(decimal: Number, exact: Expr) -> bool:
    """Whether a plain decimal is an exact number rounded or cut to the digits that it shows."""
    value = exact.evalf(_DIGITS)
    if not value.is_real:
        return False
    shifted = Abs(value) * 10**decimal.places
    shown = Abs(decimal.value) * 10**decimal.places
    same_sign = bool((decimal.value < 0) == (value < 0))
    return same_sign and shown in (floor(shifted), floor(shifted + Fraction(1, 2)))


def _agree(left: Expr, answer: Number, right: Expr, gold: Number) -> bool:
    """Equal; or the gold has two decimals of an exact answer or six of a longer one; or the answer four of the gold."""
    if equal(left, right):
        return True
    if gold.decimal and answer.decimal:
        longer = gold.places >= 6 and gold.digits >= 6 and answer.places > gold.places
        return longer and _rounds_up_or_down(gold, left)
    if gold.decimal:
        return gold.places >= 2 and gold.digits >= 2 and is_rounding(gold, left)
    return answer.places >= 4 and answer.digits >= 3 and is_rounding(answer, right)


def _rounds_up_or_down(decimal: Number, value: Expr) -> bool:
    return bool(Abs(value - decimal.value) * 10**decimal.places * 2 <= 1)
