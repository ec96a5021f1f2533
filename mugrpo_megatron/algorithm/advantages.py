"""Group-relative advantages, and updates made only of groups whose advantages are not all zero."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import numpy as np

from mugrpo_megatron.errors import FunctionFailure
from mugrpo_megatron.recipe.functions import ForeignFailure, arguments_of, call_foreign, load_function
from mugrpo_megatron.recipe.objective import ObjectiveSection
from mugrpo_megatron.samples import Sample, trained_lengths

ARGUMENTS = ("rewards", "groups", "lengths", "rows", "components")
"""Arguments that a user's advantage function may name: `rewards` float64 [n], `groups` int64 [n], `lengths` int64 [n]
(each response's number of trained tokens), and for each response its problem's row in the data set (`rows`) and its
reward's parts by name (`components`)."""
STD_EPSILON = 1e-6
"""Added to a group's standard deviation: a nearly constant group would otherwise get huge advantages."""
LARGEST = float(np.finfo(np.float32).max)
"""The largest float32. The formulas here clip rewards and advantages to this magnitude; a user's function gets rewards
that are not clipped."""
ROUNDING = 4 * float(np.finfo(np.float32).eps)
"""Rewards count as equal up to this relative difference: adding their parts in another order, or in float32, changes
them by as much."""


def group_advantages(
    rewards: np.ndarray,
    groups: np.ndarray,
    config: ObjectiveSection,
    samples: Sequence[Sample] = (),
) -> np.ndarray:
    """The advantage of each response: its reward compared with the rewards of its group.

    With G responses in a group, m their mean reward and s their unbiased standard deviation:
    `group_std`: (R - m) / (s + 1e-6) (GRPO, arXiv 2402.03300, section 4.1.2);
    `group_mean`: R - m (Dr.GRPO, arXiv 2503.20783);
    `leave_one_out`: R - mean of the other G - 1 = (R - m) * G / (G - 1) (RLOO, arXiv 2402.14740).
    With these three, a group whose rewards are all equal, including a group of one, gets exactly 0; a user's function
    may return other values. NaN is a missing reward: G, m and s leave out that response, and its advantage is 0.

    Args:
        rewards: [N] numbers.
        groups: integers [N]; equal numbers are one group, in any order.
        samples: [N], with their rows; only a user's function reads them.

    Returns:
        float32 [N].

    Raises FunctionFailure when a user's function fails, or does not return a finite number for each response that has a
    reward; UserError when it cannot be loaded, takes no argument of `ARGUMENTS`, or needs another one.
    """
    if config.has_user_advantage:
        return _user_advantages(rewards, groups, config, samples)
    rewards = np.clip(np.asarray(rewards, dtype=np.float64), -LARGEST, LARGEST)
    if (missing := np.isnan(rewards)).any():
        advantages = np.zeros(len(rewards), dtype=np.float32)
        advantages[~missing] = group_advantages(rewards[~missing], np.asarray(groups)[~missing], config)
        return advantages
    _, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    means = np.bincount(inverse, rewards, len(sizes)) / sizes
    centred = np.where(informative(rewards, groups), rewards - means[inverse], 0.0)
    if config.advantage == "group_mean":
        return _as_float32(centred)
    others = np.maximum(sizes - 1, 1)
    if config.advantage == "leave_one_out":
        return _as_float32(centred * (sizes / others)[inverse])
    std = np.sqrt(np.bincount(inverse, centred**2, len(sizes)) / others)
    return (centred / (std[inverse] + STD_EPSILON)).astype(np.float32)


def _as_float32(values: np.ndarray) -> np.ndarray:
    return np.clip(values, -LARGEST, LARGEST).astype(np.float32)


def _user_advantages(
    rewards: np.ndarray, groups: np.ndarray, config: ObjectiveSection, samples: Sequence[Sample]
) -> np.ndarray:
    """Call the user's advantage function with those of `ARGUMENTS` that its parameters name; returns float32 [n].

    Responses without a reward (NaN) are not passed to the function, and their advantage is 0.
    """
    if len(rewards) != len(samples):
        raise ValueError(
            f"objective.advantage = {config.advantage} reads the samples: pass one sample for each of the "
            f"{len(rewards)} rewards, not {len(samples)}"
        )
    name = f"objective.advantage = {config.advantage}"
    function = load_function("objective.advantage", config.advantage)
    scored = np.flatnonzero(~np.isnan(rewards))
    lengths, kept = trained_lengths(samples), [samples[index] for index in scored.tolist()]
    taken = arguments_of(name, function, ARGUMENTS)
    given: dict[str, Any] = {
        "rewards": np.asarray(rewards, float)[scored],
        "groups": np.asarray(groups, int)[scored],
        "lengths": np.asarray(lengths, int)[scored],
        "rows": [json.loads(sample.row) if sample.row else {} for sample in kept],
        "components": [dict(sample.components) for sample in kept],
    }

    def call() -> np.ndarray:
        return np.asarray(function(**{argument: given[argument] for argument in taken}), dtype=np.float32)

    try:
        values = call_foreign(call, hidden=[__file__])
    except ForeignFailure as failure:
        raise FunctionFailure(f"{name} failed: {failure}; correct the function and run the command again") from None
    if values.shape != scored.shape or not np.isfinite(values).all():
        raise FunctionFailure(
            f"{name} returned an array of shape {list(values.shape)}; it has to be {len(scored)} finite numbers, one "
            "for each response with a reward"
        )
    advantages = np.zeros(len(rewards), dtype=np.float32)
    advantages[scored] = values
    return advantages


def before_penalty(rewards: np.ndarray, penalties: np.ndarray) -> np.ndarray:
    """The rewards [N] without the overlong penalties [N]; groups are chosen by these rewards.

    DAPO samples groups by accuracy (arXiv 2503.14476, eq. 11; verl's `filter_groups.metric = "acc"`): responses that
    are all wrong and differ in length are no informative group.
    """
    # Rounded, because 1 - 0.3 + 0.3 may differ from 1 in the last bit, and equal rewards must stay equal.
    return np.round(rewards + penalties, 9) if np.any(penalties) else rewards


def informative(rewards: np.ndarray, groups: np.ndarray) -> np.ndarray:
    """Find the responses whose group has different rewards, so that its advantages are not all 0; returns bool [N].

    Rewards that differ only by rounding, as 0.1 + 0.2 and 0.3 do, count as equal.
    """
    rewards = np.asarray(rewards, dtype=np.float64)
    _, inverse, sizes = np.unique(groups, return_inverse=True, return_counts=True)
    low, high = np.full(len(sizes), np.inf), np.full(len(sizes), -np.inf)
    np.minimum.at(low, inverse, rewards)
    np.maximum.at(high, inverse, rewards)
    return (high - low > ROUNDING * np.maximum(np.abs(low), np.abs(high)))[inverse]


def informative_updates(informative: np.ndarray, prompts_per_update: int) -> np.ndarray:
    """Choose the groups of each update of a stage among the informative ones, whose rewards differ.

    The stage keeps its number of updates. The informative groups fill the updates in order; when none is left, they are
    used again from the first one on. So every update is full although no more responses are generated. If a fraction z
    of the groups is uninformative, the last fraction z of the stage repeats groups.

    Args:
        informative: bool [updates * prompts_per_update], for each group in the order of the stage.

    Returns:
        int64 [updates, prompts_per_update]: indices of groups. If no group is informative, every group stays in its
        place, and the updates have no gradient (`masks.counted_responses`).
    """
    indices = np.flatnonzero(informative) if informative.any() else np.arange(len(informative))
    return np.resize(indices, len(informative)).reshape(-1, prompts_per_update)
