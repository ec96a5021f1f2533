"""Which columns of a row are the question and the gold, in the shapes that data sets have; and chat messages."""

from __future__ import annotations

import ast
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from mugrpo_megatron.samples import Message


@dataclass(frozen=True, slots=True)
class Columns:
    """Where a row has its question and its gold: columns, or paths inside one."""

    question: str
    answer: str
    question_prefix: str = ""
    """Text that the data set puts before every question; it is cut off."""
    question_suffix: str = ""
    """Text after every question, cut off as well."""


QUESTIONS = ("problem", "question", "prompt", "messages")
ANSWERS = ("reward_model.ground_truth", "answer", "label", "ground_truth", "solution", "final_answer")
KNOWN = {
    ("question", "answer"): "GSM8K's",
    ("prompt", "label"): "slime's",
    ("prompt", "reward_model.ground_truth"): "verl's",
    ("problem", "solution"): "MATH's",
    ("prompt", "answer"): "TRL's",
    ("prompt", "solution"): "TRL's",
    ("prompt", "ground_truth"): "TRL's",
}
"""What rows with these columns are called."""
CONVERSATION = "the last message"
"""Stands for the gold of a row of messages without a column for it: what the assistant says last."""


RESPONSES = ("response", "completion", "output", "completions")
"""Columns of a response, to imitate or to score, the first that a row has."""
TESTS = ("tests", "test_cases", "test_list", "input_output", "public_tests")
"""Columns that hold a program's tests, in the sets that have them; a gold for functions that read any value."""
NOTHING = ""
"""Stands for the gold of a row that has none: a user's function may judge by the row or by the response alone."""


def recognised(row: dict[str, Any], any_gold: bool = False) -> Columns | None:
    """The columns of a row that has a question under a usual name; None when it has none, or nothing to verify.

    With `any_gold` a program's tests are a gold too, and a row needs none.
    """
    question = next((name for name in QUESTIONS if row.get(name) is not None), None)
    if question is None:
        return None
    if answer := gold_column(row, any_gold):
        return Columns(question, answer)
    messages = row[question]
    if isinstance(messages, list) and len(messages) > 1 and _role(messages[-1]) == "assistant":
        return Columns(question, CONVERSATION)
    return Columns(question, NOTHING) if any_gold else None


def gold_column(row: dict[str, Any], any_gold: bool) -> str:
    """The first column of a gold under a usual name that the row has, "" without one; tests are one with `any_gold`."""
    return next((name for name in ((*ANSWERS, *TESTS) if any_gold else ANSWERS) if has(row, name)), "")


def described(columns: Columns) -> str:
    """The columns in words: `slime's (prompt, label)`."""
    if columns.answer == NOTHING:
        return f"{columns.question}, without a gold"
    named = KNOWN.get((columns.question, columns.answer), "")
    return f"{named} {columns.question}, {columns.answer}".strip()


OPTIONS = ("choices", "options", "endings", "candidates")
"""Columns of the answers that a question offers to choose from."""
LETTERED: tuple[tuple[str, ...], ...] = (
    ("A", "B", "C", "D"),
    ("opa", "opb", "opc", "opd"),
    ("option_a", "option_b", "option_c", "option_d"),
)
"""Such columns in the sets that have one for each answer."""


def unseen_options(row: dict[str, Any], question: str) -> str:
    """The columns of a row whose options do not stand in its question, in words; empty without any."""
    name = next((name for name in OPTIONS if row.get(name)), "")
    lettered = next((names for names in LETTERED if all(_plain(row.get(one)) for one in names)), ("",))
    options = _texts(row[name]) if name else [str(row[one]) for one in lettered if one]
    if len(options) < 2 or all(option.strip() in question for option in options):
        return ""
    return f"`{name}`" if name else f"`{lettered[0]}` to `{lettered[-1]}`"


def _texts(options: Any) -> list[str]:
    """The options in a list of texts, in ARC's table of lists, in a table by letter or in a printed list."""
    if isinstance(options, dict):
        inner = options.get("text")
        return _texts(inner if isinstance(inner, list) else list(options.values()))
    if isinstance(options, list):
        parts = [one.get("text", one.get("content")) if isinstance(one, dict) else one for one in options]
        return [str(part) for part in parts if _plain(part)]
    if isinstance(options, str) and options.lstrip().startswith(("[", "{")):
        try:
            return _texts(ast.literal_eval(options.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return []
    return []


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip() != ""


def found_in(row: Mapping[str, Any]) -> str:
    """The columns of a row, for messages about one that is missing."""
    return f"(found {', '.join(sorted(map(str, row))) or 'none'})"


def has(row: dict[str, Any], path: str) -> bool:
    """Whether `field_at` finds something other than null."""
    try:
        return field_at(row, path) is not None
    except KeyError:
        return False


def field_at(row: dict[str, Any], path: str) -> Any:
    """Value of a column, or at a path inside one: `reward_model.ground_truth`, `prompt.0.content`.

    Raises KeyError naming the part that is missing.
    """
    if path in row:
        return row[path]
    value: Any = row
    for part in path.split("."):
        if isinstance(value, dict) and part in value:
            value = value[part]
        elif isinstance(value, list) and part.isdecimal() and int(part) < len(value):
            value = value[int(part)]
        else:
            raise KeyError(part)
    return value


def messages_of(value: list[Any]) -> tuple[Message, ...]:
    """The messages of a chat, each as (role, text); ValueError with what is wrong.

    A content is text, or a list of parts of type `text`.
    """
    return tuple((_role_of(number, one), _text_of(number, one)) for number, one in enumerate(value, start=1))


def _role_of(number: int, message: Any) -> str:
    role = _role(message)
    if not isinstance(role, str) or not role.strip():
        raise ValueError(f"message {number} has no role")
    return role


def _role(message: Any) -> Any:
    return message.get("role") if isinstance(message, dict) else None


def _text_of(number: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        other = [part.get("type") for part in content if part.get("type") != "text"]
        if other:
            raise ValueError(f"message {number} has a part of type {other[0]!r}, and only text can be read")
        if all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
    raise ValueError(f"message {number} has no text")
