"""`mugrpo score`: add the verifier's scores to the rows of a file of responses, in order."""

from __future__ import annotations

import json
import math
import time
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from decimal import Decimal
from itertools import chain, islice
from pathlib import Path
from typing import Any

from mugrpo_megatron.data.files import rows
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import durable_file
from mugrpo_megatron.files.json_values import json_value
from mugrpo_megatron.files.outputs import check_output, make_directory
from mugrpo_megatron.recipe.scoring import RewardSection
from mugrpo_megatron.rewards.items import Asked
from mugrpo_megatron.rewards.pool import Verifier
from mugrpo_megatron.rewards.scores import Pending, Score

BLOCK = 512
"""Rows that are read and written together."""
BLOCKS_AHEAD = 8
"""Blocks that are scored while an earlier one is pending; bounds memory for a file of any size."""
WRITTEN = (".jsonl", ".json")
"""Suffixes of an output, which is JSON lines."""

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ScoreSummary:
    """What a scored file holds."""

    rows: int
    malformed: int
    """Rows that were skipped."""
    reward: float
    """Mean over the scored rows."""
    without_answer: int
    whys: dict[str, int]
    """How often each reason was given, most frequent first."""
    seconds: float

    def __str__(self) -> str:
        reasons = "\n".join(f"  {count:>8}  {why}" for why, count in self.whys.items())
        return (
            f"{self.rows} rows, mean reward {self.reward:.4f}, {self.without_answer} without an answer, "
            f"{self.malformed} malformed and skipped; {self.seconds:.1f} s, {self.rows / max(self.seconds, 1e-9):.0f} "
            f"rows a second\n{reasons}"
        )


def run(
    input_path: Path, output_path: Path, section: RewardSection, strict: bool = True, overwrite: bool = False
) -> ScoreSummary:
    """Score rows {"response", "answer", ...} of a JSONL or Parquet file into `output_path`, one JSON object a line.

    Each row gains `reward`, `extracted`, `why`, `seconds` and `components`; its other columns are kept as `json_value`
    writes them. The output appears complete or not at all. Raises UserError before anything is scored when the output
    may not be written (`check_output`), for a file without rows, and with `strict` for the first malformed row.
    """
    start = time.perf_counter()
    counts: Counter[str] = Counter()
    malformed: list[str] = []
    total, reward, without_answer = 0, 0.0, 0
    _check_output(output_path, input_path, overwrite)
    source = _well_formed(input_path, section, strict, malformed)
    first = next(source, None)
    if first is None:
        raise UserError(f"{input_path} holds no row to score ({len(malformed)} malformed): check the file")
    make_directory(output_path.parent, f"--out {output_path}")
    with durable_file(output_path) as output, Verifier(section) as verifier:
        for row, score in _scored(chain([first], source), verifier):
            found = {name: value for name, value in asdict(score).items() if value is not None}
            output.write(json.dumps(json_value(row | found)).encode() + b"\n")
            total += 1
            reward += score.reward
            without_answer += not score.extracted and section.is_right_or_wrong
            counts[score.why] += 1
        _check_output(output_path, input_path, overwrite)  # another process may have written it meanwhile
    whys = dict(counts.most_common())
    return ScoreSummary(total, len(malformed), reward / total, without_answer, whys, time.perf_counter() - start)


def _check_output(path: Path, source: Path, overwrite: bool) -> None:
    if path.suffix not in WRITTEN:
        raise UserError(f"--out {path}: scores are written as JSON lines; name the file {path.stem}.jsonl")
    check_output(
        path, f"--out {path}", own=overwrite, inputs=[source], remedy="choose another path, or pass --overwrite"
    )


def _scored(source: Iterator[Row], verifier: Verifier) -> Iterator[tuple[Row, Score]]:
    waiting: deque[tuple[list[Row], Pending]] = deque()
    while block := list(islice(source, BLOCK)):
        kept: list[Row] = [json_value(row) for row in block]
        pending = verifier.submit(
            [row["response"] for row in block],
            [row.get("answer") for row in kept],
            kept,
            [_prompt(row) for row in kept],
            answers=[str(row.get("answer")) for row in block],
            sources=[source_of(row) for row in block],
        )
        waiting.append((block, pending))
        if len(waiting) > BLOCKS_AHEAD:
            yield from _finished(waiting)
    while waiting:
        yield from _finished(waiting)


def _prompt(row: Row) -> Asked:
    """The column `prompt` where it is a text or a chat's messages."""
    prompt = row.get("prompt", "")
    is_chat = isinstance(prompt, list) and all(isinstance(turn, dict) for turn in prompt)
    return prompt if is_chat or isinstance(prompt, str) else ""


def source_of(row: Row) -> str:
    """The column `data_source`, by which reward functions are chosen; empty without one."""
    return str(row.get("data_source", ""))


def _finished(waiting: deque[tuple[list[Row], Pending]]) -> Iterator[tuple[Row, Score]]:
    block, pending = waiting.popleft()
    return zip(block, pending.result(), strict=True)


def _well_formed(path: Path, section: RewardSection, strict: bool, malformed: list[str]) -> Iterator[Row]:
    for line, row in rows(path):
        reason = row if isinstance(row, str) else _flaw(row, section.any_gold(source_of(row)))
        if not reason:
            assert isinstance(row, dict)
            yield row
        elif strict:
            raise UserError(f"{path}:{line}: {reason}: fix the row, or pass --skip-malformed")
        else:
            malformed.append(f"{path}:{line}: {reason}")


def _flaw(row: Row, any_gold: bool) -> str:
    if not isinstance(row.get("response"), str):
        return "field 'response' is missing or not text"
    if any_gold:
        return ""
    answer = row.get("answer")
    if isinstance(answer, bool) or not isinstance(answer, str | int | float | Decimal) or not str(answer).strip():
        return "field 'answer' is missing, empty, or neither text nor a number"
    if isinstance(answer, float | Decimal) and not math.isfinite(answer):
        return f"field 'answer' is {answer}, not a number"
    return ""
