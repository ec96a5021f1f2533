"""When a program's output or result counts as the expected one, and values that stand for others."""

from __future__ import annotations

import collections
import json
import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.sandbox.code import same, same_output, same_value
from mugrpo_megatron.extras.sandbox.value_codec import pack, unpack

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


_SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
_KEYS = st.integers() | st.text() | st.tuples(st.integers(), st.text())
PLAIN = st.recursive(
    _SCALARS | st.frozensets(_KEYS) | st.sets(_KEYS) | st.complex_numbers(allow_nan=False),
    lambda inner: st.lists(inner) | st.lists(inner).map(tuple) | st.dictionaries(_KEYS, inner),
    max_leaves=20,
)


class Point(NamedTuple):
    x: int
    y: int


def refuse(value: Any) -> Any:
    raise AssertionError(value)


@given(PLAIN)
def test_plain_data_arrives_as_it_is(value: Any) -> None:
    arrived = unpack(json.loads(json.dumps(pack(value, refuse))), refuse)
    assert arrived == value
    assert type(arrived) is type(value)


def test_a_type_of_the_programs_own_does_not_travel() -> None:
    class Text(str):
        pass

    class Pair(list[int]):
        def __eq__(self, other: object) -> bool:
            return True

    for value in (Text("a"), Pair(), object(), range(3), iter(()), lambda: 0):
        assert pack(value, lambda _: "handle") == "handle"
    assert pack([Pair()], lambda _: "handle") == ["handle"]


def test_containers_of_the_library_travel_as_their_content() -> None:
    for value, plain in (
        (collections.Counter("aab"), {"a": 2, "b": 1}),
        (collections.defaultdict(list, {1: [2]}), {1: [2]}),
        (Point(1, 2), (1, 2)),
    ):
        assert unpack(pack(value, refuse), refuse) == plain
    assert math.isnan(unpack(pack(math.nan, refuse), refuse))


@pytest.mark.parametrize("packed", [{"list": 3}, {"dict": [1]}, {"a": 1, "b": 2}, {}, {"float": "x"}, {"bytes": "z"}])
def test_what_nobody_packed_is_refused(packed: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        unpack(packed, lambda _: _raise())


def _raise() -> Any:
    raise TypeError
