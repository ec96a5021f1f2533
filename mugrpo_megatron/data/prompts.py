"""Renders problems as prompts, by prompt styles and chat templates; imports nothing slow."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError

from mugrpo_megatron.call_guard import TookTooLong, template_clock
from mugrpo_megatron.data.fields import SPOKEN, TOOLS, in_accepted_form, row_arguments
from mugrpo_megatron.data.quoted import encode_quoting, mark_special
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.vocabulary import chat_templates, tokenizer_config
from mugrpo_megatron.recipe.sections import DataSection, fill_template
from mugrpo_megatron.samples import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # imported for the type alone: it takes a second

INSTRUCTION = "Please reason step by step, and put your final answer within \\boxed{}."

STYLES: dict[str, str] = {
    "plain": "{question}",
    "qwen2.5-math": (
        f"<|im_start|>system\n{INSTRUCTION.replace('{}', '{{}}')}<|im_end|>\n"
        "<|im_start|>user\n{question}<|im_end|>\n<|im_start|>assistant\n"
    ),
    "deepseek-math": f"User: {{question}}\n{INSTRUCTION.replace('{}', '{{}}')}\n\nAssistant:",
    "deepseek-r1": f"<｜User｜>{{question}}\n{INSTRUCTION.replace('{}', '{{}}')}<｜Assistant｜><think>\n",
    "llama": (
        "<|start_header_id|>user<|end_header_id|>\n\n"
        f"{{question}}\n{INSTRUCTION.replace('{}', '{{}}')}<|eot_id|>"
        "<|start_header_id|>assistant<|end_header_id|>\n\n"
    ),
}
"""Prompt text of each style, as the model cards give it. The style `chat` takes the tokenizer's own template."""


_WRITE = "write this into the message's text, or name another template with data.chat_template"
EXCERPT_CHARS = 400
"""Characters that an excerpt of a long prompt has of its beginning, and as many of its end."""


@dataclass(frozen=True, slots=True)
class Template:
    """The settings of prompts besides the style: the chat template, its arguments, and the text around each
    question."""

    text: str | None = None
    """Jinja source; None for the tokenizer's own template."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the template, such as `enable_thinking` of Qwen3's."""
    question: str | None = None
    """Text around each question, in every style; None leaves questions as they are."""
    path: Path | None = None
    """The file that `text` was read from."""


TOKENIZER_TEMPLATE = Template()
"""The template that comes with the tokenizer, without arguments."""


def first_prompt(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], style: str, template: Template = TOKENIZER_TEMPLATE
) -> str:
    """A line for the log: the first prompt of a run or an evaluation, and its style."""
    style = resolved_style(style, tokenizer, template)
    return f"the first prompt as the model sees it ({style}): {decoded_line(tokenizer, ids)}"


