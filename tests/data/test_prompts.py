"""Prompts in each style; as text they are what the tokenizer's own methods render."""

from __future__ import annotations

import json
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest

from mugrpo_megatron.data.prompts import (
    INSTRUCTION,
    STYLES,
    Template,
    first_prompt,
    fitting_prompts,
    prompt_text,
    render,
)
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer, load_tokenizer
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
    chat = Problem(
        "set:1", "q", "1", "set", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "q"})
    )
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


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}", "it took longer than 0.2 s"),
        ("{% set n = namespace(t='x') %}{% for i in range(40) %}{% set n.t = n.t ~ n.t %}{% endfor %}", "MemoryError"),
        ("{% if x %}" * 200 + "{% endif %}" * 200, "too many statically nested blocks|indentation|too many levels"),
        ("{{ messages[0].content.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_a_template_has_an_end_and_no_traceback(text: str, says: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mugrpo_megatron.call_guard.TEMPLATE_BYTES", 64 << 20)
    if says.startswith("it took"):
        monkeypatch.setattr("mugrpo_megatron.call_guard.TEMPLATE_S", 0.2)
    with pytest.raises(UserError, match=says):
        render(PROBLEM, TOKENIZER, "chat", Template(text))


def test_long_prompts_are_left_out_and_counted() -> None:
    problems = [Problem(f"set:{n}", "x" * n, "1") for n in (3, 9, 5)]
    fit = fitting_prompts(problems, TOKENIZER, "plain", 5)
    assert [p.id for p in fit.problems] == ["set:3", "set:5"]
    assert [len(ids) for ids in fit.prompts] == [3, 5]
    assert fit.too_long == 1
    with pytest.raises(UserError, match=r"the shortest has 3 tokens"):
        fitting_prompts(problems, TOKENIZER, "plain", 2)


PLAIN = Problem("set:1", "What is $\\frac{1}{2}$ of {4}?", "2", "set")
CHAT = Problem(
    "set:2", "Hi", "2", "set", ({"role": "system", "content": "Be brief."}, {"role": "user", "content": "Hi"})
)
OWN = "{{ bos_token }}{{ messages | tojson }}{{ eos_token }}{% if thinking %}<think>{% endif %}"


@pytest.fixture(params=[None, CHAT_ML, OWN])
def model(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    tokenizer = build_arithmetic_tokenizer(request.param)
    tokenizer.bos_token = "<|im_start|>"
    tokenizer.save_pretrained(tmp_path)
    return tmp_path


def test_a_text_is_what_the_tokenizer_renders(model: Path) -> None:
    tokenizer = load_tokenizer(model)
    templates = (Template(), Template(OWN, {"thinking": True}, "Box: {question}"))
    for style, problem, template in product(("auto", "chat", *STYLES), (PLAIN, CHAT), templates):
        try:
            ids = render(problem, tokenizer, style, template)
        except UserError:
            with pytest.raises(UserError):
                prompt_text(problem, style, template, model)
            continue
        found = prompt_text(problem, style, template, model)
        assert found is not None
        named, text = found
        begins = [] if named == "chat" or tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
        assert [*begins, *tokenizer.encode(text, add_special_tokens=False)] == ids
        assert style in (named, "auto")


def template(begin: str) -> str:
    return begin + "{{ messages[0].content }}{{ eos_token }}"


PARTS = "{% for part in messages[0].content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
TEMPLATE_FILES: dict[str, tuple[dict[str, object], dict[str, str], str]] = {
    "listed": ({"chat_template": [{"name": n, "template": template(n)} for n in ("rag", "default")]}, {}, "default"),
    "a table": ({"chat_template": {"default": template("a"), "rag": "-"}}, {}, "a"),
    "tools": ({"chat_template": {"default": "-", "tool_use": template("{{ tools[0].name }}")}}, {}, "add"),
    "a file first": ({"chat_template": template("-")}, {"chat_template.jinja": template("a")}, "a"),
    "a file of tools": (
        {},
        {"chat_template.jinja": "-", "additional_chat_templates/tool_use.jinja": template("{{ tools[0].name }}")},
        "add",
    ),
    "a processor's": ({}, {"chat_template.json": json.dumps({"chat_template": template("a")})}, "a"),
    "a byte order mark": ({}, {"chat_template.jinja": "\ufeff" + template("a")}, "a"),
    "a byte order mark inside": ({"chat_template": "\ufeff" + template("a")}, {}, "a"),
    "a list of parts": ({"chat_template": PARTS + "{{ eos_token }}"}, {}, ""),
    "no default": ({"chat_template": {"rag": template("a")}}, {}, "refused"),
    "empty": ({"chat_template": ""}, {}, "refused"),
    "an empty file": ({"chat_template": template("a")}, {"chat_template.jinja": "\n"}, "refused"),
    "another field": ({"chat_template": "{{ messages[0].value }}{{ eos_token }}"}, {}, "refused"),
    "a pointer of LFS": ({}, {"chat_template.jinja": "version https://git-lfs.github.com/spec/v1\noid"}, "refused"),
}  # fmt: skip


@pytest.mark.parametrize("name", TEMPLATE_FILES)
def test_templates_are_found_and_show_the_question(name: str, tmp_path: Path) -> None:
    """With the tokenizer and without it; a template that shows nothing of the question is refused."""
    fields, files, begin = TEMPLATE_FILES[name]
    build_arithmetic_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | fields))
    (tmp_path / "additional_chat_templates").mkdir()
    for file, text in files.items():
        (tmp_path / file).write_text(text, encoding="utf-8")
    problem = replace(PLAIN, row={"tools": [{"name": "add"}]}) if begin == "add" else PLAIN
    tokenizer = load_tokenizer(tmp_path)
    if begin == "refused":
        with pytest.raises(UserError, match=r"shows nothing of the user|no default"):
            render(problem, tokenizer, "auto")
        with pytest.raises(UserError, match=r"shows nothing of the user|no default"):
            prompt_text(problem, "auto", Template(), tmp_path)
        return
    said = f"{begin}{PLAIN.question}{tokenizer.eos_token}"
    assert tokenizer.decode(render(problem, tokenizer, "auto")) == said
    assert prompt_text(problem, "auto", Template(), tmp_path) == ("chat", said)


def test_what_is_not_known_without_the_model_is_not_said() -> None:
    for style in ("auto", "chat"):
        assert prompt_text(PLAIN, style, Template(), None) is None
        assert prompt_text(PLAIN, style, Template("{{ messages[0].content }}"), None) == ("chat", PLAIN.question)
    assert prompt_text(PLAIN, "plain", Template(), None) == ("plain", PLAIN.question)
