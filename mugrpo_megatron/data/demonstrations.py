"""Reads rows of prompts and responses for `mugrpo sft`, which trains a model to imitate the responses."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from mugrpo_megatron.data.fields import spoken_message, unread_fields
from mugrpo_megatron.data.files import (
    CHATS,
    CONVERSATION,
    QUESTIONS,
    RESPONSES,
    ColumnPaths,
    field_at,
    found_in,
    has,
    is_empty,
    messages_of,
    question_column,
    rows,
)
from mugrpo_megatron.data.problems import first_malformed, named_sources, refuse_malformed, resolve, with_system
from mugrpo_megatron.data.prompts import messages_to_render, render, render_reply, rendered, template_of
from mugrpo_megatron.data.reading import kind_of, problem_of
from mugrpo_megatron.data.tokenizer import prompt_end, without_repetition
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.samples import Message, Problem

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase  # imported for the type alone: it takes a second

SOLUTIONS = ("solution", "answer")
"""Columns to take the response from if a row has neither a column of `RESPONSES` nor a message of the assistant. MATH's
worked solution comes before its answer; GSM8K's answer is a worked one."""
TRACES = (
    *(
        "generations",
        "generation",
        "generated_solution",
        "reasoning",
        "reasoning_content",
        "deepseek_reasoning",
        "trace",
    ),
    *("thinking_trajectories", "deepseek_thinking_trajectory", "r1_generation", "cot"),
)
"""Columns that hold a model's response in published sets. (`SOLUTIONS` hold solutions that people wrote.)"""
WEIGHT = "weight"
"""Field of a message; where it is 0, OpenAI's fine-tuning does not train on the message."""


@dataclass(frozen=True, slots=True)
class Demonstration:
    problem: Problem
    response: str
    reply: Message | None = None
    """The response as a message, where it has calls or a thought that only a chat template writes."""
    column: str = ""
    """Name of the column that the response is from."""
    unread: str = ""
    """Another column of the row that has a model's response and is not read; empty without one."""


@dataclass(frozen=True, slots=True)
class Sequences:
    pairs: list[tuple[list[int], list[int]]] = field(default_factory=list)
    """Token ids of each demonstration: (prompt, response with the end-of-sequence token)."""
    too_long: int = 0
    """Number of demonstrations that are left out because they are too long or have an empty prompt."""
    notes: list[str] = field(default_factory=list)


def demonstrations(source: str, section: DataSection) -> list[Demonstration]:
    """Read the rows of a source, or of several separated by commas: a file, a named data set or one of the hub.

    A row has a prompt and a response. The prompt is one of the columns `QUESTIONS`, as text or as messages. The
    response comes from the first of these that the row has:

    - one of the columns `RESPONSES`, as text or as messages, of which each of the assistant's is a response;
    - the last turn of a chat (`CHATS`). If any turn of the chat has a `weight`, every turn of the assistant is a
      response unless its weight is 0;
    - one of the columns `SOLUTIONS`.

    A prompt without a system turn gets `data.system_prompt`, as in RL. Raises UserError when no row is usable, and
    unless `data.strict` is false for malformed rows, which it names.
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
        why = first_malformed(malformed)
        raise UserError(f"sft.train = {source} has no usable row{why}; add rows with a prompt and a response")
    if section.system_prompt:
        return [replace(row, problem=with_system(row.problem, section.system_prompt)) for row in rows_read]
    return rows_read


def sequences(
    examples: list[Demonstration], tokenizer: PreTrainedTokenizerBase, section: DataSection, max_response_tokens: int
) -> Sequences:
    """Tokenize demonstrations: prompts as in RL, responses with the end-of-sequence token.

    Leaves out a demonstration whose prompt is empty or longer than `data.max_prompt_tokens`, or whose response is
    longer than `max_response_tokens`. A response that the template cannot write raises UserError with `data.strict`;
    without it the response is left out with a note. Raises UserError too when no demonstration is left.
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
            f"no row is left: {too_long:,} are longer than data.max_prompt_tokens = {section.max_prompt_tokens} or "
            f"rollout.max_response_tokens = {max_response_tokens}; raise the limit that they exceed"
        )
    shown = partial(rendered, tokenizer=tokenizer, style=section.prompt_style, template=template)
    notes = [*_columns_read(examples), *unread_fields([example.problem for example in examples], shown)]
    notes += [f"{len(refused):,} rows are left out: {refused[0]}"] if refused else []
    return Sequences(fitting.pairs, too_long, notes)


