"""Loads problems from bundled tasks, files and the hub; names every malformed row by file and line."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.files import SUFFIXES, field_at, rows
from mugrpo_megatron.data.presets import PRESETS, Preset, download
from mugrpo_megatron.data.sets import named_sources
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.rewards.extract import boxed_answer
from mugrpo_megatron.samples import Problem

_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")
_PYTHON_LIST = re.compile(r"\[\s*['\"].*['\"]\s*,?\s*\]", re.DOTALL)


SHOWN_ROWS = 3
"""Malformed rows that one error message names; the others are counted."""


@dataclass(frozen=True, slots=True)
class Source:
    """One data set: its name, its files, and how they are read."""

    name: str
    files: list[Path]
    readings: tuple[Preset, ...]
    """Presets to try; the first whose question column a row has reads the row."""


@dataclass(frozen=True, slots=True)
class Read:
    """The well-formed problems of a source, and one sentence (file:line: reason) for every malformed row."""

    problems: list[Problem] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)


def load_problems(source: str, section: DataSection, split: arithmetic.Split = "train", seed: int = 0) -> list[Problem]:
    """The problems of `load`, for callers that do not report malformed rows."""
    return load(source, section, split, seed).problems


def load(source: str, section: DataSection, split: arithmetic.Split = "train", seed: int = 0) -> Read:
    """All problems of a source, or of several separated by commas; `split` and `seed` choose inside a named set.

    A problem's `source` is the short name of its set (`sets.named_sources`).

    A source is a bundled task, a `.jsonl` or `.parquet` file, a preset's name, `NAME@FILE` (a file read as that preset
    is), or a hub name `owner/name[/config][:split]`. Raises UserError for a source that cannot be read or is
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
    if found.malformed and section.strict:
        hidden = len(found.malformed) - SHOWN_ROWS
        shown = "; ".join(found.malformed[:SHOWN_ROWS]) + (f"; and {hidden:,} more rows" if hidden > 0 else "")
        raise UserError(f"{shown}: fix these rows or set data.strict=false to leave them out")
    if not found.problems:
        raise UserError(f"data source {source!r} is empty: name a task, a file or a data set")
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
    return Path(source) if Path(source).suffix in SUFFIXES else None


def _unknown(source: str) -> UserError:
    known = ", ".join([*arithmetic.TASKS, *PRESETS])
    return UserError(f"data source {source!r} is not a file, a hub name or one of {known}: check the spelling")


def resolve(source: str, section: DataSection, split: arithmetic.Split) -> Source:
    """The files of a source; downloads a data set of the hub."""
    plain = Preset("", question=section.question_field, answer=section.answer_field)
    if file := _file_of(source):
        name = source.partition("@")[0]
        return Source(name, [file], (PRESETS[name], plain)) if name in PRESETS else Source(file.stem, [file], (plain,))
    if source in PRESETS:
        preset = PRESETS[source]
        chosen = preset.train if split == "train" else preset.eval
        return Source(source, download(preset.repository, preset.config, chosen), (preset,))
    if match := _HUB_NAME.fullmatch(source):
        chosen = match["split"] or ("train" if split == "train" else "test")
        return Source(source, download(match["repository"], match["config"] or "default", chosen), (plain,))
    raise _unknown(source)


def read_source(source: Source) -> Read:
    """Every row of a source, in order."""
    read = Read()
    for path in source.files:
        for line, row in rows(path):
            made = row if isinstance(row, str) else _problem(row, source, f"{path}:{line}")
            if isinstance(made, str):
                read.malformed.append(f"{path}:{line}: {made}")
            else:
                read.problems.append(made)
    return read


def _problem(row: dict[str, Any], source: Source, place: str) -> Problem | str:
    """The problem of a row, or why the row is malformed."""
    reading = next((r for r in source.readings if r.question in row), source.readings[0])
    texts = []
    for path in (reading.question, reading.answer):
        try:
            value = field_at(row, path)
        except KeyError:
            return f"field {path!r} is missing (found {', '.join(sorted(row)) or 'none'})"
        if value is None or isinstance(value, dict | bool):
            return f"field {path!r} holds {type(value).__name__}, not text or a number"
        text = ", ".join(_answers(value))
        if not text.strip():
            return f"field {path!r} is empty"
        texts.append(text)
    question = texts[0].removeprefix(reading.question_prefix).removesuffix(reading.question_suffix)
    answer = final_answer(texts[1])
    if not answer:
        return f"field {reading.answer!r} holds no answer"
    return Problem(place, question, answer, source.name)


def final_answer(text: str) -> str:
    r"""The answer in a gold text: after the last `####`, in the last `\boxed{}`, or the whole text."""
    if "####" in text:
        return text.rsplit("####", 1)[1].strip()
    boxed = boxed_answer(text)
    return text.strip() if boxed is None else boxed


def _answers(value: Any) -> Iterator[str]:
    """The answers in a value: several come as a list, in some data sets as a printed Python list."""
    if isinstance(value, str) and _PYTHON_LIST.fullmatch(value.strip()):
        try:
            value = ast.literal_eval(value.strip())
        except (ValueError, SyntaxError, MemoryError, RecursionError):  # brackets that mean something else
            value = [value]
    yield from map(str, value if isinstance(value, list) else [value])
