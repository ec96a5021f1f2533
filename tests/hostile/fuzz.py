"""What the night's fuzzing shares: JSON that nothing expects, and values changed at one place.

`pytest -m night tests/hostile --hypothesis-profile long` takes 20,000 cases of each property instead of 100.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

from tests.hostile.damage import ODD_JSON

WORDS = st.text(max_size=6) | st.sampled_from(
    ["1", "\\boxed{", "$", "\n", "```python\n", "assert ", "\0", "\ud800", "é"]
)
TEXTS = st.lists(WORDS, max_size=6).map("".join)
ODD = st.recursive(
    st.sampled_from(ODD_JSON) | TEXTS | st.integers() | st.floats() | st.booleans() | st.none(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=6,
)
"""Any JSON value, those that break programs more often than others."""


@st.composite
def changed(draw: st.DrawFn, value: Any, odd: st.SearchStrategy[Any] = ODD, most: int = 3) -> Any:
    """The JSON value with up to `most` places changed: another value, a key less, a key more, an item twice."""
    result = copy.deepcopy(value)
    for _ in range(draw(st.integers(1, most))):
        if not (places := list(_places(result))):
            break
        holder, key = draw(st.sampled_from(places))
        kind = draw(st.sampled_from(["replace", "replace", "replace", "remove", "more", "twice"]))
        if kind == "remove":
            del holder[key]
        elif kind == "twice" and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        elif kind == "more" and isinstance(holder, dict):
            holder[draw(TEXTS)] = copy.deepcopy(draw(odd))
        else:
            holder[key] = copy.deepcopy(draw(odd))
    return result


def _places(value: Any) -> Iterator[tuple[Any, Any]]:
    """(container, key or index) of every value inside."""
    for key in list(value) if isinstance(value, dict) else range(len(value)):
        yield value, key
        if isinstance(value[key], dict | list):
            yield from _places(value[key])
