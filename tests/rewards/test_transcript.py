"""Thoughts and answers in tags: a thought never counts, and tags hold the only answer."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.math.extract import Extract, after_thoughts, answer_of
from tests.rewards.verdicts import right

TAGS = st.sampled_from(["think", "thinking", "thought", "reasoning", "THINK"])
THOUGHTS = st.sampled_from(["{}", "\\boxed{{{}}}", "The answer is {}.", "#### {}", "<answer>{}</answer>"])
SHAPES = [
    "{}",
    "\n{}\n",
    "\\boxed{{{}}}",
    "The answer is {}.",
    "Answer: {}",
    "**{}**",
    "$x = {}$",
    "#### {}",
    "{} apples",
]
WHOLE = st.integers(0, 999)


@given(TAGS, THOUGHTS, WHOLE, WHOLE, st.booleans(), st.sampled_from(["final", "boxed"]))
def test_a_thought_is_no_answer(tag: str, thought: str, inside: int, stated: int, opened: bool, mode: Extract) -> None:
    """With or without the opening tag, which the prompt may hold."""
    thinking = (f"<{tag}>" if opened else "") + thought.format(inside) + f"</{tag}>"
    assert answer_of(thinking, mode) == ""
    assert right(f"{thinking}\nSo \\boxed{{{stated}}}", str(inside), mode) == (inside == stated)
    assert answer_of(f"<{tag}>{thought.format(inside)}", mode) == ""
    assert answer_of(f"\\boxed{{{stated}}} <{tag}>{thought.format(inside)}", mode) == str(stated)


@given(st.text(max_size=100), st.text(max_size=100))
def test_what_follows_a_thought_is_kept_whole(thought: str, rest: str) -> None:
    """Text that opens no thought itself, as `analysis` without gpt-oss's special tokens does at its beginning."""
    if not any(mark in rest for mark in ("<", "◁", "[THINK]", "analysis")):
        assert after_thoughts(f"<think>{thought}</think>{rest}") == rest
        assert after_thoughts(rest) == rest


@given(WHOLE, WHOLE, st.sampled_from(SHAPES), st.sampled_from(["answer", "Answer", "final_answer"]))
def test_the_answer_in_tags_is_read_as_a_response_is(value: int, gold: int, shape: str, tag: str) -> None:
    response = f"<think>no</think> <{tag}>{shape.format(value)}</{tag}>"
    assert right(response, str(gold)) == (value == gold)
    assert right(response, str(gold), "boxed") == (value == gold and "boxed" in shape)


@given(WHOLE, WHOLE, st.sampled_from(["{} <answer>{}</answer>", "\\boxed{{{}}} <answer>{}</answer>"]))
def test_nothing_outside_of_the_tags_is_an_answer(outside: int, inside: int, form: str) -> None:
    assert right(form.format(outside, inside), str(inside))
    assert right(form.format(outside, inside), str(outside)) == (outside == inside)


@pytest.mark.parametrize(
    ("response", "answer"),
    [
        ("<answer>1</answer> and <answer>2</answer>", "1, 2"),
        ("<answer>1</answer><answer>2</answer>", "1, 2"),
        ("<answer>1</answer> No, that is wrong. <answer>2</answer>", "2"),
        ("I use <answer> tags: <answer>2</answer>", "2"),
        ("<answer></answer> 2", ""),
        ("<answer> </answer> \\boxed{2}", ""),
        ("<answer>1 or 2</answer>", "1, 2"),
        ("<answer>not 2</answer>", "not 2"),
        ("<think>a</think> b <think>\\boxed{2}</think>", ""),
    ],
)
def test_several_empty_and_hedging_tags(response: str, answer: str) -> None:
    assert answer_of(response) == answer


@pytest.mark.parametrize(
    ("gold", "inside", "other"),
    [("C", "(C) Paris", "(B) Paris"), ("Apollo 11", "apollo 11", "Apollo 12"), ("1,2", "2 and 1", "2 and 3")],
)
def test_golds_of_every_kind_stand_in_tags(gold: str, inside: str, other: str) -> None:
    assert right(f"<answer>{inside}</answer>", gold)
    assert not right(f"<answer>{other}</answer>", gold)
