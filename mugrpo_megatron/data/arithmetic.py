"""The bundled tasks: generated arithmetic problems; no training seed can draw a held-out problem."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

import numpy as np

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.samples import Problem

Split = Literal["train", "eval"]

EVAL_SHARE = 8
"""One question in this many belongs to the held-out split."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One operation, the digits of its operands, and how often it is drawn."""

    operator: str
    left_digits: int
    right_digits: int
    weight: float


MIX = (
    Kind("+", 3, 3, 0.45),
    Kind("-", 3, 3, 0.40),
    Kind("+", 3, 2, 0.05),
    Kind("+", 2, 2, 0.05),
    Kind("*", 2, 1, 0.05),
)
"""Mostly three-digit sums and differences, which a small model picks up within a minute, with a tail of rarer kinds."""

LONG_TERMS = (3, 48)
"""Fewest and most terms of an `arithmetic_long` sum; the number is Pareto-distributed in between."""


def problems(seed: int, split: Split, n: int, task: str = "arithmetic") -> list[Problem]:
    """Return `n` problems of `split`, the same for the same arguments on every machine.

    A hash of a question's operands (sorted where the operation commutes) decides its split, so training and held-out
    problems are disjoint for all seeds. Held-out questions are distinct. Training questions may repeat: without repeats
    a long set would run out of short questions and drift from the mix.
    """
    if task not in TASKS:
        raise UserError(f"{task!r} is not a bundled task: choose one of {', '.join(TASKS)}")
    rng = np.random.default_rng([seed, 0 if split == "train" else 1])
    found: list[Problem] = []
    asked: set[str] = set()
    for question, answer, key in TASKS[task](rng):
        if len(found) == n:
            break
        if _is_held_out(key) == (split == "eval") and (split == "train" or question not in asked):
            found.append(Problem(f"{task}-{split}-{seed}:{len(found) + 1}", question, answer, task))
            asked.add(question)
    return found


def demonstration(problem: Problem) -> str:
    """The target response of a warm start: the bare answer, or for a long sum running totals and a boxed answer."""
    if problem.source != "arithmetic_long":
        return problem.answer
    total, totals = 0, []
    for term in problem.question.rstrip("=").split("+"):
        total += int(term)
        totals.append(str(total))
    return f"{' '.join(totals[1:])} \\boxed{{{problem.answer}}}"


def _short(rng: np.random.Generator) -> Iterator[tuple[str, str, str]]:
    """Endless (question, answer, key) of `MIX`; the larger operand of a difference comes first."""
    weights = np.array([kind.weight for kind in MIX])
    while True:
        for choice in rng.choice(len(MIX), size=1024, p=weights / weights.sum()):
            kind = MIX[choice]
            left, right = _number(rng, kind.left_digits), _number(rng, kind.right_digits)
            if kind.operator == "-":
                left, right = max(left, right), min(left, right)
            question = f"{left}{kind.operator}{right}="
            value = {"+": left + right, "-": left - right, "*": left * right}[kind.operator]
            yield question, str(value), f"{kind.operator}{min(left, right)},{max(left, right)}"


def _long(rng: np.random.Generator) -> Iterator[tuple[str, str, str]]:
    """Endless sums whose number of terms has a heavy tail, so that response lengths have one."""
    fewest, most = LONG_TERMS
    while True:
        terms = min(most, int(fewest * (1.0 + rng.pareto(1.2))))
        operands = [_number(rng, int(rng.integers(1, 3))) for _ in range(terms)]
        yield "+".join(map(str, operands)) + "=", str(sum(operands)), "+" + ",".join(map(str, sorted(operands)))


def _number(rng: np.random.Generator, digits: int) -> int:
    return int(rng.integers(10 ** (digits - 1), 10**digits))


def _is_held_out(key: str) -> bool:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % EVAL_SHARE == 0


TASKS: dict[str, Callable[[np.random.Generator], Iterator[tuple[str, str, str]]]] = {
    "arithmetic": _short,
    "arithmetic_long": _long,
}
