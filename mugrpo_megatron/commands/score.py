"""`mugrpo score`: add the verifier's scores to the rows of a file of responses, in order."""

from __future__ import annotations

import json
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import chain, islice
from pathlib import Path
from typing import Any, NamedTuple

from mugrpo_megatron.data.files import found_in, rows
from mugrpo_megatron.data.problems import first_malformed
from mugrpo_megatron.data.prompts import prompt_text, template_of
from mugrpo_megatron.data.reading import any_answer, data_source_of, kept_row, prompt_in_row, verifiable_answer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import check_output, durable_file, make_directory
from mugrpo_megatron.files.json_text import to_json_value
from mugrpo_megatron.recipe import Recipe
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Pending, Score
from mugrpo_megatron.rewards.math.thoughts import opening_of
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.samples import Problem
from mugrpo_megatron.terminal import visible

BLOCK = 512
"""Number of rows that are read and written together."""
BLOCKS_AHEAD = 8
"""Most blocks that the verifier has before the first of them is written; this bounds the memory for large files."""
MAX_REASONS = 20
"""Most reasons that the summary lists; it only counts the others."""
MAX_REASON_CHARS = 160
OUTPUT_SUFFIXES = (".jsonl", ".json")
"""Allowed suffixes of the output file, which has JSON lines in either case."""

Row = dict[str, Any]


class _Input(NamedTuple):
    row: Row
    """The input's row as JSON values."""
    answer: str
    """The gold answer that `math` compares with."""


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    rows: int
    malformed: int
    """Number of malformed rows that were skipped."""
    reward: float
    """Mean reward of the scored rows."""
    without_answer: int
    whys: dict[str, int]
    """Reason -> number of rows, most frequent first."""
    replaced: tuple[str, ...]
    """Columns of the input that the scores replace."""
    seconds: float
    failed: int = 0
    """Number of rows on which a reward function failed; their scores count as 0."""

    def __str__(self) -> str:
        lines = [
            f"{self.rows} rows, mean reward {self.reward:.4f}, {self.without_answer} without an answer, "
            f"{self.malformed} malformed and skipped; {self.seconds:.1f} s, {self.rows / max(self.seconds, 1e-9):.0f} "
            "rows a second"
        ]
        if self.replaced:
            lines.append(f"columns of the input that the scores replace: {', '.join(self.replaced)}")
        counts = list(self.whys.items())
        lines += [f"  {count:>8}  {_one_line(why)}" for why, count in counts[:MAX_REASONS]]
        if hidden := counts[MAX_REASONS:]:
            lines.append(f"  {sum(count for _, count in hidden):>8}  for {len(hidden):,} other reasons (column why)")
        return "\n".join(lines)


def run(
    input_path: Path,
    output_path: Path,
    section: RewardSection,
    strict: bool = True,
    overwrite: bool = False,
    opening: str = "",
) -> ScoreSummary:
    """Score the rows {"response", "answer", ...} of a file (`data.files`) into `output_path`, one JSON object a line.

    Each row gains `reward`, `extracted`, `why`, `seconds` and `components`; its other columns stay, as `to_json_value`
    writes them. Its gold (`answer`) is read as in training: text, `#### 42`, a box, a number, a list of them. `opening`
    is the tag with which the recipe's prompts open a thought; a tag in a row's text `prompt` takes precedence. The
    output is written completely or not at all. Raises UserError before scoring if the output must not be written
    (`check_output`) or no row is well-formed, and with `strict` for the first malformed row. A row on which a function
    fails is written with the exception as `why`.
    """
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    malformed: list[str] = []
    replaced: set[str] = set()
    total, reward, without_answer, failed = 0, 0.0, 0, 0
    _check_output(output_path, input_path, overwrite)
    source = _well_formed(input_path, section, strict, malformed)
    first = next(source, None)
    if first is None:
        why = first_malformed(malformed)
        raise UserError(f"{input_path} holds no row to score{why}; add rows with the fields 'response' and 'answer'")
    # Failures do not stop the scoring: a row on which the function fails is written too.
    patient = section.model_copy(update={"max_failure_share": 1.0})
    make_directory(output_path.parent, f"--out {output_path}")
    with (
        durable_file(output_path.resolve()) as output,
        Verifier(patient) as verifier,
    ):  # --out may be a link: its target is written
        for row, score in _scored(chain([first], source), verifier, opening):
            columns = {name: value for name, value in asdict(score).items() if name not in ("missing", "failed")}
            replaced.update(name for name in row if name in columns)
            output.write(json.dumps(row | to_json_value(columns)).encode() + b"\n")
            total += 1
            reward += score.reward
            without_answer += not score.extracted and section.finds_answers
            failed += bool(score.failed)
            counts[score.why] += 1
        _check_output(output_path, input_path, overwrite)  # another process may have created the output meanwhile
    return ScoreSummary(
        total,
        len(malformed),
        reward / total,
        without_answer,
        dict(counts.most_common()),
        tuple(sorted(replaced)),
        time.perf_counter() - start,
        failed,
    )


