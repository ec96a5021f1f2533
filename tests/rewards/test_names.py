"""The left side of an equation counts where it differs from the gold's."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.compare import compare_answer
from mugrpo_megatron.rewards.math.names import name_different_things

FUNCTIONS = ("\\sin", "\\cos", "\\tan", "\\cot", "\\ln", "\\log", "\\exp")
DIFFERENT = (
    ("\\sin B", "\\sin C"),
    ("\\tan x", "x"),
    ("\\log_2 x", "\\log_5 x"),
    ("g(4)", "g(5)"),
    ("P(B)", "P(C)"),
    ("k", "m"),
    ("b_1", "b_2"),
    ("PQ", "PR"),
    ("\\angle PQR", "\\angle QPR"),
    ("h'(x)", "h(x)"),
    ("\\alpha", "\\gamma"),
    ("\\Delta t", "t"),
    ("\\overline{w}", "w"),
    ("\\frac{PQ}{RS}", "\\frac{RS}{PQ}"),
    ("E(Y)", "P(Y)"),
    ("E(Y)", "\\mathrm{Var}(Y)"),
    ("\\mathbb{E}[Y]", "\\operatorname{Cov}(Y, Z)"),
    ("\\mathrm{Cov}(Y, Z)", "\\mathrm{Cov}(Y, W)"),
    ("\\mathbb{P}(B)", "\\Pr(C)"),
    ("\\mathrm{Re}(w)", "\\Im(w)"),
    ("\\mathrm{tr}(M)", "\\det M"),
    ("\\mathrm{rank}(M)", "\\dim M"),
    ("Q", "q"),
    ("\\text{mean}", "\\text{median}"),
    ("\\text{largest root}", "\\text{smallest root}"),
)
ALIKE = (
    ("PQ", "QP"),
    ("\\overline{PQ}", "|PQ|"),
    ("\\angle PQR", "\\angle RQP"),
    ("m\\angle P", "\\angle P"),
    ("\\sin(t)", "\\sin t"),
    ("y", "f(x)"),
    ("h(n)", "h(x)"),
    ("S", "[PQR]"),
    ("b", "b_1"),
    ("V", "\\text{Volume}"),
    ("\\mathbf{w}", "w"),
    ("S_{n}", "S_n"),
    ("\\text{Area}", "\\text{area of the square}"),
    ("", "x"),
    ("x", ""),
    ("E[Y]", "E(Y)"),
    ("\\mathbb{E}[Y]", "E(Y)"),
    ("\\mathrm{Var}(Y)", "\\operatorname{Var}(Y)"),
    ("\\mathrm{Var}[Y]", "Var(Y)"),
    ("\\Pr(B)", "P(B)"),
    ("\\mathbb{P}(B)", "P(B)"),
    ("\\Re(w)", "\\text{Re}(w)"),
    ("\\bar{w}", "\\overline{w}"),
)


@pytest.mark.parametrize(("left", "right"), DIFFERENT)
def test_other_left_sides(left: str, right: str) -> None:
    assert name_different_things(left, right)
    assert name_different_things(right, left)
    assert compare_answer(f"{left} = 8", f"{right} = 8")[0] == 0.0
    assert compare_answer(f"{left} = 8", f"{right} = 8", "lenient")[0] == 0.0


@pytest.mark.parametrize(("left", "right"), ALIKE)
def test_left_sides_that_may_name_one_thing(left: str, right: str) -> None:
    assert not name_different_things(left, right)
    assert not name_different_things(right, left)
    answer, gold = (f"{side} = 8" if side else "8" for side in (left, right))
    assert compare_answer(answer, gold) == (1.0, "equal")


@given(st.sampled_from(FUNCTIONS), st.sampled_from(FUNCTIONS), st.sampled_from("xyABt"), st.integers(1, 50))
def test_functions(one: str, other: str, argument: str, value: int) -> None:
    gold, answer = f"{one} {argument} = \\frac{{{value}}}{{53}}", f"{other}({argument}) = \\frac{{{value}}}{{53}}"
    assert compare_answer(answer, gold)[0] == float(one == other)
    assert compare_answer(f"\\frac{{{value}}}{{53}}", gold)[0] == 1.0


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("B = \\{3, 4\\}", "C = \\{3, 4\\}", False),
        ("P = (3, 4)", "Q = (3, 4)", False),
        ("P = (3, 4)", "(3, 4)", True),
        ("t = 1, s = 2", "a = 1, b = 2", True),
        ("\\sin B = 1, \\cos B = 0", "\\sin C = 1, \\cos C = 0", False),
        ("y = 2 + 6 = 8", "x = 8", False),
        ("8 = x", "8 = y", False),
        ("8 = x", "x = 8", True),
        ("x = 2y + 1", "y = \\frac{x - 1}{2}", True),
        ("g(t) = 3t - 1", "y = 3t - 1", True),
        ("y = 3t - 1", "g(t) = 3t - 1", True),
        ("y = 3t + 1", "g(t) = 3t - 1", False),
        ("S = 3t - 1", "g(t) = 3t - 1", False),
        ("y = 3s - 1", "g(t) = 3t - 1", False),
    ],
)
def test_chains_tuples_and_whole_equations(answer: str, gold: str, equal: bool) -> None:
    assert compare_answer(answer, gold)[0] == float(equal)
