"""The fields of rows, besides roles and texts, that a chat template may use, and whether it shows them in a prompt."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from jinja2 import TemplateError

from mugrpo_megatron.data.files import messages_of, without_nulls
from mugrpo_megatron.data.quoted import MARK
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import parse_json
from mugrpo_megatron.samples import Message, Problem

SPOKEN = ("reasoning_content", "reasoning", "thinking", "tool_calls", "function_call")
"""Fields of an assistant's message, besides its content, whose values the model wrote: its thought and its calls."""
TOOLS, ARGUMENTS = "tools", "chat_template_kwargs"
"""Columns of tools (TRL, slime) and of further arguments of the template (TRL)."""
EMPTY: tuple[Any, ...] = (None, [], {}, "", "[]", "{}", "null")
MOST_TRIED = 64
"""Most rows of a source that are rendered with and without a field. If no prompt changes by that, the field counts as
unread."""


def row_arguments(row: Mapping[str, Any]) -> dict[str, Any]:
    """A row's arguments for its chat template: `chat_template_kwargs`, and `tools` if they are a list of objects."""
    arguments, tools = row.get(ARGUMENTS), row.get(TOOLS)
    tools = [without_nulls(_parsed(tool)) for tool in tools] if isinstance(tools, list) else []
    return {
        **(without_nulls(arguments) if isinstance(arguments, dict) else {}),
        **({TOOLS: tools} if tools and all(isinstance(tool, dict) for tool in tools) else {}),
    }


def _parsed(tool: Any) -> Any:
    try:
        return parse_json(tool) if isinstance(tool, str) else tool
    except ValueError:
        return tool


def spoken_message(value: Any) -> Message | None:
    """Returns the message if `value` is a list of one, which is the assistant's and has one of the fields `SPOKEN`.

    Returns None for any other value, and raises ValueError for a malformed message.
    """
    if not isinstance(value, list) or len(value) != 1:
        return None
    [message] = messages_of(value)
    return message if message["role"] == "assistant" and not message.keys().isdisjoint(SPOKEN) else None


def in_accepted_form(render: Callable[[list[dict[str, Any]]], str], messages: list[dict[str, Any]]) -> str:
    """Render messages with a chat template, in the first of several equivalent forms that the template accepts.

    The messages are tried as they are first; then with calls' arguments as JSON text, with empty text for null content,
    with both changes, and with each content as a list of parts. Most templates write arguments with `tojson`, but
    DeepSeek-V3's adds them to a text; some take no null content. A form also counts as refused if the longest word of
    the last user message is not in the result, as when the template's file is a pointer of Git LFS. If all forms are
    refused, raises the error of the first.
    """
    # Forms that keep `content: null` come before those with empty text: some templates show tool calls only if the
    # content is null.
    forms = [messages, _with_written_arguments(messages)]
    forms += [[{**message, "content": message["content"] or ""} for message in form] for form in forms]
    forms.append([{**message, "content": _as_parts(message["content"])} for message in messages])
    questions = [message["content"].split() for message in messages if message["role"] == "user"]
    word = max(questions[-1], key=len, default="") if questions else ""
    refusal: Exception | None = None
    for index, form in enumerate(forms):
        if form not in forms[:index]:
            try:
                if word in (text := render(form)).replace(MARK, ""):
                    return text
                refusal = refusal or ValueError("it shows nothing of the user's message")
            except (TemplateError, TypeError, ValueError, LookupError, ArithmeticError) as error:
                refusal = refusal or error
    raise refusal or ValueError("there is no message")


def _as_parts(content: Any) -> Any:
    """A content that is text as a list of one part, the form that templates of multimodal models iterate over; another
    content unchanged."""
    return [{"type": "text", "text": content}] if isinstance(content, str) else content


def _with_written_arguments(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [
        {**message, "tool_calls": [_written(call) for call in message["tool_calls"]]}
        if "tool_calls" in message
        else message
        for message in messages
    ]


def _written(call: dict[str, Any]) -> dict[str, Any]:
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": _written(function)}
    arguments = call.get("arguments")
    return {**call, "arguments": json.dumps(arguments, ensure_ascii=False)} if isinstance(arguments, dict) else call


def unread_fields(problems: Sequence[Problem], rendered: Callable[[Problem], str]) -> list[str]:
    """A sentence for each field of rows or messages that changes no prompt, so that its value has no effect.

    `rendered` gives a problem's prompt as text.
    """
    rows: Counter[tuple[str, str]] = Counter()
    tried: Counter[tuple[str, str]] = Counter()
    read: set[tuple[str, str]] = set()
    for problem in problems:
        prompt: str | None = None
        for name, rest in _without_fields(problem):
            key = problem.source, name
            rows[key] += 1
            if key in read or tried[key] >= MOST_TRIED:
                continue
            tried[key] += 1
            prompt = rendered(problem) if prompt is None else prompt
            if _differs(rendered, rest, prompt):
                read.add(key)
    return [
        f"{source}: {count:,} rows have {name}, which changes no prompt: the template or style does not show it"
        for (source, name), count in rows.items()
        if (source, name) not in read
    ]


def _differs(rendered: Callable[[Problem], str], rest: Problem, prompt: str) -> bool:
    try:
        return rendered(rest) != prompt
    except UserError:  # the template fails without the field, so it uses the field
        return True


def _without_fields(problem: Problem) -> Iterator[tuple[str, Problem]]:
    """Yields, for each field that only a chat template could show, its name and the problem without it."""
    arguments = problem.row.get(ARGUMENTS)
    for column in (TOOLS, *([] if isinstance(arguments, dict) else [ARGUMENTS])):
        if problem.row.get(column) not in EMPTY:
            yield column, replace(problem, row={key: value for key, value in problem.row.items() if key != column})
    given = without_nulls(arguments) if isinstance(arguments, dict) else {}
    for name in given:
        rest = {key: value for key, value in given.items() if key != name}
        yield f"{ARGUMENTS}.{name}", replace(problem, row={**problem.row, ARGUMENTS: rest})
    for name in sorted({key for message in problem.messages for key in message} - {"role", "content"}):
        messages = tuple({key: value for key, value in message.items() if key != name} for message in problem.messages)
        yield f"message.{name}", replace(problem, messages=messages)
