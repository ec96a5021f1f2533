from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.extract import answer_of


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("933", "933"),
        (" -7\n", "-7"),
        ("So \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("final answer is $4$, no, it is \\boxed{3}", "3"),
        ("\\boxed{4} was wrong. It is \\boxed{3}", "3"),
        ("\\boxed{1} and \\boxed{2}", "1, 2"),
        ("$\\boxed{k = 45} \\quad \\text{and} \\quad \\boxed{n = 2}$", "k = 45, n = 2"),
        ("\\boxed{3} unfinished \\boxed{4", "3"),
        ("\\boxed{\\boxed{3}}", "\\boxed{3}"),
        ("\\boxed{4 \\boxed{3}", "3"),
        ("\\boxed{\\left\\{ x \\right.}", "\\left\\{ x \\right."),
        ("\\fbox{3} }", "3"),
        ("reasoning\n#### 42", "42"),
        ("The answer is 0.5.", "0.5"),
        ("The answer is 3 or 4", "3, 4"),
        ("She pays 3 times, so it costs 18 dollars per day", "18"),
        ("We get $x$ and then $\\frac{1}{2}$ in the end", "\\frac{1}{2}"),
        ("", ""),
        ("\\boxed{}", ""),
    ],
)
def test_where_the_answer_stands(response: str, answer: str) -> None:
    assert answer_of(response) == answer


@given(st.text(max_size=300))
def test_an_answer_is_made_of_what_the_response_says(text: str) -> None:
    assert all(part in text for part in answer_of(text).split(", "))
