"""Parses text to sympy values with math-verify, and compares such values."""

from __future__ import annotations

import logging
import re
import zlib
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import Any

from math_verify import LatexExtractionConfig, parse, verify
from sympy import Abs, Basic, Expr, FiniteSet, Float, I, Integer, NumberSymbol, Pow, Rational, floor, nan

from mugrpo_megatron.rewards.math.upright import is_value

logging.getLogger("math_verify").setLevel(logging.ERROR)

PLAIN_NUMBER = re.compile(r"[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)")
_LATEX = [LatexExtractionConfig(boxed_match_priority=0)]

# `\,` is put before a variable `d`, since math-verify 0.9 reads `4d` as 4 and a differential.
_DIFFERENTIAL, _TIMES_D = re.compile(r"(?<=[0-9)}])\s*d(?![A-Za-z])"), r"\\,d"
_LAST_LETTERS = re.compile(r"(?<=[0-9}\s])\s*([A-Za-z]{1,2})\Z")
_MACRO = re.compile(r"\\(?:text|mathrm)\s*\{[^{}]*\}|\\[A-Za-z]+")
_FORMULA = re.compile(r"[A-Za-z]|[0-9)}]\s*[+-]")


def parsed(text: str) -> list[Any]:
    """The sympy values of LaTeX text, possibly none; `i` is the imaginary unit.

    The text is put into a box for the parser, because math-verify reads `\\frac12` outside of math mode as text.
    """
    if PLAIN_NUMBER.fullmatch(text):  # a plain number needs no parser, and most golds and answers are plain numbers
        return [Float(text, max(15, len(text))) if "." in text else Integer(text)]
    wrapped = f"\\boxed{{{_DIFFERENTIAL.sub(_TIMES_D, _with_last_variable(text))}}}"
    values = parse(wrapped, extraction_config=_LATEX, fallback_mode="no_fallback", parsing_timeout=None)
    return [v.subs({s: I for s in v.free_symbols if s.name == "i"}) if isinstance(v, Expr) else v for v in values]


def _with_last_variable(text: str) -> str:
    r"""Put `\,` before the last letters of a text if they are variables, since math-verify 0.9 would drop them as a
    unit: `\pi r^2\,h` for `\pi r^2 h`, while `7 h` stays unchanged."""
    last = _LAST_LETTERS.search(text)
    if last is None:
        return text
    before = text[: last.start()]
    is_formula = _FORMULA.search(_MACRO.sub(" ", before.rpartition("=")[2]))
    is_variable = len(last[0]) == 1 or last[1] == "bc" or is_formula or is_value(last[1])
    return f"{before}\\,{last[1]}" if is_variable else text


def number(text: str) -> Expr | None:
    """The finite number that text stands for, or that is the only element of a set; None for other text."""
    values = parsed(text)
    value = values[0] if values else None
    if isinstance(value, FiniteSet) and len(value.args) == 1:
        value = value.args[0]
    if not isinstance(value, Expr) or not value.is_number or value.is_finite is False or value is nan:
        return None
    return value


def same(gold: list[Any], answer: list[Any]) -> bool:
    """Whether the values of gold and answer are equal. math-verify decides, except that they are unequal if one
    side has no values, and two single values are unequal if they differ at a sample point."""
    if not gold or not answer or (len(gold) == len(answer) == 1 and _differ_at_a_point(gold[0], answer[0])):
        return False
    return bool(verify(gold, answer, timeout_seconds=None))


def _differ_at_a_point(gold: Basic, answer: Basic) -> bool:
    """Whether both are expressions, and their numeric values at a sample point are far apart; False if one has none."""
    if not isinstance(gold, Expr) or not isinstance(answer, Expr):
        return False
    try:
        left, right = _at_a_point(gold), _at_a_point(answer)
    # One side has no numeric value, so math-verify decides; sympy 1.14 raises AttributeError for a variable's floor.
    except (TypeError, ValueError, AttributeError, OverflowError, ArithmeticError):
        return False
    small, large = sorted((abs(left), abs(right)))
    return large > 1e-12 and abs(left - right) > 1e-4 * small  # false for NaN, so that math-verify decides


def _at_a_point(value: Expr) -> complex:
    """The value of an expression at a sample point. The point depends on the variables' names alone, so that a variable
    has the same value in answer and gold."""
    point = {symbol: 1.3 + zlib.crc32(symbol.name.encode()) % 997 / 997 for symbol in value.free_symbols}
    return complex(value.evalf(15, subs=point) if point else value.evalf(15))


