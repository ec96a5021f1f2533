"""Converts a row of a data file to a problem: its question, its gold, and the row as JSON values."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Mapping, Sequence
from datetime import date, time, timedelta
from decimal import Decimal
from typing import Any

from mugrpo_megatron.data.files import (
    CHATS,
    CONVERSATION,
    INPUT,
    INSTRUCTION,
    NO_GOLD,
    ColumnPaths,
    Unreadable,
    field_at,
    found_in,
    has,
    is_empty,
    messages_of,
    null_columns,
    recognised,
)
from mugrpo_megatron.data.printed import parsed_text, printed_list
from mugrpo_megatron.files.json_text import to_json_value
from mugrpo_megatron.rewards.items import ChatOrText
from mugrpo_megatron.rewards.math.extract import boxed_answer
from mugrpo_megatron.samples import Message, Problem


class FieldMissing(ValueError):
    """The error for a row that lacks a column."""


_LOST_BACKSLASH = re.compile(
    "\a(?=lpha|ngle|pprox)|\b(?=eta|inom|egin|oxed|ar\\b)|\f(?=rac|orall)|\v(?=ec|arphi|ert|dots)"
    "|\t(?=ext|heta|imes|au\\b|frac|an[({^])|\n(?=eq\\b|abla)|\r(?=ho\\b|ight\\b)"
)
"""Matches what is left of `\\frac` or `\\theta` after JSON or Python has read its backslash as an escape."""


def columns_of(
    row: dict[str, Any], readings: Sequence[ColumnPaths], recognises: bool, any_gold: bool
) -> tuple[ColumnPaths, bool]:
    """Choose the columns of question and gold in a row: the first of `readings` that the row has and that are not
    empty; else, with `recognises`, columns with usual names.

    The second value is whether they were recognised by their names. If the row has such columns, but with null, they
    are returned, so that the error is about the null. If nothing fits, the first of `readings` is returned.
    """
    for columns in readings:
        if _filled(row, columns.question) and _filled(row, columns.answer):
            return columns, False
    if not recognises:
        return readings[0], False
    if recognition := recognised(row, any_gold):
        return recognition, True
    return null_columns(row) or readings[0], False


def _only_text(value: list[Any], path: str) -> Any:
    """The text in a list that has one text and nothing else; ValueError for several texts; other lists unchanged."""
    if not value or not all(isinstance(text, str) for text in value):
        return value
    if len(value) > 1:
        raise ValueError(f"field {path!r} holds {len(value)} texts, where one question belongs: write a row for each")
    return value[0]


def _filled(row: dict[str, Any], path: str) -> bool:
    return has(row, path) and not is_empty(field_at(row, path))


PICTURES = ("image", "images", "decoded_image", "video", "videos", "audio", "audios")
"""Columns of pictures, videos or sound, which a model that reads only text does not get."""
_PICTURE_FILE = re.compile(
    r"\Adata:(?:image|video|audio)/|\.(?:png|jpe?g|gif|webp|bmp|mp4|webm|wav|mp3)\Z", re.IGNORECASE
)
_PLACE = re.compile(r"^\s*<(?:image|video|audio)[ _]?[0-9]*>|<(?:image|video|audio)[ _]?[0-9]*>\s*\Z", re.MULTILINE)


def _check_pictures(row: Mapping[str, Any], question: str) -> None:
    """Raise ValueError for a question about pictures or sound, which the model would not get."""
    for name in PICTURES:
        value = row.get(name)
        shown = value[0] if isinstance(value, list) and value else value
        if (isinstance(shown, dict) and shown) or (isinstance(shown, bytes) and shown):
            raise ValueError(f"has pictures or sound in column {name!r}, and only text can be read")
        if isinstance(shown, str) and _PICTURE_FILE.search(shown):
            raise ValueError(f"has pictures or sound in column {name!r} ({shown[:60]}), and only text can be read")
    if place := _PLACE.search(question):
        raise ValueError(
            f"has a place for pictures or sound, {place[0].strip()!r}, in its question, and only text can be read"
        )


def problem_of(
    row: dict[str, Any], columns: ColumnPaths, source: str, problem_id: str, any_gold: bool = False
) -> Problem:
    """Convert a row to a problem; ValueError with the reason for a malformed row.

    With `any_gold` the gold may be any JSON value, or missing if `columns.answer` is NO_GOLD. Otherwise it must be an
    answer that `math` can verify: text, a number, or a list of texts and numbers.
    """
    cell = _found(row, columns.question)
    cell = _only_text(cell, columns.question) if isinstance(cell, list) else _scalar(cell, columns.question)
    cell = parsed_text(columns.question, cell) if isinstance(cell, str) else cell
    messages = _messages(cell, columns) if isinstance(cell, list) else ()
    reply = messages[-1]["content"] or "" if messages and columns.answer == CONVERSATION else None
    if messages and (reply is not None or columns.question in CHATS):
        messages = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    if messages and messages[-1]["role"] == "assistant":
        raise ValueError(f"field {columns.question!r} ends with the assistant's turn, not with a question")
    texts = [message["content"] or "" for message in messages]
    question = "\n".join(texts) if isinstance(cell, list) else str(cell)
    if not question.strip():
        raise ValueError(f"field {columns.question!r} is empty")
    question = question.removeprefix(columns.question_prefix).removesuffix(columns.question_suffix)
    if columns.question == INSTRUCTION and isinstance(given := row.get(INPUT), str) and given.strip():
        question = f"{question}\n\n{given}"
    _check_pictures(row, question)
    columns_of_row = kept_row(row)
    gold = reply if reply is not None else None if columns.answer == NO_GOLD else _found(columns_of_row, columns.answer)
    if any_gold:
        answer = any_answer(gold)
    elif reply is not None:
        answer = _verifiable(reply, columns.answer)
    else:
        answer = verifiable_answer(_found(row, columns.answer), columns.answer)
    return Problem(problem_id, question, answer, source, messages, gold, data_source_of(row), columns_of_row)


def prompt_in_row(row: Mapping[str, Any]) -> ChatOrText:
    """The prompt in a row, for reward functions: the column `prompt`, as text or a chat's messages; "" without it."""
    prompt = row.get("prompt")
    if isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt):
        return prompt
    return prompt if isinstance(prompt, str) else ""


