"""Sample responses on the page: of each stage and evaluation some with a high and some with a low reward."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

from mugrpo_megatron.observe.examples import Example, shortened
from mugrpo_megatron.report.details import Details, spaced
from mugrpo_megatron.rewards.pool import reward_before_penalty
from mugrpo_megatron.terminal import visible

CHARACTERS = 32_000
"""Of all texts on the page together."""
LONGEST, SHORTEST = 3000, 300
"""Characters of one text."""
FOLDED = 120
"""Characters, and LINES lines, above which a text is folded."""
LINES = 6
EACH, MOST = 3, 6
"""Responses of a kind, right or wrong, that a stage or a set shows; responses of all sets of an evaluation."""
STAGES = 4
"""Stages whose responses are shown."""


def sample_sections(details: Details, measure: str) -> list[dict[str, Any]]:
    """One list of responses for each evaluation, newest first, and each stage; `measure` is accuracy or reward."""
    shown = spaced(sorted(details.stages), STAGES)
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
            if number in shown
        ),
    ]
    lists = [(title, examples) for title, examples in lists if examples]
    texts = sum(2 * len(examples) for _, examples in lists) or 1
    most = max(SHORTEST, min(LONGEST, CHARACTERS // texts))
    return [
        {
            "title": title,
            "counts": _counts(examples, measure),
            "open": place == 0,
            "responses": [_shown(one, measure, most) for one in examples],
        }
        for place, (title, examples) in enumerate(lists)
    ]


def _of_each_kind(examples: Sequence[Example], measure: str) -> list[Example]:
    """Of each set some right and wrong ones, in their order; of rewards the highest and the lowest."""
    some: list[Example] = []
    names = list(dict.fromkeys(one.set for one in examples))
    each = max(1, min(EACH, MOST // (2 * len(names) or 1)))
    for name in names:
        own = [one for one in examples if one.set == name]
        if measure == "accuracy":
            right, wrong = ([one for one in own if _is_right(one) == is_right] for is_right in (True, False))
        else:
            by_reward = sorted(own, key=lambda one: -one.reward)
            right, wrong = by_reward[: len(own) - len(own) // 2], by_reward[len(own) - len(own) // 2 :][::-1]
        pairs = zip_longest(right[:each], wrong[:each])
        some += [one for pair in pairs for one in pair if one]
    return some


def _is_right(one: Example) -> bool:
    """By the verdict: a right response may have lost reward to its length, a wrong one gained some by its form."""
    return reward_before_penalty(one.reward, one.components) >= 1.0


def _counts(examples: Sequence[Example], measure: str) -> str:
    right = sum(map(_is_right, examples))
    count = f"{len(examples)} examples"
    return f"{count}: {right} right, {len(examples) - right} wrong" if measure == "accuracy" else count


def _shown(one: Example, measure: str, most: int) -> dict[str, Any]:
    right = _is_right(one)
    return {
        "kind": ("right" if right else "wrong") if measure == "accuracy" else "",
        "reward": f"{one.reward:.4g}",
        "problem": visible(one.problem),
        "facts": [(name, visible(value)) for name, value in _facts(one)],
        "texts": [
            _text(name, text, most) for name, text in (("Prompt", one.question), ("Response", one.text)) if text.strip()
        ],
    }


def _facts(one: Example) -> Iterable[tuple[str, str]]:
    """Name and value of what explains the score."""
    yield "gold", shortened(one.gold, 200)
    yield "extracted", shortened(one.extracted, 200) if one.extracted else "nothing"
    if one.why:
        yield "why", shortened(one.why, 300)
    for name, value in one.components.items():
        yield name, f"{value:.4g}"
    yield "tokens", f"{one.tokens:,}{', cut off' if one.truncated else ''}"


def _text(name: str, text: str, most: int) -> dict[str, Any]:
    """A text, with its beginning where it is long enough to be folded."""
    shown = visible(shortened(text, most))
    folded = len(shown) > FOLDED or shown.count("\n") >= LINES
    lines = "\n".join(shown.split("\n")[:LINES])
    return {"name": name, "text": shown, "head": f"{lines[:FOLDED].rstrip()} …" if folded else ""}
