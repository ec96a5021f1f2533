"""Loads problems from bundled tasks, files and the hub; errors name malformed rows by file and line."""

from __future__ import annotations

import difflib
import re
from collections import Counter
from collections.abc import Callable, Sequence, Set
from dataclasses import dataclass, field, replace
from pathlib import Path

from mugrpo_megatron.data import arithmetic
from mugrpo_megatron.data.arithmetic import TASKS
from mugrpo_megatron.data.files import (
    ALIKE,
    SUFFIXES,
    ColumnPaths,
    check_file,
    described,
    names_alike,
    rows,
    unseen_options,
)
from mugrpo_megatron.data.reading import FieldMissing, columns_of, data_source_of, lists_answers, problem_of
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.hub import snapshot
from mugrpo_megatron.pages import page_address
from mugrpo_megatron.recipe.scoring import GYM, MEAN, EvalSection
from mugrpo_megatron.recipe.sections import DataSection
from mugrpo_megatron.samples import Problem


def generated_sets(sources: str) -> set[str]:
    """The names of the generated sets among the comma-separated sources: bundled tasks and sets of Reasoning Gym. The
    training and the held-out problems of a generated set are disjoint."""
    return {name for name, source in named_sources(sources).items() if source in TASKS or source.startswith(GYM)}


def named_sources(sources: str) -> dict[str, str]:
    """Split comma-separated sources and give each a short name: name -> source, in their order.

    A bundled task and a preset keep their name, also in `PRESET@FILE`; a file gets its stem, a data set of the hub the
    last part of its name. When a source would share its name with another source or a task, a file's folder, a hub
    set's owner, or the stem of the file in `PRESET@FILE` goes in front; names that are still equal get a number. Other
    characters than letters, digits, `-` and `_` become `-`, so that a name can be a TOML key.
    """
    listed = [source for source in map(str.strip, sources.split(",")) if source]
    short = Counter([MEAN, *TASKS, *(_name(source, words=1) for source in listed)])
    named: dict[str, str] = {}
    for source in listed:
        name = _name(source, words=1 if short[_name(source, words=1)] == 1 else 2)
        taken = {*named, MEAN}
        number = next(n for n in range(1, len(listed) + 2) if _numbered(name, n) not in taken)
        named[_numbered(name, number)] = source
    return named


def held_out_sets(sources: str, key: str = "data.eval") -> dict[str, str]:
    """The held-out sets by short name (`named_sources`). Raises UserError when one is named twice, since it would count
    twice."""
    named = named_sources(sources)
    for source, times in Counter(named.values()).items():
        if times > 1:
            raise UserError(f"{key} names {source} {times} times: name it once")
    files: dict[tuple[int, int], str] = {}
    for source in named.values():
        path = Path(source.rpartition("@")[2])
        if path.is_file():
            status = path.stat()
            other = files.setdefault((status.st_dev, status.st_ino), source)
            if other != source:
                raise UserError(f"{key} names one file as {other} and as {source}: name it once")
    return named


def check_sets(section: EvalSection, known: Set[str], key: str = "data.eval") -> None:
    """Raise UserError when `[eval.sets]` has settings for a set that is not among the `known` ones."""
    unknown = sorted(section.sets.keys() - known)
    if unknown:
        raise UserError(
            f"[eval.sets.{unknown[0]}] names no held-out set: rename or remove the section; the sets in {key} are "
            f"{', '.join(sorted(known)) or 'none'}"
        )


def _name(source: str, words: int) -> str:
    """A source's name, made of the last `words` parts of its path; a bundled task and a preset keep their own name."""
    preset, at, file = source.partition("@")
    if source in TASKS or source in PRESETS:
        candidates = [source]
    elif source.startswith(GYM):
        candidates = source.partition("?")[0].split(":")
    elif at and preset in PRESETS:
        candidates = [Path(file).stem, preset]
    elif Path(source).suffix in SUFFIXES:
        candidates = [Path(source).parent.name, Path(source).stem]
    else:
        candidates = source.partition(":")[0].split("/")[:2]
    return "-".join(re.sub(r"[^A-Za-z0-9_-]+", "-", word).strip("-") for word in candidates[-words:] if word) or "set"


def _numbered(name: str, number: int) -> str:
    return name if number == 1 else f"{name}-{number}"


PLAIN = ColumnPaths("problem", "answer")
PARQUET_BRANCH = "refs/convert/parquet"
"""The branch on which the hub has Parquet files of every data set."""


