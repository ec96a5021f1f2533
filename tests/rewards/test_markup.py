"""Emphasis, end tokens, answer tags, rows of equations and options around an answer."""

from __future__ import annotations

import pytest

from mugrpo_megatron.rewards.math.extract import answer_of
from mugrpo_megatron.rewards.math.markup import answering_turn, without_markup
from tests.rewards.verdicts import right

EMPHASIS = (
    "**{}**",
    "*{}*",
    "__{}__",
    "_{}_",
    "***{}***",
    "_**{}**_",
    "`{}`",
    "=={}==",
    "<b>{}</b>",
    "<strong>{}</strong>",
    "<em>{}</em>",
    "<u>{}</u>",
    "**{}.**",
)


@pytest.mark.parametrize("emphasis", EMPHASIS)
@pytest.mark.parametrize(
    "around", ["{}", "Answer: {}", "**Answer:** {}", "So we get 5 and then\n\n{}", "Total {} apples"]
)
def test_emphasis(emphasis: str, around: str) -> None:
    assert right(around.format(emphasis.format("58")), "58")
    assert not right(around.format(emphasis.format("57")), "58")


@pytest.mark.parametrize("text", ["2*3*4", "x_1", "x_1 + x_2", "a*b", "3 * 4", "f_*", "snake_case_name", "{}_2F_1(a)"])
def test_what_is_no_emphasis(text: str) -> None:
    assert without_markup(text) == text


@pytest.mark.parametrize(
    "around",
    [
        "“{}”",
        "„{}“",
        "‘{}’",
        "'{}'",
        "«{}»",
        "「{}」",
        "『{}』",
        "【{}】",
        "✅ {}",
        "{} 🎉",
        "👉{}",
        "∴ {}",
        "= {}",
        "→ {}",
    ],
)
def test_quotation_marks_and_decoration(around: str) -> None:
    for answer in ("58", "\\frac{1}{58}", "x=58"):
        assert right(around.format(answer), answer)
    assert right(around.format("58"), "58")
    assert not right(around.format("57"), "58")


@pytest.mark.parametrize("answer", ["57 = 58", "57 → 58", "=> 58", "~58", "58'", "58 to 57", "57 over 58", "arctan 58"])
def test_what_is_no_decoration(answer: str) -> None:
    assert not right(answer, "58")


def test_struck_text_fences_and_exponents() -> None:
    assert right("~~57~~ 58", "58")
    assert not right("~~58~~ 57", "58")
    assert right("```\n58\n```", "58")
    assert right("x<sup>3</sup>", "x^3")
    assert right("### 58", "58")


ENDS = (
    "<|im_end|>",
    "</s>",
    "<eos>",
    "<|eot_id|>",
    "<|end_of_text|>",
    "<｜end▁of▁sentence｜>",
    "<end_of_turn>",
    "<|return|>",
    "<|eom_id|>",
    "<|endoftext|><|endoftext|>",
    "[EOS]",
    "<|im_end|>\n",
    "<|a_token_of_tomorrow|>",
    "[|endofturn|]",
    "[|endofturn|]\n[|user|]And 60?",
    "[e~[",
    "<seed:eos>",
    "<eoa>",
    "<reserved_107>",
    "<extra_id_1>",
    "<SPECIAL_12>",
    "<[EOS_never_used]>",
)


@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(
    "response", ["58", "The answer is 58", "\\boxed{58}", "#### 58", "<answer>58", "<think>57</think>58"]
)
def test_end_tokens(response: str, end: str) -> None:
    assert answer_of(response + end) == "58"


def test_only_the_assistants_last_turn_counts() -> None:
    assert answer_of("58<|im_end|>\n<|im_start|>user\nAnd 60?<|im_end|>") == "58"
    assert answer_of("call<|im_end|><|im_start|>tool\n57<|im_end|><|im_start|>assistant\n58<|im_end|>") == "58"
    assert answering_turn("x < y and [1, 2]") == "x < y and [1, 2]"


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>58", "58"),
        ("so\n<answer>\n58\n", "58"),
        ("<answer>58</", "58"),
        ("it is 58</answer>", "it is 58"),
        ("<answer>57</answer> wait <answer>58", "58"),
        ("<answer>57</answer><answer>58</answer>", "57, 58"),
        ("<final_answer>58", "58"),
        ("<|begin_of_box|>58<|end_of_box|>", "58"),
        ("<answer>", ""),
    ],
)
def test_answer_tags_that_are_cut(response: str, answer: str) -> None:
    got = answer_of(response)
    assert got == answer or (answer == "it is 58" and got == "58")


