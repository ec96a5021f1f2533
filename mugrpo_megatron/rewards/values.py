"""Parses text into sympy values with math-verify, and compares values."""

from __future__ import annotations

import logging
import re
import zlib
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Basic, Expr, FiniteSet, Float, I, Integer, nan

logging.getLogger("math_verify").setLevel(logging.ERROR)

PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]


def parsed(text: str) -> list[Any]:
    """Sympy values of LaTeX, possibly none; `i` is the imaginary unit.

    Wraps the text in a box, because math-verify reads `\\frac12` outside of math mode as text.
    """
    if PLAIN_NUMBER.fullmatch(text):  # most golds and answers: no grammar is needed
        return [Float(text, max(15, len(text))) if "." in text else Integer(text)]
    wrapped = f"\\boxed{{{text}}}"
    found = parse(wrapped, extraction_config=_LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    return [v.subs({s: I for s in v.free_symbols if s.name == "i"}) if isinstance(v, Expr) else v for v in found]


def number(text: str) -> Expr | None:
    """The finite number that text stands for, else None."""
    found = parsed(text)
    value = found[0] if found else None
    if isinstance(value, FiniteSet) and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, Expr) or not value.is_number or value.is_finite is False or value is nan:
        return None
    return value


def same(gold: list[Any], answer: list[Any]) -> bool:
    """Whether math-verify finds them equal; values that differ at a sample point skip its simplifications."""
    if not gold or not answer or (len(gold) == len(answer) == 1 and _differ_at_a_point(gold[0], answer[0])):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))


def _differ_at_a_point(gold: Basic, answer: Basic) -> bool:
    """Whether both are expressions whose values at a sample point are far apart."""
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    try:
        left, right = _at_a_point(gold), _at_a_point(answer)
    except (TypeError, ValueError, OverflowError, ArithmeticError):  # no number there: math-verify decides
        return False
    small, large = sorted((abs(left), abs(right)))
    return large > 1e-12 and abs(left - right) > 1e-4 * small  # False where one of them is not a number


def _at_a_point(value: Expr) -> complex:
    """The value at a sample point that depends on the variables' names: two parses may have different symbols."""
    point = {symbol: 1.3 + zlib.crc32(symbol.name.encode()) % 997 / 997 for symbol in value.free_symbols}
    return complex(value.evalf(15, subs=point) if point else value.evalf(15))
