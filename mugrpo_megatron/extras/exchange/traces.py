"""Traces of agents as rows of rollouts: OpenEnv's `TrainingTrace`, schema 1, read without OpenEnv.

A row is a trace (`schema_version`, `turns`), or has one in its column `trace` beside a reward, a gold or a group. A
turn is one call of an engine (openenv/core/harness/training.py): `prompt_token_ids`, `completion_token_ids`,
`per_token_logps` of the completion, and a `loss_mask` over prompt and completion. Each turn that is trained on has to
continue the one before, token by token; turns with a mask of zeros are of other conversations, or context.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

SCHEMA = 1
LISTS = ("prompt_token_ids", "completion_token_ids", "per_token_logps", "loss_mask")


def flattened(row: Mapping[str, Any]) -> dict[str, Any]:
    """The row with `prompt_ids`, `response_ids`, `logprobs` and `loss_mask` in place of its trace; others as they are.

    Raises ValueError for a trace that is not one.
    """
    trace = row.get("trace", row)
    if not isinstance(trace, Mapping) or "schema_version" not in trace or "turns" not in trace:
        return dict(row)
    if trace["schema_version"] != SCHEMA:
        raise ValueError(f"a trace of schema {trace['schema_version']!r}, and {SCHEMA} is read")
    turns = [_turn(place, one) for place, one in enumerate(_list(trace["turns"], "turns"))]
    trained = [one for one in turns if any(one["loss_mask"])]
    if not trained:
        raise ValueError("a trace whose loss masks leave no token to train on")
    prompt = list(trained[0]["prompt_token_ids"])
    response: list[Any] = []
    logprobs: list[Any] = []
    mask: list[Any] = []
    for number, one in enumerate(trained):
        asked, said = one["prompt_token_ids"], one["completion_token_ids"]
        context = prompt + response
        if asked[: len(context)] != context:
            place = next(
                (k for k, pair in enumerate(zip(context, asked, strict=False)) if pair[0] != pair[1]), len(asked)
            )
            given = asked[place] if place < len(asked) else "missing"
            raise ValueError(
                f"trained turn {number} of the trace does not continue the one before: its token {place} is {given}, "
                f"and was {context[place]}"
            )
        between = asked[len(context) :]
        response += [*between, *said]
        logprobs += [0.0] * len(between) + one["per_token_logps"]
        mask += [0] * len(between) + one["loss_mask"][len(asked) :]
    rest = {name: value for name, value in row.items() if name not in ("trace", "turns", "schema_version")}
    return {**rest, "prompt_ids": prompt, "response_ids": response, "logprobs": logprobs, "loss_mask": mask}


def _turn(place: int, turn: Any) -> dict[str, list[Any]]:
    if not isinstance(turn, Mapping):
        raise ValueError(f"turn {place} of the trace is no object")
    lists = {name: _list(turn.get(name), f"{name} of turn {place}") for name in LISTS}
    prompt, completion, logprobs, mask = (len(lists[name]) for name in LISTS)
    if logprobs != completion:
        raise ValueError(
            f"turn {place} of the trace has {completion} completion_token_ids and {logprobs} per_token_logps"
        )
    if mask != prompt + completion:
        raise ValueError(f"the loss_mask of turn {place} has {mask} values for {prompt + completion} tokens")
    if any(lists["loss_mask"][:prompt]):
        raise ValueError(f"the loss_mask of turn {place} trains tokens of its prompt")
    return lists


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, Sequence) or isinstance(value, str):
        raise ValueError(f"{name} is no list")
    return list(value)
