"""Compares what a program wrote or returned with what a test expects.

Text is compared line by line, a line word by word: white space at the ends and its amount do not count. Words are equal
as text, or as numbers: integers exactly, and within `close` where a number of the expected output is written with a
decimal point or an exponent. Values are compared by their content, lists and tuples alike.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from decimal import Decimal
from typing import Any

from mugrpo_megatron.extras.sandbox.packed import unpack

TOLERANCE = "1e-6"
"""Relative to the expected number, as most problem statements allow; absolute where that is less than what it shows."""
_MOST_BITS = 1100
"""A float has fewer."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def same_output(written: bytes, expected: str) -> bool:
    """Whether a program's stdout is the expected text."""
    lines, others = written.decode("utf-8", "replace").strip().splitlines(), expected.strip().splitlines()
    return len(lines) == len(others) and all(map(_same_line, lines, others))


def _same_line(line: str, expected: str) -> bool:
    words, others = line.split(), expected.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, expected: str) -> bool:
    if word == expected:
        return True
    if _INTEGER.fullmatch(expected):
        return _INTEGER.fullmatch(word) is not None and int(word) == int(expected)
    if len(expected) > 400 or len(word) > 400 or not _NUMBER.fullmatch(expected) or not _NUMBER.fullmatch(word):
        return False
    return close(Decimal(word), Decimal(expected))


def same_value(answers: bytes, expected: Sequence[Any]) -> tuple[bool, str]:
    """Whether what `served.py` wrote ends with a result that equals one of `expected`; with the reason if not."""
    lines = answers.splitlines()
    if len(lines) < 2:
        return False, "returned nothing: the program ended first"
    try:
        answer = json.loads(lines[1])
        if "error" in answer:
            first = json.loads(lines[0])
            problem = first if "error" in first else answer
            return False, f"{problem['error']}: {str(problem['text'])[:160]}"
        result = unpack(answer["value"], _refused)["result"]
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError, OverflowError):
        return False, "returned a value that is not plain data"
    return any(same(result, one) for one in expected), "differs from the expected result"


def same(result: Any, expected: Any) -> bool:
    """Whether two values are equal. Iterative, because a program chooses the depth of what it returns."""
    pairs = [(result, expected)]
    while pairs:
        left, right = pairs.pop()
        if isinstance(left, list | tuple) and isinstance(right, list | tuple):
            if len(left) != len(right):
                return False
            pairs += zip(left, right, strict=True)
        elif isinstance(left, dict) and isinstance(right, dict):
            texts = {str(key): value for key, value in left.items()}  # in JSON every key is text
            if texts.keys() != right.keys() or len(texts) != len(left):
                return False
            pairs += [(texts[key], right[key]) for key in right]
        elif isinstance(right, float) and type(left) in (int, float):
            if (type(left) is int and left.bit_length() > _MOST_BITS) or not close(
                Decimal(repr(left)), Decimal(repr(right))
            ):
                return False
        elif (type(left) is bool) != (type(right) is bool) or left != right:
            return False
    return True


def close(value: Decimal, expected: Decimal) -> bool:
    """Whether a number is the expected one to TOLERANCE, or to half a unit of the last digit that the latter shows.

    So the 0 for which one wrote 0.0000001 is wrong, and 1e-12 is right where 0.0 is expected.
    """
    if value == expected:
        return True
    if not (value.is_finite() and expected.is_finite()):
        return False
    exponent = int(expected.as_tuple().exponent)
    shown = min(Decimal(TOLERANCE), Decimal((0, (5,), exponent - 1)))
    return abs(value - expected) <= max(Decimal(TOLERANCE) * abs(expected), shown)


def _refused(_handle: dict[str, Any]) -> Any:
    raise TypeError