@dataclass(frozen=True, slots=True)
class Preset:
    """A data set of the hub that has a short name here: its repository, columns and splits."""

    repository: str
    columns: ColumnPaths = PLAIN
    """Columns of question and gold. The answer in a worked solution is its `####` line or its last box."""
    config: str = "default"
    """Folder of the hub's Parquet branch; `*` takes all."""
    train: str = "train"
    """Name of the split to train on."""
    eval: str = "test"
    """Name of the split to evaluate on."""


_DAPO_PREFIX = (
    "Solve the following math problem step by step. The last line of your response should be of the form "
    "Answer: $Answer (without quotes) where $Answer is the answer to the problem.\n\n"
)
_DAPO_SUFFIX = '\n\nRemember to put your answer on its own line after "Answer:".'

PRESETS: dict[str, Preset] = {
    "gsm8k": Preset("openai/gsm8k", ColumnPaths("question", "answer"), config="main"),
    "math": Preset("EleutherAI/hendrycks_math", ColumnPaths("problem", "solution"), config="*"),
    "deepscaler": Preset("agentica-org/DeepScaleR-Preview-Dataset", eval="train"),
    "dapo-math-17k": Preset(
        "BytedTsinghua-SIA/DAPO-Math-17k",
        ColumnPaths("prompt.0.content", "reward_model.ground_truth", _DAPO_PREFIX, _DAPO_SUFFIX),
        eval="train",
    ),
    "amc23": Preset("math-ai/amc23", ColumnPaths("question", "answer"), train="test"),
    "amc24": Preset("rawsh/2024_AMC12", eval="train"),
    "aime24": Preset("HuggingFaceH4/aime_2024", eval="train"),
    "aime25": Preset("math-ai/aime25", train="test"),
    "math500": Preset("HuggingFaceH4/MATH-500", train="test"),
    "minerva": Preset("math-ai/minervamath", ColumnPaths("question", "answer"), train="test"),
    "olympiadbench": Preset("math-ai/olympiadbench", ColumnPaths("question", "final_answer"), train="test"),
}
"""Names for data.train, data.eval and `mugrpo eval --data`; `NAME@FILE` reads a local copy the same way."""


def download(repository: str, config: str, split: str) -> list[Path]:
    """The Parquet files of a split, from the local cache or downloaded; UserError when there are none or the download
    fails."""
    name = f"{repository} ({config}, {split})"
    pattern = f"{config}/{split}/*.parquet"
    try:
        folder = snapshot(repository, "dataset", PARQUET_BRANCH, [pattern])
    except ValueError as error:
        raise UserError(
            f"{name} could not be downloaded from the Hugging Face hub ({error}): check the name and the network, "
            "or give a local file, as NAME@FILE for a named data set"
        ) from error
    files = sorted(folder.glob(pattern))
    if not files:
        raise UserError(f"{name} has no Parquet files on the Hugging Face hub: check configuration and split")
    return files


_HUB_NAME = re.compile(r"(?P<repository>[\w.-]+/[\w.-]+)(?:/(?P<config>[\w.-]+))?(?::(?P<split>[\w.-]+))?")


OTHER_SUFFIXES = (".txt", ".arrow", ".feather", ".xlsx", ".gz", ".zip", ".zst", ".bz2", ".xz")
"""Suffixes of files that cannot be read: they tell that `folder/file.txt` is not meant as a name on the hub."""
MOST_NAMED_ROWS = 3
"""Most malformed rows that an error message names; it only counts the others."""


@dataclass(frozen=True, slots=True)
class Source:
    """A data set to read: its name, its files, and the columns of question and gold."""

    name: str
    files: list[Path]
    readings: tuple[ColumnPaths, ...]
    """Columns to try for each row; the first that the row has are read."""
    recognises: bool = False
    """Whether a row without these columns may have question and gold under other usual names."""


@dataclass(frozen=True, slots=True)
class Read:
    """The content of a source: its problems, and a sentence (file:line: reason) for every malformed row."""

    problems: list[Problem] = field(default_factory=list)
    malformed: list[str] = field(default_factory=list)
    without_field: list[str] = field(default_factory=list)
    """The malformed rows that lack a column."""
    recognised: Counter[str] = field(default_factory=Counter)
    """Description of recognised columns -> number of rows that have them."""
    unseen: Counter[str] = field(default_factory=Counter)
    """Names of option columns whose options the question lacks -> number of rows."""
    listed: Counter[str] = field(default_factory=Counter)
    """Gold column with a list of several answers -> its number of rows. `math` requires all of them at once."""
    notes: list[str] = field(default_factory=list)
    """Sentences about the recognised formats, the lists of answers and the unseen options."""