def data_source_of(row: Mapping[str, Any]) -> str:
    """Text of verl's column `data_source`; empty if missing."""
    named = row.get("data_source")
    return named if isinstance(named, str) else ""


def kept_row(row: dict[str, Any]) -> dict[str, Any]:
    """The row as JSON values, in the order of its columns and without `Unreadable` values.

    ValueError for another value that JSON cannot express.
    """
    try:
        # Names are interned, since millions of rows have the same ones.
        return {
            sys.intern(str(name)): to_json_value(value)
            for name, value in row.items()
            if not isinstance(value, Unreadable)
        }
    except TypeError as error:
        raise ValueError(str(error)) from None
    except RecursionError:
        raise ValueError("lists or objects are nested too deep") from None


def final_answer(text: str) -> str:
    r"""The final answer in a gold's text: after the last `####`, in the last `\boxed{}`, or else the whole text."""
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    boxed = boxed_answer(text)
    return text.strip() if boxed is None else boxed


def verifiable_answer(gold: Any, path: str) -> str:
    """The answer for `math` in `gold`, the value of the field `path`: text, a number, or a list of texts and numbers,
    which may be printed as text. The answers of a list are joined by commas.

    Raises ValueError for another value, and for a gold without an answer.
    """
    gold = printed_list(gold) or gold if isinstance(gold, str) else gold
    answers = gold if isinstance(gold, list) else [gold]
    return _verifiable(", ".join(str(_scalar(answer, path)) for answer in answers), path)