def opening_of_prompts(recipe: Recipe) -> str:
    """The tag with which the prompt style or the chat template opens a thought, such as `<think>`.

    Empty if it opens none, or if the prompts depend on the model's tokenizer and the model is not on this machine.
    """
    model = recipe.model.directory
    problem = Problem("a question", "1+1", "2")
    rendered = prompt_text(
        problem, recipe.data.prompt_style, template_of(recipe.data), model if model.is_dir() else None
    )
    return opening_of(rendered[1]) if rendered else ""


def _check_output(path: Path, source: Path, overwrite: bool) -> None:
    if path.suffix not in OUTPUT_SUFFIXES:
        raise UserError(f"--out {path}: scores are written as JSON lines; name the file {path.stem}.jsonl")
    check_output(
        path, f"--out {path}", own=overwrite, inputs=[source], remedy="choose another path, or pass --overwrite"
    )


def _one_line(why: str) -> str:
    line = visible(" ".join(why.split()))
    return line if len(line) <= MAX_REASON_CHARS else f"{line[:MAX_REASON_CHARS]}..."


def _scored(source: Iterator[_Input], verifier: Verifier, opening: str) -> Iterator[tuple[Row, Score]]:
    waiting: deque[tuple[list[_Input], Pending[Score]]] = deque()
    while block := list(islice(source, BLOCK)):
        rows_of_block = [entry.row for entry in block]
        pending = verifier.submit(
            [row["response"] for row in rows_of_block],
            [row.get("answer") for row in rows_of_block],
            rows_of_block,
            [prompt_in_row(row) for row in rows_of_block],
            answers=[entry.answer for entry in block],
            sources=[data_source_of(row) for row in rows_of_block],
            openings=[_opening(row, opening) for row in rows_of_block],
        )
        waiting.append((block, pending))
        if len(waiting) > BLOCKS_AHEAD:
            yield from _finished(waiting)
    while waiting:
        yield from _finished(waiting)


def _opening(row: Row, opening: str) -> str:
    """The tag with which the prompt before this row's response opens a thought.

    It is read from the row's text `prompt`, as the model saw it; without one, or without a tag there, it is `opening`.
    """
    prompt = row.get("prompt")
    return (opening_of(prompt) if isinstance(prompt, str) else "") or opening


def _finished(waiting: deque[tuple[list[_Input], Pending[Score]]]) -> Iterator[tuple[Row, Score]]:
    block, pending = waiting.popleft()
    return zip((entry.row for entry in block), pending.result(), strict=True)


def _well_formed(path: Path, section: RewardSection, strict: bool, malformed: list[str]) -> Iterator[_Input]:
    for line, row in rows(path):
        try:
            yield _input(row, section)
        except ValueError as error:
            if strict:
                raise UserError(f"{path}:{line}: {error}: fix the row, or pass --skip-malformed") from None
            malformed.append(f"{path}:{line}: {error}")


def _input(row: Row | str, section: RewardSection) -> _Input:
    """Returns the row and its gold answer, read as in training; ValueError if the row is malformed."""
    if isinstance(row, str):
        raise ValueError(row)
    if not isinstance(row.get("response"), str):
        raise ValueError(f"field 'response' is missing or not text {found_in(row)}")
    columns = kept_row(row)
    if section.accepts_any_gold(data_source_of(row)):
        return _Input(columns, any_answer(columns.get("answer")))
    if "answer" not in row:
        raise ValueError(f"field 'answer' is missing {found_in(row)}")
    return _Input(columns, verifiable_answer(row["answer"], "answer"))
