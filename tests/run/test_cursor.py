"""The cursor visits every update once, in the same problem order for every S and µ, however early stages end."""

from __future__ import annotations

import json
from dataclasses import asdict
from itertools import accumulate, pairwise

from hypothesis import given
from hypothesis import strategies as st

from mugrpo_megatron.files.checkpoint_state import CURSOR
from mugrpo_megatron.recipe.sections import ScheduleSection
from mugrpo_megatron.run.cursor import SMOOTHING, Cursor, nats_moved, stage_exhausted

schedules = st.builds(
    ScheduleSection, stages=st.integers(1, 6), updates_per_stage=st.integers(1, 6), epochs=st.integers(1, 3)
)
growing = st.builds(
    ScheduleSection,
    stages=st.integers(1, 6),
    updates_per_stage=st.integers(1, 6),
    growth=st.sampled_from([0.1, 0.5, 1.0, 1.5, 2.0, 10.0]),
    epochs=st.integers(1, 3),
)
endings = st.lists(st.booleans(), min_size=108, max_size=108)


def visited(schedule: ScheduleSection, ends: list[bool]) -> list[Cursor]:
    """Every cursor of a run, its end included; update k ends its stage where `ends[k]`."""
    cursors = [Cursor()]
    while not cursors[-1].finished(schedule):
        held = cursors[-1].updates_sampled(schedule)
        cursors.append(cursors[-1].advanced(schedule, held, ends[cursors[-1].updates]))
    return cursors


@given(schedules)
def test_stages_of_full_length_are_s_stages_of_all_passes(schedule: ScheduleSection) -> None:
    """With one pass nothing is repeated: the cursors of a run without epochs."""
    cursors = visited(schedule, [False] * 108)
    mu, epochs = schedule.updates_per_stage, schedule.epochs
    own = mu * epochs
    assert cursors == [
        Cursor(k // own, k % own, k, k // own * mu * (epochs - 1)) for k in range(schedule.total_updates + 1)
    ]


@given(growing)
def test_stages_grow_and_add_up(schedule: ScheduleSection) -> None:
    lengths = [schedule.length(stage) for stage in range(schedule.stages)]
    assert sum(lengths) * schedule.epochs == schedule.total_updates
    assert min(lengths) >= 1
    assert schedule.length(schedule.stages + 3) == lengths[-1]
    for before, after in pairwise(lengths):
        assert after >= before - 1 if schedule.growth >= 1 else after <= before + 1  # they are rounded
    assert [cursor.stage for cursor in visited(schedule, [False] * 108)[:-1]] == [
        stage for stage, length in enumerate(lengths) for _ in range(length * schedule.epochs)
    ]


def test_lengths_are_in_the_ratio_of_growth() -> None:
    doubling = ScheduleSection(stages=7, updates_per_stage=73, growth=2.0)
    assert [doubling.length(stage) for stage in range(7)] == [5, 9, 17, 33, 64, 128, 255]
    many = ScheduleSection(stages=2000, updates_per_stage=2, growth=10.0)  # powers beyond a float's range
    assert many.length(0) == 1
    assert many.length(1999) > 1000


@given(growing, endings)
def test_every_update_is_taken_once_however_early_stages_end(schedule: ScheduleSection, ends: list[bool]) -> None:
    cursors = visited(schedule, ends)
    assert [cursor.updates for cursor in cursors] == list(range(schedule.total_updates + 1))
    for before, after in pairwise(cursors):
        held = before.updates_sampled(schedule)
        assert held <= schedule.length(before.stage)
        assert 0 <= before.stage_progress(schedule, held) < 1
        assert before.age < before.updates_taken(schedule, held) <= held * schedule.epochs
        last = ends[before.updates] or before.age + 1 == before.updates_taken(schedule, held)
        assert (after.stage, after.age) == ((before.stage + 1, 0) if last else (before.stage, before.age + 1))


@given(growing, endings, st.integers(1, 5))
def test_problems_come_in_the_run_s_order_whatever_the_split_into_stages(
    schedule: ScheduleSection, ends: list[bool], prompts: int
) -> None:
    """What a stage that ended early leaves untouched, the next one samples anew; later epochs sample nothing."""
    taken: list[int] = []
    for cursor in visited(schedule, ends)[:-1]:
        positions = cursor.stage_positions(schedule, prompts)
        assert len(positions) == cursor.updates_sampled(schedule) * prompts
        taken += positions[cursor.age * prompts : (cursor.age + 1) * prompts]  # nothing in a later pass
    assert taken == list(range(len(taken)))
    if schedule.epochs == 1:
        assert len(taken) == schedule.total_updates * prompts


def test_a_stage_is_exhausted_beyond_its_bound() -> None:
    assert not ScheduleSection().ends_early
    assert not stage_exhausted(1e9, ScheduleSection()), "off by default"
    bound = ScheduleSection(max_kl=0.4)
    assert bound.ends_early
    assert stage_exhausted(0.5, bound)
    assert not stage_exhausted(0.4, bound)


def test_an_update_without_a_token_to_train_on_exhausts_no_stage() -> None:
    assert nats_moved(Cursor(nats=0.3), {"loss": 0.0}) == 0.3


@given(st.lists(st.floats(0, 10), min_size=1, max_size=40), st.integers(0, 40))
def test_the_nats_moved_are_the_same_wherever_a_run_was_interrupted(moves: list[float], saved_after: int) -> None:
    """They lie between the moves, go with the cursor into a checkpoint, and start at 0 in each stage."""
    schedule, cursor = ScheduleSection(stages=2, updates_per_stage=41, max_kl=100.0), Cursor()
    means = [cursor.nats]
    for place, move in enumerate(moves):
        if place == saved_after:
            cursor = Cursor(**CURSOR.validate_python(json.loads(json.dumps(asdict(cursor)))))
        cursor = cursor.advanced(schedule, 41, nats=nats_moved(cursor, {"kl_response": move}))
        means.append(cursor.nats)
        assert min(0.0, *moves) <= cursor.nats <= max(moves) + 1e-12
    assert means == list(accumulate(moves, lambda mean, move: mean + SMOOTHING * (move - mean), initial=0.0))
    assert cursor.advanced(schedule, 41, exhausted=True, nats=cursor.nats).nats == 0.0
