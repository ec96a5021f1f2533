"""When a program's output or result counts as the expected one."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.sandbox.code import same, same_output, same_value

WORDS = st.text(st.characters(codec="utf-8", categories=("L", "N", "P")), min_size=1, max_size=8)
LINES = st.lists(st.lists(WORDS, min_size=1, max_size=4), min_size=1, max_size=4)


@given(LINES, st.sampled_from([" ", "  ", "\t"]), st.sampled_from(["", "\n", " \n\n"]))
def test_white_space_does_not_count(lines: list[list[str]], space: str, end: str) -> None:
    expected = "\n".join(" ".join(line) for line in lines)
    written = "\n".join(space.join(line) + space for line in lines) + end
    assert same_output(written.encode(), expected)
    assert not same_output((written + "\nmore").encode(), expected)


@pytest.mark.parametrize(
    ("written", "expected", "equal"),
    [
        ("1\n2", "1 2", False),
        ("01", "1", True),
        ("+7", "7", True),
        ("1.0", "1", False),
        ("1", "1.0", True),
        ("0.333333", "0.3333333333", True),
        ("0.33333", "0.3333333333", False),
        ("1000000.5", "1000000.0", True),
        ("1e-7", "0.0", True),
        ("nan", "1.0", False),
        ("inf", "1e999", False),
        ("1e999", "1e999", True),
        ("yes", "YES", False),
        ("", "", True),
        ("", "0", False),
        ("9" * 5000, "9" * 5000, True),
        ("9" * 5000, "9" * 4999 + "8", False),
        ("1." + "0" * 10**6, "1.0", False),
    ],
)
def test_words(written: str, expected: str, equal: bool) -> None:
    assert same_output(written.encode(), expected) is equal


@pytest.mark.parametrize(
    ("result", "expected", "equal"),
    [
        ((1, [2, (3,)]), [1, [2, [3]]], True),
        ([1], [1, 2], False),
        (1, 1.0000001, True),
        (1.0000001, 1, False),
        (True, 1, False),
        (True, True, True),
        ({1: [2]}, {"1": [2]}, True),
        ({1: 2, "1": 3}, {"1": 3}, False),
        ("1", 1, False),
        (None, None, True),
        ({1, 2}, [1, 2], False),
        (10**400, 1.0, False),
    ],
)
def test_values(result: Any, expected: Any, equal: bool) -> None:
    assert same(result, expected) is equal


def test_depth_costs_no_stack() -> None:
    deep: Any = []
    for _ in range(100_000):
        deep = [deep]
    assert same(deep, deep)


@pytest.mark.parametrize(
    ("lines", "passed"),
    [
        (['{"value": {"handle": 0}}', '{"value": {"dict": [["result", 3], ["arguments", []]]}}'], True),
        (['{"value": {"handle": 0}}', '{"value": {"dict": [["result", 4]]}}'], False),
        (['{"value": {"handle": 0}}'], False),
        (['{"error": "AttributeError", "text": "f"}', '{"error": "IndexError", "text": ""}'], False),
        (["x", "{"], False),
        (["x", "[" * 100_000], False),
        (["x", "[]"], False),
        (["x", '{"value": {"handle": 1}}'], False),
        (["x", '{"value": 3}'], False),
        (["x", '{"error": 3}'], False),
        ([], False),
    ],
)
def test_answers_of_a_program_that_may_have_written_them_itself(lines: list[str], passed: bool) -> None:
    assert same_value("\n".join(lines).encode(), [3])[0] is passed
