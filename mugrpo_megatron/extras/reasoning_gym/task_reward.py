"""The verifier of reasoning-gym's task as a reward function. Only workers import this file, and with it the package."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from importlib import import_module
from typing import Any

from mugrpo_megatron.rewards.math.extract import boxed_answer

# Imported at the top: it takes a second, and the CPU time of a call is limited.
GYM = import_module("reasoning_gym")
EXTRACT = import_module("reasoning_gym.utils").extract_answer


def task_reward(response: str, answer: str, row: Mapping[str, Any]) -> float:
    """The task's score of the answer in a response: in the last <answer> tags, else in the last box, else all of it.

    Raises ValueError for a row that reasoning-gym did not generate.
    """
    if "task" not in row:
        raise ValueError("the row names no task of reasoning-gym, so no task can score it; set reward.function")
    extracted = EXTRACT(response) or boxed_answer(response) or response.strip()
    dataset, entry = _entry(row["task"], json.dumps(row["parameters"]), row["index"])
    return float(dataset.score_answer(extracted, entry))


@lru_cache(maxsize=256)
def _entry(task: str, parameters: str, index: int) -> tuple[Any, dict[str, Any]]:
    """The task's data set and one entry, generated again, because JSON would have changed the entry's tuples and
    keys."""
    dataset = _dataset(task, parameters)
    return dataset, dataset[index]


@lru_cache(maxsize=16)
def _dataset(task: str, parameters: str) -> Any:
    return GYM.create_dataset(task, **json.loads(parameters))
