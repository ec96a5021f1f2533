"""Group-relative advantages against plain loops; updates made of informative groups."""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.advantages import STD_EPSILON, group_advantages, informative, informative_updates
from mugrpo_megatron.errors import FunctionFailure
from mugrpo_megatron.recipe import ObjectiveSection
from mugrpo_megatron.samples import Sample
from tests.algorithm.user_advantages import gdpo
from tests.checkout import ROOT

HERE = "tests.algorithm.test_advantages"
GROUPS = st.lists(st.lists(st.floats(-10, 10, width=32), min_size=1, max_size=8), min_size=1, max_size=6)


def expected(rewards: list[float], kind: str) -> list[float]:
    """One group's advantages by the book."""
    if max(rewards) == min(rewards):
        return [0.0] * len(rewards)
    mean = statistics.fmean(rewards)
    if kind == "group_mean":
        return [r - mean for r in rewards]
    if kind == "leave_one_out":
        return [r - (sum(rewards) - r) / (len(rewards) - 1) for r in rewards]
    return [(r - mean) / (statistics.stdev(rewards) + STD_EPSILON) for r in rewards]


@given(GROUPS, st.sampled_from(["group_std", "group_mean", "leave_one_out"]), st.randoms(use_true_random=False))
def test_equals_the_definition_whatever_the_order(groups: list[list[float]], kind: str, random: object) -> None:
    rows = [(i, r, a) for i, group in enumerate(groups) for r, a in zip(group, expected(group, kind), strict=True)]
    random.shuffle(rows)  # type: ignore[attr-defined]
    ids, rewards, wanted = (np.array(column) for column in zip(*rows, strict=True))
    result = group_advantages(rewards, 7 - 3 * ids, ObjectiveSection(advantage=kind))
    assert result.dtype == np.float32
    np.testing.assert_allclose(result, wanted, rtol=1e-4, atol=1e-4)


@given(st.floats(-1e6, 1e6), st.integers(1, 8))
def test_equal_rewards_are_exactly_zero(reward: float, size: int) -> None:
    rewards, groups = np.full(size, reward), np.zeros(size, dtype=int)
    for kind in ("group_std", "group_mean", "leave_one_out"):
        assert not group_advantages(rewards, groups, ObjectiveSection(advantage=kind)).any()
    assert not informative(rewards, groups).any()


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_every_update_is_full_of_informative_groups(per_update: int, updates: int, data: st.DataObject) -> None:
    size = per_update * updates
    differs = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    plan = informative_updates(differs, per_update)
    assert plan.shape == (updates, per_update)
    if differs.any():
        assert differs[plan].all()
        visits = np.bincount(plan.ravel(), minlength=size)[differs]
        assert visits.max() - visits.min() <= 1
        first_round = plan.ravel()[: differs.sum()]
        assert (np.diff(first_round) > 0).all()
    else:
        assert plan.ravel().tolist() == list(range(size))


Rows = list[dict[str, object]]
Columns = tuple[np.ndarray, np.ndarray, np.ndarray, Rows]


def chosen(rewards: np.ndarray, groups: np.ndarray, lengths: np.ndarray, rows: Rows) -> object:
    """Replaced by each test."""
    raise NotImplementedError


def by_function(function: Callable[..., object], *columns: Any) -> np.ndarray:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys.modules[HERE], "chosen", function)
        rewards, groups, lengths, rows, *parts = columns
        samples = [
            Sample(0, "p", ids, ids, ids, 0.0, 0, "stop", row=row, components=components)
            for ids, row, components in zip(
                map(np.zeros, map(int, lengths)), rows, *(parts or [[{}] * len(lengths)]), strict=True
            )
        ]
        return group_advantages(rewards, groups, ObjectiveSection(advantage=f"{HERE}:chosen"), samples)


def test_a_users_function_sees_the_responses_that_have_a_reward() -> None:
    """A response without a reward is in nobody's baseline and has advantage 0."""
    seen: list[Columns] = []

    def function(lengths: object, rows: object, rewards: object, groups: object) -> list[int]:
        """In another order: arguments go by name."""
        seen.append((rewards, groups, lengths, rows))  # type: ignore[arg-type]
        return [1, -2, 3]

    rewards = np.array([0.5, np.nan, 1.0, 0.0])
    rows = [json.dumps({"n": 1}), "", "", json.dumps({"n": 4})]
    result = by_function(function, rewards, np.array([0, 0, 3, 3]), [5, 6, 7, 8], rows)
    assert result.dtype == np.float32
    assert result.tolist() == [1, 0, -2, 3]
    [(given_rewards, groups, lengths, fields)] = seen
    assert given_rewards.tolist() == [0.5, 1.0, 0.0]
    assert (groups.tolist(), lengths.tolist()) == ([0, 3, 3], [5, 7, 8])
    assert (groups.dtype, lengths.dtype) == (np.int64, np.int64)
    assert fields == [{"n": 1}, {}, {"n": 4}]


