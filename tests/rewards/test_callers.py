"""What a reward function returns becomes a verdict; what it may not return is a failure."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.callers import MOST_PARTS, Caller, GaveUp, verdict_of
from mugrpo_megatron.rewards.items import ScoringInput, Verdict


def items(*responses: str, gold: object = "4", **known: Any) -> list[ScoringInput]:
    return [ScoringInput(response, gold, str(gold), ids=list(range(len(response))), **known) for response in responses]


def rewards(function: Any, given: list[ScoringInput], limit_s: float = 60.0) -> list[object]:
    found = Caller(function, "own", limit_s)(given)
    return [one.reward if isinstance(one, Verdict) else type(one) for one in found]


@given(st.floats(allow_nan=False, allow_infinity=False))
def test_any_finite_number_is_a_reward(number: float) -> None:
    assert verdict_of(number, "own", False) == Verdict(number, "", "own")
    assert verdict_of({"score": number, "other": number}, "own", False).parts == {"other": number}


@pytest.mark.parametrize("returned", ["0.5", None, math.nan, math.inf, [1.0], {}, {"other": 1.0}, {"score": None}])
def test_anything_else_is_a_failure(returned: object) -> None:
    with pytest.raises((TypeError, ValueError), match="own returned"):
        verdict_of(returned, "own", False)


def test_a_dictionary_has_a_score_an_answer_and_numbers() -> None:
    found = verdict_of({"score": True, "acc": False, "pred": "4", "a b": 2, "bad": math.nan}, "own", False)
    assert (found.reward, found.extracted, found.parts) == (1.0, "4", {"acc": 0.0, "a_b": 2.0})
    many = verdict_of({"score": 1} | {str(n): n for n in range(1000)}, "own", False)
    assert len(many.parts) == MOST_PARTS


@pytest.mark.parametrize("returned", [[1.0], [1.0] * 3, 1.0, None, "12", {"score": 1.0}])
def test_a_function_of_several_returns_as_many(returned: object) -> None:
    def function(responses: list[str]) -> object:
        return returned

    with pytest.raises(TypeError, match="and not a list of 2 rewards"):
        Caller(function, "own", 60.0)(items("1", "2"))


def test_one_bad_entry_costs_no_other() -> None:
    def function(responses: list[str]) -> list[object]:
        return [1.0, "x", None]

    assert rewards(function, items("1", "2", "3")) == [1.0, TypeError, None]


def test_an_async_function_works_on_all_at_once_and_fails_one_by_one() -> None:
    here: set[str] = set()
    together = asyncio.Event()

    async def function(response: str, answer: str) -> float:
        here.add(response)
        if len(here) == 4:
            together.set()
        await together.wait()
        if response == "raise":
            raise RuntimeError(response)
        if response == "hang":
            await asyncio.Event().wait()
        if response == "its own":
            raise TimeoutError
        return 1.0

    given = items("raise", "hang", "its own", "4")
    assert rewards(function, given, limit_s=0.2) == [RuntimeError, GaveUp, TimeoutError, 1.0]


def test_an_async_function_keeps_its_loop() -> None:
    loops = []

    async def function(responses: list[str]) -> list[float]:
        loops.append(asyncio.get_running_loop())
        return [0.0] * len(responses)

    caller = Caller(function, "own", 60.0)
    caller(items("1"))
    caller(items("1", "2"))
    assert loops[0] is loops[1]


def test_a_callable_object() -> None:
    class Judge:
        async def __call__(self, response: str, answer: str) -> float:
            return float(response == answer)

    assert rewards(Judge(), items("4", "5")) == [1.0, 0.0]
