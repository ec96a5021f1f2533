"""Compares what a program wrote or returned with what a test expects.

Text is compared line by line, a line word by word: white space at the ends and its amount do not count. Words are equal
as text, or as numbers: integers exactly, and within TOLERANCE where a number of the expected output is written with a
decimal point or an exponent. Values are compared by their content, lists and tuples alike.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from typing import Any

from mugrpo_megatron.extras.sandbox.packed import unpack

TOLERANCE = 1e-6
"""Absolute, and relative to the expected number: what most problem statements allow."""
_INTEGER = re.compile(r"[+-]?[0-9]{1,4000}")
_NUMBER = re.compile(r"[+-]?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4})?")


def same_output(written: bytes, expected: str) -> bool:
    """Whether a program's stdout is the expected text."""
    return _words(written.decode("utf-8", "replace"), expected)


def _words(written: str, expected: str) -> bool:
    lines, wanted = written.strip().splitlines(), expected.strip().splitlines()
    return len(lines) == len(wanted) and all(map(_same_line, lines, wanted))


def _same_line(line: str, wanted: str) -> bool:
    words, others = line.split(), wanted.split()
    return len(words) == len(others) and all(map(_same_word, words, others))


def _same_word(word: str, wanted: str) -> bool:
    if word == wanted:
        return True
    if _INTEGER.fullmatch(wanted):
        return _INTEGER.fullmatch(word) is not None and int(word) == int(wanted)
    if len(wanted) > 400 or len(word) > 400 or not _NUMBER.fullmatch(wanted) or not _NUMBER.fullmatch(word):
        return False
    return _close(float(word), float(wanted))


def same_value(answers: bytes, expected: Sequence[Any]) -> tuple[bool, str]:
    """Whether what `served.py` wrote ends with a result that equals one of `expected`; with the reason if not."""
    lines = answers.splitlines()
    if len(lines) < 2:
        return False, "returned nothing: the program ended first"
    try:
        answer = json.loads(lines[1])
        if "error" in answer:
            first = json.loads(lines[0])
            told = first if "error" in first else answer
            return False, f"{told['error']}: {str(told['text'])[:160]}"
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
            if not _close(left, right):
                return False
        elif (type(left) is bool) != (type(right) is bool) or left != right:
            return False
    return True


def _close(value: float, expected: float) -> bool:
    try:
        return value == expected or math.isclose(value, expected, rel_tol=TOLERANCE, abs_tol=TOLERANCE)
    except OverflowError:  # an integer that is larger than every float
        return False


def _refused(_handle: dict[str, Any]) -> Any:
    raise TypeError
