"""Reads JSON, Parquet and CSV files row by row, with line numbers."""

from __future__ import annotations

import ast
import codecs
import csv
import difflib
import os
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from mugrpo_megatron.data.printed import parsed_text, printed_list, with_parsed_texts
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.json_text import parse_json, to_json_value
from mugrpo_megatron.samples import Message

SUFFIXES = (".jsonl", ".json", ".parquet", ".csv", ".tsv")
"""Suffixes of files that can be read. A `.json` file is an array of objects, or JSON lines like `.jsonl`."""

MOST_ALIKE = 3
"""Most suggestions for a name that does not exist."""
ALIKE = 0.7
"""Least similarity of a suggestion, a ratio of `difflib`."""

csv.field_size_limit(sys.maxsize)  # the default limit is 128 KiB, which a row of tests or a worked solution may exceed


def rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield (line from 1, row) for each row of a file. For a malformed row the second value is text: the reason why it
    is malformed.

    In Parquet and JSON arrays a line is a row's number. Chats and objects that a column holds as text are parsed
    (`with_parsed_texts`).

    Raises UserError for a file that is missing, unreadable or of another format.
    """
    check_file(path)
    try:
        for line, row in _rows_as_written(path):
            try:
                yield line, row if isinstance(row, str) else with_parsed_texts(row)
            except ValueError as error:
                yield line, str(error)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror or error}): check its permissions") from None


def _rows_as_written(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    if path.suffix == ".parquet":
        return _parquet_rows(path)
    if path.suffix in (".csv", ".tsv"):
        return _csv_rows(path, "," if path.suffix == ".csv" else "\t")
    if path.suffix == ".json":
        with path.open("rb") as file:
            if file.read(4096).removeprefix(codecs.BOM_UTF8).lstrip().startswith(b"["):
                return _array_rows(path)
    return _json_rows(path)


def check_file(path: Path) -> None:
    """Raise UserError for a file that is missing or has an unknown suffix; does not read it.

    The error about a missing file suggests similar names.
    """
    if path.suffix not in SUFFIXES:
        raise UserError(f"{path}: unknown file type; convert it to one of {', '.join(SUFFIXES)}")
    try:
        if path.is_file():
            return
    except OSError as error:  # the name is too long, or this user may not enter its directory
        raise UserError(f"{path} cannot be read ({error.strerror}): check the path") from None
    if not os.path.lexists(path) and (alike := names_alike(path)):
        raise UserError(f"{path} does not exist; did you mean {' or '.join(map(str, alike))}?")
    raise UserError(f"{path} does not exist or is not a file: check the path")


def names_alike(path: Path) -> list[Path]:
    """Files and folders with names like that of the path's first missing part, in the folder where it is missing; the
    most similar first."""
    missing = path
    while not os.path.lexists(missing.parent) and missing.parent != missing:
        missing = missing.parent
    try:
        names = sorted(os.listdir(missing.parent))
    except OSError:  # the parent is a file, or a directory that this user may not read
        return []
    spelled = {name.lower(): name for name in names} | {Path(name).stem.lower(): name for name in names}
    alike = difflib.get_close_matches(missing.name.lower(), spelled, n=MOST_ALIKE, cutoff=ALIKE)
    return [missing.parent / name for name in dict.fromkeys(map(spelled.__getitem__, alike)) if name != missing.name]


def _array_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    try:
        value = parse_json(path.read_bytes().removeprefix(codecs.BOM_UTF8))
    except ValueError as error:
        raise UserError(f"{path} is not a JSON array ({error}): write it again") from None
    for number, row in enumerate(value, start=1):
        yield number, _object(row)


def _csv_rows(path: Path, delimiter: str) -> Iterator[tuple[int, dict[str, Any] | str]]:
    """Yield the rows as dictionaries whose keys are the names in the first line. A field that a row lacks is left out;
    for a row with too many fields the reason is yielded instead, as text."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = reader.fieldnames or []
            if len(names) == 1 and (other := next((sign for sign in ",;\t|" if sign in names[0]), "")):
                raise UserError(f"{path}:1: {other!r} separates the columns: write the file again with {delimiter!r}")
            if len(set(names)) < len(names):
                twice = next(name for name in names if names.count(name) > 1)
                raise UserError(f"{path}:1: two columns have one name, {twice!r}; rename one of them")
            for row in reader:
                if None in row:
                    yield reader.line_num, "has more fields than the first line has names"
                else:
                    yield reader.line_num, {name: value for name, value in row.items() if value is not None}
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is not UTF-8 ({error}): save it as UTF-8") from None
    except csv.Error as error:
        raise UserError(f"{path} is not a readable {path.suffix[1:].upper()} file ({error}): write it again") from None


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    with path.open("rb") as file:
        for line, raw in enumerate(file, start=1):
            text = raw.removeprefix(codecs.BOM_UTF8) if line == 1 else raw
            if line == 1 and text.strip() == b"[":
                raise UserError(
                    f"{path} is a JSON array, not one object a line: rename it to {path.with_suffix('.json').name}"
                )
            if text.strip():
                try:
                    row = _object(parse_json(text))
                except ValueError as error:
                    row = f"not JSON ({error})"
                yield line, row


