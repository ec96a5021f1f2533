"""How a reward function is called is read from the names of its parameters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.rewards.callers import LISTS, SINGLE, Unsupported, form_of, list_arguments, single_arguments
from mugrpo_megatron.rewards.items import ScoringInput
from tests.rewards.foreign import slime_reward, trl_rewards, verl_reward

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
        ("response, answer, budget", "needs 'budget', which nothing here gives"),
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
