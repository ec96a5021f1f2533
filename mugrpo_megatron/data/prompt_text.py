"""Prompts as text, for checks before torch is imported: chat templates are rendered without a tokenizer."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mugrpo_megatron.data.prompts import (
    STYLES,
    Template,
    check_style,
    messages_to_render,
    refusals,
    with_question_asked,
    without_template,
)
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.samples import Problem

SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def prompt_text(problem: Problem, style: str, template: Template, model: Path | None) -> tuple[str, str] | None:
    """The style that is taken, and the problem's prompt in it before it is tokenized.

    `model` is the directory with the tokenizer, None where it is not on this machine; then the prompt may depend on
    what is not known, and is None. Raises UserError for a template that is not one, or that refuses the messages.
    """
    check_style(style)
    config = _config(model) if model else {}
    text = template.text or (_own(model, config) if model else None)
    if style == "chat" or (style == "auto" and text is not None):
        if text is None and model is None:
            return None
        if text is None:
            raise without_template()
        return "chat", _rendered(with_question_asked(problem, template), text, template, _special(config))
    if style == "auto" and model is None:
        return None
    if len(problem.messages) > 1:
        raise UserError(
            f"{problem.id} is a chat of {len(problem.messages)} messages, which only a chat template renders: name a "
            'file with data.chat_template, or set data.prompt_style = "chat" where the tokenizer has a template'
        )
    named = "plain" if style == "auto" else style
    return named, STYLES[named].format(question=with_question_asked(problem, template).question)


def _rendered(problem: Problem, text: str, template: Template, special: Mapping[str, str]) -> str:
    from transformers.utils.chat_template_utils import render_jinja_template  # a second, and no torch

    with refusals(problem, template):
        made: Any = render_jinja_template(
            conversations=[messages_to_render(problem)],
            chat_template=text,
            add_generation_prompt=True,
            **{**special, **template.arguments},
        )
        return str(made[0][0])


def _config(model: Path) -> dict[str, Any]:
    path = model / "tokenizer_config.json"
    return read_json(path) if path.is_file() else {}


def _own(model: Path, config: Mapping[str, Any]) -> str | None:
    """The tokenizer's own template, where transformers finds it."""
    path = model / "chat_template.jinja"
    if path.is_file():
        try:
            return path.read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise UserError(f"{path} cannot be read ({error}): restore it from a copy of the model") from None
    template = config.get("chat_template")
    if isinstance(template, list):
        named = {one.get("name"): one.get("template") for one in template if isinstance(one, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """The special tokens that templates may name."""
    tokens = {name: config.get(name) for name in SPECIAL}
    texts = {name: one.get("content") if isinstance(one, dict) else one for name, one in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