_DIGITS = 40
_EQUAL = Float("1e-30")
"""Largest relative difference at which two values, computed with _DIGITS digits, count as equal."""
_PERCENT = re.compile(r"\s*\\?%\s*\Z")


@dataclass(frozen=True, slots=True)
class Number:
    """A finite number, with the form in which it was written."""

    value: Expr
    """The exact value, without floating-point numbers."""
    percent: bool
    decimal: bool
    """Whether a decimal point was written."""
    places: int
    """Number of digits after the point of a plain decimal; else 0."""
    digits: int
    """Number of significant digits of a plain decimal; else 0."""


@lru_cache(maxsize=4096)
def read_number(text: str) -> Number | None:
    """The number that text stands for, with the form in which it is written; None if it does not stand for one."""
    bare = _PERCENT.sub("", text)
    value = number(bare)
    if value is None:
        return None
    exact = value.xreplace({decimal: Rational(str(decimal)) for decimal in value.atoms(Float)})
    plain = PLAIN_NUMBER.fullmatch(bare) is not None and "." in bare
    places = len(bare.partition(".")[2]) if plain else 0
    digits = len(bare.lstrip("+-").replace(".", "").lstrip("0")) if plain else 0
    return Number(exact, bare != text, value.has(Float), places, digits)


def agree(answer: Number, gold: Number) -> bool:
    """Whether an answer equals the gold, or one of them is the other, rounded. If only one of them is a percentage, it
    may be written with or without the factor 1/100: `5 %` agrees with 5 and with 0.05."""
    if answer.percent == gold.percent:
        return _agree(answer.value, answer, gold.value, gold)
    hundredth = Rational(1, 100)
    as_written = _agree(answer.value, answer, gold.value, gold)
    if answer.percent:
        return as_written or equal(answer.value * hundredth, gold.value)
    return as_written or equal(answer.value, gold.value * hundredth)


def equal(left: Expr, right: Expr) -> bool:
    if left == right:
        return True
    if left.is_Rational and right.is_Rational:
        return False
    near, far = left.evalf(_DIGITS), right.evalf(_DIGITS)
    apart, scale = Abs(near - far).evalf(), max(Abs(near).evalf(), Abs(far).evalf())
    return bool(apart <= _EQUAL * scale)


def rounded(value: Any, places: int) -> Any:
    """Round the roots, fractions and constants in a sympy object to `places` decimals, as in a gold `x + 1.414`."""
    if not isinstance(value, Basic):
        return value
    atoms = [atom for atom in value.atoms(Pow, Rational, NumberSymbol) if atom.is_real and atom.is_integer is False]
    return value.xreplace({atom: floor(atom * 10**places + Rational(1, 2)) / Integer(10) ** places for atom in atoms})


def is_rounding(decimal: Number, exact: Expr) -> bool:
    """Whether a plain decimal is the exact number, rounded or cut to the decimal's digits."""
    value = exact.evalf(_DIGITS)
    if not value.is_real:
        return False
    shifted = Abs(value) * 10**decimal.places
    digits = Abs(decimal.value) * 10**decimal.places
    same_sign = bool((decimal.value < 0) == (value < 0))
    return same_sign and digits in (floor(shifted), floor(shifted + Fraction(1, 2)))


def _agree(left: Expr, answer: Number, right: Expr, gold: Number) -> bool:
    """Whether the two values are equal, or one is the other, rounded to enough digits.

    Enough decimals and significant digits are: 2 and 2 for a gold that rounds an exact answer, 6 and 6 for a gold that
    rounds a longer decimal, 4 and 3 for an answer that rounds an exact gold.
    """
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


# fmt: off
_VALUE_COMMANDS = frozenset((
    "frac", "sqrt", "pi", "cdot", "times", "pm", "infty", "circ", "degree", "binom", "div", "exp", "log", "ln",
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan",
))
# fmt: on
"""LaTeX commands that an answer may have if its gold is a number."""
_CONSTANT_LETTERS = frozenset("eiIE")
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]+|[0-9.]+|\s+|.", re.DOTALL)
_VALUE_CHARACTERS = frozenset("+-*/^(){}[]!%\\")
_LOOSE_NUMBERS = re.compile(r"[0-9.]\s+[0-9.]|[0-9})]\s+\(?[0-9]")
_HEDGES = re.compile(
    r"\\(?:to|rightarrow|Rightarrow|longrightarrow|implies|iff|mapsto|sim|simeq|cong|ne|neq|not|b?mod|pmod|[vh]?phantom|"
    r"color|tag|wedge|land|label|href|"
    r"sum|prod|i*int|oint|lim)(?![A-Za-z])|[?&|;#]|\\text|\bmod\b"
)
_TEN_TO_THE = re.compile(r"(?:\\times|\\cdot|\*)\s*10\s*\^\s*(?:\{\s*[+-]?[0-9]+\s*\}|[0-9])")
_OPERATORS = re.compile(
    r"(?<=[0-9A-Za-z)}!%])\s*[+-]|\*|\\(?:times|cdot|binom|div)|!|\\(?:log|ln|sin|cos|tan|cot|sec|csc)"
)
_FRACTIONS = re.compile(r"/|\\frac")