@pytest.mark.parametrize(
    ("answer", "words"),
    [
        (KeyError("lost"), "failed: KeyError: 'lost'"),
        (SystemExit(0), "failed: SystemExit: 0"),
        ("text", "failed: ValueError"),
        (None, "returned an array of shape \\[\\]; it has to be 2 finite numbers"),
        ([1.0], "returned an array of shape \\[1\\]"),
        ([[1.0], [2.0]], "returned an array of shape \\[2, 1\\]"),
        ([1.0, float("inf")], "returned an array of shape \\[2\\]; it has to be 2 finite numbers"),
    ],
    ids=str,
)
def test_a_users_advantages_that_are_none_are_refused(answer: object, words: str) -> None:
    def function(rewards: object) -> object:
        if isinstance(answer, BaseException):
            raise answer
        return answer

    with pytest.raises(FunctionFailure, match=f"objective.advantage = {HERE}:chosen {words}"):
        by_function(function, np.array([0.0, 1.0]), np.zeros(2), [3, 4], ["", ""])


def opo(group: list[tuple[float, int]]) -> list[float]:
    """One group's advantages by OPO's definition, from (reward, length): every token votes for its reward."""
    votes = [reward for reward, length in group for _ in range(length)]
    return [reward - statistics.fmean(votes) for reward, _ in group]


def maxrl(group: list[tuple[float, int]]) -> list[float]:
    """One group's advantages by MaxRL's definition: with k right of n, n/k - 1 for right ones, else -1, or 0."""
    right = sum(reward for reward, _ in group)
    return [(len(group) / right - 1 if reward else -1.0) if right else 0.0 for reward, _ in group]


@given(
    st.lists(
        st.lists(st.tuples(st.sampled_from([0.0, 1.0]), st.integers(1, 20)), min_size=1, max_size=8),
        min_size=1,
        max_size=5,
    )
)
def test_the_pages_advantages_equal_their_definitions(groups: list[list[tuple[float, int]]]) -> None:
    page = Path(ROOT, "docs/own-functions.md").read_text(encoding="utf-8").split("## Your own advantages")[1]
    functions: dict[str, Callable[..., object]] = {}
    exec(page.split("```python\n")[1].split("```")[0], functions)
    rewards, lengths = np.array([response for group in groups for response in group]).T
    ids = np.repeat(9 - np.arange(len(groups)), [len(group) for group in groups])
    for name, definition in (("opo", opo), ("maxrl", maxrl)):
        result = by_function(functions[name], rewards, ids, lengths, [""] * len(rewards))
        np.testing.assert_allclose(result, [a for group in groups for a in definition(group)], rtol=1e-5, atol=1e-6)


@given(
    st.lists(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 9)), min_size=1, max_size=5), min_size=1, max_size=4)
)
def test_gdpo_normalises_each_part_of_the_reward_in_its_group(groups: list[list[tuple[int, int]]]) -> None:
    """Against the definition in loops: (right, -length / 10) of each response."""

    def normal(values: list[float]) -> list[float]:
        spread = statistics.stdev(values) if len(values) > 1 else 0.0
        return [(value - statistics.fmean(values)) / (spread + 1e-6) for value in values]

    parts = [[{"right": float(right), "short": -length / 10} for right, length in group] for group in groups]
    sums = [
        right + short
        for group in parts
        for right, short in zip(*(normal([part[name] for part in group]) for name in ("right", "short")), strict=True)
    ]
    middle, spread = statistics.fmean(sums), statistics.pstdev(sums)
    flat = [part for group in parts for part in group]
    ids = np.repeat(np.arange(len(groups)), [len(group) for group in groups])
    rewards, texts = np.array([part["right"] + part["short"] for part in flat]), [""] * len(flat)
    result = by_function(gdpo, rewards, ids, [1] * len(flat), texts, flat)
    np.testing.assert_allclose(result, [(value - middle) / (spread + 1e-6) for value in sums], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "advantages"),
    [
        ("group_mean", [1.0, 0.0, -2.0, 0.0, 1.0, 0.0]),
        ("leave_one_out", [1.5, 0.0, -3.0, 0.0, 1.5, 0.0]),
        ("group_std", [3**-0.5, 0.0, -2 * 3**-0.5, 0.0, 3**-0.5, 0.0]),
    ],
)
def test_missing_rewards_have_no_advantage_and_are_not_in_the_baseline(kind: str, advantages: list[float]) -> None:
    """By hand: 4, 1, 4 have the mean 3 and the deviation 3^0.5; a group with one known reward gets 0."""
    rewards = np.array([4.0, np.nan, 1.0, 7.0, 4.0, np.nan])
    config = ObjectiveSection.model_validate({"advantage": kind})
    given = group_advantages(rewards, np.array([2, 2, 2, 5, 2, 5]), config)
    assert given.tolist() == pytest.approx(advantages, rel=1e-5)
