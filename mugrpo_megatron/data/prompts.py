"""Prompts: the styles, chat templates, and what a prompt is before it is tokenized; nothing slow is imported."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError, TemplateSyntaxError

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import read_json
from mugrpo_megatron.recipe.sections import DataSection, fill_template
from mugrpo_megatron.samples import Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # a second to import

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
"""Prompt texts by style, as the model cards give them; `chat` is the tokenizer's own template."""


SHOWN_CHARS = 400
"""Characters that are shown of a long prompt's beginning and of its end."""


@dataclass(frozen=True, slots=True)
class Template:
    """The chat template of the style `chat`, and what it is called with."""

    text: str | None = None
    """Jinja; None takes the tokenizer's own."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """Such as `enable_thinking` of Qwen3's template."""
    question: str | None = None
    """Text around each question, in every style; None leaves questions as they are."""
    path: Path | None = None
    """Where `text` was read."""


TOKENIZER_TEMPLATE = Template()
"""The tokenizer's template without arguments."""


def first_prompt(
    tokenizer: PreTrainedTokenizerBase, ids: list[int], style: str, template: Template = TOKENIZER_TEMPLATE
) -> str:
    """The line about the first prompt of a run or an evaluation, with the style that it was rendered in."""
    style = resolved_style(style, tokenizer, template)
    return f"the first prompt as the model sees it ({style}): {decoded_line(tokenizer, ids)}"


def decoded_line(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """A prompt as one quoted line, special tokens included."""
    return quoted(str(tokenizer.decode(ids)))


def quoted(prompt: str) -> str:
    """A prompt as one quoted line; the middle of a long one is left out."""
    text = repr(prompt)
    return text if len(text) <= 2 * SHOWN_CHARS else f"{text[:SHOWN_CHARS]} ... {text[-SHOWN_CHARS:]}"


def template_of(section: DataSection) -> Template:
    """What `data.chat_template`, `template_arguments` and `question_template` say; UserError for an unreadable file."""
    if (path := section.chat_template) is None:
        return Template(None, section.template_arguments, section.question_template)
    try:
        text = path.read_text(encoding="utf-8")
        return Template(text, section.template_arguments, section.question_template, path)
    except (OSError, ValueError) as error:
        raise UserError(f"data.chat_template = {path} cannot be read ({error})") from None


@dataclass(frozen=True, slots=True)
class FittingPrompts:
    """The problems whose prompts fit, with their token ids, and how many did not."""

    problems: list[Problem]
    prompts: list[list[int]]
    too_long: int


def check_style(style: str) -> None:
    """UserError for a style that `render` does not know."""
    if style not in ("auto", "chat", *STYLES):
        raise UserError(f"data.prompt_style {style!r} is unknown: choose one of auto, chat, {', '.join(STYLES)}")


def resolved_style(style: str, tokenizer: PreTrainedTokenizerBase, template: Template = TOKENIZER_TEMPLATE) -> str:
    """The style that `auto` stands for: `chat` where there is a template, else `plain`; any other is itself."""
    if style != "auto":
        return style
    return "plain" if tokenizer.chat_template is None and template.text is None else "chat"


def render(
    problem: Problem, tokenizer: PreTrainedTokenizerBase, style: str, template: Template = TOKENIZER_TEMPLATE
) -> list[int]:
    """Prompt token ids of one problem, with the tokenizer's beginning-of-sequence token where it has one.

    Only `chat` renders more than one message. Raises UserError for a chat that the style or the template cannot render.
    """
    fitting = resolved_style(style, tokenizer, template)
    if fitting == "chat":
        text = _chat(with_question_asked(problem, template), tokenizer, template)
        return tokenizer.encode(text, add_special_tokens=False)
    ids = tokenizer.encode(_styled(problem, fitting, template), add_special_tokens=False)
    return ids if tokenizer.bos_token_id is None else [tokenizer.bos_token_id, *ids]


def _styled(problem: Problem, style: str, template: Template) -> str:
    """The prompt in a style that is a fixed text."""
    check_style(style)
    if len(problem.messages) > 1:
        raise UserError(
            f"{problem.id} is a chat of {len(problem.messages)} messages, which only a chat template renders: name a "
            'file with data.chat_template, or set data.prompt_style = "chat" where the tokenizer has a template'
        )
    return STYLES[style].format(question=with_question_asked(problem, template).question)


def with_question_asked(problem: Problem, template: Template) -> Problem:
    """The problem with its question, in a chat the user's last turn, inside the text that the template puts around it.

    A chat without a user's turn stays as it is.
    """
    if template.question is None:
        return problem
    turns = problem.messages
    last = max((place for place, (role, _) in enumerate(turns) if role == "user"), default=None)
    if last is not None:
        turn = ("user", fill_template(turns[last][1], template.question))
        turns = (*turns[:last], turn, *turns[last + 1 :])
    return replace(problem, question=fill_template(problem.question, template.question), messages=turns)


def messages_to_render(problem: Problem) -> list[dict[str, str]]:
    """The messages that a chat template is called with."""
    turns = problem.messages or (("user", problem.question),)
    return [{"role": role, "content": content} for role, content in turns]


def _chat(problem: Problem, tokenizer: PreTrainedTokenizerBase, template: Template) -> str:
    if tokenizer.chat_template is None and template.text is None:
        raise without_template()
    with refusals(problem, template):
        return str(
            tokenizer.apply_chat_template(
                messages_to_render(problem),
                chat_template=template.text,
                tokenize=False,
                add_generation_prompt=True,
                **template.arguments,
            )
        )


def without_template() -> UserError:
    """The error of the style `chat` where there is no template."""
    return UserError(
        "data.prompt_style is 'chat' but the tokenizer has no chat template: choose another style, or name a file "
        "with data.chat_template"
    )


@contextmanager
def refusals(problem: Problem, template: Template) -> Iterator[None]:
    """Turn the errors of a chat template inside the block into UserErrors, which name its file if it has one."""
    named = f"data.chat_template = {template.path}" if template.path else "the tokenizer's chat template"
    try:
        yield
    except TemplateSyntaxError as error:
        raise UserError(f"{named}, line {error.lineno}: {error.message}; correct the template") from None
    except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:  # roles must alternate
        place = f" ({named})" if template.path else ""
        raise UserError(f"{problem.id}: the chat template refuses the messages ({error}){place}") from None


def fitting_prompts(
    problems: Sequence[Problem],
    tokenizer: PreTrainedTokenizerBase,
    style: str,
    max_prompt_tokens: int,
    template: Template = TOKENIZER_TEMPLATE,
) -> FittingPrompts:
    """Render every problem and leave out those whose prompt is longer than `max_prompt_tokens`."""
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
    """`fitting_prompts` of several data sets, concatenated; each must have a prompt that fits."""
    sets: dict[str, list[Problem]] = {}
    for problem in problems:
        sets.setdefault(problem.source, []).append(problem)
    fits = [fitting_prompts(own, tokenizer, style, max_prompt_tokens, template) for own in sets.values()]
    return FittingPrompts(
        [problem for fit in fits for problem in fit.problems],
        [prompt for fit in fits for prompt in fit.prompts],
        sum(fit.too_long for fit in fits),
    )


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
    named = "plain" if style == "auto" else style
    return named, _styled(problem, named, template)


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
