from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.data.order import problem_at


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