def decoded_line(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """A tokenized prompt as one quoted line of text, special tokens included."""
    return quoted(str(tokenizer.decode(ids)))


def quoted(prompt: str) -> str:
    """A prompt as one quoted line; the middle of a long one is left out."""
    text = repr(prompt)
    return text if len(text) <= 2 * EXCERPT_CHARS else f"{text[:EXCERPT_CHARS]} ... {text[-EXCERPT_CHARS:]}"


def template_of(section: DataSection) -> Template:
    """The template that `data.chat_template`, `template_arguments` and `question_template` set; UserError if the chat
    template's file cannot be read."""
    if (path := section.chat_template) is None:
        return Template(None, section.template_arguments, section.question_template)
    try:
        text = path.read_text(encoding="utf-8-sig")
        return Template(text, section.template_arguments, section.question_template, path)
    except (OSError, ValueError) as error:
        raise UserError(
            f"data.chat_template = {path} cannot be read ({error}); name a readable file in UTF-8"
        ) from None


@dataclass(frozen=True, slots=True)
class FittingPrompts:
    """The problems whose prompts are short enough, and the token ids of these prompts."""

    problems: list[Problem]
    prompts: list[list[int]]
    too_long: int
    """Number of problems that are left out because their prompts are too long."""


def check_style(style: str) -> None:
    """Raise UserError for an unknown style."""
    if style not in ("auto", "chat", *STYLES):
        raise UserError(f"data.prompt_style {style!r} is unknown: choose one of auto, chat, {', '.join(STYLES)}")


def resolved_style(style: str, tokenizer: PreTrainedTokenizerBase, template: Template = TOKENIZER_TEMPLATE) -> str:
    """Resolve `auto`: `chat` if there is a template, else `plain`; other styles are returned unchanged."""
    if style != "auto":
        return style
    return "plain" if tokenizer.chat_template is None and template.text is None else "chat"


def render(
    problem: Problem, tokenizer: PreTrainedTokenizerBase, style: str, template: Template = TOKENIZER_TEMPLATE
) -> list[int]:
    """Token ids of a problem's prompt.

    A prompt of another style than `chat` begins with the tokenizer's beginning-of-sequence token, if it has one. Only
    `chat` renders more than one message. Raises UserError for a chat that the style or the template cannot render, and
    for a question that is rendered already (`refuse_rendered`), except in the style `plain`.
    """
    text = rendered(problem, tokenizer, style, template)
    if resolved_style(style, tokenizer, template) == "chat":
        return encode_quoting(text, tokenizer)
    ids = tokenizer.encode(text, add_special_tokens=False)
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


_MARK = re.compile(
    r"\A\s*(?:<s>\s*|<bos>\s*|<[|｜]begin[_▁]of[_▁](?:text|sentence)[|｜]>\s*|\[gMASK\]\s*<sop>\s*)?"
    r"(?P<mark><[|｜][^<>|｜\n]{1,40}[|｜]>|\[INST\]|<start_of_turn>|<\|turn>|<bos>|<s>)"
)
_ENDING = re.compile(r"(?:\A|\n)\s*(?:User|Human):.*\n\s*(?P<mark>Assistant:)\s*(?:<think>\s*)?\Z", re.DOTALL)


def refuse_rendered(problem: Problem) -> None:
    """Raise UserError for a question to which somebody has applied a chat template already."""
    if len(problem.messages) > 1:
        return
    text = str(problem.messages[0]["content"] or "") if problem.messages else problem.question
    if found := _MARK.match(text) or _ENDING.search(text):
        raise UserError(
            f"{problem.id}: the question is rendered already: it has {found['mark']!r} of a chat template, which would "
            'be applied again; set data.prompt_style = "plain", or name the bare question with data.question_field'
        )


def rendered(problem: Problem, tokenizer: PreTrainedTokenizerBase, style: str, template: Template) -> str:
    """A problem's prompt as text. In the style `chat`, special tokens that the row's own texts spell out are marked, so
    that `encode_quoting` encodes them as plain characters."""
    fitting = resolved_style(style, tokenizer, template)
    if fitting != "plain":
        refuse_rendered(problem)
    if fitting == "chat":
        return _chat(with_question_asked(problem, template), tokenizer, template)
    return _styled(problem, fitting, template)


def render_reply(
    problem: Problem, reply: Message, tokenizer: PreTrainedTokenizerBase, style: str, template: Template
) -> list[int]:
    """Token ids of the assistant's message as the chat template writes it after the problem's prompt, up to its end.

    Raises UserError when the prompt style is not `chat`, when there is no template, when the text with the message does
    not begin with the prompt, and when the template leaves out one of the fields `SPOKEN` that the message has.
    """
    spoken = [name for name in SPOKEN if name in reply]
    if resolved_style(style, tokenizer, template) != "chat":
        raise UserError(
            f"{problem.id} has {', '.join(spoken)}, which only a chat template writes; write this into the message's "
            'text, or set data.prompt_style = "chat", with a template of data.chat_template if the tokenizer has none'
        )
    asked = with_question_asked(problem, template)
    prompt = _chat(asked, tokenizer, template)

    def written(message: Message) -> str:
        chat = replace(asked, messages=(*messages_to_render(asked), message))
        return _chat(chat, tokenizer, template, is_prompt=False)

    text = written(reply)
    if lost := [name for name in spoken if written({k: v for k, v in reply.items() if k != name}) == text]:
        raise UserError(f"{problem.id} has {', '.join(lost)}, which the chat template leaves out; {_WRITE}")
    if not text.startswith(prompt):
        raise UserError(
            f"{problem.id} has {', '.join(spoken)}, and with this message the chat template's text does not begin with "
            f"the prompt, so the message cannot follow the prompt; {_WRITE}"
        )
    end = str(tokenizer.eos_token)
    body = text[len(prompt) :].rpartition(end)[0] if end in text[len(prompt) :] else text[len(prompt) :].rstrip()
    return [*encode_quoting(body, tokenizer), tokenizer.eos_token_id]


def _styled(problem: Problem, style: str, template: Template) -> str:
    """The prompt in a style of `STYLES`, each a fixed text around the question. UserError for a chat of several
    messages."""
    check_style(style)
    if len(problem.messages) > 1:
        raise UserError(
            f"{problem.id} is a chat of {len(problem.messages)} messages, which only a chat template renders: name a "
            'file with data.chat_template, or set data.prompt_style = "chat" where the tokenizer has a template'
        )
    return STYLES[style].format(question=with_question_asked(problem, template).question)


def with_question_asked(problem: Problem, template: Template) -> Problem:
    """Put the text of `Template.question` around the question, or around a chat's last user message."""
    if template.question is None:
        return problem
    turns = problem.messages
    last = max((index for index, message in enumerate(turns) if message["role"] == "user"), default=None)
    if last is not None:
        turn = {**turns[last], "content": fill_template(turns[last]["content"], template.question)}
        turns = (*turns[:last], turn, *turns[last + 1 :])
    return replace(problem, question=fill_template(problem.question, template.question), messages=turns)


def messages_to_render(problem: Problem) -> list[dict[str, Any]]:
    return [dict(message) for message in problem.messages] or [{"role": "user", "content": problem.question}]


def _chat(problem: Problem, tokenizer: PreTrainedTokenizerBase, template: Template, is_prompt: bool = True) -> str:
    if tokenizer.chat_template is None and template.text is None:
        raise without_template()

    with refusals(problem, template):
        arguments = mark_special(row_arguments(problem.row), tokenizer)
        apply = partial(
            apply_template, tokenizer=tokenizer, template=template, arguments=arguments, is_prompt=is_prompt
        )
        return in_accepted_form(apply, messages_to_render(problem))


def apply_template(
    messages: list[dict[str, Any]],
    tokenizer: PreTrainedTokenizerBase,
    template: Template,
    arguments: Mapping[str, Any],
    is_prompt: bool,
) -> str:
    """A chat as the template writes it. Special tokens that stand in the messages' text are marked, so that
    `encode_quoting` encodes them as characters.

    An argument in `arguments` replaces one of the same name in `template`; its special tokens must be marked already.
    """
    return str(
        tokenizer.apply_chat_template(
            mark_special(messages, tokenizer),
            chat_template=template.text,
            tokenize=False,
            add_generation_prompt=is_prompt,
            **{**template.arguments, **arguments},
        )
    )


def without_template() -> UserError:
    """The error for `data.prompt_style = "chat"` when there is no chat template."""
    return UserError(
        "data.prompt_style is 'chat' but the tokenizer has no chat template: choose another style, or name a file "
        "with data.chat_template"
    )


@contextmanager
def refusals(problem: Problem, template: Template) -> Iterator[None]:
    """Use this around the rendering of a chat template: its errors become UserErrors, its time and memory are limited.

    The errors name the file of `data.chat_template`, if the template is from there.
    """
    named = f"data.chat_template = {template.path}" if template.path else "the tokenizer's chat template"
    try:
        with template_clock():
            yield
    except TemplateSyntaxError as error:
        raise UserError(f"{named}, line {error.lineno}: {error.message}; correct the template") from None
    # Every exception is caught, since a template is a program: many raise an error of their own unless user and
    # assistant alternate.
    except (Exception, TookTooLong) as error:
        why, file = str(error) or type(error).__name__, f" ({named})" if template.path else ""
        raise UserError(
            f"{problem.id}: the chat template refuses the messages ({why}){file}; correct the row or the template"
        ) from None


def fitting_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    style: str,
    max_prompt_tokens: int,
    template: Template = TOKENIZER_TEMPLATE,
) -> FittingPrompts:
    """Render every problem, and leave out prompts longer than `max_prompt_tokens`; UserError when all are longer."""
    rendered = [(problem, render(problem, tokenizer, style, template)) for problem in problems]
    fitting = [(problem, ids) for problem, ids in rendered if len(ids) <= max_prompt_tokens]
    if problems and not fitting:
        shortest = min(len(ids) for _, ids in rendered)
        sources = ", ".join(dict.fromkeys(problem.source for problem in problems))
        raise UserError(
            f"all {len(problems)} prompts of {sources} are longer than data.max_prompt_tokens={max_prompt_tokens} "
            f"(the shortest has {shortest} tokens): raise it"
        )
    return FittingPrompts([p for p, _ in fitting], [ids for _, ids in fitting], len(rendered) - len(fitting))


