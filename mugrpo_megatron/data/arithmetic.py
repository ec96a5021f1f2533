"""The bundled tasks: generators of arithmetic problems. No seed makes a training problem that is also a held-out
one."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from math import gcd
from typing import Literal

import numpy as np

from mugrpo_megatron.errors import UserError
from mugrpo_megatron.samples import Problem

Split = Literal["train", "eval"]

GENERATED = 50_000
"""Training problems of a bundled task, more than any bundled recipe samples from one."""
BUCKETS = 8
"""Number of buckets into which a hash divides the questions; a task's splits consist of whole buckets."""


@dataclass(frozen=True, slots=True)
class Operation:
    """One kind of arithmetic problem: its operator, the digits of its operands, and the share of problems of this
    kind."""

    operator: str
    left_digits: int
    right_digits: int
    weight: float


MIX = (
    Operation("+", 3, 3, 0.45),
    Operation("-", 3, 3, 0.40),
    Operation("+", 3, 2, 0.05),
    Operation("+", 2, 2, 0.05),
    Operation("*", 2, 1, 0.05),
)
"""Mostly three-digit sums and differences, which a small model picks up within a minute, with a tail of rarer kinds."""

LONG_TERMS = (3, 48)
"""Fewest and most terms of an `arithmetic_long` sum; the number is Pareto-distributed in between."""

CHAIN_TERMS = 6
"""Number of two-digit terms of a `chain` sum."""

EUCLID_STEPS = (6, 12)
"""Fewest and most subtractions of a `euclid` problem."""
EUCLID_DIVISORS = (2, 40)
"""Least and largest value of the answer to a `euclid` problem, a greatest common divisor."""

Drawn = tuple[str, str, str]
"""Question, answer, and the key that is hashed to a bucket."""


@dataclass(frozen=True, slots=True)
class Task:
    """A generator of problems, and the buckets of its splits: a hash puts each problem into one of BUCKETS buckets."""

    draw: Callable[[np.random.Generator], Iterator[Drawn]]
    held_out: int = 0
    """Index of the bucket that is the `eval` split."""
    reserved: int = 1
    """Number of buckets, counted from the first, from which no training problem comes."""

    def holds(self, split: Split, bucket: int) -> bool:
        return bucket == self.held_out if split == "eval" else bucket >= self.reserved


def problems(seed: int, split: Split, n: int, task: str = "arithmetic") -> list[Problem]:
    """Return `n` problems of `split`, the same for the same arguments on every machine.

    A hash of a question's operands (sorted where the operation commutes) determines its split, so training and held-out
    problems are disjoint for all seeds. Held-out questions are distinct. Training questions may repeat: without repeats
    a long set would run out of short questions, and the shares of the kinds in `MIX` would shift.
    """
    if task not in TASKS:
        raise UserError(f"{task!r} is not a bundled task: choose one of {', '.join(TASKS)}")
    rng = np.random.default_rng([seed, 0 if split == "train" else 1])
    generator = TASKS[task]
    drawn: list[Problem] = []
    questions: set[str] = set()
    for question, answer, key in generator.draw(rng):
        if len(drawn) == n:
            break
        if generator.holds(split, _bucket(key)) and (split == "train" or question not in questions):
            drawn.append(Problem(f"{task}-{split}-{seed}:{len(drawn) + 1}", question, answer, task))
            questions.add(question)
    return drawn


def demonstration(problem: Problem) -> str:
    """The response that `mugrpo sft` teaches a new model: for `arithmetic` the bare answer, for the other tasks the
    steps to the answer and a box with it.

    The steps of `arithmetic_long` are running totals. Those of `chain` are equations, `37+58=95 95+91=186 ...`, and
    those of `euclid` are subtractions in the same form.
    """
    if problem.source == "arithmetic":
        return problem.answer
    return f"{' '.join(_steps(problem))} \\boxed{{{problem.answer}}}"


def _steps(problem: Problem) -> list[str]:
    if problem.source == "euclid":
        first, second = problem.question.removeprefix("gcd(").removesuffix(")=").split(",")
        return [f"{larger}-{less}={larger - less}" for larger, less in _subtractions(int(first), int(second))]
    terms = [int(term) for term in problem.question.rstrip("=").split("+")]
    totals = list(accumulate(terms))
    if problem.source == "arithmetic_long":
        return [str(total) for total in totals[1:]]
    return [f"{before}+{term}={before + term}" for before, term in zip(totals, terms[1:], strict=False)]


def _short(rng: np.random.Generator) -> Iterator[Drawn]:
    """Yield problems of `MIX` without end; in a difference the larger operand comes first."""
    weights = np.array([operation.weight for operation in MIX])
    while True:
        for choice in rng.choice(len(MIX), size=1024, p=weights / weights.sum()):
            operation = MIX[choice]
            operator = operation.operator
            first, second = _number(rng, operation.left_digits), _number(rng, operation.right_digits)
            if operator == "-":
                first, second = max(first, second), min(first, second)
            question = f"{first}{operator}{second}="
            value = {"+": first + second, "-": first - second, "*": first * second}[operator]
            yield question, str(value), f"{operator}{min(first, second)},{max(first, second)}"


def _long(rng: np.random.Generator) -> Iterator[Drawn]:
    """Yield sums without end; their number of terms, and with it the response length, has a heavy tail."""
    fewest, most = LONG_TERMS
    while True:
        terms = min(most, int(fewest * (1.0 + rng.pareto(1.2))))
        operands = [_number(rng, int(rng.integers(1, 3))) for _ in range(terms)]
        yield "+".join(map(str, operands)) + "=", str(sum(operands)), "+" + ",".join(map(str, sorted(operands)))


def _chain(rng: np.random.Generator) -> Iterator[Drawn]:
    while True:
        operands = [_number(rng, 2) for _ in range(CHAIN_TERMS)]
        yield "+".join(map(str, operands)) + "=", str(sum(operands)), "+" + ",".join(map(str, sorted(operands)))


def _euclid(rng: np.random.Generator) -> Iterator[Drawn]:
    """Yield, without end, pairs of three-digit numbers whose greatest common divisor is found by subtractions."""
    least, greatest = EUCLID_DIVISORS
    fewest, most = EUCLID_STEPS
    while True:
        divisor = int(rng.integers(least, greatest + 1))
        first, second = (divisor * int(rng.integers(100 // divisor + 1, 999 // divisor + 1)) for _ in range(2))
        steps = sum(1 for _ in _subtractions(first, second))
        if gcd(first, second) == divisor and fewest <= steps <= most:
            yield f"gcd({first},{second})=", str(divisor), f"gcd{min(first, second)},{max(first, second)}"


def _subtractions(first: int, second: int) -> Iterator[tuple[int, int]]:
    """Yield (larger, smaller) for each subtraction of Euclid's algorithm, until the two numbers are equal."""
    while first != second:
        first, second = max(first, second), min(first, second)
        yield first, second
        first -= second


def _number(rng: np.random.Generator, digits: int) -> int:
    return int(rng.integers(10 ** (digits - 1), 10**digits))


def _bucket(key: str) -> int:
    return hashlib.blake2b(key.encode(), digest_size=8).digest()[0] % BUCKETS


TASKS: dict[str, Task] = {
    "arithmetic": Task(_short),
    "arithmetic_long": Task(_long),
    "chain": Task(_chain, reserved=2),
    "chain_validation": Task(_chain, held_out=1, reserved=2),
    "euclid": Task(_euclid),
}
"""Bundled tasks. `chain_validation` has the training problems of `chain` and other held-out ones, for tuning."""