def _object(row: Any) -> dict[str, Any] | str:
    """The row as an object; if it is malformed, the reason as text. A row that is a list of turns, as in
    Open-Reasoner-Zero, becomes an object with a chat."""
    if isinstance(row, dict):
        return row
    if isinstance(row, list) and row and all(isinstance(turn, dict) and turn.keys() & {"from", "role"} for turn in row):
        return {"conversations" if "from" in row[0] else "messages": row}
    return f"expected a JSON object, found {type(row).__name__}"


def _parquet_rows(path: Path) -> Iterator[tuple[int, dict[str, Any] | str]]:
    line = 0
    try:
        with pq.ParquetFile(path) as file:
            for batch in file.iter_batches(batch_size=1024):
                for row in _python_rows(batch):
                    line += 1
                    yield line, row
    except (pa.ArrowException, OSError, ValueError, OverflowError, MemoryError) as error:
        raise UserError(f"{path} is not a readable Parquet file ({error}): write it again") from error


def _python_rows(batch: pa.RecordBatch) -> Iterator[dict[str, Any]]:
    """Yield the rows of a batch; a value that Python cannot hold (text that is not UTF-8) is `Unreadable`."""
    try:
        yield from batch.to_pylist()
        return
    except (ValueError, OverflowError, pa.ArrowException):
        pass
    for index in range(batch.num_rows):
        yield {name: _value(column[index]) for name, column in zip(batch.schema.names, batch.columns, strict=True)}


@dataclass(frozen=True, slots=True)
class Unreadable:
    """Stands for a value that Python cannot hold. It makes a row malformed only if it is the question or the gold."""

    reason: str


def _value(scalar: pa.Scalar) -> Any:
    """The value of one field as Python has it. A time without a Python type (nanoseconds, years after 9999) becomes
    text, and a value that has no text either becomes `Unreadable`."""
    try:
        return scalar.as_py()
    except (ValueError, OverflowError, pa.ArrowException) as error:
        try:
            return scalar.cast(pa.string()).as_py()
        except (ValueError, OverflowError, pa.ArrowException):
            return Unreadable(str(error))


@dataclass(frozen=True, slots=True)
class ColumnPaths:
    """The columns of the question and of the gold in a data set, or paths inside a column."""

    question: str
    answer: str
    question_prefix: str = ""
    """Text before every question of the data set, which is removed."""
    question_suffix: str = ""
    """Text after every question, which is removed."""


CHATS = ("messages", "conversations", "conversation")
"""Columns of a chat; the last two are ShareGPT's, with `from` and `value`."""
INSTRUCTION, INPUT = "instruction", "input"
"""Alpaca's columns of a question; what `input` holds follows the instruction."""
QUESTIONS = ("problem", "question", "prompt", *CHATS, INSTRUCTION)
ORZ_ANSWER = "conversations.1.ground_truth.value"
"""Path of the gold in Open-Reasoner-Zero, whose rows are lists of two turns."""
ANSWERS = (
    *("reward_model.ground_truth", "answer", "label", "ground_truth", "final_answer", "answer_number"),
    *("solution", ORZ_ANSWER),
)
"""Columns and paths of a gold; `solution` is often a worked one beside `final_answer` (OlympiadBench), and MGSM's
`answer` is null beside `answer_number`."""
KNOWN = {
    ("question", "answer"): "GSM8K's",
    ("prompt", "label"): "slime's",
    ("prompt", "reward_model.ground_truth"): "verl's",
    ("problem", "solution"): "MATH's",
    ("prompt", "answer"): "TRL's",
    ("prompt", "solution"): "TRL's",
    ("prompt", "ground_truth"): "TRL's",
    ("conversations", ORZ_ANSWER): "Open-Reasoner-Zero's",
}
"""Columns of question and gold -> whose format has them, in words for the user."""
CONVERSATION = "the last message"
"""Stands for the gold's column if a row of messages has none: the gold is the assistant's last message."""


RESPONSES = ("response", "completion", "output", "completions")
"""Columns of a response, in the order in which they are looked for; one that is null does not count."""
TESTS = ("tests", "test_cases", "test_list", "input_output", "public_tests")
"""Columns of tests for a program; they are golds for reward functions that accept any value."""
NO_GOLD = ""
"""Stands for the gold's column in a row without a gold: a user's function may score by the row or the response
alone."""


