"""A prompt as text is what the tokenizer's own methods render."""

from __future__ import annotations

import json
from itertools import product
from pathlib import Path

import pytest

from mugrpo_megatron.data.prompts import STYLES, Template, prompt_text, render
from mugrpo_megatron.data.tokenizer import CHAT_ML, build_arithmetic_tokenizer, load_tokenizer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.samples import Problem

PLAIN = Problem("set:1", "What is $\\frac{1}{2}$ of {4}?", "2", "set")
CHAT = Problem("set:2", "Hi", "2", "set", (("system", "Be brief."), ("user", "Hi")))
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


def test_templates_are_found_where_transformers_finds_them(tmp_path: Path) -> None:
    build_arithmetic_tokenizer().save_pretrained(tmp_path)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    named = [{"name": "tool_use", "template": "tool"}, {"name": "default", "template": "listed {{ eos_token }}"}]
    for given, said in ((named, "listed <|im_end|>"), ("one", "one")):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({**config, "chat_template": given}))
        ids = render(PLAIN, load_tokenizer(tmp_path), "chat")
        assert prompt_text(PLAIN, "auto", Template(), tmp_path) == ("chat", said)
        assert load_tokenizer(tmp_path).decode(ids) == said


def test_what_is_not_known_without_the_model_is_not_said() -> None:
    for style in ("auto", "chat"):
        assert prompt_text(PLAIN, style, Template(), None) is None
        assert prompt_text(PLAIN, style, Template("{{ messages[0].content }}"), None) == ("chat", PLAIN.question)
    assert prompt_text(PLAIN, "plain", Template(), None) == ("plain", PLAIN.question)
