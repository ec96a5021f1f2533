"""Refuses answers before comparison: hedges, unfinished sums, and text that is too large to evaluate.

A policy under optimisation finds every string that a parser reads two ways. These rules require an answer to commit
to one value. They look at text only and cost microseconds.
"""

from __future__ import annotations

import re

# fmt: off
_VALUE_COMMANDS = frozenset((
    "frac", "sqrt", "pi", "cdot", "times", "pm", "infty", "circ", "degree", "binom", "div", "exp", "log", "ln",
    "sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan",
))
# fmt: on
"""Commands that may stand in an answer whose gold is a number."""
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
    r"\^\s*\{?\s*\(?[+-]?[0-9]{5,}"  # an exponent of five digits
    r"|\^\s*\{[^{}]*\^\s*\{[^{}]*\^|\^\s*[^{}\s]\s*\^"  # a tower of powers
    r"|[0-9)}]\s*\^\s*\{?\s*[0-9]+\s*\}?\s*\^"  # a tower of two numbers
    r"|\)\s*!|!\s*\)?\s*!|[0-9]{4,}\s*\)?\s*!|\\binom\s*\{\s*[0-9]{4,}"  # factorials of factorials or of large numbers
    r"|[0-9]{400,}"
    rf"|\\exp.{{0,8}}\\exp|(?:{_FUNCTION}){{3}}"  # functions of functions of functions
)
MAX_DEPTH = 10
"""Braces inside braces."""
MAX_GROUPS = 6
"""Parentheses inside parentheses: the parser's time is exponential in them."""
MAX_TERMS = 80
MAX_SPARE_ELEMENTS = 4


def hedged(answer: str, gold: str) -> str:
    """Why an answer to a non-numeric gold is refused, or "": it has an evasive sign that the gold lacks."""
    for match in _HEDGES.finditer(answer):
        if match[0] not in gold:
            return f"ambiguous: {match[0]} is not in the gold answer"
    return ""


def no_single_value(side: str) -> str:
    """Why text is not one number, or "". Refuses anything that a parser might skip, not only known tricks."""
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
    """Why text leaves the arithmetic to the verifier, or "": it is a sum or product where a number is asked for."""
    bare = _TEN_TO_THE.sub("", side)
    if _OPERATORS.search(bare) or len(_FRACTIONS.findall(bare)) > 1:
        return "not worked out: the gold is a plain number and the answer is an expression"
    return ""


def too_large(text: str, gold: str) -> str:
    """Why text is not parsed, or "": depth, length or size would cost a parser or an evaluation seconds.

    What the gold itself needs is added to each limit.
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