def recognised(row: dict[str, Any], any_gold: bool = False) -> ColumnPaths | None:
    """The columns of question and gold in a row, found by their usual names; None without a question or a gold.

    With `any_gold` a program's tests count as a gold, and a row without any gold is recognised too.
    """
    question = question_column(row)
    if question is None:
        return None
    if answer := gold_column(row, any_gold):
        return ColumnPaths(question, answer)
    messages = row[question]
    if isinstance(messages, list) and len(messages) > 1 and _role(messages[-1]) == "assistant":
        return ColumnPaths(question, CONVERSATION)
    return ColumnPaths(question, NO_GOLD) if any_gold else None


def question_column(row: Mapping[str, Any]) -> str | None:
    """The first of the columns `QUESTIONS` whose value in the row is not empty; else the first whose value is not null;
    else None."""
    filled = next((name for name in QUESTIONS if not is_empty(row.get(name))), None)
    return filled or next((name for name in QUESTIONS if row.get(name) is not None), None)


def gold_column(row: dict[str, Any], any_gold: bool) -> str:
    """The first of `ANSWERS` whose value in the row is not empty; else the first whose value is not null; else "".

    With `any_gold` the columns `TESTS` follow those of `ANSWERS`.
    """
    names = (*ANSWERS, *TESTS) if any_gold else ANSWERS
    filled = next((name for name in names if has(row, name) and not is_empty(field_at(row, name))), "")
    return filled or next((name for name in names if has(row, name)), "")


def is_empty(value: Any) -> bool:
    """Whether a value counts as nothing: null, blank text, an empty list or an empty object."""
    return value is None or value in ([], {}) or (isinstance(value, str) and not value.strip())


def null_columns(row: dict[str, Any]) -> ColumnPaths | None:
    """The columns with the usual names of a question and a gold, even if they hold null.

    None unless the row has both.
    """
    question = next((name for name in QUESTIONS if has(row, name)), None)
    question = question or next((name for name in QUESTIONS if name in row), None)
    answer = next((name for name in ANSWERS if has(row, name, or_null=True)), None)
    return ColumnPaths(question, answer) if question and answer else None


def described(columns: ColumnPaths) -> str:
    """The columns in words, with the format that has them: `slime's prompt, label`."""
    if columns.answer == NO_GOLD:
        return f"{columns.question}, without a gold"
    named = KNOWN.get((columns.question, columns.answer), "")
    return f"{named} {columns.question}, {columns.answer}".strip()


OPTIONS = ("choices", "options", "endings", "candidates")
"""Columns that list the options of a multiple-choice question."""
LETTERED: tuple[tuple[str, ...], ...] = (
    ("A", "B", "C", "D"),
    ("opa", "opb", "opc", "opd"),
    ("option_a", "option_b", "option_c", "option_d"),
)
"""Columns of options in data sets that have a column for each option."""


def unseen_options(row: dict[str, Any], question: str) -> str:
    """The names of the columns with options that the question's text lacks, in words; "" if there are none."""
    name = next((name for name in OPTIONS if row.get(name)), "")
    lettered = next((names for names in LETTERED if all(_plain(row.get(letter)) for letter in names)), ("",))
    options = _texts(row[name]) if name else [str(row[letter]) for letter in lettered if letter]
    if len(options) < 2 or all(option.strip() in question for option in options):
        return ""
    return f"`{name}`" if name else f"`{lettered[0]}` to `{lettered[-1]}`"


def _texts(options: Any) -> list[str]:
    """The texts of the options, which may be a list, ARC's table of lists, a table by letter or a printed list."""
    if isinstance(options, dict):
        inner = options.get("text")
        return _texts(inner if isinstance(inner, list) else list(options.values()))
    if isinstance(options, list):
        values = [
            option.get("text", option.get("content")) if isinstance(option, dict) else option for option in options
        ]
        return [str(value) for value in values if _plain(value)]
    if isinstance(options, str) and (printed := printed_list(options)):
        return printed
    if isinstance(options, str) and options.lstrip().startswith(("[", "{")):
        try:
            return _texts(ast.literal_eval(options.strip()))
        except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
            return []
    return []


def _plain(value: Any) -> bool:
    return isinstance(value, str | int | float) and not isinstance(value, bool) and str(value).strip() != ""


def found_in(row: Mapping[str, Any]) -> str:
    """The names of a row's columns in parentheses, for a message about a missing one."""
    return f"(found {', '.join(sorted(map(str, row))) or 'none'})"


