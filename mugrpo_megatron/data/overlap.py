"""Duplicate problems within a set, and training problems that are also in an evaluation set."""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from mugrpo_megatron.samples import Problem

NGRAM = 8
"""Words that make one n-gram."""
OVERLAP = 0.5
"""A training problem with this share of an evaluation problem's n-grams counts as the same."""

_LATEX = re.compile(r"\\(?:left|right|displaystyle|text|mathrm|[dt]?frac|[,;:! ])|[\\${}~]")
_WORD = re.compile(r"[a-z]+|[0-9]+(?:\.[0-9]+)?|[^\sa-z0-9]")
_PUNCTUATION = frozenset(".,;:?!'\"`()[]")


@dataclass(frozen=True, slots=True)
class Contamination:
    """A training problem that is also an evaluation problem."""

    train: Problem
    held_out: Problem
    overlap: float
    """Share of the evaluation problem's n-grams found in the training problem; 1 for equal texts."""


def words(text: str) -> tuple[str, ...]:
    """The words of a question without case, punctuation and LaTeX layout; operators and digits stay."""
    found = _WORD.findall(_LATEX.sub(" ", text.lower()))
    return tuple(word for word in found if word not in _PUNCTUATION)


def without_duplicates(problems: Sequence[Problem]) -> tuple[list[Problem], list[str]]:
    """Keep the first copy of every question; also return a sentence for each copy with another answer.

    A copy has the same `words` and the same answer, or the same text but for case and spaces: `5!` and `5`, `f'(x)` and
    `f(x)` have the same words, and their answers tell them apart.
    """
    alike: dict[tuple[str, ...], list[Problem]] = defaultdict(list)
    kept: list[Problem] = []
    disagreements: list[str] = []
    for problem in problems:
        others = alike[words(problem.question)]
        first = next((one for one in others if _is_copy(problem, one)), None)
        if first is None:
            others.append(problem)
            kept.append(problem)
        elif first.answer != problem.answer:
            disagreements.append(
                f"{problem.id}: same question as {first.id} but answer {problem.answer!r}, not {first.answer!r}"
            )
    return kept, disagreements


def _is_copy(problem: Problem, other: Problem) -> bool:
    return problem.answer == other.answer or _spelled(problem) == _spelled(other)


def _spelled(problem: Problem) -> str:
    """The question without case, spaces, and punctuation at its end."""
    return "".join(problem.question.lower().split()).rstrip(".,;:?")


def contamination(train: Sequence[Problem], held_out: Sequence[Problem]) -> list[Contamination]:
    """Training problems with at least OVERLAP of an evaluation problem's n-grams.

    A problem of fewer than NGRAM words matches only when all its words are the same.
    """
    grams = [_ngrams(words(problem.question)) for problem in held_out]
    holders: dict[tuple[str, ...], list[int]] = defaultdict(list)
    for place, own in enumerate(grams):
        for gram in own:
            holders[gram].append(place)
    found = []
    for problem in train:
        hits = Counter(place for gram in _ngrams(words(problem.question)) for place in holders.get(gram, ()))
        shares = [(count / len(grams[place]), -place) for place, count in hits.items()]
        if shares and max(shares)[0] >= OVERLAP:
            share, place = max(shares)
            found.append(Contamination(problem, held_out[-place], share))
    return found


def _ngrams(text: tuple[str, ...]) -> set[tuple[str, ...]]:
    """All n-grams of a text; a shorter text is its own single n-gram."""
    return {text[i : i + NGRAM] for i in range(max(1, len(text) - NGRAM + 1))}
