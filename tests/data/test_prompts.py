from __future__ import annotations

import pytest

from mugrpo_megatron.data.prompts import INSTRUCTION, STYLES, Template, first_prompt, fitting_prompts, render
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.samples import Problem

TOKENIZER = build_arithmetic_tokenizer(CHAT_ML)
PROBLEM = Problem("set:1", "What is $\\frac{1}{2}$ of {4}?", "2")


def text(style: str) -> str:
    return str(TOKENIZER.decode(render(PROBLEM, TOKENIZER, style)))


@pytest.mark.parametrize(
    ("style", "around"),
    [
        ("plain", "{}"),
        (
            "qwen2.5-math",
            f"<|im_start|>system\n{INSTRUCTION.replace('{}', '{{}}')}<|im_end|>\n<|im_start|>user\n{{}}<|im_end|>\n"
            "<|im_start|>assistant\n",
        ),
        ("chat", "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"),
    ],
)
def test_a_style_is_its_text_around_the_question(style: str, around: str) -> None:
    assert text(style) == around.format(PROBLEM.question)


@pytest.mark.parametrize("style", sorted(set(STYLES) - {"plain"}))
def test_a_math_style_asks_for_a_box(style: str) -> None:
    assert PROBLEM.question in text(style)
    assert INSTRUCTION in text(style)


def test_auto_is_the_template_where_there_is_one() -> None:
    bare = build_arithmetic_tokenizer()
    assert text("auto") == text("chat")
    assert render(PROBLEM, bare, "auto") == render(PROBLEM, TOKENIZER, "plain")
    own = Template("{{ messages[0].content }}!")
    assert bare.decode(render(PROBLEM, bare, "auto", own)) == f"{PROBLEM.question}!"
    ids = render(PROBLEM, bare, "plain")
    for tokenizer, style in ((bare, "plain"), (TOKENIZER, "chat")):
        assert first_prompt(tokenizer, ids, "auto").startswith(
            f"the first prompt as the model sees it ({style}): 'What"
        )
    chat = Problem("set:1", "q", "1", "set", (("system", "Be brief."), ("user", "q")))
    with pytest.raises(UserError, match=r"only a chat template renders: name a file with data.chat_template"):
        render(chat, bare, "auto")


def test_a_beginning_of_sequence_token_comes_first() -> None:
    tokenizer = build_arithmetic_tokenizer()
    tokenizer.bos_token = "<|im_start|>"
    ids = render(PROBLEM, tokenizer, "plain")
    assert ids == [tokenizer.bos_token_id, *render(PROBLEM, TOKENIZER, "plain")]


def test_an_unusable_style_is_the_users_mistake() -> None:
    with pytest.raises(UserError, match="unknown: choose one of auto, chat, plain"):
        render(PROBLEM, TOKENIZER, "haiku")
    tokenizer = build_arithmetic_tokenizer()
    with pytest.raises(UserError, match="no chat template"):
        render(PROBLEM, tokenizer, "chat")


def test_long_prompts_are_left_out_and_counted() -> None:
    problems = [Problem(f"set:{n}", "x" * n, "1") for n in (3, 9, 5)]
    fit = fitting_prompts(problems, TOKENIZER, "plain", 5)
    assert [p.id for p in fit.problems] == ["set:3", "set:5"]
    assert [len(ids) for ids in fit.prompts] == [3, 5]
    assert fit.too_long == 1
    with pytest.raises(UserError, match=r"the shortest has 3 tokens"):
        fitting_prompts(problems, TOKENIZER, "plain", 2)
