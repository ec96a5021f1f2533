"""Loads problems from bundled tasks, files and the hub; names every malformed row by file and line."""

from __future__ import annotations

import ast
import math
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from decimal import Decimal
from pathlib import Path
from typing import Any

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.columns import CONVERSATION, Columns, described, field_at, has, messages_of, recognised
from mugrpo_megatron.data.files import SUFFIXES, rows
from mugrpo_megatron.data.presets import PLAIN, PRESETS, download
from mugrpo_megatron.data.sets import named_sources
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.extract import boxed_answer
from mugrpo_megatron.samples import Message, Problem

_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")
_PYTHON_LIST = re.compile(r"\[\s*['\"].*['\"]\s*,?\s*\]", re.DOTALL)


OTHER_SUFFIXES = (".txt", ".arrow", ".feather", ".xlsx", ".gz", ".zip", ".zst", ".bz2", ".xz")
"""Of files that are not read here, so that `folder/file.txt` is not looked up on the hub."""
SHOWN_ROWS = 3
"""Malformed rows that one error message names; the others are counted."""


@dataclass(frozen=True, slots=True)
class Source:
    """One data set: its name, its files, and how they are read."""

    name: str
    files: list[Path]
    readings: tuple[Columns, ...]
    """Columns to try; the first that a row has read the row."""
    recognises: bool = False
    """Whether a row without them may have its question and gold under other usual names."""


@dataclass(frozen=True, slots=True)
class Read:
    """The well-formed problems of a source, and one sentence (file:line: reason) for every malformed row."""

    problems: list[Problem] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    recognised: Counter[str] = field(default_factory=Counter)
    """Columns that were recognised, in words -> rows."""
    notes: list[str] = field(default_factory=list)
    """One sentence for each kind of rows that was recognised."""


def load_problems(source: str, section: DataSection, split: arithmetic.Split = "train", seed: int = 0) -> list[Problem]:
    """The problems of `load`, for callers that do not report malformed rows."""
    return load(source, section, split, seed).problems


def load(source: str, section: DataSection, split: arithmetic.Split = "train", seed: int = 0) -> Read:
    """All problems of a source, or of several separated by commas; `split` and `seed` choose inside a named set.

    A problem's `source` is the short name of its set (`sets.named_sources`).

    A source is a bundled task, a file (`files.SUFFIXES`), a preset's name, `NAME@FILE` (a file read as that preset is),
    or a hub name `owner/name[/config][:split]`. Unless the section names other columns, a row is read by the columns
    that it has (`columns.recognised`). Raises UserError for a source that cannot be read or is
    empty, and with `data.strict` when rows are malformed.
    """
    found = Read()
    for name, one in named_sources(source).items():
        if one in arithmetic.TASKS:
            count = section.generated_problems if split == "train" else section.eval_problems
            found.problems.extend(arithmetic.problems(seed, split, count, one))
            continue
        read = read_source(replace(resolve(one, section, split), name=name))
        if not read.problems and not (read.malformed and section.strict):
            raise UserError(f"data source {one!r} holds no usable problem ({len(read.malformed)} malformed rows)")
        found.problems.extend(read.problems)
        found.malformed.extend(read.malformed)
        found.notes.extend(f"{name}: {count:,} rows read as {what}" for what, count in read.recognised.items())
    if found.malformed and section.strict:
        hidden = len(found.malformed) - SHOWN_ROWS
        shown = "; ".join(found.malformed[:SHOWN_ROWS]) + (f"; and {hidden:,} more rows" if hidden > 0 else "")
        raise UserError(f"{shown}: fix these rows or set data.strict=false to leave them out")
    if not found.problems:
        raise UserError(f"data source {source!r} is empty: name a task, a file or a data set")
    if section.system_prompt:
        found.problems[:] = [_with_system(problem, section.system_prompt) for problem in found.problems]
    return found


def absent(source: str) -> list[str]:
    """The parts of a source that are not on this machine: missing files, and what is read from the hub.

    Raises UserError for a part that is neither a task, a file nor a name on the hub.
    """
    found = []
    for part in filter(None, (part.strip() for part in source.split(","))):
        if part in arithmetic.TASKS:
            continue
        file = _file_of(part)
        if file is None and part not in PRESETS and not _HUB_NAME.fullmatch(part):
            raise _unknown(part)
        if file is None or not file.is_file():
            found.append(part)
    return found


def _file_of(source: str) -> Path | None:
    """The file that a source names, as `FILE` or as `NAME@FILE`."""
    name, at, file = source.partition("@")
    if at and name in PRESETS:
        return Path(file)
    path = Path(source)
    return path if path.suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES) or path.is_file() else None


def _unknown(source: str) -> UserError:
    known = ", ".join([*arithmetic.TASKS, *PRESETS])
    return UserError(f"data source {source!r} is not a file, a hub name or one of {known}: check the spelling")