_FUNCTION = r"\\(?:exp|log|ln|sin|cos|tan|cot|sec|csc)(?![A-Za-z])[^\\]{0,4}"
_TOO_LARGE = re.compile(
    r"\^\s*\{?\s*\(?[+-]?[0-9]{5,}"  # an exponent of five digits or more
    r"|[0-9.]\s*[Ee]\s*[+-]?\s*[0-9]{5,}"  # the same behind E: math-verify 0.9 computes all digits of 2E100000
    r"|\^\s*\{[^{}]*\^\s*\{[^{}]*\^|\^\s*[^{}\s]\s*\^"  # a tower of powers
    r"|[0-9)}]\s*\^\s*\{?\s*[0-9]+\s*\}?\s*\^"  # a tower of numbers, as 2^10^3
    r"|\)\s*!|!\s*\)?\s*!|[0-9]{4,}\s*\)?\s*!|\\binom\s*\{\s*[0-9]{4,}"  # factorials of (...), n! or large numbers
    r"|[0-9]{400,}"
    rf"|\\exp.{{0,8}}\\exp|(?:{_FUNCTION}){{3}}"  # functions of functions of functions
)
MAX_DEPTH = 10
"""Deepest nesting of braces that is given to the parser."""
MAX_GROUPS = 6
"""Deepest nesting of parentheses that is given to the parser, since its time is exponential in it."""
MAX_TERMS = 80
MAX_SPARE_ELEMENTS = 4


def hedged(answer: str, gold: str) -> str:
    r"""The reason to refuse an answer to a gold that is not a number; "" for none.

    It is refused if it has a sign that leaves open what the answer is (`\to`, `?`, `\text`) and that the gold lacks.
    """
    for match in _HEDGES.finditer(answer):
        if match[0] not in gold:
            return f"ambiguous: {match[0]} is not in the gold answer"
    return ""


def no_single_value(side: str) -> str:
    """The reason to refuse text that is not a single number; else "". Whatever a parser might skip is refused."""
    for token in _TOKEN.findall(side):
        if token.startswith("\\") and len(token) > 1:
            if token[1:] not in _VALUE_COMMANDS:
                return f"ambiguous: {token} in a number"
        elif token.isalpha():
            if token not in _CONSTANT_LETTERS:
                return f"ambiguous: {token!r} in a number"
        elif token == ",":
            return "ambiguous: several answers where one number is asked for"
        elif not (token[0].isdigit() or token[0] == "." or token.isspace() or token in _VALUE_CHARACTERS):
            return f"ambiguous: {token!r} in a number"
    if _LOOSE_NUMBERS.search(side):
        return "ambiguous: two numbers side by side"
    return ""


def not_worked_out(side: str) -> str:
    """The reason to refuse an expression, such as a sum or a product, where a number is asked for; "" for a number."""
    bare = _TEN_TO_THE.sub("", side)
    if _OPERATORS.search(bare) or len(_FRACTIONS.findall(bare)) > 1:
        return "not worked out: the gold is a plain number and the answer is an expression"
    return ""


def too_large(text: str, gold: str) -> str:
    """The reason to refuse text that would take a parser seconds, because it is too deep, long or large; else "".

    The gold's own depth, its number of commas and twice its number of terms are added to the limits for these.
    """
    braces, groups = _depth(text, "{", "}"), _depth(text, "([", ")]")
    if braces > MAX_DEPTH + _depth(gold, "{", "}") or groups > MAX_GROUPS + _depth(gold, "([", ")]"):
        return "too large: nested too deep"
    if _terms(text) > MAX_TERMS + 2 * _terms(gold):
        return "too large: too many terms"
    if text.count(",") > MAX_SPARE_ELEMENTS + gold.count(","):
        return "too large: many more answers than were asked for"
    return "too large: a number that no answer needs" if _TOO_LARGE.search(text) else ""


def _depth(text: str, opening: str, closing: str) -> int:
    depth = deepest = 0
    for character in text:
        depth += (character in opening) - (character in closing)
        deepest = max(deepest, depth)
    return deepest


def _terms(text: str) -> int:
    return sum(text.count(sign) for sign in "+-,=*&")