AnyGold = Callable[[str], bool]
"""Whether the gold of a row with this `data_source` may be any JSON value, for a function other than `math`."""


def load(
    source: str,
    section: DataSection,
    split: arithmetic.Split = "train",
    seed: int = 0,
    any_gold: AnyGold = lambda data_source: False,
) -> Read:
    """Read all problems of a source, or of several separated by commas.

    A source is a bundled task, `reasoning_gym:TASK?key=value`, a file (`files.SUFFIXES`), a preset's name, `NAME@FILE`
    (a file with that preset's columns), or a hub name `owner/name[/config][:split]`. `split` is the part of a bundled
    task or a data set of the hub that is read, `seed` the seed of a bundled task. Unless the section names other
    columns, a row is read by the columns that it has (`files.recognised`). A problem's `source` is the short name of
    its set (`named_sources`). Raises UserError for a source that cannot be read or has no usable problem, and with
    `data.strict` when rows are malformed.
    """
    result = Read()
    for name, named in named_sources(source).items():
        if named in arithmetic.TASKS:
            count = arithmetic.GENERATED if split == "train" else section.eval_problems
            result.problems.extend(arithmetic.problems(seed, split, count, named))
            continue
        if named.startswith(GYM):
            from mugrpo_megatron.extras.reasoning_gym.tasks import gym_problems

            result.problems.extend(gym_problems(named, name, split, section.eval_problems))
            continue
        read = read_source(replace(resolve(named, section, split), name=name), any_gold)
        if not read.problems and read.malformed and read.without_field == read.malformed:
            raise UserError(
                f"{read.malformed[0]}, and no row of {named} has both a question and an answer: name their columns "
                "with data.question_field and data.answer_field"
            )
        if not read.problems and not (read.malformed and section.strict):
            raise UserError(
                f"data source {named!r} holds no usable problem, and {len(read.malformed)} malformed rows: add rows "
                "with a question and an answer; data.strict=true says what is wrong with malformed ones"
            )
        result.problems.extend(read.problems)
        result.malformed.extend(read.malformed)
        result.notes.extend(f"{name}: {count:,} rows read as {columns}" for columns, count in read.recognised.items())
        result.notes.extend(
            f"{name}: {count:,} rows have a list of several answers in {column}: all of them are required, in any "
            f"order; to accept any one of them, take a function as in {page_address('rewards', 'Alternative answers')}"
            for column, count in read.listed.items()
        )
        result.notes.extend(
            f"{name}: {count:,} rows have options in {columns} that are not in the question, so the model does not see "
            "them: write each row's options into its question, and the right one, as its gold"
            for columns, count in read.unseen.items()
        )
    if section.strict:
        refuse_malformed(result.malformed)
    if not result.problems:
        raise UserError(f"data source {source!r} is empty: name a task, a file or a data set")
    if section.system_prompt:
        result.problems[:] = [with_system(problem, section.system_prompt) for problem in result.problems]
    return result


def first_malformed(rows: Sequence[str]) -> str:
    """The part of an error about a source without a usable row that names its first malformed row; empty without
    one. `rows` has a sentence for each malformed row."""
    return f"; {len(rows):,} rows are malformed, the first: {rows[0]}" if rows else ""


def refuse_malformed(rows: Sequence[str]) -> None:
    """Raise UserError if there are malformed rows. `rows` has a sentence for each; the error has the first
    MOST_NAMED_ROWS sentences, and counts the others."""
    if rows:
        hidden = len(rows) - MOST_NAMED_ROWS
        named = "; ".join(rows[:MOST_NAMED_ROWS]) + (f"; and {hidden:,} more rows" if hidden > 0 else "")
        raise UserError(f"{named}: fix these rows or set data.strict=false to leave them out")


def absent(source: str) -> list[str]:
    """The names of the hub's data sets among the comma-separated sources; whether they are on this machine is not
    checked.

    Raises UserError for a source that is neither a file, a generated set nor a name on the hub, and for a missing file.
    """
    check_files(source)
    return [name for name, file in _files_of(source).items() if file is None]


def check_files(source: str) -> None:
    """Raise UserError if one of the comma-separated sources is a missing file, or neither a file, a generated set nor a
    name on the hub."""
    for file in filter(None, _files_of(source).values()):
        check_file(file)


