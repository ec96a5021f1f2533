"""Reads a gold answer; its kind and its value decide how answers are compared with it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal

from mugrpo_megatron.rewards.math.extract import boxed_answer, values_in_prose
from mugrpo_megatron.rewards.math.literal import gold_text, is_words, letter_of, letters_of, option_of, says_no_number
from mugrpo_megatron.rewards.math.normalize import REPEATING, normalize, split_top, without_words
from mugrpo_megatron.rewards.math.units import Unit, money, split_unit
from mugrpo_megatron.rewards.math.values import (
    PLAIN_NUMBER,
    Number,
    no_single_value,
    parsed,
    read_number,
    same,
    too_large,
)

_PLAIN_FRACTION = re.compile(r"[+-]?[0-9]*(?:\\frac ?\{?[0-9]+\}? ?\{?[0-9]+\}?|(?<=[0-9])/[0-9]+)")
_NUMBER_AND_NAME = re.compile(r"([+-]?[0-9]+(?:\.[0-9]+)?) ?\((?!mod\b)[A-Za-z]{3,}(?:[ -][A-Za-z]{2,})*\)")
IN_BASE = re.compile(r"([0-9][0-9A-Z]*) ?_ ?(?:\{ ?)?(?:\\text\{ ?)?([0-9]{1,2}|[a-z]+)[ }]*")
_EQUALS = r"(?<![<>!:=])=(?!=)|\\approx(?![A-Za-z])"
_CONSTANTS = frozenset({"\\pi", "e", "i", "\\infty"})
_NAME_DETAIL = re.compile(
    r"_(?:\{[^{}]*\}|\w)|\^\s*\{\s*-1\s*\}(?=\s*\()|(?<=\\(?:sin|cos|tan))\s*\^\s*\{?2\}?|(?<=[A-Za-z}'])\s*\([^()]*\)"
)
_NOT_A_NAME = re.compile(
    r"[0-9]|^\s*-|\\sqrt|^\s*(?:\\[a-z]+\s*\{)?\s*"
    r"(?i:not|no(?!\.)|never|if|unless|either|neither|maybe|perhaps|possibly|probably|un(?:known|clear|sure)|guess"
    r"|let|suppose|assum(?:e|ing)|about|approximately|roughly|almost|at\s+(?:least|most)|(?:more|less|fewer)\s+than"
    r"|(?:wrong|incorrect|false)\s+(?:answer|value|result|solution))\b"
)
"""Matches a side of an equation that is not a name: it has a digit or a root, or begins with a word such as "about"."""


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold answer. Kind `number` is a single value, `other` is compared by math-verify, and the other kinds as
    text."""

    text: str
    kind: Literal["number", "words", "choice", "choices", "base", "other"]
    plain: bool = False
    """Whether the gold is a number that is written out; then an answer that is an expression counts as not worked
    out."""
    parsed: list[Any] = field(default_factory=list)
    number: Number | None = None
    unit: Unit | None = None
    name: str = ""
    """The name on the left side of the equation that the gold is, such as `x` in `x = 5`; "" without one."""
    option: str = ""
    """The text that stands beside the gold's letter, if the gold is a choice."""
    repeating: bool = False
    """Whether the gold is a repeating decimal, with a bar over its digits; a decimal without the bar does not equal
    it."""


@lru_cache(maxsize=4096)
def read_gold(answer: str) -> Gold:
    r"""Normalize and parse a gold answer, or the last `\boxed{}` in it; ValueError when it is empty.

    A sentence about numbers or formulas is reduced to these. A text of words that also has a number stays whole.
    """
    sentence = gold_text(answer)
    text = normalize(sentence)
    if not text:
        raise ValueError("the gold answer is empty")
    if letter := letter_of(text):
        return Gold(letter, "choice")
    if option := option_of(text):
        return Gold(option[0], "choice", option=option[1])
    if letters := letters_of(text):
        return Gold(letters, "choices")
    if is_words(text):
        return Gold(text, "words")
    labelled = text
    if named := _NUMBER_AND_NAME.fullmatch(text):
        text = named[1]
    elif _single_value(split_unit(text)[0]) is None:
        text = _reduced(text, sentence if boxed_answer(answer) is None else "")
    if IN_BASE.fullmatch(text):
        return Gold(text, "base")
    value, unit = split_unit(text)
    single = _single_value(value)
    if single is not None:
        plain = bool(PLAIN_NUMBER.fullmatch(single) or _PLAIN_FRACTION.fullmatch(single))
        repeating = REPEATING.search(sentence) is not None
        return Gold(
            labelled if named else single,
            "number",
            plain,
            parsed(single),
            read_number(single),
            unit or money(sentence),
            left_side(text),
            repeating=repeating,
        )
    return Gold(text, "other", False, parsed(without_name(without_words(text))), name=_name_of_constants(text))


