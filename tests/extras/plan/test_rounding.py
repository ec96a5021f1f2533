"""Two digits, whatever the size."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.extras.plan.printing import about, two_digits


@given(st.floats(1e-9, 1e12))
def test_two_digits_are_within_half_a_step_of_the_value(value: float) -> None:
    said = two_digits(value)
    assert float(said.replace(",", "")) == pytest.approx(value, rel=0.0501)
    assert len(said.replace(",", "").replace(".", "").strip("0")) <= 2


@pytest.mark.parametrize(
    ("value", "said"),
    [
        (0, "0"),
        (0.00412, "0.0041"),
        (0.996, "1.0"),
        (9.26, "9.3"),
        (9.99, "10"),
        (37.1, "37"),
        (156.2, "160"),
        (9_212, "9,200"),
    ],
)
def test_examples(value: float, said: str) -> None:
    assert two_digits(value) == said


@pytest.mark.parametrize(
    ("seconds", "said"), [(0, "0 s"), (0.71, "0.71 s"), (28.2, "28 s"), (558, "9.3 min"), (133_620, "37 h")]
)
def test_times_are_in_the_largest_unit_of_which_there_is_one(seconds: float, said: str) -> None:
    assert about(seconds) == said
