"""OpenEnv's traces as rows: tokens, masks and logprobs in place, and one sentence for what is no trace."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mugrpo_megatron.extras.exchange.foreign_rollouts import read_rollouts
from mugrpo_megatron.extras.exchange.traces import flatten_trace
from tests.extras.exchange.test_foreign_rollouts import TEMPLATE, TOKENIZER
from tests.refusals import refuses


def turn(prompt: list[Any], completion: list[int], mask: list[int] | None = None, node: str = "a") -> dict[str, Any]:
    mask_values = [1] * len(completion) if mask is None else mask
    return {
        "node_id": node,
        "prompt_token_ids": prompt,
        "completion_token_ids": completion,
        "per_token_logps": [-0.5 * (place + 1) for place in range(len(completion))],
        "loss_mask": [0] * len(prompt) + mask_values,
        "request": {},
        "response": {},
        "metadata": {},
    }


TWO = {"schema_version": 1, "turns": [turn([1, 2], [3, 4]), turn([1, 2, 3, 4, 9, 9], [5], node="b")]}
FLAT = {
    "prompt_ids": [1, 2],
    "response_ids": [3, 4, 9, 9, 5],
    "logprobs": [-0.5, -1.0, 0.0, 0.0, -0.5],
    "loss_mask": [1, 1, 0, 0, 1],
}


def test_turns_become_one_response_with_a_mask(tmp_path: Path) -> None:
    assert flatten_trace(TWO) == FLAT
    assert flatten_trace({"trace": TWO, "reward": 1.0, "group": 4}) == {**FLAT, "reward": 1.0, "group": 4}
    assert flatten_trace({"prompt": "1+1=", "response": "2"}) == {"prompt": "1+1=", "response": "2"}
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({"trace": TWO, "reward": 1.0}) + "\n")
    [[rollout]] = read_rollouts(path, TOKENIZER, TEMPLATE, (1000, 1000))
    assert rollout.response_ids.tolist() == FLAT["response_ids"]
    assert rollout.loss_mask is not None
    assert rollout.loss_mask.tolist() == [True, True, False, False, True]


def test_a_turn_that_is_not_trained_on_may_be_of_another_conversation() -> None:
    other = turn([7, 7], [8], [0], node="title")
    assert flatten_trace({**TWO, "turns": [TWO["turns"][0], other, TWO["turns"][1]]}) == FLAT
    part = {**TWO, "turns": [turn([1, 2], [3, 4], [1, 0]), TWO["turns"][1]]}
    assert flatten_trace(part)["loss_mask"] == [1, 0, 0, 0, 1]


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"schema_version": 2}, "the trace has schema 2, and only schema 1 can be read"),
        ({"schema_version": "x" * 5000}, r"the trace has schema 'x{10,60}\.\.\., and only schema 1 can be read"),
        (
            {"turns": [turn(["x" * 5000], [3]), turn([1, 3], [5])]},
            r"its token 0 is 1, and was 'x{10,60}\.\.\.; leave the trace out$",
        ),
        ({"turns": [turn([1, 2], [3, 4]), turn([1, 2, 3, 6], [5])]}, "its token 3 is 6, and was 4"),
        ({"turns": [turn([1, 2], [3, 4]), turn([1, 2, 3], [5])]}, "its token 3 is missing, and was 4"),
        ({"turns": [turn([1], [2], [0])]}, "no token to train on"),
        ({"turns": []}, "no token to train on"),
        ({"turns": "x"}, "turns is not a list"),
        ({"turns": [3]}, "turn 0 of the trace is not an object"),
        ({"turns": [{**turn([1], [2]), "per_token_logps": []}]}, "1 completion_token_ids and 0 per_token_logps"),
        ({"turns": [{**turn([1], [2]), "loss_mask": [1]}]}, "has 1 values for 2 tokens"),
        ({"turns": [{**turn([1], [2]), "loss_mask": [1, 1]}]}, "trains tokens of its prompt"),
    ],
)
def test_what_is_no_trace_is_said_in_a_sentence(change: dict[str, Any], why: str) -> None:
    refuses(why, flatten_trace, {**TWO, **change}, error=ValueError)


def node(parent: int | None, ids: list[int], mask: list[bool] | None = None, **more: Any) -> dict[str, Any]:
    inside = [False] * len(ids) if mask is None else mask
    fields = {"token_ids": ids, "mask": inside, "logprobs": [-0.5 * (n + 1) for n in range(sum(inside))]}
    return {"parent": parent, "message": {"role": "user", "content": ""}, "sampled": any(inside), **fields, **more}


NODES = [
    node(None, [1, 2]),
    node(0, [6, 3, 4], [False, True, True]),
    node(1, [9]),
    node(2, [9, 5], [False, True]),
    node(3, [8]),
]
VERIFIERS = {
    "version": 1,
    "task": {"type": "T", "data": {}},
    "agent": {"config": {}},
    "nodes": NODES,
    "rewards": {"right": {"score": 1.0, "weight": 2.0}, "none": None, "short": {"score": 0.5, "weight": 1.0}},
}


def test_an_episode_of_verifiers_is_its_trained_traces(tmp_path: Path) -> None:
    """The file that its evaluations save: agents that do not train the policy are left out, groups are its own."""
    judge = {**VERIFIERS, "agent": {"config": {}, "trainable": False}}
    cut = {**VERIFIERS, "calls": [{"finish_reason": "stop"}, {"finish_reason": "length"}]}
    path = tmp_path / "traces.jsonl"
    episodes = [
        {"env": {"id": "e"}, "task": VERIFIERS["task"], "group": {"id": group}, "traces": traces}
        for group, traces in (("a", [VERIFIERS, judge]), ("b", [cut]), ("a", [cut]), ("b", [judge, VERIFIERS]))
    ]
    path.write_text("".join(json.dumps(episode) + "\n" for episode in episodes))
    groups = read_rollouts(path, TOKENIZER, TEMPLATE, (1000, 1000))
    assert [[rollout.finish_reason for rollout in group] for group in groups] == [
        ["stop", "length"],
        ["length", "stop"],
    ]
    assert {rollout.row["reward"] for group in groups for rollout in group} == {2.5}
    assert groups[0][0].response_ids.tolist() == [3, 4, 9, 9, 5]
    for traces, why in (
        ([judge], "no trace of the episode is of a trainable agent"),
        ("x", "traces is not a list"),
        ([3], "is not a list of objects"),
    ):
        path.write_text(json.dumps({**episodes[0], "traces": traces}) + "\n")
        refuses(rf"traces.jsonl:1: .*{why}", read_rollouts, path, TOKENIZER, TEMPLATE, (1000, 1000))


def test_a_branch_of_verifiers_is_one_response_with_a_mask() -> None:
    assert flatten_trace(VERIFIERS) == {
        "reward": 2.5,
        "prompt_ids": [1, 2, 6],
        "response_ids": [3, 4, 9, 9, 5],
        "logprobs": [-0.5, -1.0, 0.0, 0.0, -0.5],
        "loss_mask": [True, True, False, False, True],
    }
    assert flatten_trace({"trace": VERIFIERS, "reward": 7.0})["reward"] == 7.0


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"version": 2}, "the trace has version 2, and only version 1 can be read"),
        ({"rewards": [1.0]}, "`rewards` of the trace is not an object"),
        ({"rewards": {"a": {"weight": 1.0}}}, "the reward 'a' of the trace has no numbers as score and weight"),
        ({"rewards": {"a": 1.0}}, "the reward 'a' of the trace has no numbers as score and weight"),
        (
            {"nodes": [*NODES[:2], node(0, [7], [True])]},
            "node 2 of the trace is no object whose `parent` is the node before",
        ),
        ({"nodes": [node(None, [1, 2])]}, "no token to train on"),
        ({"rewards": {"a": {"score": 10**400, "weight": 0.5}}}, "have a sum that no float can hold"),
        (
            {"nodes": [{**node(None, [1, 2], [False, True]), "mask": [0, 2]}]},
            "the mask of node 0 of the trace has 2, not true",
        ),
        ({"nodes": [{**node(None, [1, 2], [False, True]), "mask": [0, "a"]}]}, "has 'a', not true or false"),
        ({"nodes": [{**node(None, [1, 2], [True, True]), "mask": [[0], 1]}]}, r"has \[0\], not true or false"),
        (
            {"nodes": [{**node(None, [1, 2], [True, True]), "mask": [True]}]},
            "node 0 of the trace has 2 token_ids and 1 values in its mask; the mask needs one for each token",
        ),
    ],
)
def test_what_is_no_trace_of_verifiers_is_said_in_a_sentence(change: dict[str, Any], why: str) -> None:
    refuses(why, flatten_trace, {**VERIFIERS, **change}, error=ValueError)


@pytest.mark.parametrize("number", [0, 1, 3])
def test_a_wrong_number_of_logprobs_of_verifiers_is_named_with_both_counts(number: int) -> None:
    """As many token ids as values in the mask: the sentence is about the logprobs alone, and its counts differ."""
    wrong = node(None, [1, 2, 3], [False, True, True], logprobs=[-0.5] * number)
    refuses(
        f"node 0 of the trace has {number} logprobs, and its mask marks 2 sampled tokens; each of them needs one",
        flatten_trace,
        {**VERIFIERS, "nodes": [wrong]},
        error=ValueError,
    )
