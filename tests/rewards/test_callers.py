"""A reward function is called by the names of its parameters, and its result becomes a verdict or a failure."""

from __future__ import annotations

import asyncio
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.callers import (
    LISTS,
    MOST_PARTS,
    SINGLE,
    Caller,
    GaveUp,
    Unsupported,
    form_of,
    list_arguments,
    single_arguments,
    verdict_of,
)
from mugrpo_megatron.rewards.items import ScoringInput, Verdict
from tests.rewards.foreign import slime_reward, trl_rewards, verl_reward


def items(*responses: str, gold: object = "4", **known: Any) -> list[ScoringInput]:
    return [ScoringInput(response, gold, str(gold), ids=list(range(len(response))), **known) for response in responses]


def rewards(function: Any, given: list[ScoringInput], limit_s: float = 60.0) -> list[object]:
    found = Caller(function, "own", limit_s)(given)
    return [one.reward if isinstance(one, Verdict) else type(one) for one in found]


@given(st.floats(-3.4e38, 3.4e38))
def test_any_finite_number_is_a_reward(number: float) -> None:
    assert verdict_of(number, "own", False) == Verdict(number, "", "own")
    assert verdict_of({"score": number, "other": number}, "own", False).parts == {"other": number}


@pytest.mark.parametrize(
    "returned", ["0.5", None, 10**400, math.nan, math.inf, -1e39, [1.0], {}, {"other": 1.0}, {"score": None}]
)
def test_anything_else_is_a_failure(returned: object) -> None:
    with pytest.raises((TypeError, ValueError), match="own returned"):
        verdict_of(returned, "own", False)


def test_a_number_that_is_no_float_fails_its_own_response_alone() -> None:
    function = Caller(lambda responses: [1.0, 10**400], "own", 1.0)
    good, bad = function(items("a", "b"))
    assert isinstance(good, Verdict)
    assert isinstance(bad, ValueError)


def test_a_dictionary_has_a_score_an_answer_and_numbers() -> None:
    found = verdict_of({"score": True, "acc": False, "pred": "4", "a b": 2, "bad": math.nan}, "own", False)
    assert (found.reward, found.extracted, found.parts) == (1.0, "4", {"acc": 0.0, "a_b": 2.0})
    strange = {"score": 1, "many": 10**400, "array": np.ones(2), "one": np.float32(0.5), "list": [1]}
    assert verdict_of(strange, "own", False) == Verdict(1.0, "", "own", parts={"one": 0.5}), "not the episode's failure"
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


CHAT = [{"role": "user", "content": "1+1?"}]
ITEMS = [
    ScoringInput("2", ["gold"], "2", {"solution": "s", "extra_info": {"level": "easy"}}, "1+1=", "sums", [5, 6]),
    ScoringInput("3", "2", "2", {"solution": "t"}, CHAT, "", [7]),
]


def made(parameters: str) -> Any:
    scope: dict[str, Any] = {}
    exec(f"def function({parameters}): return locals()", scope)
    return scope["function"]


@given(st.sampled_from(sorted(SINGLE)), st.data())
def test_a_function_of_one_response_gets_the_parameters_that_it_names(key: str, data: st.DataObject) -> None:
    others = data.draw(st.lists(st.sampled_from(sorted(SINGLE[key])), unique=True))
    names = list(dict.fromkeys([*others, key]))
    form = form_of(made(", ".join(names)))
    assert not form.takes_lists
    assert list(single_arguments(form, ITEMS[0])) == [name for name in SINGLE[key] if name in names]
    every = single_arguments(form_of(made(f"{key}, **rest")), ITEMS[0])
    assert every.keys() == SINGLE[key].keys()


@given(st.sampled_from(sorted(LISTS.keys() - {"completions", "samples"})))
def test_a_function_of_several_responses_gets_lists_of_the_same(key: str) -> None:
    given = list_arguments(form_of(made(f"{key}, **rest")), ITEMS, {})
    assert given.keys() == LISTS[key].keys()
    assert all(len(values) == 2 for values in given.values())


def test_ours() -> None:
    given = single_arguments(form_of(made("response, answer, row, prompt")), ITEMS[0])
    assert given == {"response": "2", "answer": ["gold"], "row": ITEMS[0].row, "prompt": "1+1="}
    assert list_arguments(form_of(made("responses, answers")), ITEMS, {}) == {
        "responses": ["2", "3"],
        "answers": [["gold"], "2"],
    }