def resolve(source: str, section: DataSection, split: arithmetic.Split) -> Source:
    """The files of a source; downloads a data set of the hub."""
    plain = Columns(section.question_field, section.answer_field)
    any_columns = plain == PLAIN
    if file := _file_of(source):
        preset = PRESETS.get(source.partition("@")[0])
        return Source(file.stem, [file], (preset.columns, plain) if preset else (plain,), any_columns)
    if source in PRESETS:
        preset = PRESETS[source]
        chosen = preset.train if split == "train" else preset.eval
        return Source(source, download(preset.repository, preset.config, chosen), (preset.columns,))
    if match := _HUB_NAME.fullmatch(source):
        chosen = match["split"] or ("train" if split == "train" else "test")
        return Source(
            source, download(match["repository"], match["config"] or "default", chosen), (plain,), any_columns
        )
    raise _unknown(source)


def read_source(source: Source) -> Read:
    """Every row of a source, in order."""
    read = Read()
    for path in source.files:
        for line, row in rows(path):
            try:
                if isinstance(row, str):
                    raise ValueError(row)
                columns, recognised = _columns(row, source)
                problem = _problem(row, columns, source.name, f"{path}:{line}")
            except ValueError as error:
                read.malformed.append(f"{path}:{line}: {error}")
            else:
                read.problems.append(problem)
                read.recognised.update([described(columns)] if recognised else [])
    return read


def _columns(row: dict[str, Any], source: Source) -> tuple[Columns, bool]:
    """The columns to read a row by, and whether they were recognised."""
    for columns in source.readings:
        if has(row, columns.question) and has(row, columns.answer):
            return columns, False
    found = recognised(row) if source.recognises else None
    return (found, True) if found else (source.readings[0], False)


def _problem(row: dict[str, Any], columns: Columns, source: str, place: str) -> Problem:
    """The problem of a row; ValueError says why the row is malformed."""
    asked = _value(row, columns.question)
    messages = _messages(asked, columns) if isinstance(asked, list) else ()
    if columns.answer == CONVERSATION:
        gold = messages[-1][1]
    else:
        gold = ", ".join(_answers(_value(row, columns.answer), columns.answer))
    if messages and (columns.answer == CONVERSATION or columns.question == "messages"):
        messages = messages[:-1] if messages[-1][0] == "assistant" else messages
    if messages and messages[-1][0] == "assistant":
        raise ValueError(f"field {columns.question!r} ends with the assistant's turn, not with a question")
    question = "\n".join(text for _, text in messages) if isinstance(asked, list) else str(asked)
    for path, text in ((columns.question, question), (columns.answer, gold)):
        if not text.strip():
            raise ValueError(f"field {path!r} is empty")
    question = question.removeprefix(columns.question_prefix).removesuffix(columns.question_suffix)
    answer = final_answer(gold)
    if not answer:
        raise ValueError(f"field {columns.answer!r} holds no answer")
    return Problem(place, question, answer, source, messages)


def _value(row: dict[str, Any], path: str) -> Any:
    """The text, number or list in a field."""
    try:
        value = field_at(row, path)
    except KeyError:
        raise ValueError(f"field {path!r} is missing (found {', '.join(sorted(row)) or 'none'})") from None
    return value if isinstance(value, list) else _scalar(value, path)


def _scalar(value: Any, path: str) -> Any:
    if value is None or isinstance(value, bool) or not isinstance(value, str | int | float | Decimal):
        raise ValueError(f"field {path!r} holds {type(value).__name__}, not text or a number")
    if isinstance(value, float | Decimal) and not math.isfinite(value):
        raise ValueError(f"field {path!r} is {value}, not a number")
    return value


def _messages(value: list[Any], columns: Columns) -> tuple[Message, ...]:
    try:
        return messages_of(value)
    except ValueError as error:
        raise ValueError(f"field {columns.question!r}: {error}") from None


def _with_system(problem: Problem, prompt: str) -> Problem:
    """The problem with a system turn, unless it has one."""
    messages = problem.messages or (("user", problem.question),)
    return problem if messages[0][0] == "system" else replace(problem, messages=(("system", prompt), *messages))


def final_answer(text: str) -> str:
    r"""The answer in a gold text: after the last `####`, in the last `\boxed{}`, or the whole text."""
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    boxed = boxed_answer(text)
    return text.strip() if boxed is None else boxed


def _answers(value: Any, path: str) -> Iterator[str]:
    """The answers in a value: several come as a list, in some data sets as a printed Python list."""
    if isinstance(value, str) and _PYTHON_LIST.fullmatch(value.strip()):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # brackets that mean something else
            value = [value]
    for one in value if isinstance(value, list) else [value]:
        yield str(_scalar(one, path))