def fitting_prompts_by_set(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    style: str,
    max_prompt_tokens: int,
    template: Template = TOKENIZER_TEMPLATE,
) -> FittingPrompts:
    """Render the problems of several sets, each as `fitting_prompts` does: UserError when all prompts of one set are
    too long."""
    sets: dict[str, list[Problem]] = {}
    for problem in problems:
        sets.setdefault(problem.source, []).append(problem)
    fits = [fitting_prompts(members, tokenizer, style, max_prompt_tokens, template) for members in sets.values()]
    return FittingPrompts(
        [problem for fit in fits for problem in fit.problems],
        [prompt for fit in fits for prompt in fit.prompts],
        sum(fit.too_long for fit in fits),
    )


SPECIAL = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")


def prompt_text(problem: Problem, style: str, template: Template, model: Path | None) -> tuple[str, str] | None:
    """Resolve the style and render a problem in it, without a tokenizer: (style, text).

    `model` is the model's directory; None if the model is not on this machine. In that case the result is None if style
    or text depend on the model's tokenizer. Raises UserError for an unknown style, for the style `chat` without a
    template, for a chat or a rendered question that the style does not take, and for a template that is invalid or
    refuses the messages.
    """
    check_style(style)
    config = tokenizer_config(model) if model else {}
    text = template.text or (_tokenizer_template(model, problem.row) if model else None)
    if style == "chat" or (style == "auto" and text is not None):
        if text is None and model is None:
            return None
        if text is None:
            raise without_template()
        refuse_rendered(problem)
        return "chat", _untokenized(with_question_asked(problem, template), text, template, _special(config))
    if style == "auto" and model is None:
        return None
    named = "plain" if style == "auto" else style
    if named != "plain":
        refuse_rendered(problem)
    return named, _styled(problem, named, template)


