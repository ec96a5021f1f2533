"""Turns traces of agents into rows of rollouts: the formats of OpenEnv and of verifiers, without their libraries.

A row of a file is a trace, or has one in its column `trace` beside other columns such as a reward, a gold or a group.

OpenEnv's `TrainingTrace`, schema 1 (openenv/core/harness/training.py), has `turns`. A turn is one call of an engine:
its `prompt_token_ids`, its `completion_token_ids`, `per_token_logps` of the completion, and a `loss_mask` over both.
The prompt of a turn that is trained on has to begin with all tokens of the trained turn before. Turns whose mask is all
zeros are skipped.

verifiers' `Trace`, version 1 (verifiers/v1/trace.py, graph.py), has `nodes`, each with its `parent`, the `token_ids`
that it adds, a `mask` over them, and `logprobs` of the tokens in the mask. Traces with several branches are refused.
Its JSON does not say which tokens the sampler could draw. A line of verifiers' `traces.jsonl` (episode.py) is an
episode, with the `traces` of its agents and its `group`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from mugrpo_megatron.recipe.load import short_repr

SCHEMA = 1
NODE = ("token_ids", "mask", "logprobs")
TERM = ("score", "weight")
LISTS = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")


def trainable_traces(row: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns a row for each trainable trace of `row` if it is an episode of verifiers, else a list of `row` alone.

    Raises ValueError if the episode's traces are not a list of objects, or none of them is trainable.
    """
    if not {"traces", "task", "env"} <= row.keys():
        return [dict(row)]
    traces = _list(row["traces"], "traces")
    if not all(isinstance(trace, Mapping) for trace in traces):
        raise ValueError("`traces` of the episode is not a list of objects")
    agents = [trace.get("agent") for trace in traces]
    trained = [
        {"trace": trace}
        for trace, agent in zip(traces, agents, strict=True)
        if not isinstance(agent, Mapping) or agent.get("trainable", True)
    ]
    if not trained:
        raise ValueError("no trace of the episode is of a trainable agent; leave the episode out")
    return trained


