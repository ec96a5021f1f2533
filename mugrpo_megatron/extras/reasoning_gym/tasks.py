"""Problems of reasoning-gym's tasks, in disjoint splits.

A source is `reasoning_gym:TASK?key=value&...`: the task's parameters, and `seed` and `size`.
"""

from __future__ import annotations

import difflib
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from mugrpo_megatron.call_guard import TookTooLong, clock
from mugrpo_megatron.data.arithmetic import BUCKETS, Split
from mugrpo_megatron.data.reading import any_answer
from mugrpo_megatron.errors import UserError
from mugrpo_megatron.recipe.functions import CALL_S
from mugrpo_megatron.recipe.scoring import GYM
from mugrpo_megatron.samples import Problem

SIZE = 10_000
"""Number of training problems of a source that does not set `size`."""
MOST = 10_000_000
"""Most problems of a source; a stage holds fewer."""
CALL_BYTES = 4 << 30
"""Address space that a task may take for its parameters, or for one problem."""
TRIES = 40
"""Most questions that are generated for each one that is wanted. More than one is needed, since each split takes only
some of them and some repeat. A task with few different questions gives fewer problems than are wanted."""


def check_task(source: str) -> None:
    """Raise UserError for a source that reasoning-gym cannot generate, or if that package is not installed."""
    _dataset(*_task_of(source))


def gym_problems(source: str, name: str, split: Split, held_out: int) -> list[Problem]:
    """Returns the problems of a split, the same on every machine.

    There are at most `size` of them (a parameter of the source), by default `held_out` for evaluation and SIZE for
    training. A hash of the question determines its split, and held-out questions are distinct. `name` is the set's
    name. A row names task, parameters and index, from which the verifier generates the entry again.
    """
    task, given = _task_of(source)
    size = given.pop("size", held_out if split == "eval" else SIZE)
    # Hashed, since reasoning-gym seeds problem i with seed + i: successive seeds would share all problems but one.
    seed = int.from_bytes(_digest(f"seed {given.get('seed', 0)}")) >> 33
    parameters = given | {"seed": seed, "size": size * TRIES}
    dataset = _dataset(task, parameters)
    problems: list[Problem] = []
    questions: set[str] = set()
    for index in range(size * TRIES):
        if len(problems) == size:
            break
        with _refusals(source):
            entry = dataset[index]
        question, answer = str(entry["question"]), entry["answer"]
        bucket = _digest(question)[0] % BUCKETS
        if (bucket == 0) is (split == "eval") and (split == "train" or question not in questions):
            gold = answer if isinstance(answer, str) else any_answer(answer)
            row = {"question": question, "answer": gold, "task": task, "parameters": parameters, "index": index}
            problems.append(Problem(f"{source}:{index}", question, gold, name, row=row))
            questions.add(question)
    if not problems:
        raise UserError(
            f"{source}: none of {size * TRIES:,} generated questions is for the {split} split; raise its `size`"
        )
    return problems


def _digest(text: str) -> bytes:
    return hashlib.blake2b(text.encode(), digest_size=8).digest()


def _task_of(source: str) -> tuple[str, dict[str, Any]]:
    """Returns a source's task and its parameters: JSON values, else text."""
    task, _, query = source.removeprefix(GYM).partition("?")
    parameters: dict[str, Any] = {}
    for pair in filter(None, query.split("&")):
        key, equals, text = pair.partition("=")
        if not equals:
            raise UserError(f"data source {source!r}: write its parameters as key=value, joined by &")
        try:
            parameters[key] = json.loads(text)
        except (ValueError, RecursionError):
            parameters[key] = text
        if key in ("seed", "size") and not (type(parameters[key]) is int and parameters[key] >= (key == "size")):
            raise UserError(f"data source {source!r}: {key} is a whole number from {int(key == 'size')}")
        if key == "size" and parameters[key] > MOST:
            raise UserError(f"data source {source!r}: size is at most {MOST:,}")
    return task, parameters


def _dataset(task: str, parameters: dict[str, Any]) -> Any:
    """Returns the task's data set; UserError where package, task or parameter does not exist, or the package refuses a
    value."""
    if find_spec("reasoning_gym") is None:
        raise UserError(
            f"data source '{GYM}{task}' needs a package that is not installed: pip install reasoning-gym==0.1.25"
        )
    gym, tasks = import_module("reasoning_gym"), import_module("reasoning_gym.factory").DATASETS
    if task not in tasks:
        close = difflib.get_close_matches(task, tasks, n=1)
        hint = f"did you mean {close[0]}?" if close else f"it has {', '.join(sorted(tasks))}"
        raise UserError(f"data source '{GYM}{task}': reasoning-gym has no such task; {hint}")
    known = [field.name for field in fields(tasks[task][1])]
    if unknown := sorted(parameters.keys() - set(known)):
        raise UserError(
            f"data source '{GYM}{task}' has no parameter {unknown[0]}: its parameters are {', '.join(known)}"
        )
    with _refusals(GYM + task):
        return gym.create_dataset(task, **parameters)


@contextmanager
def _refusals(source: str) -> Iterator[None]:
    """Turn any error of the package in the block into UserError. It is also raised if the block takes more than CALL_S
    CPU seconds or CALL_BYTES of address space."""
    try:
        with clock(CALL_S, memory=CALL_BYTES):
            yield
    except (Exception, TookTooLong) as error:
        why = str(error) or type(error).__name__
        raise UserError(
            f"data source {source!r}: reasoning-gym fails with its parameters: {why}; change them"
        ) from None