@pytest.mark.parametrize(
    ("answer", "gold", "equal"),
    [
        ("\\begin{aligned} p &= 4 \\\\ q &= 9 \\end{aligned}", "p=4, q=9", True),
        ("\\begin{cases} p = 4 \\\\ q = 9 \\end{cases}", "(4, 9)", True),
        ("\\begin{cases} p = 9 \\\\ q = 4 \\end{cases}", "(4, 9)", False),
        ("\\left\\{\\begin{array}{l} p = 4 \\\\ q = 9 \\end{array}\\right.", "p=4, q=9", True),
        ("\\begin{split} V &= 3 + 5 \\\\ &= 8 \\end{split}", "8", True),
        ("\\begin{aligned} V &= 7 \\\\ &= 8 \\end{aligned}", "7", False),
        ("\\begin{aligned} & t = 2 \\\\ & t = -2 \\end{aligned}", "2, -2", True),
        ("\\begin{aligned} & t = 2 \\\\ & t = -2 \\end{aligned}", "2", False),
        ("V &= 8", "8", True),
        ("\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", "\\begin{pmatrix} 1 & 2 \\\\ 3 & 4 \\end{pmatrix}", True),
    ],
)
def test_rows_of_equations(answer: str, gold: str, equal: bool) -> None:
    assert right(f"\\boxed{{{answer}}}", gold) is equal


@pytest.mark.parametrize("name", ["align", "align*", "gather*", "eqnarray*", "multline", "flalign"])
@pytest.mark.parametrize("outer", ["{}", "$${}$$", "\\[{}\\]"])
def test_a_displayed_chain_at_the_end(name: str, outer: str) -> None:
    rows = f"\\begin{{{name}}}\nV &= 3 \\cdot 4 \\\\\n&= 12\n\\end{{{name}}}"
    assert right("So we find\n" + outer.format(rows), "12")
    assert not right("So we find\n" + outer.format(rows), "13")


OPTIONS = ("(B) 30 km", "B. 30 km", "B) 30 km", "B: 30 km", "\\textbf{(B)}\\ 30 km", "（B）30 km", "B、30千米")


@pytest.mark.parametrize("gold", OPTIONS)
def test_a_gold_that_is_a_letter_with_its_option(gold: str) -> None:
    for answer in ("B", "(B)", "\\text{B}", "b", "B. 30 km", "Answer: **B**", "30 km", "\\boxed{B}", "答案：B"):
        assert right(answer, gold), answer
    for answer in ("C", "(C) 30 km", "B or C", "31 km", "(B) 31 km", "not B"):
        assert not right(answer, gold), answer
    assert right(gold, "B")


@pytest.mark.parametrize("gold", ["A. A. Milne", "(B) \\cup (C)", "E: y = 4x", "(A) 3 (B) 4"])
def test_a_letter_that_is_no_option(gold: str) -> None:
    assert not right(gold.strip("(")[0], gold)


@pytest.mark.parametrize(
    "behind", ["**Answer: C**", "The correct option is (C).", "Final Answer: C. 5 m", "答案：C", "故选C"]
)
@pytest.mark.parametrize("box", ["\\Delta S > 0", "F = ma", "p \\ll q", "\\rho"])
def test_a_choice_behind_a_box_with_a_formula(box: str, behind: str) -> None:
    response = f"So \\boxed{{{box}}}.\n\n{behind}"
    assert right(response, "C")
    assert not right(response, "D")
    assert answer_of(response) == "C"


def test_a_box_wins_over_what_is_behind_it() -> None:
    assert right("\\boxed{58}\n\nThe correct option is (C).", "58")
    assert right("\\boxed{C}\n\nThe answer is a formula.", "C")
    assert not right("\\boxed{C}\n\nAnswer: D", "C")
    assert not right("\\boxed{C}\n\nAnswer: D", "D")
    assert not right("\\boxed{x}\n\nThe answer is not C.", "C")
    assert right("\\boxed{p = mv}\nThe answer is Galileo.", "Galileo")