def has(row: dict[str, Any], path: str, or_null: bool = False) -> bool:
    """Whether the row has a value at this path; null counts only with `or_null`."""
    try:
        return field_at(row, path) is not None or or_null
    except KeyError:
        return False


def field_at(row: dict[str, Any], path: str) -> Any:
    """The value of a column, or at a path inside one: `reward_model.ground_truth`, `prompt.0.content`.

    Raises KeyError with the first step of the path that is missing.
    """
    if path in row:
        return row[path]
    value: Any = row
    for step in path.split("."):
        if isinstance(value, dict) and step in value:
            value = value[step]
        elif isinstance(value, list) and step.isdecimal() and int(step) < len(value):
            value = value[int(step)]
        else:
            raise KeyError(step)
    return value


def messages_of(value: list[Any]) -> tuple[Message, ...]:
    """The messages of a chat with all their fields; ValueError for a malformed one.

    A content is text, or a list of parts of type `text`, which are joined. Calls and their arguments may be JSON text.
    A field that is null or empty counts as absent, since `datasets` gives every message the fields of all messages.
    """
    try:
        return tuple(_message(number, message) for number, message in enumerate(value, start=1))
    except RecursionError:
        raise ValueError("its messages are nested too deep") from None
    except TypeError as error:  # the row has a value that JSON cannot express
        raise ValueError(str(error)) from None


SPEAKERS = {
    "human": "user", "user": "user", "gpt": "assistant", "chatgpt": "assistant", "assistant": "assistant",
    "model": "assistant", "bot": "assistant", "system": "system", "tool": "tool", "observation": "tool",
    "function_response": "tool",
}  # fmt: skip
"""Name of a speaker in ShareGPT's field `from` -> role of the message."""


def _with_role(message: Any) -> Any:
    """A turn of ShareGPT (`from`, `value`) as a message (`role`, `content`); any other value unchanged."""
    if not isinstance(message, dict) or message.get("role") is not None or message.get("from") not in SPEAKERS:
        return message
    others = {key: value for key, value in message.items() if key not in ("role", "from", "value")}
    return {"role": SPEAKERS[message["from"]], "content": message.get("value"), **others}


def _message(number: int, message: Any) -> Message:
    message = _with_role(message)
    role = _role(message)
    if not isinstance(role, str) or not role.strip():
        raise ValueError(f"message {number} has no role")
    others = to_json_value({str(key): value for key, value in message.items() if key not in ("role", "content")})
    fields = {key: value for key, value in without_nulls(others).items() if value not in ([], {}, "")}
    if "tool_calls" in fields:
        fields["tool_calls"] = _calls(number, fields["tool_calls"])
    only_fields = role == "assistant" and bool(fields) and message.get("content") is None
    return {"role": role, "content": None if only_fields else _text_of(number, message), **fields}


def _calls(number: int, calls: Any) -> list[dict[str, Any]]:
    """The calls of a message in the form that transformers' templates take: objects whose arguments are objects."""
    calls = parsed_text("tool_calls", calls) if isinstance(calls, str) else calls
    if not isinstance(calls, list) or not all(isinstance(call, dict) for call in calls):
        raise ValueError(f"message {number} has tool_calls that are not a list of objects")
    return [with_parsed_arguments(call) for call in calls]


def with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """The call with its arguments parsed: servers of OpenAI's protocol write them as JSON text. A text that is no JSON
    object stays as it is."""
    if isinstance(function := call.get("function"), dict):
        return {**call, "function": with_parsed_arguments(function)}
    if not isinstance(text := call.get("arguments"), str):
        return call
    try:
        arguments = parse_json(text)
    except ValueError:  # the text may be a model's output, which need not be JSON
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call


def without_nulls(value: Any) -> Any:
    """A JSON value without the fields of its objects that are null."""
    if isinstance(value, dict):
        return {key: without_nulls(inner) for key, inner in value.items() if inner is not None}
    return [without_nulls(inner) for inner in value] if isinstance(value, list) else value


def _role(message: Any) -> Any:
    message = _with_role(message)
    return message.get("role") if isinstance(message, dict) else None


def _text_of(number: int, message: dict[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, str):
        if not content.startswith('[{"type"'):
            return content
        try:
            content = parse_json(content)
        except ValueError:
            return str(content)
    if isinstance(content, list) and content and all(isinstance(part, dict) for part in content):
        other = [part.get("type") for part in content if part.get("type") != "text"]
        if other:
            raise ValueError(f"message {number} has a part of type {other[0]!r}, and only text can be read")
        if all(isinstance(part.get("text"), str) for part in content):
            return "".join(part["text"] for part in content)
    raise ValueError(f"message {number} has no text: its content is neither text nor a list of text parts")
