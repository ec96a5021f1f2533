r"""Compares left sides of equations: whether two of them name different things, as `\sin x` and `\cos x` do."""

from __future__ import annotations

import re
from typing import NamedTuple

_COMMANDS = (
    "sin cos tan cot sec csc arcsin arccos arctan sinh cosh tanh log ln lg exp det gcd lcm lim max min arg deg"
    " Var Cov Corr tr rank dim Re Im"
)
_FUNCTIONS = frozenset(_COMMANDS.split())
_SPREAD = re.compile(rf"(?<![\\A-Za-z])(?:{'|'.join(map(' '.join, _FUNCTIONS))})(?= ?[(\[])")
"""Matches names whose letters `normalize` has separated, because three upright letters may be variables: `V a r(X)`."""
_STYLE = re.compile(
    r"\\(?:text(?:bf|rm|it|sf)?|math(?:rm|bf|it|sf|normal|bb)|boldsymbol|bm|mbox|operatorname\*?|left|right|displaystyle)(?![A-Za-z])"
)
_TOKEN = re.compile(r"\\[A-Za-z]+|[A-Za-z]|[0-9]+|\S")
_WORD = re.compile(rf"(?<![\\A-Za-z])(?!(?:{'|'.join(_FUNCTIONS)})(?![A-Za-z]))(?=[A-Z]*[a-z])[A-Za-z]{{3,}}")
_ENCLOSING = frozenset(
    ("\\overline", "\\widehat", "\\hat", "\\angle", "\\triangle", "|", "\\vert", "\\lvert", "\\rvert")
)
_DROPPED = frozenset("{}() ")
_UNSTYLED = re.compile(rf"(?<![_^\\A-Za-z])\{{\s*([A-Za-z]|{'|'.join(_FUNCTIONS)})\s*\}}")
"""Matches a name in the braces of a style macro that was removed: `{E}` of `\\mathbb{E}`, `{Var}` of
`\\mathrm{Var}`."""


class _Name(NamedTuple):
    letter: str
    primes: int
    below: tuple[str, ...]
    """The subscripts of the letter."""
    arguments: tuple[str, ...] | None
    """The arguments in parentheses, None without parentheses. A single small letter or LaTeX command is stored as
    "any"."""


def name_different_things(left: str, right: str) -> bool:
    r"""Whether two left sides have different meanings: `x` and `y`, `f(2)` and `f(3)`, `\sin x` and `x`, `AB` and `AC`.

    Two sides that consist of words are different if each has a word that the other lacks: `maximum value` and `minimum
    value`. False if one side is empty, if only one consists of words (`\text{Area}`), and for kinds that may name
    one thing, such as `y` and `f(x)`, `S` and `[ABC]`, `x` and `x_1`.
    """
    first, second = _plain(left), _plain(right)
    words, others_words = ({word.lower() for word in _WORD.findall(side)} for side in (first, second))
    if words and others_words:
        return bool(words - others_words and others_words - words)
    if not first or not second or words or others_words:
        return False
    tokens, others = _tokens(first), _tokens(second)
    if tokens == others:
        return False
    if _has_function(tokens) or _has_function(others):
        return True
    points, other_points = _points(tokens), _points(others)
    if points and other_points:
        return points not in (other_points, other_points[::-1])
    one, other = _name(first), _name(second)
    if one and other:
        return _differ(one, other)
    inside, around = sorted((tokens, others), key=len)
    if not one and not other:
        return sorted(tokens) != sorted(others) or "\\frac" in tokens or "-" in tokens or "/" in tokens
    return set(inside) < set(around) and not _points(around)


def _differ(one: _Name, other: _Name) -> bool:
    if (one.arguments is None) != (other.arguments is None):
        return one.letter == other.letter and one.primes != other.primes
    if one.letter != other.letter or one.primes != other.primes:
        return True
    indices = one.below and other.below and one.below != other.below
    return bool(indices) or one.arguments != other.arguments


def _plain(side: str) -> str:
    r"""A left side without style macros, with `\sin` for a bare `sin` and `\angle` for `m\angle`."""
    text = " ".join(_STYLE.sub("", side).replace("\\,", " ").replace("\\Pr", "P").split()).strip()
    text = _SPREAD.sub(lambda name: name[0].replace(" ", ""), _UNSTYLED.sub(r"\1", text))
    text = re.sub(r"(?<=[A-Za-z])\[([^\[\]]*)\]", r"(\1)", text.replace("\\bar", "\\overline"))
    text = re.sub(rf"(?<![\\A-Za-z])({'|'.join(_FUNCTIONS)})(?![A-Za-z])", r"\\\1 ", text)
    return re.sub(r"\bm\s*(?=\\angle)|\\measuredangle", lambda match: "" if match[0][0] == "m" else "\\angle", text)


def _tokens(text: str) -> tuple[str, ...]:
    return tuple(token for token in _TOKEN.findall(text) if token not in _DROPPED and token != "_")


def _has_function(tokens: tuple[str, ...]) -> bool:
    return any(token[1:] in _FUNCTIONS for token in tokens if token[0] == "\\")


def _points(tokens: tuple[str, ...]) -> tuple[str, ...]:
    """The capital letters that name a segment, an angle or a polygon by its points; empty for another name."""
    letters = tuple(token for token in tokens if token not in _ENCLOSING)
    return letters if len(letters) > 1 and all(letter.isupper() and len(letter) == 1 for letter in letters) else ()


_LETTER = re.compile(
    r"(?:\\angle\s*)?(?P<letter>[A-Za-z]|\\[a-zA-Z]+)\s*(?P<before>'*)\s*(?:_\s*(?:\{(?P<group>[^{}]*)\}|(?P<index>[A-Za-z0-9]|\\[a-z]+)))?"
    r"\s*(?P<primes>'*)\s*(?:\^\s*\{?\s*(?P<inverse>-\s*1|\\prime)\s*\}?)?\s*(?:\((?P<arguments>[^()]*)\))?"
)


def _name(text: str) -> _Name | None:
    match = _LETTER.fullmatch(text)
    if match is None:
        return None
    arguments = None if match["arguments"] is None else _tokens(match["arguments"])
    if arguments is not None and len(arguments) == 1 and (arguments[0].islower() or arguments[0][0] == "\\"):
        arguments = ("any",)
    primes = len(match["before"]) + len(match["primes"])
    primes += {"": 0, "\\": 1}.get((match["inverse"] or "")[:1], -1)
    return _Name(match["letter"], primes, _tokens(match["group"] or match["index"] or ""), arguments)