def test_trls_completions_are_messages_after_messages() -> None:
    metrics: dict[str, float] = {}
    form = form_of(made("prompts, completions, completion_ids, solution, **kwargs"))
    given = list_arguments(form, ITEMS, metrics)
    assert given["prompts"] == ["1+1=", CHAT]
    assert given["completions"] == ["2", [{"role": "assistant", "content": "3"}]]
    assert given["completion_ids"] == [[5, 6], [7]]
    assert given["solution"] == ["s", "t"]
    assert given["extra_info"] == [{"level": "easy"}, None]
    given["log_metric"]("share", 0.5)
    given["log_extra"]("column", ["a", "b"])
    assert metrics == {"share": 0.5}


def test_a_logged_metric_is_not_the_reward() -> None:
    """Whatever its name."""

    def reward(completions: list[str], log_metric: Any) -> list[float]:
        for name in ("score", "reward", "share"):
            log_metric(name, 0.5)
        return [1.0] * len(completions)

    for found in Caller(reward, "own", 60.0)(items("a", "b")):
        assert isinstance(found, Verdict)
        assert found.reward == 1.0
        assert found.parts == {"logged_score": 0.5, "logged_reward": 0.5, "share": 0.5}


def test_a_column_that_the_row_lacks() -> None:
    assert list_arguments(form_of(made("completions, answer")), ITEMS, {})["answer"] == [["gold"], "2"]
    assert "topic" not in list_arguments(form_of(made("completions, topic=None")), ITEMS, {})
    with pytest.raises(LookupError, match="needs the column 'topic', and the row has solution, extra_info"):
        list_arguments(form_of(made("completions, topic")), ITEMS, {})
    bare = [ScoringInput("2", "4", "4")]
    assert list_arguments(form_of(made("completions, **columns")), bare, {})["answer"] == ["4"]


def test_slimes_sample() -> None:
    sample = single_arguments(form_of(slime_reward.reward), ITEMS[0])["sample"]
    assert (sample.prompt, sample.response, sample.response_length, sample.label) == ("1+1=", "2", 2, ["gold"])
    assert sample.metadata == ITEMS[0].row
    given = list_arguments(form_of(slime_reward.of_group), ITEMS, {})
    assert [one.response for one in given["samples"]] == ["2", "3"]
    assert not isinstance(given["args"], list)


def test_what_is_not_needed_is_not_sent() -> None:
    needs = {name: form_of(function).needs for name, function in vars(trl_rewards).items() if name[0] in "cba"}
    assert form_of(made("response, answer")).needs == (1, False, False, False)
    assert form_of(made("response, answer, row")).needs == (1, True, False, False)
    assert form_of(verl_reward.compute_score).needs == (1, True, False, False)
    assert needs["brevity"].ids
    assert form_of(made("completions")).needs.ids is False


@pytest.mark.parametrize(
    ("parameters", "words"),
    [
        ("a, b", r"takes \(a, b\): name its parameters"),
        ("", "name its parameters"),
        ("*arguments", "name its parameters"),
        ("response, answer, budget", "needs 'budget', which is not a known parameter"),
        ("completions, trainer_state", "needs 'trainer_state'"),
        ("response, answer, /", "by position alone"),
    ],
)
def test_other_parameters_are_refused_in_a_sentence(parameters: str, words: str) -> None:
    with pytest.raises(Unsupported, match=words):
        form_of(made(parameters))


def test_other_parameters_with_defaults_keep_them() -> None:
    assert single_arguments(form_of(made("response, answer, scale=2")), ITEMS[0]).keys() == {"response", "answer"}


def test_a_function_without_a_signature_is_refused() -> None:
    with pytest.raises(Unsupported, match="no signature"):
        form_of(dict)


def test_what_a_function_changes_is_its_own_copy() -> None:
    """The responses of a group share a row; nothing that a call changes inside it reaches another."""
    row = {"tests": [3, 1], "extra_info": {"seen": []}, "metadata": {"n": {"calls": 0}}}
    given = items("a", "b", "c", gold=[2, 1], row=row)

    def one(response: str, answer: Any, row: Any) -> float:
        answer.pop()
        row["tests"].append(1)
        row["extra_info"]["seen"].append(response)
        return float(len(row["tests"]) + len(row["extra_info"]["seen"]) + len(answer))

    def several(args: Any, samples: Any) -> list[float]:
        for sample in samples:
            sample.metadata["n"]["calls"] += 1
        return [float(sample.metadata["n"]["calls"]) for sample in samples]

    assert rewards(one, given) == rewards(one, given) == [5.0] * 3
    assert rewards(several, given) == [1.0] * 3
    assert row == {"tests": [3, 1], "extra_info": {"seen": []}, "metadata": {"n": {"calls": 0}}}
