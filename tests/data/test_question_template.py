"""`data.question_template`: one text around each question, wherever prompts are made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mugrpo_megatron.commands.eval import EvalRecord, settings_of
from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.demonstrations import demonstrations, sequences
from mugrpo_megatron.data.prepare import prepare
from mugrpo_megatron.data.prompts import STYLES, Template, render
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe import Recipe, load_recipe
from mugrpo_megatron.recipe.load import validate
from mugrpo_megatron.samples import Problem

TOKENIZER = build_arithmetic_tokenizer(CHAT_ML)
TEXT = "{question}\nPut the final answer in \\boxed{}."
PROBLEM = Problem("set:1", "What is {4} of \\frac{1}{2}?", "2")
ASKED = "What is {4} of \\frac{1}{2}?\nPut the final answer in \\boxed{}."


def recipe_with(template: str | None, **data: object) -> Recipe:
    given = {} if template is None else {"question_template": template}
    return validate({"data": {"train": "arithmetic", **given, **data}}, "recipe")


def text(problem: Problem, style: str, template: Template) -> str:
    return str(TOKENIZER.decode(render(problem, TOKENIZER, style, template)))


@pytest.mark.parametrize("style", [*STYLES, "chat", "auto"])
def test_a_question_is_wrapped_in_every_style(style: str) -> None:
    plain = Problem("set:1", ASKED, "2")
    assert text(PROBLEM, style, Template(question=TEXT)) == text(plain, style, Template())
    assert text(PROBLEM, style, Template()) == text(PROBLEM, style, Template(question="{question}"))


@pytest.mark.parametrize(
    ("turns", "wrapped"),
    [
        ([("user", "q")], 0),
        ([("system", "s"), ("user", "a"), ("assistant", "b"), ("user", "q")], 3),
        ([("user", "q"), ("tool", "t")], 0),
        ([("system", "s"), ("tool", "t")], None),
    ],
)
def test_the_users_last_turn_of_a_chat_is_wrapped(turns: list[tuple[str, str]], wrapped: int | None) -> None:
    asked = [(role, f"<{said}>" if place == wrapped else said) for place, (role, said) in enumerate(turns)]
    plain, expected = ([{"role": role, "content": said} for role, said in chat] for chat in (turns, asked))
    found = text(Problem("set:1", "q", "1", "set", tuple(plain)), "chat", Template(question="<{question}>"))
    assert found == text(Problem("set:1", "q", "1", "set", tuple(expected)), "chat", Template())


def test_training_held_out_and_demonstrations_ask_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arithmetic, "GENERATED", 4)
    section = recipe_with(TEXT, prompt_style="chat", eval_problems=2).data
    prepared = prepare(section, Recipe().reward, TOKENIZER)
    for fit in (prepared.train, prepared.held_out):
        for problem, ids in zip(fit.problems, fit.prompts, strict=True):
            assert f"user\n{problem.question}\nPut the final answer in \\boxed{{}}.<|im_end|>" in TOKENIZER.decode(ids)
    assert "Put the final answer" in prepared.notes[-1]  # the first prompt as the model sees it
    path = tmp_path / "rows.jsonl"
    path.write_text(json.dumps({"problem": "1+1=", "response": "2"}) + "\n", encoding="utf-8")
    ((prompt, _),) = sequences(demonstrations(str(path), section), TOKENIZER, section, 9).pairs
    assert "1+1=\nPut the final answer" in TOKENIZER.decode(prompt)


@pytest.mark.parametrize(
    ("template", "said"),
    [
        ("Put it in \\boxed{}.", r"has no \{question\}, where each question goes"),
        ("", r"has no \{question\}"),
        ("{question} {answer}", r"\{answer\} cannot be filled in"),
        ("{question} {row.hint}", r"\{row.hint\} cannot be filled in"),
        ("{{question}}", r"braces are not doubled here"),
        ("{question} \\boxed{{}}", r"braces are not doubled here"),
    ],
)
def test_a_template_with_other_fields_is_refused(template: str, said: str) -> None:
    with pytest.raises(UserError, match=rf"`data.question_template` = .*{said}"):
        recipe_with(template)


@pytest.mark.parametrize(
    "template", [TEXT, "{question}", "{question} as \\frac{a}{b}, \\boxed{\\text{answer}}", '{question} {"a": 1}']
)
def test_a_template_may_have_other_braces(template: str) -> None:
    recipe = recipe_with(template)
    assert recipe.data.question_template == template
    assert load_recipe(None, [f"data.question_template={template}"]).data.question_template == template


def test_an_evaluation_begun_before_the_key_is_continued(tmp_path: Path) -> None:
    settings = settings_of(recipe_with(None), {"a": "a"}, [])
    before = {**settings, "data": {key: value for key, value in settings["data"].items() if key != "question_template"}}
    assert before != settings
    EvalRecord(tmp_path, before)
    EvalRecord(tmp_path, settings)
    EvalRecord(tmp_path, before)
    with pytest.raises(UserError, match=r"holds an evaluation with other settings \(data\)"):
        EvalRecord(tmp_path, settings_of(recipe_with(TEXT), {"a": "a"}, []))
