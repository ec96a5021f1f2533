"""Rows of prompts and responses to imitate, as `mugrpo sft` learns them."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.data.fields import spoken_message, unread_fields
from mugrpo_megatron.data.files import CONVERSATION, QUESTIONS, RESPONSES, ColumnPaths, found_in, has, messages_of, rows
from mugrpo_megatron.data.problems import named_sources, refuse_malformed, resolve, with_system
from mugrpo_megatron.data.prompts import messages_to_render, render, render_reply, rendered, template_of
from mugrpo_megatron.data.reading import problem_of
from mugrpo_megatron.data.tokenizer import prompt_end, without_repetition
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.samples import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # a second to import

SOLUTIONS = ("solution", "answer")
"""Columns of the response in rows without a response and without an assistant's turn: MATH's worked solution comes
before its answer, GSM8K's answer is a worked one."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    problem: Problem
    response: str
    reply: Message | None = None
    """The response as a message, where it has calls or a thought that only a chat template writes."""


@dataclass(frozen=True, slots=True)
class Sequences:
    pairs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """(prompt, response with the end-of-sequence token)."""
    too_long: int = 0
    """Demonstrations left out."""
    notes: list[str] = field(default_factory=list)


def demonstrations(source: str, section: DataSection) -> list[Demonstration]:
    """Read the rows of a source, or of several separated by commas: a file, a named data set or one of the hub.

    A row has a prompt (`prompt`, `question` or `problem`; text or messages) and a response (`RESPONSES`; text, or
    messages: each of the assistant's is a response), or `messages` whose last turn is the response, or else one of
    `SOLUTIONS`. A prompt without a system turn gets `data.system_prompt`, as in RL. Raises UserError that names
    malformed rows, unless `data.strict` is false, and for a source without any row.
    """
    rows_read: list[Demonstration] = []
    malformed: list[str] = []
    for name, named in named_sources(source).items():
        for path in resolve(named, section, "train").files:
            for line, row in rows(path):
                try:
                    rows_read += _demonstrations(row, name, f"{path}:{line}")
                except ValueError as error:
                    malformed.append(f"{path}:{line}: {error}")
    if section.strict:
        refuse_malformed(malformed)
    if not rows_read:
        raise UserError(f"sft.train = {source}: no usable row ({len(malformed)} malformed)")
    if section.system_prompt:
        return [replace(row, problem=with_system(row.problem, section.system_prompt)) for row in rows_read]
    return rows_read


def sequences(
    examples: list[Demonstration], tokenizer: PreTrainedTokenizerBase, section: DataSection, max_response_tokens: int
) -> Sequences:
    """Tokenize demonstrations: prompts as in RL, responses with the end-of-sequence token.

    Leaves out prompts longer than `data.max_prompt_tokens` and responses longer than `max_response_tokens`; UserError
    when all are.
    """
    template = template_of(section)
    fitting = Sequences()
    too_long = 0
    refused: list[str] = []
    for example in examples:
        prompt = render(example.problem, tokenizer, section.prompt_style, template)
        if example.reply:
            try:
                response = render_reply(example.problem, example.reply, tokenizer, section.prompt_style, template)
            except UserError as error:
                refused.append(str(error))
                continue
        else:
            text = without_repetition(example.response, prompt_end(prompt, tokenizer), tokenizer)
            response = [*tokenizer.encode(text, add_special_tokens=False), tokenizer.eos_token_id]
        if 0 < len(prompt) <= section.max_prompt_tokens and len(response) <= max_response_tokens:
            fitting.pairs.append((prompt, response))
        else:
            too_long += 1
    if section.strict or not (fitting.pairs or too_long):
        refuse_malformed(refused)
    if not fitting.pairs:
        raise UserError(
            f"all {too_long:,} rows are longer than data.max_prompt_tokens = {section.max_prompt_tokens} or "
            f"rollout.max_response_tokens = {max_response_tokens}: raise them"
        )
    shown = partial(rendered, tokenizer=tokenizer, style=section.prompt_style, template=template)
    notes = unread_fields([example.problem for example in examples], shown)
    notes += [f"{len(refused):,} rows are left out: {refused[0]}"] if refused else []
    return Sequences(fitting.pairs, too_long, notes)


def _demonstrations(row: dict[str, Any] | str, source: str, problem_id: str) -> list[Demonstration]:
    """The responses in a row: one, or each of the assistant's messages in a list of several, after those before it."""
    if isinstance(row, str):
        raise ValueError(row)
    columns = _columns(row)
    problem = problem_of(row, columns, source, problem_id, any_gold=True)
    said = row[columns.question][-1:] if columns.answer == CONVERSATION else problem.gold
    examples: list[Demonstration] = []
    if isinstance(said, list):
        asked, turns = messages_to_render(problem), messages_of(said)
        if not turns or turns[-1]["role"] != "assistant":
            last = turns[-1]["role"] if turns else None
            raise ValueError(f"field {columns.answer!r} ends with a message of {last!r}, not the assistant's")
        for index, turn in enumerate(turns):
            if turn["role"] == "assistant":
                earlier = replace(problem, messages=(*asked, *turns[:index])) if index else problem
                examples.append(Demonstration(earlier, turn["content"] or "", spoken_message([turn])))
    elif isinstance(said, str | int | float) and not isinstance(said, bool):
        examples.append(Demonstration(problem, str(said)))
    else:
        raise ValueError(f"field {columns.answer!r} holds {type(said).__name__}, not a response")
    if not all(example.response.strip() or example.reply for example in examples):
        raise ValueError(f"field {columns.answer!r} is empty")
    return examples


def _columns(row: dict[str, Any]) -> ColumnPaths:
    question = next((name for name in QUESTIONS if row.get(name) is not None), None)
    if question is None:
        raise ValueError(f"has none of the columns {', '.join(QUESTIONS)} {found_in(row)}")
    messages = row[question]
    ends_with_response = isinstance(messages, list) and messages and messages_of(messages)[-1]["role"] == "assistant"
    columns = RESPONSES if ends_with_response else (*RESPONSES, *SOLUTIONS)
    if response := next((name for name in columns if has(row, name)), None):
        return ColumnPaths(question, response)
    if ends_with_response:
        return ColumnPaths(question, CONVERSATION)
    raise ValueError(
        f"has no response: none of {', '.join(columns)}, and no messages that end with the assistant's {found_in(row)}"
    )