def _files_of(source: str) -> dict[str, Path | None]:
    """Source -> its file, or None for a data set of the hub; generated sets are left out.

    Raises UserError for a source that is none of these; whether a file exists is not checked.
    """
    files = {}
    for name in filter(None, map(str.strip, source.split(","))):
        if name in arithmetic.TASKS:
            continue
        if name.startswith(GYM):
            from mugrpo_megatron.extras.reasoning_gym.tasks import check_task

            check_task(name)
            continue
        files[name] = _file_of(name)
        if files[name] is None and name not in PRESETS and (Path(name).is_dir() or not _HUB_NAME.fullmatch(name)):
            raise _unknown(name)
    return files


def _file_of(source: str) -> Path | None:
    """The file that a source names, as `FILE` or as `NAME@FILE`; None for another source."""
    name, at, file = source.partition("@")
    if at and name in PRESETS:
        return Path(file)
    path = Path(source)
    return path if path.suffix.lower() in (*SUFFIXES, *OTHER_SUFFIXES) or path.is_file() else None


def _unknown(source: str) -> UserError:
    path = Path(source)
    if path.is_dir():
        files = sorted(str(file) for file in path.rglob("*") if file.suffix in SUFFIXES)
        hub = f", or {source}:SPLIT for the hub's" if _HUB_NAME.fullmatch(source) else ""
        examples = f"such as {files[0]}" if files else f"of which it has none with {', '.join(SUFFIXES)}"
        return UserError(f"data source {source!r} is a directory: name the files in it, {examples}, with commas{hub}")
    known = [*arithmetic.TASKS, *PRESETS]
    close = [*difflib.get_close_matches(source, known, n=1, cutoff=ALIKE), *map(str, names_alike(path))]
    hint = f"; did you mean {' or '.join(close)}?" if close else ": check the spelling"
    return UserError(f"data source {source!r} is not a file, a hub name or one of {', '.join(known)}{hint}")


def resolve(source: str, section: DataSection, split: arithmetic.Split) -> Source:
    """Find the files and columns of a source; a data set of the hub is downloaded.

    Raises UserError for a source that is neither a file nor the name of a data set, and if a download fails.
    """
    plain = ColumnPaths(section.question_field, section.answer_field)
    any_columns = plain == PLAIN
    if file := _file_of(source):
        preset = PRESETS.get(source.partition("@")[0])
        return Source(file.stem, [file], (preset.columns, plain) if preset else (plain,), any_columns)
    if source in PRESETS:
        preset = PRESETS[source]
        dataset_split = preset.train if split == "train" else preset.eval
        return Source(source, download(preset.repository, preset.config, dataset_split), (preset.columns,))
    if not Path(source).is_dir() and (match := _HUB_NAME.fullmatch(source)):
        dataset_split = match["split"] or ("train" if split == "train" else "test")
        return Source(
            source, download(match["repository"], match["config"] or "default", dataset_split), (plain,), any_columns
        )
    raise _unknown(source)


def read_source(source: Source, any_gold: AnyGold = lambda data_source: False) -> Read:
    """Read every row of a source, in order."""
    read = Read()
    for path in source.files:
        for line, row in rows(path):
            try:
                if isinstance(row, str):
                    raise ValueError(row)
                free = any_gold(data_source_of(row) or source.name)
                columns, recognised = columns_of(row, source.readings, source.recognises, free)
                problem = problem_of(row, columns, source.name, f"{path}:{line}", free)
            except ValueError as error:
                read.malformed.append(f"{path}:{line}: {error}")
                read.without_field.extend(read.malformed[-1:] if isinstance(error, FieldMissing) else [])
            else:
                read.problems.append(problem)
                read.recognised.update([described(columns)] if recognised else [])
                read.listed.update([columns.answer] if not free and lists_answers(row, columns.answer) else [])
                read.unseen.update(filter(None, [unseen_options(row, _full_question(problem))]))
    return read


def _full_question(problem: Problem) -> str:
    """The question with the texts of all messages of its chat."""
    return "\n".join((problem.question, *(message["content"] or "" for message in problem.messages)))


def with_system(problem: Problem, prompt: str) -> Problem:
    """Add a system message to the problem, unless it has one."""
    messages = problem.messages or ({"role": "user", "content": problem.question},)
    if messages[0]["role"] == "system":
        return problem
    return replace(problem, messages=({"role": "system", "content": prompt}, *messages))
