"""The order of the cells: fixed by the plan, and by nothing but the outcomes of tuning and of twins."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from run_scripts.study.cells import Cell, Outcome, Waiting
from run_scripts.study.grid import load_grid
from run_scripts.study.search import choose, of_twin, tuned_rate, wanted

STUDY = load_grid()
LADDER = (2.5e-6, 5e-6, 1e-5, 2e-5, 4e-5, 8e-5, 1.6e-4, 3.2e-4, 6.4e-4, 1.28e-3)
PRIMARY = STUDY.blocks["schedule"]
SCHEDULES = ("four", "eight", "grow_mild", "grow", "grow_decay")


def outcome(after: float, least_ratio: float = 0.1) -> Outcome:
    return Outcome(0.45, after, 500, least_ratio)


def tuned(ends: dict[str, float]) -> dict[Cell, Outcome]:
    """Every tuning cell of these methods: each ends best, as named, at 4e-5."""
    return {
        Cell(STUDY.tuning_seed, name, rate): outcome(best - 0.01 * abs(LADDER.index(rate) - 4))
        for name, best in ends.items()
        for rate in LADDER
    }


def on_the_test_split(cells: list[Cell | Waiting], methods: tuple[str, ...]) -> list[Cell]:
    """The cells of these methods on the test split."""
    return [one for one in cells if isinstance(one, Cell) and one.method in methods and one.seed != STUDY.tuning_seed]


@pytest.mark.parametrize("best", range(len(LADDER)))
def test_tuning_climbs_to_the_best_rate_and_tries_both_its_neighbours(best: int) -> None:
    """On a ladder with one summit, from any place."""
    done: dict[Cell, Outcome] = {}
    while (search := tuned_rate(STUDY, done, "veto")).rate is None:
        (left, *_) = [cell for cell in search.cells if cell not in done]
        done[left] = outcome(0.6 - 0.01 * abs(LADDER.index(left.rate) - best))
    assert search.rate == LADDER[best]
    assert {cell.seed for cell in done} == {STUDY.tuning_seed}
    tried = {cell.rate for cell in done}
    assert {*LADDER[max(0, best - 1) : best + 2]} <= tried
    assert len(tried) <= 2 + abs(best - 4) + 1


def test_of_two_equal_rates_the_lower_is_tuned() -> None:
    done = {Cell(STUDY.tuning_seed, "veto", rate): outcome(0.5) for rate in LADDER}
    assert tuned_rate(STUDY, done, "veto").rate == LADDER[0]


def test_tuned_cells_wait_for_their_rate_and_schedules_for_the_choice() -> None:
    waiting = {one for one in wanted(STUDY, {}) if isinstance(one, Waiting)}
    assert len(waiting) == 4 * 8 + 8 + (5 + 3 + 1) * 3
    part = tuned(dict.fromkeys(SCHEDULES, 0.6))
    missing = Cell(STUDY.tuning_seed, "grow_decay", 4e-5)
    del part[missing]
    cells = list(wanted(STUDY, part))
    assert on_the_test_split(cells, SCHEDULES) == []  # four are tuned, and none of them runs before the choice
    assert missing in cells
    assert {one.what for one in cells if isinstance(one, Waiting)} >= {"schedule", *SCHEDULES}


@given(st.lists(st.integers(0, 3), min_size=5, max_size=5))
def test_the_schedule_that_ends_best_is_chosen_and_in_a_tie_the_one_with_fewer_stages(ends: list[int]) -> None:
    done = tuned({name: 0.6 + end / 100 for name, end in zip(SCHEDULES, ends, strict=True)})
    found = choose(STUDY, done, PRIMARY).best
    best = [name for name, end in zip(SCHEDULES, ends, strict=True) if end == max(ends)]
    assert found == Cell(STUDY.tuning_seed, best[0], 4e-5)  # `four` is the first
    cells = list(dict.fromkeys(wanted(STUDY, done)))
    seeds = {name: [one.seed for one in on_the_test_split(cells, (name,))] for name in SCHEDULES}
    assert seeds == {name: [*range(8)] if name == best[0] else [5, 6, 7] for name in SCHEDULES}


def test_fewer_stages_win_a_tie_wherever_they_stand() -> None:
    turned = replace(PRIMARY, methods=SCHEDULES[::-1])
    found = choose(STUDY, tuned(dict.fromkeys(SCHEDULES, 0.6)), turned).best
    assert found
    assert found.method == "four"


def test_a_veto_that_had_no_trigger_has_the_outcome_of_its_twin() -> None:
    cell = Cell(0, "veto", 4e-5)
    twin = replace(cell, method="none")
    assert of_twin(STUDY, {twin: outcome(0.5, 1e-4)}, cell) == outcome(0.5, 1e-4)
    assert of_twin(STUDY, {twin: outcome(0.5, 0.99e-4)}, cell) is None
    assert of_twin(STUDY, {}, cell) is None
    assert of_twin(STUDY, {twin: outcome(0.5)}, replace(cell, method="strict")) is None
    assert of_twin(STUDY, {twin: outcome(0.5)}, replace(cell, method="veto_dual")) is None


def test_a_trigger_is_one_by_the_methods_own_threshold() -> None:
    twin = {Cell(0, "none", 4e-5): outcome(0.5, 0.05)}
    found = {
        name for name in ("veto", *STUDY.blocks["thresholds"].methods) if of_twin(STUDY, twin, Cell(0, name, 4e-5))
    }
    assert found == {"veto", "veto_1e-3", "veto_1e-2"}
