"""Values travel between jails as copies of plain data, or as handles."""

from __future__ import annotations

import collections
import json
import math
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.sandbox.value_codec import pack, unpack

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