def _untokenized(problem: Problem, text: str, template: Template, special: Mapping[str, str]) -> str:
    # Not at the top: it takes a second (but imports no torch).
    from transformers.utils.chat_template_utils import render_jinja_template

    def apply(messages: list[dict[str, Any]]) -> str:
        texts: Any = render_jinja_template(
            conversations=[messages],
            chat_template=text,
            add_generation_prompt=True,
            **{**special, **template.arguments, **row_arguments(problem.row)},
        )
        return str(texts[0][0])

    with refusals(problem, template):
        return in_accepted_form(apply, messages_to_render(problem))


def _tokenizer_template(model: Path, row: Mapping[str, Any]) -> str | None:
    """The one of the tokenizer's own templates that transformers would choose for a row; None if it has no template.
    UserError if that is the default one, and there are only others."""
    templates = chat_templates(model)
    name = "tool_use" if "tool_use" in templates and TOOLS in row_arguments(row) else "default"
    if templates and name not in templates:
        raise UserError(
            f"{model} has the chat templates {', '.join(templates)} and no default: name a file with data.chat_template"
        )
    return templates.get(name)


def _special(config: Mapping[str, Any]) -> dict[str, str]:
    """Name -> text of the special tokens that templates may use."""
    tokens = {name: config.get(name) for name in SPECIAL}
    texts = {name: token.get("content") if isinstance(token, dict) else token for name, token in tokens.items()}
    return {name: text for name, text in texts.items() if isinstance(text, str)}
