"""Group-relative advantages against plain loops; updates made of informative groups."""

from __future__ import annotations

import statistics

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.advantages import STD_EPSILON, group_advantages, informative, informative_updates
from mugrpo_megatron.recipe import ObjectiveSection

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
