"""The cursor visits every update once, in the same problem order for every S and µ, however early stages end."""

from __future__ import annotations

from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.run.cursor import Cursor, stage_exhausted

schedules = st.builds(ScheduleSection, stages=st.integers(1, 6), updates_per_stage=st.integers(1, 6))
endings = st.lists(st.booleans(), min_size=36, max_size=36)


def visited(schedule: ScheduleSection, ends: list[bool]) -> list[Cursor]:
    """Every cursor of a run, its end included; update k ends its stage where `ends[k]`."""
    cursors = [Cursor()]
    while not cursors[-1].finished(schedule):
        cursors.append(cursors[-1].advanced(schedule, ends[cursors[-1].updates]))
    return cursors


@given(schedules)
def test_stages_of_full_length_are_s_stages_of_mu_updates(schedule: ScheduleSection) -> None:
    cursors = visited(schedule, [False] * 36)
    mu = schedule.updates_per_stage
    assert cursors == [Cursor(k // mu, k % mu, k) for k in range(schedule.total_updates + 1)]


@given(schedules, endings)
def test_every_update_is_taken_once_however_early_stages_end(schedule: ScheduleSection, ends: list[bool]) -> None:
    cursors = visited(schedule, ends)
    assert [cursor.updates for cursor in cursors] == list(range(schedule.total_updates + 1))
    for before, after in pairwise(cursors):
        assert before.age < before.stage_updates(schedule) <= schedule.updates_per_stage
        last = ends[before.updates] or before.age + 1 == before.stage_updates(schedule)
        assert (after.stage, after.age) == ((before.stage + 1, 0) if last else (before.stage, before.age + 1))


@given(schedules, endings, st.integers(1, 5))
def test_problems_come_in_the_run_s_order_whatever_the_split_into_stages(
    schedule: ScheduleSection, ends: list[bool], prompts: int
) -> None:
    """What a stage that ended early leaves untouched, the next one samples anew."""
    taken: list[int] = []
    for cursor in visited(schedule, ends)[:-1]:
        positions = cursor.stage_positions(schedule, prompts)
        assert len(positions) == cursor.stage_updates(schedule) * prompts
        taken += positions[cursor.age * prompts : (cursor.age + 1) * prompts]
    assert taken == list(range(schedule.total_updates * prompts))


def test_a_stage_is_worn_out_by_either_bound() -> None:
    fresh = {"ess": 0.9, "vetoed_fraction": 0.02}
    assert not stage_exhausted(fresh, ScheduleSection())
    assert not stage_exhausted({"ess": 0.0, "vetoed_fraction": 1.0}, ScheduleSection()), "off unless asked for"
    assert stage_exhausted(fresh, ScheduleSection(min_ess=0.95))
    assert stage_exhausted(fresh, ScheduleSection(max_vetoed=0.01))