def _demonstrations(row: dict[str, Any] | str, source: str, problem_id: str) -> list[Demonstration]:
    """The demonstrations in a row: one for each response. If the responses are messages of the assistant in a list, the
    messages before a response belong to its prompt. ValueError for a malformed row."""
    if isinstance(row, str):
        raise ValueError(row)
    columns = _columns(row)
    problem = problem_of(row, columns, source, problem_id, any_gold=True)
    said = row[columns.question][-1:] if columns.answer == CONVERSATION else problem.gold
    unread = next((name for name in TRACES if not is_empty(row.get(name))), "") if columns.answer in SOLUTIONS else ""
    examples: list[Demonstration] = []
    if columns.answer == CONVERSATION and any(WEIGHT in turn for turn in messages_of(row[columns.question])):
        examples = _weighed(problem, row[columns.question])
    elif isinstance(said, list) and said and all(isinstance(text, str) for text in said):
        examples = [Demonstration(problem, text) for text in said]
    elif isinstance(said, list):
        asked, turns = messages_to_render(problem), messages_of(said)
        if not turns or turns[-1]["role"] != "assistant":
            last = f"ends with a message of {turns[-1]['role']!r}" if turns else "is an empty list"
            raise ValueError(f"field {columns.answer!r} {last}, and its last message must be the assistant's")
        for index, turn in enumerate(turns):
            if turn["role"] == "assistant":
                earlier = replace(problem, messages=(*asked, *turns[:index])) if index else problem
                examples.append(Demonstration(earlier, turn["content"] or "", spoken_message([turn])))
    elif isinstance(said, str | int | float) and not isinstance(said, bool):
        examples.append(Demonstration(problem, str(said)))
    else:
        raise ValueError(f"field {columns.answer!r} holds {kind_of(said)}, where the text of a response belongs")
    if not all(example.response.strip() or example.reply for example in examples):
        raise ValueError(f"field {columns.answer!r} has an empty response")
    column = columns.question if columns.answer == CONVERSATION else columns.answer
    return [replace(example, column=column, unread=unread) for example in examples]


def _weighed(problem: Problem, chat: list[Any]) -> list[Demonstration]:
    """The demonstrations of a chat with weights: each message of the assistant whose weight is not 0 is a response to
    the messages before it. ValueError for a weight other than 0 and 1, and if all weights are 0."""
    turns = messages_of(chat)
    if odd := [turn[WEIGHT] for turn in turns if turn.get(WEIGHT, 1) not in (0, 1)]:
        raise ValueError(f"a message has the weight {odd[0]!r}: only 0 (not learnt) and 1 (learnt) are possible")
    plain = [{key: value for key, value in turn.items() if key != WEIGHT} for turn in turns]
    learnt = [i for i, turn in enumerate(turns) if turn["role"] == "assistant" and turn.get(WEIGHT, 1) != 0]
    if not learnt:
        raise ValueError("every turn of the assistant has the weight 0, so there is nothing to learn")
    return [
        Demonstration(
            replace(problem, messages=tuple(plain[:i])), plain[i]["content"] or "", spoken_message([plain[i]])
        )
        for i in learnt
    ]


def _columns_read(examples: list[Demonstration]) -> list[str]:
    """A sentence for each column of solutions that responses were taken from, although the same rows have a model's
    response in a column of `TRACES`."""
    counts = Counter((example.column, example.unread) for example in examples if example.unread)
    return [
        f"{count:,} responses are read from {column!r}; these rows also have {unread!r}, which is not read: rename it "
        "to 'response' to learn it"
        for (column, unread), count in counts.items()
    ]


def _columns(row: dict[str, Any]) -> ColumnPaths:
    response = next((name for name in RESPONSES if has(row, name) and not is_empty(field_at(row, name))), None)
    chat = next((name for name in CHATS if _ends_with_response(row.get(name))), None)
    # A chat comes before `SOLUTIONS`: a row of OpenR1 has a chat with the model's response, and a solution that a
    # person wrote.
    if chat and not response:
        return ColumnPaths(chat, CONVERSATION)
    question = question_column(row)
    if question is None:
        raise ValueError(f"has none of the columns {', '.join(QUESTIONS)} {found_in(row)}")
    columns = RESPONSES if _ends_with_response(row[question]) else (*RESPONSES, *SOLUTIONS)
    if response := response or next((name for name in columns if has(row, name)), None):
        return ColumnPaths(question, response)
    if _ends_with_response(row[question]):
        return ColumnPaths(question, CONVERSATION)
    raise ValueError(
        f"has no response: none of {', '.join(columns)}, and no messages that end with the assistant's {found_in(row)}"
    )


def _ends_with_response(value: Any) -> bool:
    return isinstance(value, list) and bool(value) and messages_of(value)[-1]["role"] == "assistant"