def _reduced(text: str, prose: str) -> str:
    """The formulas, or else the numbers, in `prose`, normalized; `prose` is the sentence from which the gold `text` was
    normalized.

    Returns `text` unchanged in three cases: it has no letter outside of LaTeX commands, `prose` is empty, or
    `says_no_number(prose)` is true.
    """
    if not prose or not re.search(r"(?<![\\A-Za-z])[A-Za-z]", text) or says_no_number(prose):
        return text
    return normalize(values_in_prose(prose))


def verifies_itself(response: str) -> float:
    """A reward function: 1.0 for a gold that is compared as text, or that math-verify finds equal to itself; else
    0.0."""
    try:
        read = read_gold(response)
    except ValueError:
        return 0.0
    return float(read.kind not in ("number", "other") or same(read.parsed, read.parsed))


def sides(text: str, operators: str = "") -> list[str]:
    """The sides of a chain of equations or approximations; a first or last side that is a name is left out.

    A name contains none of `operators`. The last side is left out only if the chain has two sides: `5 = x`.
    """
    parts = split_top(text, _EQUALS)
    named = [_is_name(side) and not any(sign in side for sign in operators) for side in parts]
    if len(parts) > 1 and named[0]:
        return parts[1:]
    return parts[:1] if len(parts) == 2 and named[1] and re.search("[0-9]", parts[0]) else parts


def left_side(text: str) -> str:
    """The name to which an equation gives a value: `x` in `x = 2 + 3 = 5` and in `5 = x`; "" for other text."""
    if len(split_top(text, ",")) > 1:
        return ""
    parts = split_top(text, _EQUALS)
    if len(parts) == 2 and not _is_name(parts[0]) and _is_name(parts[1]):
        return parts[1]
    return name_of(text)


_VARIABLES = re.compile(r"(?<![\\A-Za-z])[A-Za-z]")


def _name_of_constants(text: str) -> str:
    """The `left_side` of an equation whose value has no variables; "" for other text. An equation whose value has
    variables is compared whole."""
    parts = split_top(text, _EQUALS)
    return left_side(text) if len(parts) == 2 and not _VARIABLES.search(parts[1]) else ""


def name_of(text: str) -> str:
    """The name on the left side of an equation: `x` in `x = 5`; "" for other text."""
    parts = split_top(text, _EQUALS)
    return parts[0] if len(parts) > 1 and _is_name(parts[0]) else ""


def without_name(text: str) -> str:
    """The values of equations that all have the same name on their left: `1, 2` for `x = 1, x = 2`. Other text stays
    unchanged."""
    pairs = [split_top(element, _EQUALS) for element in split_top(text, ",")]
    if len(pairs) > 1 and all(len(pair) == 2 and _is_name(pair[0]) and pair[0] == pairs[0][0] for pair in pairs):
        return ", ".join(value for _, value in pairs)
    return text


def _is_name(side: str) -> bool:
    """Whether a side of an equation is a name and nothing else, such as `x_1`, `f(2)` or `total cost`.

    Without subscripts, arguments and exponents of a function's name, it has letters, but no digit, no root, no minus
    sign in front, and no first word such as "about", and it is no constant.
    """
    bare = _NAME_DETAIL.sub("", side)
    return bool(re.search("[A-Za-z]", bare)) and not _NOT_A_NAME.search(bare) and bare.strip() not in _CONSTANTS


def _single_value(text: str) -> str | None:
    """The number that a gold consists of, without its unit, or the first side of a chain such as `1/2 = 0.5`. None for
    any other gold."""
    if len(split_top(text, ",")) > 1:
        return None
    values = [split_unit(side)[0] for side in sides(text, "+-*/")]
    if any(no_single_value(value) or too_large(value, "") for value in values):
        return None
    return values[0] if read_number(values[0]) is not None else None
