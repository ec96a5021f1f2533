"""Chooses the sample responses on the page: for each stage and evaluation some with a high and some with a low
reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from mugrpo_megatron.observe.examples import Example, shorten
from mugrpo_megatron.report.details import Details, spaced
from mugrpo_megatron.rewards.pool import reward_before_penalty
from mugrpo_megatron.terminal import visible

CHARACTERS = 32_000
"""Most characters of all texts on the page together. They may have more if there are so many texts that each is cut to
SHORTEST."""
LONGEST, SHORTEST = 3000, 300
"""Most characters of one text: if few texts are shown, and if many are."""
FOLDED = 120
"""A text with more characters than this, or with more than LINES lines, is folded."""
LINES = 6
EACH, MOST = 3, 6
"""Most responses of one kind (right or wrong) of a stage or a set, and most responses of an evaluation over up to
three sets. With more sets, each has at most one of each kind."""
STAGES = 4
"""Number of stages whose responses are shown."""


def sample_sections(details: Details, measure: str) -> list[dict[str, Any]]:
    """The lists of responses on the page, one for each evaluation, then one for each of STAGES stages, newest first.

    `measure`, "accuracy" or "reward", says how responses are divided into right and wrong, or high and low.
    """
    stages = spaced(sorted(details.stages), STAGES)
    lists = [
        *(
            (
                f"Evaluation after {updates:,} updates" if updates else "Evaluation before training",
                _of_each_kind(examples, measure),
            )
            for updates, examples in sorted(details.evaluations.items(), reverse=True)
        ),
        *(
            (f"Stage {number}", _of_each_kind(stage.examples, measure))
            for number, stage in sorted(details.stages.items(), reverse=True)
            if number in stages
        ),
    ]
    lists = [(title, examples) for title, examples in lists if examples]
    texts = sum(2 * len(examples) for _, examples in lists) or 1
    most = max(SHORTEST, min(LONGEST, CHARACTERS // texts))
    return [
        {
            "title": title,
            "counts": _counts(examples, measure),
            "open": index == 0,
            "responses": [_shown(example, measure, most) for example in examples],
        }
        for index, (title, examples) in enumerate(lists)
    ]


def _of_each_kind(examples: Sequence[Example], measure: str) -> list[Example]:
    """Some right and some wrong examples of each set, alternately; with `measure` "reward", those with the highest and
    with the lowest rewards."""
    some: list[Example] = []
    names = list(dict.fromkeys(example.set for example in examples))
    per_kind = max(1, min(EACH, MOST // (2 * len(names) or 1)))
    for name in names:
        of_set = [example for example in examples if example.set == name]
        if measure == "accuracy":
            right, wrong = (
                [example for example in of_set if _is_right(example) == is_right] for is_right in (True, False)
            )
        else:
            by_reward = sorted(of_set, key=lambda example: -example.reward)
            right, wrong = (
                by_reward[: len(of_set) - len(of_set) // 2],
                by_reward[len(of_set) - len(of_set) // 2 :][::-1],
            )
        pairs = zip_longest(right[:per_kind], wrong[:per_kind])
        some += [example for pair in pairs for example in pair if example]
    return some


def _is_right(example: Example) -> bool:
    """Whether the response is right, by its reward without penalty: the reward itself may include an overlong
    penalty."""
    return reward_before_penalty(example.reward, example.components) >= 1.0


def _counts(examples: Sequence[Example], measure: str) -> str:
    right = sum(map(_is_right, examples))
    count = f"{len(examples)} examples"
    return f"{count}: {right} right, {len(examples) - right} wrong" if measure == "accuracy" else count


def _shown(example: Example, measure: str, most: int) -> dict[str, Any]:
    right = _is_right(example)
    return {
        "kind": ("right" if right else "wrong") if measure == "accuracy" else "",
        "reward": f"{example.reward:.4g}",
        "problem": visible(example.problem),
        "facts": [(name, visible(value)) for name, value in _facts(example)],
        "texts": [
            _text(name, text, most)
            for name, text in (("Prompt", example.question), ("Response", example.text))
            if text.strip()
        ],
    }


def _facts(example: Example) -> Iterable[tuple[str, str]]:
    yield "gold", shorten(example.gold, 200)
    yield "extracted", shorten(example.extracted, 200) if example.extracted else "nothing"
    if example.why:
        yield "why", shorten(example.why, 300)
    for name, value in example.components.items():
        yield name, f"{value:.4g}"
    yield "tokens", f"{example.tokens:,}{', cut off' if example.truncated else ''}"


def _text(name: str, text: str, most: int) -> dict[str, Any]:
    """A text of the page, cut to `most` characters. `head` has its first lines if the page folds it, else it is ""."""
    excerpt = visible(shorten(text, most))
    folded = len(excerpt) > FOLDED or excerpt.count("\n") >= LINES
    lines = "\n".join(excerpt.split("\n")[:LINES])
    return {"name": name, "text": excerpt, "head": f"{lines[:FOLDED].rstrip()} …" if folded else ""}
