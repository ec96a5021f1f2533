"""Reads a gold answer: its kind and its value, which decide how answers are compared with it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Literal

from mugrpo_megatron.rewards.ambiguity import no_single_value, too_large
from mugrpo_megatron.rewards.extract import boxed_answer, committed
from mugrpo_megatron.rewards.normalize import normalize, split_top, without_unit
from mugrpo_megatron.rewards.values import PLAIN_NUMBER, number, parsed, same

CHOICE = re.compile(r"\(?([A-Z])\)?")
_PLAIN_FRACTION = re.compile(r"[+-]?[0-9]*(?:\\frac ?\{?[0-9]+\}? ?\{?[0-9]+\}?|(?<=[0-9])/[0-9]+)")
_WORDS = re.compile(r"[A-Za-z]{3,}(?:[ -][A-Za-z]+)*")
_EQUALS = r"(?<![<>!:=])=(?!=)|\\approx(?![A-Za-z])"
_CONSTANTS = frozenset({"\\pi", "e", "i", "\\infty"})
_NAME_DETAIL = re.compile(r"[_^](?:\{[^{}]*\}|\w)|(?<=[A-Za-z}])\s*\([^()]*\)")


@dataclass(frozen=True, slots=True)
class Gold:
    """A gold answer: `number` takes one value only, `words` and `choice` are compared as text, `other` as a whole."""

    text: str
    kind: Literal["number", "words", "choice", "other"]
    plain: bool
    """Whether it is a written-out number, so that an expression counts as not worked out."""
    parsed: list[Any]


@lru_cache(maxsize=4096)
def read_gold(answer: str) -> Gold:
    r"""Normalize and parse a gold answer, or its last `\boxed{}`; ValueError when it is empty."""
    boxed = boxed_answer(answer)
    text = normalize(committed(answer) if boxed is None else boxed)
    if not text:
        raise ValueError("the gold answer is empty")
    if CHOICE.fullmatch(text):
        return Gold(text, "choice", False, [])
    if _WORDS.fullmatch(text):
        return Gold(text, "words", False, [])
    value = _single_value(without_unit(text))
    if value is not None:
        plain = bool(PLAIN_NUMBER.fullmatch(value) or _PLAIN_FRACTION.fullmatch(value))
        return Gold(value, "number", plain, parsed(value))
    return Gold(text, "other", False, parsed(without_name(text)))


def verifies_itself(answer: str, gold: str) -> float:
    """1.0 for a gold that is compared as text or equals itself in math-verify, else 0.0; a reward function."""
    try:
        read = read_gold(gold)
    except ValueError:
        return 0.0
    return float(read.kind in ("words", "choice") or same(read.parsed, read.parsed))


def sides(text: str, operators: str = "") -> list[str]:
    """The sides of a chain of equations or approximations, less a first side that is a name without `operators`."""
    found = split_top(text, _EQUALS)
    named = len(found) > 1 and _is_name(found[0]) and not any(sign in found[0] for sign in operators)
    return found[1:] if named else found


def without_name(text: str) -> str:
    """`x = 1, x = 2` becomes `1, 2`; text is unchanged unless every element assigns to the same name."""
    pairs = [split_top(element, _EQUALS) for element in split_top(text, ",")]
    if len(pairs) > 1 and all(len(pair) == 2 and _is_name(pair[0]) and pair[0] == pairs[0][0] for pair in pairs):
        return ", ".join(value for _, value in pairs)
    return text


def _is_name(side: str) -> bool:
    """Whether a side only names the unknown: it has letters, and digits only in indices, powers and arguments."""
    bare = _NAME_DETAIL.sub("", side)
    return bool(re.search("[A-Za-z]", bare)) and not re.search("[0-9]", bare) and bare.strip() not in _CONSTANTS


def _single_value(text: str) -> str | None:
    """The first value of a gold that is one number, else None."""
    values = [without_unit(side) for side in sides(text, "+-*/")]
    if any(no_single_value(value) or too_large(value, "") for value in values):
        return None
    return values[0] if number(values[0]) is not None else None
