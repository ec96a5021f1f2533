"""Example responses for people to read: the same problems at every evaluation, and a stage's among its columns.

evaluations/update000128.jsonl   one response of some problems of each held-out set, after 128 updates of the run
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

MAX_EXAMPLES = 16_000
"""Characters of a text that are stored; of a longer one its two ends."""


@dataclass(frozen=True, slots=True)
class Example:
    """One response, with what its score was made of."""

    set: str
    """The held-out set; empty for a response of a stage."""
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


def shorten(text: str, most: int = MAX_EXAMPLES) -> str:
    """The text, or its two ends with a note of what is left out between them."""
    if len(text) <= most:
        return text
    head = most * 3 // 5
    tail = most - head
    return f"{text[:head]}\n[… {len(text) - most:,} characters are left out …]\n{text[len(text) - tail :]}"


def example_indices(names: Sequence[str], count: int) -> list[int]:
    """Places of at most `count` problems of each set, evenly spaced in it; `names` holds the set of each problem."""
    places: list[int] = []
    for name in dict.fromkeys(names):
        own = [place for place, other in enumerate(names) if other == name]
        few = min(count, len(own))
        places += [own[part * len(own) // few] for part in range(few)]
    return places


def write_examples(path: Path, responses: Sequence[Example]) -> None:
    """Write an evaluation's responses, one JSON object per line; those of the same weights before are replaced."""
    path.parent.mkdir(parents=True, exist_ok=True)
    remove_leftovers(path.parent, path.name)
    write_text(path, "".join(json.dumps(_plain(one)) + "\n" for one in responses))


def read_examples(path: Path) -> list[Example]:
    """What `write_examples` wrote. Raises UserError when the file is damaged."""
    try:
        return [_checked(parse_json(line)) for line in path.read_bytes().splitlines() if line.strip()]
    except (OSError, UserError, ValueError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error}); remove it, the report does not need it") from None


def _plain(one: Example) -> dict[str, Any]:
    texts = {name: shorten(getattr(one, name)) for name in ("question", "gold", "text", "extracted", "why")}
    return asdict(one) | texts | {"components": dict(one.components)}


def _checked(row: Any) -> Example:
    example = Example(**row)
    texts = (example.set, example.problem, example.question, example.gold, example.text, example.extracted, example.why)
    numbers = (example.reward, example.tokens, *example.components.values())
    if not all(isinstance(text, str) for text in texts) or not all(type(n) in (int, float, bool) for n in numbers):
        raise ValueError("a value of another type")
    return example