def flatten_trace(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with its trace replaced by `prompt_ids`, `response_ids`, `logprobs` and `loss_mask`.

    A verifiers `Trace` may also give `reward` and `finish_reason`; columns of the row with these names take precedence.
    A row without a trace is returned unchanged. Raises ValueError for a malformed trace, and for one of another version
    or with several branches.
    """
    trace = row.get("trace", row)
    if isinstance(trace, Mapping) and {"version", "nodes", "task"} <= trace.keys():
        return _read_verifiers_trace(row, trace)
    if not isinstance(trace, Mapping) or "schema_version" not in trace or "turns" not in trace:
        return dict(row)
    if trace["schema_version"] != SCHEMA:
        raise ValueError(
            f"the trace has schema {short_repr(trace['schema_version'])}, and only schema {SCHEMA} can be read"
        )
    turns = [_turn(position, turn) for position, turn in enumerate(_list(trace["turns"], "turns"))]
    trained = [turn for turn in turns if any(turn["loss_mask"])]
    if not trained:
        raise ValueError("the loss masks of the trace leave no token to train on; leave it out")
    prompt = list(trained[0]["prompt_token_ids"])
    response: list[Any] = []
    logprobs: list[Any] = []
    mask: list[Any] = []
    for number, turn in enumerate(trained):
        ids, completion = turn["prompt_token_ids"], turn["completion_token_ids"]
        context = prompt + response
        if ids[: len(context)] != context:
            pairs = enumerate(zip(context, ids, strict=False))
            position = next((position for position, (ours, theirs) in pairs if ours != theirs), len(ids))
            token = short_repr(ids[position]) if position < len(ids) else "missing"
            raise ValueError(
                f"trained turn {number} of the trace (from 0) does not continue the trained turn before: its token "
                f"{position} is {token}, and was {short_repr(context[position])}; leave the trace out"
            )
        between = ids[len(context) :]
        response += [*between, *completion]
        logprobs += [0.0] * len(between) + turn["per_token_logps"]
        mask += [0] * len(between) + turn["loss_mask"][len(ids) :]
    rest = {name: value for name, value in row.items() if name not in ("trace", "turns", "schema_version")}
    return {**rest, "prompt_ids": prompt, "response_ids": response, "logprobs": logprobs, "loss_mask": mask}


def _read_verifiers_trace(row: Mapping[str, Any], trace: Mapping[str, Any]) -> dict[str, Any]:
    """The row with a verifiers `Trace` flattened. Raises ValueError if the trace is malformed, has another version or
    several branches, or leaves no token to train on."""
    if trace["version"] != SCHEMA:
        raise ValueError(f"the trace has version {short_repr(trace['version'])}, and only version {SCHEMA} can be read")
    nodes = _list(trace["nodes"], "nodes")
    ids: list[Any] = []
    mask: list[Any] = []
    logprobs: list[Any] = []
    for index, node in enumerate(nodes):
        if not isinstance(node, Mapping) or node.get("parent") != (index - 1 if index else None):
            raise ValueError(
                f"node {index} of the trace is no object whose `parent` is the node before (of node 0: null), and only "
                "traces of one branch can be read; write a trace for each branch"
            )
        tokens, sampled, values = (_list(node.get(name), f"{name} of node {index}") for name in NODE)
        if len(sampled) != len(tokens):
            raise ValueError(
                f"node {index} of the trace has {len(tokens)} token_ids and {len(sampled)} values in its mask; the "
                "mask needs one for each token"
            )
        if wrong := [value for value in sampled if type(value) not in (bool, int) or value not in (0, 1)]:
            raise ValueError(f"the mask of node {index} of the trace has {short_repr(wrong[0])}, not true or false")
        if len(values) != sum(sampled):
            raise ValueError(
                f"node {index} of the trace has {len(values)} logprobs, and its mask marks {sum(sampled)} sampled "
                "tokens; each of them needs one"
            )
        rest = iter(values)
        ids, mask = ids + tokens, mask + sampled
        logprobs += [next(rest) if is_sampled else 0.0 for is_sampled in sampled]
    if not any(mask):
        raise ValueError("the masks of the trace leave no token to train on; leave it out")
    first, end = mask.index(True), len(mask) - mask[::-1].index(True)
    calls = trace.get("calls")
    last = calls[-1] if isinstance(calls, list) and calls else None
    cut = isinstance(last, Mapping) and last.get("finish_reason") == "length"
    outcome: dict[str, Any] = _reward(trace.get("rewards")) | ({"finish_reason": "length"} if cut else {})
    others = {name: value for name, value in row.items() if name != "trace"} if "trace" in row else {}
    response = {"response_ids": ids[first:end], "logprobs": logprobs[first:end], "loss_mask": mask[first:end]}
    return {**outcome, **others, "prompt_ids": ids[:first], **response}


def _reward(rewards: Any) -> dict[str, float]:
    """`{"reward": the sum of a trace's scores times their weights}`; empty if the trace has no score."""
    if rewards is not None and not isinstance(rewards, Mapping):
        raise ValueError("`rewards` of the trace is not an object")
    terms = {name: term for name, term in (rewards or {}).items() if term is not None}
    for name, term in terms.items():
        if not isinstance(term, Mapping) or not all(isinstance(term.get(key), int | float) for key in TERM):
            raise ValueError(f"the reward {short_repr(name)} of the trace has no numbers as score and weight")
    try:
        return {"reward": sum(float(term["score"]) * float(term["weight"]) for term in terms.values())} if terms else {}
    except OverflowError:
        raise ValueError("the rewards of the trace have a sum that no float can hold; leave it out") from None


def _turn(index: int, turn: Any) -> dict[str, list[Any]]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {index} of the trace is not an object")
    lists = {name: _list(turn.get(name), f"{name} of turn {index}") for name in LISTS}
    prompt, completion, logprobs, mask = (len(lists[name]) for name in LISTS)
    if logprobs != completion:
        raise ValueError(
            f"turn {index} of the trace has {completion} completion_token_ids and {logprobs} per_token_logps; each "
            "token needs one"
        )
    if mask != prompt + completion:
        raise ValueError(
            f"the loss_mask of turn {index} has {mask} values for {prompt + completion} tokens; each needs one"
        )
    if any(lists["loss_mask"][:prompt]):
        raise ValueError(f"the loss_mask of turn {index} trains tokens of its prompt; set these values to 0")
    return lists


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{name} is not a list")
    return list(value)
