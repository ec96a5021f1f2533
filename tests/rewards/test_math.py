from __future__ import annotations

import json
from pathlib import Path

import pytest

from mugrpo_megatron.rewards.math.compare import compare_answer
from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.gold import read_gold
from mugrpo_megatron.rewards.math.values import same

HEDGES = [
    "The answer is 3 or 4", "The answer is 3, or 4, or 5.", "\\boxed{4=3}", "\\boxed{3=4}", "\\boxed{x=4=3}",
    "\\boxed{3 \\approx 4}", "\\boxed{4 \\approx 3}", "\\boxed{3,4}", "\\boxed{3 \\lor 4}", "\\boxed{4 \\lor 3}",
    "\\boxed{3 \\text{ or } 4}", "\\boxed{4 \\to 3}", "\\boxed{4 \\Rightarrow 3}", "\\boxed{4 \\cup 3}",
    "\\boxed{3 \\bmod 4}", "\\boxed{3 (or 4)}", "\\boxed{4 (or 3)}", "\\boxed{3 \\text{ (maybe 4)}}",
    "\\boxed{4 & 3}", "\\boxed{3 4}", "\\boxed{2\\quad 1}", "\\boxed{3} and \\boxed{4}", "\\boxed{\\{3, 4\\}}",
    "\\boxed{\\pm 3}", "\\boxed{x > 3}", "\\boxed{3/4=3}", "\\boxed{x \\in \\{3, 4\\}}", "\\boxed{\\max(3, 2)}",
    "\\boxed{2.9999999}", "\\boxed{1+2}", "\\boxed{3!/2}", "\\boxed{\\binom{3}{1}}", "\\boxed{2 \\cdot 1.5}",
]  # fmt: skip


@pytest.mark.parametrize("response", HEDGES)
def test_a_hedge_gains_nothing(response: str) -> None:
    assert compare_answer(answer_of(response), "3")[0] == 0.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("(-2,1)", "1,-2"),
        ("1,-2,5", "1,-2"),
        ("347+586", "933"),
        ("y^2", "x^2"),
        ("[1,2]", "(1,2)"),
        ("(2,1)", "(1,2)"),
        ("tac", "cat"),
        ("B", "A"),
        ("", "0"),
        ("x+1+0.01", "x+1"),
        ("E", "E'"),
        ("]2,7[", "[2,7]"),
        ("[2,7[", "[2,7]"),
        ("1'23", "123"),
        ("7 to 2", "2"),
        ("\\lfloor y \\rfloor", "\\lfloor x \\rfloor"),
        ("\\lfloor y \\rfloor", "\\lceil y \\rceil"),
    ],
)
def test_what_differs_is_refused(answer: str, gold: str) -> None:
    assert compare_answer(answer, gold)[0] == 0.0


@pytest.mark.parametrize(
    ("answer", "gold"),
    [
        ("x = 3", "3"),
        ("347+586=933", "933"),
        ("x = \\frac{22}{7} \\approx 3.14", "\\frac{22}{7}"),
        ("3 \\text{ apples}", "3"),
        ("18 dollars per day", "18"),
        ("\\$18", "18"),
        ("1 1/2", "1.5"),
        ("2.5e3", "2500"),
        ("1,234", "1234"),
        ("12{,}345", "12345"),
        ("\\frac12", "0.5"),
        ("-2, 1", "1,-2"),
        ("\\{-2, 1\\}", "1,-2"),
        ("1,-2", "(1,-2)"),
        ("\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", "(1,2)"),
        ("x = -1 \\text{ or } x = 4", "-1, 4"),
        ("2x+1+x^2", "(x+1)^2"),
        ("y = 2x+3", "y = 3+2x"),
        ("\\text{(C)}", "C"),
        ("C. x = 42", "C"),
        ("evelyn", "\\text{Evelyn}"),
        ("1+2i", "i(2-i)"),
        ("50\\%", "50"),
        ("40\\pi", "125.66"),
        ("2.6667", "\\frac{8}{3}"),
        ("0.5", "My work, then \\boxed{\\frac{1}{2}}"),
        ("1'234'567", "1234567"),
        ("1_234_567", "1234567"),
        ("2.5 x 10^3", "2500"),
        ("ln7", "\\ln 7"),
        ("log_{3}7", "\\log_3 7"),
        ("3sin x", "3\\sin x"),
        ("\\text{Total cost: } 7", "7"),
        ("[2,7[", "[2,7)"),
        ("]2,7]", "(2,7]"),
        ("]-\\infty,2[\\cup]7,9]", "(-\\infty,2)\\cup(7,9]"),
        ("All real numbers", "\\mathbb{R}"),
        ("7 to 2", "7:2"),
        ("7 over 2", "\\frac{7}{2}"),
        ("\\tan^{-1} 7", "\\arctan 7"),
        ("arctan 7", "\\arctan 7"),
        ("\\lg 7", "\\log_{10} 7"),
        ("\\lfloor y \\rfloor", "\\lfloor y \\rfloor + 0"),
    ],
)
def test_other_spellings_are_accepted(answer: str, gold: str) -> None:
    assert compare_answer(answer, gold) == (1.0, "equal")


def test_the_lenient_policy_takes_unfinished_sums() -> None:
    assert compare_answer("347+586", "933", "lenient")[0] == 1.0


def test_an_empty_gold_is_equal_to_nothing() -> None:
    assert compare_answer("", " $ $ ")[0] == 0.0
    with pytest.raises(ValueError, match="empty"):
        read_gold("\\boxed{}")


def test_labelled_cases(shared_data: Path) -> None:
    cases = [json.loads(line) for line in (shared_data / "verifier_cases.jsonl").read_text().splitlines()]
    verdicts = [compare_answer(answer_of(case["pred"]), case["gold"])[0] == 1.0 for case in cases]
    right = sum(verdict == case["equal"] for verdict, case in zip(verdicts, cases, strict=True))
    assert right >= 0.95 * len(cases)


@pytest.mark.parametrize("name", ["math500", "gsm8k_test", "aime24", "aime25", "amc23"])
def test_golds_of_real_sets_equal_their_boxed_selves(shared_data: Path, name: str) -> None:
    golds = [json.loads(line)["answer"] for line in (shared_data / f"{name}.jsonl").read_text().splitlines()]
    assert [gold for gold in golds if compare_answer(answer_of(f"So \\boxed{{{gold}}}"), gold) != (1.0, "equal")] == []
    read = [read_gold(gold) for gold in golds]
    assert [gold.text for gold in read if gold.kind in ("number", "other") and not same(gold.parsed, gold.parsed)] == []
