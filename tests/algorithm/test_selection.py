"""Updates made of informative groups."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.algorithm.advantages import informative_updates


@given(st.integers(1, 5), st.integers(1, 6), st.data())
def test_every_update_is_full_of_informative_groups(per_update: int, updates: int, data: st.DataObject) -> None:
    size = per_update * updates
    informative = np.array(data.draw(st.lists(st.booleans(), min_size=size, max_size=size)))
    plan = informative_updates(informative, per_update)
    assert plan.shape == (updates, per_update)
    if informative.any():
        assert informative[plan].all()
        visits = np.bincount(plan.ravel(), minlength=size)[informative]
        assert visits.max() - visits.min() <= 1
        first_round = plan.ravel()[: informative.sum()]
        assert (np.diff(first_round) > 0).all()
    else:
        assert plan.ravel().tolist() == list(range(size))


def test_a_stage_without_equal_rewards_stays_as_it_is() -> None:
    assert informative_updates(np.ones(6, dtype=bool), 3).tolist() == [[0, 1, 2], [3, 4, 5]]


def test_places_move_up_and_come_round() -> None:
    informative = np.array([0, 1, 1, 0, 1, 0], dtype=bool)
    assert informative_updates(informative, 2).tolist() == [[1, 2], [4, 1], [2, 4]]
