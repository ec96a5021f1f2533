from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.prepare import problem_at, update_at


@given(st.integers(0, 2**63), st.integers(1, 60), st.integers(0, 5))
def test_every_epoch_visits_every_problem_once(seed: int, n: int, epoch: int) -> None:
    visited = [problem_at(seed, n, epoch * n + i) for i in range(n)]
    assert sorted(visited) == list(range(n))


def test_epochs_and_seeds_differ_and_repeat() -> None:
    def epoch(seed: int, number: int) -> list[int]:
        return [problem_at(seed, 50, number * 50 + i) for i in range(50)]

    assert epoch(0, 0) == epoch(0, 0)
    assert len({tuple(epoch(seed, number)) for seed in range(3) for number in range(3)}) == 9


def test_the_order_never_changes() -> None:
    """A run resumed with a later numpy continues with the same problems."""
    assert [problem_at(7, 10, i) for i in range(10)] == [6, 3, 4, 9, 0, 2, 8, 7, 5, 1]


@given(st.integers(0, 2**31), st.integers(0, 9), st.integers(1, 40), st.integers(0, 4))
def test_every_pass_takes_every_update_once_and_the_first_one_in_order(
    seed: int, stage: int, updates: int, number: int
) -> None:
    taken = [update_at(seed, stage, updates, number * updates + place) for place in range(updates)]
    assert sorted(taken) == list(range(updates))
    assert number > 0 or taken == list(range(updates))


def test_later_passes_differ_by_seed_stage_and_pass_and_repeat() -> None:
    def order(seed: int, stage: int, number: int) -> tuple[int, ...]:
        return tuple(update_at(seed, stage, 50, number * 50 + place) for place in range(50))

    assert order(1, 1, 1) == order(1, 1, 1)
    orders = {order(seed, stage, number) for seed in range(3) for stage in range(3) for number in (1, 2)}
    assert len(orders) == 18


def test_the_order_of_a_later_pass_never_changes() -> None:
    """A run resumed with a later numpy continues with the same updates."""
    assert [update_at(7, 2, 8, 8 + place) for place in range(8)] == [2, 1, 7, 6, 4, 0, 5, 3]