def _verifiable(gold: str, path: str) -> str:
    if not gold.strip():
        raise ValueError(f"field {path!r} is empty")
    if not (answer := final_answer(gold)):
        raise ValueError(f"field {path!r} holds no answer: nothing follows its last ####, or its last box is empty")
    if lost := _LOST_BACKSLASH.search(gold):
        raise ValueError(
            f"field {path!r} holds the control character {lost[0]!r} where LaTeX has a command: the file writes one "
            "backslash where JSON needs two; double the backslashes"
        )
    return answer


def lists_answers(row: Mapping[str, Any], path: str) -> bool:
    """Whether the gold in the field `path` is a list of several answers."""
    try:
        gold = field_at(dict(row), path)
    except KeyError:
        return False
    gold = printed_list(gold) if isinstance(gold, str) else gold
    return isinstance(gold, list) and len(gold) > 1


def any_answer(gold: Any) -> str:
    """The answer in a gold for a user's function: a text's `final_answer`, or the whole text if that is empty; another
    value as JSON; "" without a gold."""
    if gold is None:
        return ""
    return (final_answer(gold) or gold) if isinstance(gold, str) else json.dumps(gold, ensure_ascii=False)


def _found(row: dict[str, Any], path: str) -> Any:
    try:
        value = field_at(row, path)
    except KeyError:
        raise FieldMissing(f"field {path!r} is missing {found_in(row)}{_hint(row)}") from None
    _check_readable(value, path)
    return value


def _check_readable(value: Any, path: str) -> None:
    if isinstance(value, Unreadable):
        raise ValueError(
            f"field {path!r} holds a value that cannot be read ({value.reason}), where text in UTF-8 or a number "
            "belongs"
        )


_QUESTION_WORDS = ("instruction", "query", "input", "problem", "question", "prompt", "quiz", "0.value")
_GOLD_WORDS = (
    *("response", "completion", "output", "completions", "answer", "final answer", "correct answer", "answer number"),
    *("answerkey", "correct", "correct option", "cop", "gold", "target", "solution text format", "solution"),
    *("verification_info.ground_truth", "1.ground_truth.value"),
)
"""Names of questions and golds in published sets, in small letters and without underscores, and paths to them."""


def _hint(row: dict[str, Any]) -> str:
    """Advice on the recipe keys with which this row can be read, if its columns have names that published sets use for
    questions and golds; else ""."""
    question, gold = _named_like(row, _QUESTION_WORDS), _named_like(row, _GOLD_WORDS)
    if not question or not gold or question == gold:
        return ""
    return f'; data.question_field = "{question}" with data.answer_field = "{gold}" reads these columns'


def _named_like(row: dict[str, Any], words: Sequence[str]) -> str:
    """The first column or path with one of these names that holds text or a number; empty without any."""
    spelled = {name.lower().replace("_", " ").strip(): name for name in row if isinstance(name, str)}
    for word in words:
        name = spelled.get(word, word)
        value = field_at(row, name) if has(row, name) else None
        if isinstance(value, str | int | float) and not isinstance(value, bool):
            return name
    return ""


_KINDS: tuple[tuple[type | tuple[type, ...], str], ...] = (
    (bool, "true or false"),
    (dict, "an object"),
    (list, "a list"),
    (bytes, "bytes"),
    ((date, time, timedelta), "a date, a time or a duration"),
)
"""Types of values in a file -> what the user calls them. `date` stands for datetime too, its subclass."""


def kind_of(value: Any) -> str:
    """The words with which an error names a value that is neither text nor a number: "an object", "a list"."""
    return next((words for kinds, words in _KINDS if isinstance(value, kinds)), type(value).__name__)


def _scalar(value: Any, path: str) -> Any:
    _check_readable(value, path)
    if value is None:
        raise ValueError(f"field {path!r} is null")
    if isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"field {path!r} holds {kind_of(value)}, where text or a number belongs")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise ValueError(f"field {path!r} is {value}, where a finite number belongs")
    return value


def _messages(value: list[Any], columns: ColumnPaths) -> tuple[Message, ...]:
    try:
        return messages_of(value)
    except ValueError as error:
        raise ValueError(f"field {columns.question!r}: {error}") from None
