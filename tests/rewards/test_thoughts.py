"""Thoughts of every family of tags: the answer stands behind them, and a thought that was cut has none."""

from __future__ import annotations

import pytest

from mugrpo_megatron.data.prompts import STYLES
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.math.extract import Extract, answer_of
from mugrpo_megatron.rewards.math.thoughts import after_thoughts, opening_of
from mugrpo_megatron.rewards.pool import Verifier

TAGS = [
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ('<thought budget="12" style=brief>', "</thought>"),
    ("<seed:think>", "</seed:think>"),
    ("◁think▷", "◁/think▷"),
    ("[THINK]", "[/THINK]"),
    ("<|begin_of_thought|>", "<|end_of_thought|>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
    ("<chain_of_thought>", "</chain_of_thought>"),
    ("<analysis>", "</analysis>"),
    ("<|inner_prefix|>", "<|inner_suffix|>"),
    ("<|reasoning_start|>", "<|reasoning_end|>"),
    ("<|channel|>analysis<|message|>", "<|end|><|start|>assistant<|channel|>final<|message|>"),
    ("analysis", "assistantfinal"),
]


@pytest.mark.parametrize(("opening", "closing"), TAGS)
@pytest.mark.parametrize("extract", ["boxed", "final", "last_number"])
def test_thoughts_are_no_answer(opening: str, closing: str, extract: Extract) -> None:
    """Nor does a second thought that is cut take the first answer away."""
    thought = f"{opening} We try \\boxed{{8}}, so the answer is 8"
    assert answer_of(thought, extract) == ""
    assert answer_of(f"{thought}{closing}It is \\boxed{{11}}", extract) == "11"


@pytest.mark.parametrize(("opening", "closing"), TAGS[:-1])
def test_prompts_that_open_a_thought(opening: str, closing: str) -> None:
    prompt = f"<|user|>2+9? Think in {opening}...{closing}.<|assistant|>"
    assert opening_of(prompt) == opening_of(f"{prompt}{opening}\n\n{closing}\n\n") == ""
    assert opening_of(f"{prompt}{opening}\n") == opening_of(f"{prompt}{opening} Okay, ") == opening
    assert after_thoughts(f"{opening}2+9 is{closing} 11").strip() == "11"


def test_only_tags_are_thoughts() -> None:
    for text in ("analysis: the answer is 3", "[think] is a list", "a < think > b", "analysisof 3 rows"):
        assert after_thoughts(text) == text


@pytest.mark.parametrize("extract", ["boxed", "final", "last_number"])
def test_a_verifier_knows_the_prompts_end(extract: Extract) -> None:
    """With the style `deepseek-r1` a response without the closing tag was cut in its thought."""
    opening = opening_of(STYLES["deepseek-r1"].format(question="2+9?"))
    texts = ["maybe \\boxed{11}", "11", "maybe \\boxed{8}</think>\\boxed{11}"]
    with Verifier(RewardSection(extract=extract)) as verifier:
        scores = verifier.score(texts, ["11"] * 3, openings=[opening] * 3)
        open_scores = verifier.score(texts[:1], ["11"])
    assert [score.reward for score in scores] == [0.0, 0.0, 1.0]
    assert open_scores[0].reward == 1.0
