"""Shares of the night tests, and what tests cost."""

from __future__ import annotations

from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st

from tests.costs import Cost, read, sums, tier_of, top, write
from tests.nights import LONGEST_S, SHARES, chosen, distribute, read_shares, write_shares

CASES = st.dictionaries(
    st.tuples(st.integers(0, 5), st.integers(0, 5)).map(lambda pair: f"tests/test_{pair[0]}.py::test_a[{pair[1]}]"),
    st.floats(0, LONGEST_S / 4),
)


@given(CASES, st.sets(st.integers(0, 99).map(lambda number: f"tests/test_new.py::test_{number}")))
def test_every_test_is_in_one_of_twelve_landings(measured: dict[str, float], new: set[str]) -> None:
    shares = distribute(measured)
    cases = [*measured, *new]
    parts = [chosen(cases, number, shares) for number in range(1_000, 1_000 + SHARES)]
    assert sorted(case for part, _ in parts for case in part) == sorted(cases)
    loads = [seconds for part, seconds in parts]
    if not new and measured:
        assert max(loads) <= sum(measured.values()) / SHARES + LONGEST_S / 4 + SHARES


def test_shares_follow_what_was_measured(tmp_path: Path) -> None:
    costs = [
        Cost("test", "tests/a/test_a.py::test_long[1]", "night", 800.0, 700.0),
        Cost("test", "tests/a/test_a.py::test_long[2]", "night", 300.0, 100.0),
        Cost("test", "tests/test_b.py::test_quick[x-1]", "night", 2.0, 1.0),
        Cost("fixture", "model of tests/a", "", 9.0, 8.0),
    ]
    write(tmp_path / "seconds.tsv", costs)
    assert read(tmp_path / "seconds.tsv") == sorted(costs, key=lambda cost: -cost.cpu)
    write_shares(tmp_path / "seconds.tsv", tmp_path / "nights.tsv")
    assert read_shares(tmp_path / "nights.tsv") == {
        "tests/a/test_a.py::test_long[1]": (0, 800.0),
        "tests/a/test_a.py::test_long[2]": (1, 300.0),
        "tests/test_b.py::test_quick": (2, 2.0),
    }
    assert top(costs, 1) == [" 700.0  800.0  tests/a/test_a.py::test_long[1]"]
    assert top(costs, 1, "fixture") == ["   8.0    9.0  model of tests/a"]
    assert sums(costs, "room") == [" 808.0 1109.0     3  tests/a", "   1.0    2.0     1  tests"]
    assert tier_of(["process", "night"]) == "night"
    assert tier_of([]) == "quick"
