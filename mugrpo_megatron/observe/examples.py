"""Example responses for people to read: some of each stage, and some of each evaluation.

Those of the evaluation after 128 updates are in evaluations/update000128.jsonl. Every evaluation of a run stores
responses to the same problems of each held-out set.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.files.durable import remove_leftovers, write_text
from mugrpo_megatron.files.json_text import parse_json

MAX_TEXT_CHARS = 16_000
"""Most characters of a stored text; a longer text keeps its beginning and its end."""


@dataclass(frozen=True, slots=True)
class Example:
    set: str
    """Name of the held-out set; empty for a response of a stage."""
    problem: str
    question: str
    gold: str
    text: str
    extracted: str
    why: str
    reward: float
    tokens: int
    truncated: bool
    components: Mapping[str, float] = field(default_factory=dict)


def shorten(text: str, limit: int = MAX_TEXT_CHARS) -> str:
    """Returns a text of at most `limit` characters as it is; of a longer one the beginning and the end, with a note
    between them about what is left out."""
    if len(text) <= limit:
        return text
    head = limit * 3 // 5
    tail = limit - head
    return f"{text[:head]}\n[… {len(text) - limit:,} characters are left out …]\n{text[len(text) - tail :]}"


def example_indices(names: Sequence[str], count: int) -> list[int]:
    """Returns the indices of at most `count` problems of each held-out set, evenly spaced; `names` has the name of the
    set for each problem."""
    chosen: list[int] = []
    for name in dict.fromkeys(names):
        indices = [index for index, other in enumerate(names) if other == name]
        size = min(count, len(indices))
        chosen += [indices[i * len(indices) // size] for i in range(size)]
    return chosen


def write_examples(path: Path, responses: Sequence[Example]) -> None:
    """Write an evaluation's responses to `path`, one JSON object a line; an earlier file is replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    write_text(path, "".join(json.dumps(_row(example)) + "\n" for example in responses))


def read_examples(path: Path) -> list[Example]:
    """Returns the responses that `write_examples` wrote; UserError if the file is damaged or unreadable."""
    try:
        return [_example(parse_json(line)) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, UserError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged or unreadable ({error}); remove it, the report does not need it") from None


def _row(example: Example) -> dict[str, Any]:
    texts = {name: shorten(getattr(example, name)) for name in ("question", "gold", "text", "extracted", "why")}
    return asdict(example) | texts | {"components": dict(example.components)}


def _example(row: Any) -> Example:
    example = Example(**row)
    texts = (example.set, example.problem, example.question, example.gold, example.text, example.extracted, example.why)
    numbers = (example.reward, example.tokens, *example.components.values())
    if not all(isinstance(text, str) for text in texts) or not all(type(n) in (int, float, bool) for n in numbers):
        raise ValueError("a value has another type than the file's format says")
    return example
